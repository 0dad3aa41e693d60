"""`ImageFolder` and `VideoDataset`: captioned images and clips for a task, which workers of the loader decode."""

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from PIL import Image
from torch.utils.data import Dataset

from sd3_light.config import VALIDATION, DirectoryConfig, load_dataset
from sd3_light.config.faults import UserError
from sd3_light.config.load_dataset import directory_from_arguments
from sd3_light.core.columns import MASK_FACTOR
from sd3_light.data.cache_plan import CachePlan, PlannedShard, decode_task
from sd3_light.data.decoded import plan_images
from sd3_light.data.split import RECORD, split_images
from sd3_light.files import write_atomically
from sd3_light.inputs import read_json_file
from sd3_light.randomness import sample_id
from sd3_light.runlog import info, progress
from sd3_light.sources.buckets import Resize, buckets_for, fits
from sd3_light.sources.catalogue import Catalogue
from sd3_light.sources.claims import Claims
from sd3_light.sources.decode import DecodeTask, decode_images
from sd3_light.sources.listing import IMAGE_SUFFIXES, VIDEOS
from sd3_light.sources.preprocess import REASONS, TRANSIENT, Reject
from sd3_light.sources.records import Location, Record, Rejected, open_location
from sd3_light.sources.scan import scan
from sd3_light.sources.video import VideoSize, decode_video, probe_video, require_av
from sd3_light.sources.workers import WorkerPool
from sd3_light.tasks.sides import Sides

_SHOWN_REJECTS = 5
_UNIT = 4096  # samples that are planned together
_BATCH = 16  # images that a process checks at a time
_UNUSED = {"flip": False, "num_repeats": 1, "caption_weights": (), "references": ()}
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

    def write_rejects(self, folder: Path) -> None:
        """Write ``rejects.jsonl``, a line per reject, to the folder of a data process."""
        rows = [{"key": reject.key, "reason": reject.reason, "detail": reject.detail} for reject in self.rejects]
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
        write_atomically(folder / "rejects.jsonl", "".join(lines).encode())


@dataclass(frozen=True, slots=True)
class _Sample:
    key: str
    captions: tuple[str, ...]
    task: DecodeTask


