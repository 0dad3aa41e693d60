"""Prior preservation (DreamBooth): images of the class, drawn by the model once before training.

Training on them beside the new images preserves what the model knows about the class.
"""

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from PIL import Image
from torch.utils.data import Dataset

from sd3_light.config.faults import UserError
from sd3_light.engines.errors import as_user_error
from sd3_light.files import atomic_file
from sd3_light.inputs import open_regular
from sd3_light.runlog import progress
from sd3_light.tasks.batches import item_of, length_of
from sd3_light.tasks.sides import Sides, sides_of

DrawImage = Callable[[str, int], Image.Image]
"""(prompt, seed) -> an image, drawn by the model before it is trained."""


class ClassPictures(Dataset[Any]):
    """``count`` images of ``prompt``, image i with seed i; ``make`` draws those that are not in ``cache`` yet.

    Items hold the image and the prompt under the names ``image`` and ``text``, which the units of the task read. The
    folder's name in the cache is a hash of the prompt and of ``made_by``, JSON that names model and sampler: another
    prompt or model gets its own images.
    """

    def __init__(
        self,
        cache: str | Path,
        prompt: str,
        count: int,
        make: DrawImage,
        made_by: Mapping[str, Any],
        image: str = "image",
        text: str = "prompt",
    ) -> None:
        if count < 1:
            raise UserError(f"{count} class images: give a number >= 1")
        with as_user_error("made_by of ClassPictures", "give JSON: strings, numbers and lists by name"):
            made_from = json.dumps({"prompt": prompt, "made_by": dict(made_by)}, sort_keys=True, ensure_ascii=False)
        self.folder = Path(cache) / hashlib.sha256(made_from.encode()).hexdigest()[:16]
        self.prompt = prompt
        self.count = count
        self.names = (image, text)
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "recipe.json").write_text(made_from, encoding="utf-8")
        missing = [index for index in range(count) if not self._path(index).is_file()]
        if missing:
            self._draw(make, missing)

    def _path(self, index: int) -> Path:
        return self.folder / f"{index:05d}.png"

    def _draw(self, make: DrawImage, missing: list[int]) -> None:
        with progress("class images", len(missing), "images") as bar:
            for done, index in enumerate(missing, start=1):
                with (
                    atomic_file(self._path(index)) as temporary,
                    as_user_error("make(prompt, seed)", "return an image"),
                ):
                    make(self.prompt, index).save(temporary, format="PNG")
                bar.set_done(done, len(missing))

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        image, text = self.names
        with open_regular(self._path(index)) as file, Image.open(file) as stored:
            return {image: stored.convert("RGB"), text: self.prompt}


class WithPrior(Dataset[Any]):
    """A dataset followed by class images, whose losses count ``weight`` times (`FlowMatchSFTLoss`).

    What the dataset holds out stays held out; class images are trained on.
    """

    def __init__(self, dataset: Dataset[Any], prior: Dataset[Any], weight: float = 1.0) -> None:
        number: Any = weight
        if not isinstance(number, int | float) or not 0 <= weight < math.inf:
            raise UserError(f"the weight of prior images is {weight!r}; give a number >= 0")
        self.dataset = dataset
        self.prior = prior
        self.weight = weight
        self._count = length_of(dataset)

    @property
    def sides(self) -> Sides | None:
        """The sides of all samples; None if the dataset is not divided."""
        own = sides_of(self.dataset)
        return None if own is None else Sides((*own.names, *("train",) * length_of(self.prior)))

    def __len__(self) -> int:
        return self._count + len(self.prior)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index < self._count:
            return {**item_of(self.dataset, index), "loss_weight": 1.0}
        return {**item_of(self.prior, index - self._count), "loss_weight": float(self.weight)}
