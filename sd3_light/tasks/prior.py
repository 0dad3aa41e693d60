"""Prior preservation (DreamBooth): pictures of the class that the model itself draws, once, and trains on beside the
new ones, so that it does not forget what the class looks like."""

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from PIL import Image
from torch.utils.data import Dataset

from sd3_light.config.faults import UserError
from sd3_light.files import atomic_file
from sd3_light.runlog import progress
from sd3_light.tasks.batches import item_of, length_of
from sd3_light.training.errors import as_user_error

Make = Callable[[str, int], Image.Image]
"""(prompt, seed) -> a picture, by the model before it is trained."""


class ClassPictures(Dataset[Any]):
    """``count`` pictures of ``prompt``, picture i with seed i, drawn by ``make`` where they are not in ``cache`` yet.

    Items are ``{image: picture, prompt: text}`` under the names that the units of the task read. The folder's name in
    the cache is a hash of the prompt and of ``made_by``, JSON that names model and sampler: another prompt or another
    model draws anew.
    """

    def __init__(
        self,
        cache: str | Path,
        prompt: str,
        count: int,
        make: Make,
        made_by: Mapping[str, Any],
        image: str = "image",
        text: str = "prompt",
    ) -> None:
        if count < 1:
            raise UserError(f"{count} class pictures: give a number from 1 on")
        with as_user_error("made_by of ClassPictures", "give JSON: texts, numbers and lists by name"):
            recipe = json.dumps({"prompt": prompt, "made_by": dict(made_by)}, sort_keys=True, ensure_ascii=False)
        self.folder = Path(cache) / hashlib.sha256(recipe.encode()).hexdigest()[:16]
        self.prompt, self.count, self.names = prompt, count, (image, text)
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "recipe.json").write_text(recipe, encoding="utf-8")
        missing = [index for index in range(count) if not self._path(index).is_file()]
        if missing:
            self._draw(make, missing)

    def _path(self, index: int) -> Path:
        return self.folder / f"{index:05d}.png"

    def _draw(self, make: Make, missing: list[int]) -> None:
        with progress("class pictures", len(missing), "pictures") as bar:
            for done, index in enumerate(missing, start=1):
                with (
                    atomic_file(self._path(index)) as temporary,
                    as_user_error("make(prompt, seed)", "let it give a picture"),
                ):
                    make(self.prompt, index).save(temporary, format="PNG")
                bar.set_done(done, len(missing))

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        image, text = self.names
        with Image.open(self._path(index)) as picture:
            return {image: picture.convert("RGB"), text: self.prompt}


class WithPrior(Dataset[Any]):
    """A data set and class pictures behind it: the losses of the latter count ``weight`` times (`FlowMatchSFTLoss`)."""

    def __init__(self, dataset: Dataset[Any], prior: Dataset[Any], weight: float = 1.0) -> None:
        given: Any = weight
        if not isinstance(given, int | float) or not 0 <= weight < math.inf:
            raise UserError(f"the weight of prior pictures is {weight!r}; give a number from 0 on")
        self.dataset, self.prior, self.weight = dataset, prior, weight
        self._own = length_of(dataset)

    def __len__(self) -> int:
        return self._own + len(self.prior)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index < self._own:
            return {**item_of(self.dataset, index), "loss_weight": 1.0}
        return {**item_of(self.prior, index - self._own), "loss_weight": float(self.weight)}
