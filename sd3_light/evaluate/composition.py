"""The composition score: how often a model's images of the demo world match their prompts."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from PIL import Image

from sd3_light.core.sampling import ImageRequest, PipelineInputs
from sd3_light.sample.generate import choose_drawing, generate
from sd3_light.sample.grid import make_grid
from sd3_light.world import Prompt
from sd3_light.world.judge import Verdict

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

    from sd3_light.sample.phases import Phases

# "all" means that everything in a prompt is right; the others are its parts, as in `Verdict`.
DEMANDS: tuple[str, ...] = ("all", "colour", "shape", "count", "relation", "background", "size")
_HARD_DEMANDS = (*DEMANDS, "texture")  # only harder scenes have textures

USUAL_STEPS = 20
"""Sampler steps of an evaluation, unless they are given or the model is distilled to fewer."""

Rates = Mapping[str, float | None]


@dataclass(frozen=True)
class CompositionScore:
    """The judged images of a model. A rate covers the prompts with that demand, and is None without such prompts."""

    prompts: tuple[Prompt, ...]
    images: tuple[Image.Image, ...]
    verdicts: tuple[Verdict, ...]

    @property
    def num_prompts(self) -> int:
        """The number of prompts."""
        return len(self.prompts)

    @property
    def rates(self) -> Rates:
        """The share of correct images by demand."""
        return _rates(self.verdicts)

    @property
    def by_kind(self) -> Mapping[str, Rates]:
        """The rates by kind of scene."""
        kinds = [prompt.scene.kind for prompt in self.prompts]
        pairs = list(zip(kinds, self.verdicts, strict=True))
        return {kind: _rates(v for k, v in pairs if k == kind) for kind in dict.fromkeys(kinds)}

    def as_dict(self) -> dict[str, Any]:
        """Return everything except the images, for JSON."""
        by_kind = {kind: dict(rates) for kind, rates in self.by_kind.items()}
        return {"num_prompts": self.num_prompts, **self.rates, "by_kind": by_kind}

    def as_grid(self, columns: int = 8, scale: int = 2, title: str | None = None) -> Image.Image:
        """Return a grid of the images with their prompts, marked as correct or not."""
        return make_grid(
            self.images,
            [prompt.text for prompt in self.prompts],
            columns,
            scale,
            title,
            marks=[verdict.all for verdict in self.verdicts],
            fallback_captions=[prompt.english for prompt in self.prompts],
        )


@dataclass(frozen=True)
class ScoreOptions:
    """How the images of a score are drawn, ``batch`` at a time.

    Image i has the seed `seed + i` and the size `sizes[i % len(sizes)]` (give `world.IMAGE_SIZES` for those of
    training). None: `USUAL_STEPS` and the usual guidance, or those of the model.
    """

    steps: int | None = None
    guidance: float | None = None
    seed: int = 0
    batch: int = 16
    sizes: tuple[tuple[int, int], ...] = ((64, 64),)


def score(
    pipe: "DiffusionPipeline | Phases",
    prompts: Sequence[Prompt],
    policy: PipelineInputs,
    options: ScoreOptions,
    on_progress: Callable[[int, int], None] | None = None,
) -> CompositionScore:
    """Generate one image per prompt and judge it. `on_progress(done, total)` counts images."""
    sizes = options.sizes
    requests = [
        ImageRequest(prompt.text, options.seed + index, *sizes[index % len(sizes)])
        for index, prompt in enumerate(prompts)
    ]
    drawing = choose_drawing(policy, options.steps, options.guidance, USUAL_STEPS)
    images = generate(pipe, requests, policy, drawing, options.batch, on_progress)
    return judge_images(prompts, images)


def judge_images(prompts: Sequence[Prompt], images: Sequence[Image.Image]) -> CompositionScore:
    """Return the score of existing images, one per prompt."""
    verdicts = [prompt.judge(image) for image, prompt in zip(images, prompts, strict=True)]
    return CompositionScore(tuple(prompts), tuple(images), tuple(verdicts))


def _rates(verdicts: Iterable[Verdict]) -> Rates:
    outcomes: dict[str, list[bool]] = {demand: [] for demand in DEMANDS}
    for verdict in verdicts:
        for demand in _HARD_DEMANDS:
            is_correct: bool | None = getattr(verdict, demand)
            if is_correct is not None:
                outcomes.setdefault(demand, []).append(is_correct)
    return {demand: sum(results) / len(results) if results else None for demand, results in outcomes.items()}
