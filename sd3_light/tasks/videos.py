"""`VideoDataset`: captioned clips for a task. All are checked when it is created; workers of the loader decode them."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from sd3_light.config.faults import UserError
from sd3_light.config.load_dataset import directory_from_arguments
from sd3_light.runlog import progress
from sd3_light.sources.buckets import ResizePlan, fits
from sd3_light.sources.listing import VIDEOS
from sd3_light.sources.preprocess import Reject
from sd3_light.sources.records import Location, Record, Rejected, open_location
from sd3_light.sources.scan import scan
from sd3_light.sources.video import VideoSize, decode_video, probe_video, require_av
from sd3_light.sources.workers import WorkerPool
from sd3_light.tasks.images import SourceDataset

_RESIZE_KEYS = ("resolutions", "enable_ar_bucket", "ar_buckets", "min_ar", "max_ar", "num_ar_buckets", "size_buckets")
_CAPTION_KEYS = ("caption_prefix", "caption_column", "skip_empty_caption", "subsample_ratio")
_Probed = VideoSize | tuple[str, str]  # or reason and detail of a reject


@dataclass(frozen=True, slots=True)
class _Clip:
    record: Record
    frames: int
    plan: ResizePlan


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
        self._counts, self._fps = _frame_counts(frames), _rate(fps)
        values = {"path": os.fspath(path), "image_column": video_column, **keys}
        directory = directory_from_arguments(values, "VideoDataset")
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
        work = partial(_probe_all, counts=self._counts, fps=self._fps)
        count = min(len(records), os.cpu_count() or 1 if num_workers is None else num_workers)
        results: list[_Probed] = []
        crashed: _Probed = ("decoder_crashed", "")
        with (
            progress("videos", len(records), "videos") as bar,
            WorkerPool(count, work, crashed) as pool,
        ):
            for batch in pool.map([record.image] for record in records):
                results += batch
                bar.set_done(len(results), len(records))
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


def _frame_counts(frames: Any) -> tuple[int, ...]:
    counts = tuple(frames) if isinstance(frames, list | tuple) else (frames,)
    if not counts or not all(type(count) is int and count >= 1 for count in counts):
        raise UserError(f"frames is {frames!r}; give a number of frames >= 1, or a list of them, such as [17, 33]")
    return counts


def _rate(fps: Any) -> float | None:
    if fps is not None and not (isinstance(fps, int | float) and 0.01 <= fps <= 1000):
        raise UserError(f"fps is {fps!r}; give frames per second from 0.01 to 1000, or None for every frame")
    return fps


def _probe_all(locations: Sequence[Location], counts: Sequence[int], fps: float | None) -> list[_Probed]:
    return [_probe_one(location, counts, fps) for location in locations]


def _probe_one(location: Location, counts: Sequence[int], fps: float | None) -> _Probed:
    try:
        with open_location(location) as file:
            return probe_video(file, counts, fps)
    except Reject as reject:
        return reject.reason, reject.detail