class ImageFolder(SourceDataset):
    """Samples ``{"image": RGB image, "prompt": str, "captions": all captions}`` of a folder, a tar or a Parquet file.

    ``path`` may be a dataset TOML instead, and ``keys`` are those of its `[[directory]]`: captions, buckets, `where`
    and so on mean what they mean there. An image is resized and cropped to its bucket when it is used; there is one
    sample per resolution. With `mask_path` samples have a ``mask`` [h, w] from 0 to 1, of latent pixels, each
    ``vae_factor`` pixels wide.

    Every image is decoded once to check it, by ``num_workers`` processes (None: one per core). Unusable ones are left
    out, and listed in ``rejects`` with a reason. ``catalogue`` is a folder that keeps the result, for later runs and
    other processes: they check only new images.

    With `validation` a part of the images is held out, in ``sides``: `launch_training_task` trains on the others, and
    evaluates it every ``eval_steps``. A ``catalogue`` remembers the side of every image.
    """

    def __init__(
        self,
        path: str | Path,
        catalogue: str | Path | None = None,
        num_workers: int | None = None,
        vae_factor: int = MASK_FACTOR,
        **keys: Any,
    ) -> None:
        directories = _directories(path, keys)
        _require_factor(vae_factor, directories)
        self._vae_factor = vae_factor
        workers = os.cpu_count() or 1 if num_workers is None else num_workers
        with TemporaryDirectory(prefix="sd3-light-") as temporary:
            folder = Path(temporary if catalogue is None else catalogue)
            with Claims(folder / "claims") as claims:
                compared = any(directory.validation for directory in directories)
                plan = plan_images(Catalogue(folder, claims), directories, workers, "images", _UNIT, compared)
                rejects = [Rejected(row.key, row.reason, row.detail, None) for row in plan.rejected()]
                checked = _check_all(plan, claims, workers, vae_factor)
                self._samples = _usable_samples(plan, checked, rejects, vae_factor)
                self.sides = _divide(plan, [sample.key for sample in self._samples], folder)
        super().__init__(path, list(dict.fromkeys(rejects)))  # an image may fail in each resolution
        otherwise = f"no file with a caption ends in {', '.join(sorted(IMAGE_SUFFIXES))}"
        remedy = "check path, captions and where"
        self._require_samples(len(self), f"{path} has no usable image", otherwise, remedy)
        self._masked = any(sample.task.location.mask is not None for sample in self._samples)

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
            raise UserError(
                f"{sample.key} was usable when the dataset was created, and is not any more ({why}); restore it before "
                "you resume, or start again without it in another output_path"
            )
        item = {
            "image": Image.fromarray(decoded.pixels),
            "prompt": sample.captions[0],
            "captions": list(sample.captions),
        }
        if self._masked:
            height, width = self.bucket_of(index)
            mask = torch.ones(height // self._vae_factor, width // self._vae_factor)
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


_Fault = tuple[str, str]  # reason and detail; both empty for a usable image


def _require_factor(vae_factor: Any, directories: Sequence[DirectoryConfig]) -> None:
    """Raise UserError if masks of latent pixels of this side do not fit the buckets."""
    if type(vae_factor) is not int or vae_factor < 1:
        raise UserError(
            f"ImageFolder: vae_factor is {vae_factor!r}; give the pixels of a latent pixel's side, such as 8"
        )
    for directory in directories:
        for bucket in buckets_for(directory):
            if bucket.width % vae_factor or bucket.height % vae_factor:
                raise UserError(
                    f"ImageFolder: vae_factor = {vae_factor} does not divide the sides of a bucket, {bucket}; write "
                    "side_step, or other resolutions"
                )


def _check_all(plan: CachePlan, claims: Claims, workers: int, factor: int) -> list[dict[int, _Fault]]:
    """Decode every sample once. Return the faults of each unit by the numbers of its samples.

    They are kept beside the plan. A unit's name has a hash of its images, so a changed one is checked again.
    """
    units = {unit.file: unit for unit in plan.shards}

    def is_checked(name: str) -> bool:
        note = _note(plan, units[name], factor)
        faults = _read_faults(note)
        if faults is None:
            return False
        return not any(reason in TRANSIENT for reason, _ in faults.values()) or claims.is_newer(note, name)

    def check(name: str) -> None:
        root = plan.source(units[name]).root
        tasks = [decode_task(member, root, mask_factor=factor) for member in plan.members(units[name])]
        faults: list[_Fault] = []
        for batch in pool.map(tasks[start : start + _BATCH] for start in range(0, len(tasks), _BATCH)):
            faults += batch
            bar.advance(len(batch))
        unusable = {number: fault for number, fault in enumerate(faults) if fault[0]}
        write_atomically(_note(plan, units[name], factor), json.dumps(unusable).encode())

    if total := sum(unit.count for name, unit in units.items() if not is_checked(name)):
        crashed: _Fault = ("decoder_crashed", "")
        with (
            WorkerPool(min(workers, 1 + total // _BATCH), _check_images, crashed) as pool,
            progress("checking images", total, "images") as bar,
        ):
            claims.divide(list(units), is_checked, check)
            bar.set_done(total)  # with what other processes have checked
    return [_read_faults(_note(plan, unit, factor)) or {} for unit in plan.shards]


def _check_images(tasks: Sequence[DecodeTask]) -> list[_Fault]:
    """Decode images as they are used, one at a time, and return their faults."""
    return [(image.reason, image.detail) for task in tasks for image in decode_images([task])]


def _note(plan: CachePlan, unit: PlannedShard, factor: int) -> Path:
    # a mask that is black at one factor may not be at another
    other = "" if factor == MASK_FACTOR else f".{factor}"
    return plan.path.with_name(f"{Path(unit.file).stem}.checked{other}.json")


def _read_faults(note: Path) -> dict[int, _Fault] | None:
    """Return what was found in a unit; None if it was not checked, or the file is damaged."""
    try:
        return {int(number): (str(reason), str(detail)) for number, (reason, detail) in read_json_file(note).items()}
    except (FileNotFoundError, ValueError, TypeError, AttributeError):
        return None


def _usable_samples(
    plan: CachePlan, faults: Sequence[Mapping[int, _Fault]], rejects: list[Rejected], factor: int
) -> list[_Sample]:
    """Return the samples without a fault; the others are added to ``rejects``."""
    samples: list[_Sample] = []
    for unit, found in zip(plan.shards, faults, strict=True):
        root = plan.source(unit).root
        for number, member in enumerate(plan.members(unit)):
            if number in found:
                reason, detail = found[number]
                rejects.append(Rejected(member.row.key, reason, detail))
                continue
            task = decode_task(member, root, mask_factor=factor)
            samples.append(_Sample(member.row.key, member.captions, task))
    return samples


def _divide(plan: CachePlan, keys: Sequence[str], folder: Path) -> Sides | None:
    """Return the sides of the samples with these keys; None if no directory is divided."""
    rows = {
        member.row.key: (member.row, plan.source(unit).directory.validation)
        for unit in plan.shards
        for member in plan.members(unit)
    }
    if not any(may_be_held_out for _, may_be_held_out in rows.values()):
        return None
    distinct = [rows[key] for key in dict.fromkeys(keys)]
    split = split_images(lambda: distinct, folder / RECORD)
    info(f"validation: {split.sentence()}")
    sides = dict.fromkeys(split.validation, VALIDATION) | dict.fromkeys(split.unused, "unused")
    return Sides(tuple(sides.get(sample_id(key), "train") for key in keys))


_RESIZE_KEYS = ("resolutions", "enable_ar_bucket", "ar_buckets", "min_ar", "max_ar", "num_ar_buckets", "size_buckets")
_CAPTION_KEYS = ("caption_prefix", "caption_column", "skip_empty_caption", "subsample_ratio")
_Probed = VideoSize | tuple[str, str]  # or reason and detail of a reject


@dataclass(frozen=True, slots=True)
class _Clip:
    record: Record
    frames: int
    plan: Resize


class VideoDataset(SourceDataset):
    """Samples ``{"video": bytes [F, H, W, 3], "prompt": str}`` of a folder of clips, a tar or a Parquet file.

    Captions come from ``NAME.txt`` or a table with a column ``video``, as for images. ``frames`` is the number of
    frames per sample, or several numbers: a video gets the largest that it has. Frames are taken from its start,
    ``fps`` per second (None: every frame), resized and cropped to a bucket by the keys of `[[directory]]`.

    Every video is decoded once, by ``num_workers`` processes (None: one per core). Unusable ones are left out, and
    listed in ``rejects`` with a reason.
    """

    def __init__(
        self,
        path: str | Path,
        frames: int | Sequence[int],
        fps: float | None = None,
        video_column: str = "",
        num_workers: int | None = None,
        **keys: Any,
    ) -> None:
        known = (*_RESIZE_KEYS, *_CAPTION_KEYS)
        if unknown := sorted(keys.keys() - set(known)):
            raise UserError(f"VideoDataset does not know {unknown[0]!r}; it knows {', '.join(known)}")
        rate = {} if fps is None else {"fps": fps}
        values = {"path": os.fspath(path), "image_column": video_column, "frames": frames, **rate, **keys}
        directory = directory_from_arguments(values, "VideoDataset")
        self._counts = directory.clip_lengths
        self._fps = directory.fps
        items = list(scan(directory, 0, VIDEOS))
        records = [item for item in items if isinstance(item, Record)]
        rejects = [item for item in items if isinstance(item, Rejected)]
        self._clips: list[_Clip] = []
        for record, result in zip(records, self._probe(records, num_workers), strict=True):
            if isinstance(result, tuple):
                rejects.append(Rejected(record.key, *result, record.image))
                continue
            plans = [resize for _, _, resize in fits(result.width, result.height, directory)]
            self._clips += [_Clip(record, result.frames, resize) for resize in plans]
        super().__init__(path, rejects)
        otherwise = f"no file ends in {', '.join(sorted(VIDEOS.suffixes))}"
        self._require_samples(len(self), f"{path} has no usable video", otherwise, "check path, frames and fps")

    def _probe(self, records: Sequence[Record], num_workers: int | None) -> list[_Probed]:
        if any(Path(record.key).suffix.lower() in VIDEOS.suffixes - {".gif"} for record in records):
            require_av()  # before the work starts; a cell of a Parquet file is known only when it is read
        work = partial(_probe_videos, counts=self._counts, fps=self._fps)
        count = min(len(records), os.cpu_count() or 1 if num_workers is None else num_workers)
        results: list[_Probed] = []
        crashed: _Probed = ("decoder_crashed", "")
        with (
            progress("videos", len(records), "videos") as bar,
            WorkerPool(count, work, crashed) as pool,
        ):
            for batch in pool.map([record.image] for record in records):
                results += batch
                bar.advance()
        return results

    def __len__(self) -> int:
        return len(self._clips)

    def bucket_of(self, index: int) -> tuple[int, int, int]:
        """Return frames, height and width of a sample; only samples of one bucket share a batch."""
        clip = self._clips[index]
        width, height = clip.plan.size
        return clip.frames, height, width

    def __getitem__(self, index: int) -> dict[str, Any]:
        clip = self._clips[index]
        try:
            with open_location(clip.record.image) as file:
                video = decode_video(file, clip.plan, clip.frames, self._fps)
        except Reject as reject:
            raise UserError(
                f"{clip.record.key} has changed since it was checked ({reject}); create the dataset again"
            ) from reject
        return {"video": video, "prompt": clip.record.captions[0]}


def _probe_videos(locations: Sequence[Location], counts: Sequence[int], fps: float | None) -> list[_Probed]:
    results: list[_Probed] = []
    for location in locations:
        try:
            with open_location(location) as file:
                results.append(probe_video(file, counts, fps))
        except Reject as reject:
            results.append((reject.reason, reject.detail))
    return results
