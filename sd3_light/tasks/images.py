"""`ImageFolder`: captioned images for a task, from the sources of dataset TOMLs. Workers of the loader decode them."""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from PIL import Image
from torch.utils.data import Dataset

from sd3_light.config import DirectoryConfig, load_dataset
from sd3_light.config.faults import UserError
from sd3_light.config.load_dataset import directory_from_arguments
from sd3_light.data.cache_plan import CachePlan, decode_task, make_cache_plan
from sd3_light.runlog import info, progress
from sd3_light.sources.catalogue import Catalogue, make_sources
from sd3_light.sources.claims import Claims
from sd3_light.sources.decode import DecodeTask, decode_images
from sd3_light.sources.listing import IMAGE_SUFFIXES
from sd3_light.sources.preprocess import PREPROCESS_VERSION, REASONS
from sd3_light.sources.records import Rejected

_SHOWN_REJECTS = 5
_UNIT = 4096  # samples that are planned together
_FEW = 500  # images; fewer are read sooner than processes start
_UNUSED = {"flip": False, "num_repeats": 1, "caption_weights": ()}
"""Keys of a directory that have no effect in scripts, and their defaults."""


class SourceDataset(Dataset[Any]):
    """A dataset whose unusable inputs are left out and listed in ``rejects``, each with key, reason and detail."""

    def __init__(self, path: str | Path, rejects: Sequence[Rejected]) -> None:
        self.rejects = tuple(rejects)
        if rejects:
            info(f"{path}: left out {len(rejects)} inputs: {self._reasons()}")
            for reject in rejects[:_SHOWN_REJECTS]:
                info(f"  {reject.key}: {reject.reason} {reject.detail}".rstrip())

    def _reasons(self) -> str:
        counts = Counter(reject.reason for reject in self.rejects)
        return ", ".join(f"{number} {reason} ({REASONS[reason]})" for reason, number in counts.most_common())

    def _require_samples(self, count: int, usable: str, otherwise: str, remedy: str) -> None:
        """Raise if there is no ``usable`` input; ``otherwise`` is the reason if none was left out."""
        if not count:
            raise UserError(f"{usable}: {self._reasons() or otherwise}; {remedy}")

    def rejects_as_json(self) -> list[dict[str, str]]:
        """Return the rejects as the data process lists them in ``rejects.jsonl``."""
        return [{"key": reject.key, "reason": reject.reason, "detail": reject.detail} for reject in self.rejects]


@dataclass(frozen=True, slots=True)
class _Sample:
    key: str
    captions: tuple[str, ...]
    task: DecodeTask
    has_mask: bool


class ImageFolder(SourceDataset):
    """Samples ``{"image": RGB image, "prompt": str, "captions": all captions}`` of a folder, a tar or a Parquet file.

    ``path`` may be a dataset TOML instead, and ``keys`` are those of its `[[directory]]`: captions, buckets, `where`
    and so on mean what they mean there. An image is resized and cropped to its bucket when it is used; there is one
    sample per resolution. With `mask_path` samples have a ``mask`` [h, w] from 0 to 1, of latent pixels.

    Only the headers of images are read at first, by ``num_workers`` processes (None: one per core), and unusable ones
    are left out. ``catalogue`` is a folder that keeps what was read, for later runs and other processes.
    """

    def __init__(
        self, path: str | Path, catalogue: str | Path | None = None, num_workers: int | None = None, **keys: Any
    ) -> None:
        directories = _directories(path, keys)
        workers = os.cpu_count() or 1 if num_workers is None else num_workers
        with TemporaryDirectory(prefix="sd3-light-") as temporary:
            folder = Path(temporary if catalogue is None else catalogue)
            with Claims(folder / "claims") as claims:
                plan = _plan(Catalogue(folder, claims), directories, workers)
                self._samples = _samples(plan)
                rejects = [Rejected(row.key, row.reason, row.detail, None) for row in plan.rejected()]
        super().__init__(path, rejects)
        otherwise = f"no file with a caption ends in {', '.join(sorted(IMAGE_SUFFIXES))}"
        remedy = "check path, captions and where"
        self._require_samples(len(self), f"{path} has no usable image", otherwise, remedy)
        self._masked = any(sample.has_mask for sample in self._samples)

    def __len__(self) -> int:
        return len(self._samples)

    def bucket_of(self, index: int) -> tuple[int, int]:
        """Return height and width of a sample; only samples of one bucket share a batch."""
        bucket = self._samples[index].task.bucket
        return bucket.height, bucket.width

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = self._samples[index]
        (decoded,) = decode_images([sample.task])
        if decoded.pixels is None:
            why = f"{REASONS[decoded.reason]} {decoded.detail}".rstrip()
            raise UserError(f"{sample.key} cannot be used ({why}); remove or repair it")
        captions = {"prompt": sample.captions[0], "captions": list(sample.captions)}
        item = {"image": Image.fromarray(decoded.pixels), **captions}
        if self._masked:
            height, width = self.bucket_of(index)
            mask = torch.ones(height // 8, width // 8)
            item["mask"] = mask if decoded.mask is None else torch.from_numpy(decoded.mask).float() / 255
        return item


def _directories(path: str | Path, keys: dict[str, Any]) -> Sequence[DirectoryConfig]:
    if Path(path).suffix == ".toml":
        if keys:
            raise UserError(f"ImageFolder: {path} has its own keys; write {next(iter(keys))} there")
        directories = load_dataset(Path(path)).directories
    else:
        directories = (directory_from_arguments({"path": os.fspath(path), **keys}, "ImageFolder"),)
    for directory in directories:
        if directory.frames is not None:
            raise UserError("ImageFolder: frames: it reads images; remove the key, or use VideoDataset for clips")
        for key, default in _UNUSED.items():
            if getattr(directory, key) != default:
                raise UserError(f"ImageFolder: {key} has no effect in scripts; remove it")
    return directories


def _plan(catalogue: Catalogue, directories: Sequence[DirectoryConfig], workers: int) -> CachePlan:
    with progress("listing", None, "inputs") as bar:
        listings = catalogue.refresh(make_sources(directories), bar.advance)
    if count := catalogue.count_unprobed(listings):
        with progress("probing new images", count, "images") as bar:
            catalogue.probe_images(listings, workers if count > _FEW else 0, bar.advance)
    return make_cache_plan(catalogue, listings, {"images": PREPROCESS_VERSION}, _UNIT)


def _samples(plan: CachePlan) -> list[_Sample]:
    samples: list[_Sample] = []
    for unit in plan.units:
        root = plan.source(unit).root
        for member in plan.members(unit):
            task = decode_task(member, root)
            samples.append(_Sample(member.row.key, member.captions, task, task.location.mask is not None))
    return samples
