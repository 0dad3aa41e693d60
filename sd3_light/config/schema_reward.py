"""[reward]: what a run is trained for if it draws its own images and a function scores them."""

from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge
from pydantic import BeforeValidator, Strict, ValidationInfo

from sd3_light.config.base import Allowed, Count, NotNegative, Positive, Table, TomlPath, parse_path
from sd3_light.config.family_keys import is_installed_class
from sd3_light.config.schema_objective import ObjectiveConfig

PYTHON = "python"
WORLD = "world"


def _parse_score(value: Any, info: ValidationInfo) -> Any:
    is_name = isinstance(value, str) and (value in (PYTHON, WORLD) or is_installed_class(value))
    return value if is_name else parse_path(value, info)


ScoreName = Annotated[
    str | Path,
    BeforeValidator(_parse_score),
    Allowed('"world", "python", "package.module:function" of an installed package, or the path of a CLIP folder'),
]


class RewardConfig(Table):
    """[reward]: train towards a score of images that the run draws itself (DiffusionNFT, arXiv 2509.16117).

    The dataset decides the size of the images and is evaluated; nothing else of it is used. No default was measured.
    """

    score: ScoreName
    """What scores an image and its prompt. `world`: the judge of the demo's world. A folder: the similarity by a CLIP
    model, or a judge of `sd3-light parts`. `package.module:function`: a function of an installed package that is marked
    with `sd3_light.tasks.reward`. `python`: the function that a script passes."""
    prompts: TomlPath
    """Text file with one prompt per line."""
    prompts_per_draw: Count = 8
    """Prompts for which images are drawn at a time."""
    images_per_prompt: Annotated[int, Strict(), Ge(2)] = 8
    """Images of each of these prompts, which are compared with one another."""
    every_n_steps: Count = 8
    """Optimizer steps between draws."""
    steps: Count = 10
    """Sampler steps per image, without guidance."""
    beta: Positive = 1.0
    """Share of the prediction in the policies that are compared; a lower one takes larger steps from the teacher."""
    kl: NotNegative = 0.0
    """Weight of the squared distance from the start's prediction, which limits how far training goes."""
    teacher: Literal["average", "start"] = "average"
    """The model that draws, and that training improves on: the average of [ema], or always the start of the run."""

    @property
    def images(self) -> int:
        """Images per draw."""
        return self.prompts_per_draw * self.images_per_prompt


class RewardTerms(ObjectiveConfig):
    """The terms of the loss of a run with [reward]."""

    reward: RewardConfig

    @property
    def teacher(self) -> Literal["average", "start"]:
        """See `ObjectiveConfig.teacher`."""
        return self.reward.teacher

    @property
    def teacher_passes(self) -> int:
        """See `ObjectiveConfig.teacher_passes`."""
        return 1

    @property
    def keeps_start(self) -> bool:
        """See `ObjectiveConfig.keeps_start`."""
        return self.reward.kl > 0

    @property
    def teacher_key(self) -> str:
        """See `ObjectiveConfig.teacher_key`."""
        return "reward.teacher"

    @property
    def trains_prediction(self) -> bool:
        """See `ObjectiveConfig.trains_prediction`."""
        return True
