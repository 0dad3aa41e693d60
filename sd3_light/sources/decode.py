"""The work of decoder processes: probing images (size, content hash, thumbnail) and resizing them to their buckets.

This module does not import torch, so that worker processes are small and start quickly.
"""

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO

from PIL import Image

from sd3_light.config.base import DataLocation
from sd3_light.config.faults import UserError
from sd3_light.core.columns import IMAGE, MASK, MASK_FACTOR, REJECTED, reference_entry
from sd3_light.sources.access import exists
from sd3_light.sources.buckets import Bucket, Resize, resize_for
from sd3_light.sources.preprocess import Pixels, Reject, decode, decode_mask, fit, fit_mask, make_thumbnail, probe
from sd3_light.sources.records import FileBytes, Location, open_location
from sd3_light.sources.video import count_frames, decode_video, is_video

_PIECE = 1 << 20


@dataclass(frozen=True, slots=True)
class SampleLocation:
    """Where a sample's images and mask are stored, and whether probing makes a thumbnail of them.

    The image may be a video: probing counts its frames at the rate ``fps`` (0: its own), or takes it for an image if
    that is None.
    """

    image: Location
    mask: Location | None
    with_thumbnail: bool = False
    rejected: Location | None = None
    fps: float | None = None
    references: tuple[Location, ...] = ()


@dataclass(frozen=True, slots=True)
class Probe:
    """An image's upright size, hashes of the bytes of its sample, or the reason why it was rejected.

    A video has ``frames`` at the rate ``fps`` (0: its own), which is part of its hash; an image has none. Videos are
    not compared by thumbnails: different ones may start alike.
    """

    width: int = 0
    height: int = 0
    digest: str = ""
    thumbnail: bytes = b""
    reason: str = ""
    detail: str = ""
    mask_digest: str = ""
    rejected_digest: str = ""
    frames: int = 0
    fps: float = 0.0
    reference_digests: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DecodeTask:
    """A probed sample and its bucket; entries in ``copied`` ("image", "mask", "rejected") are not read.

    A value of the mask is that of a square of ``mask_factor`` pixels. References have the size ``seen_at``, None: that
    of the bucket.
    """

    location: SampleLocation
    probe: Probe
    bucket: Bucket
    copied: tuple[str, ...] = ()
    mask_factor: int = MASK_FACTOR
    seen_at: Bucket | None = None


@dataclass(frozen=True, slots=True)
class Decoded:
    """Pixels [height, width, 3] and the mask at latent resolution, or the reason why they were rejected.

    ``worse`` are the pixels of the other image of a pair, ``references`` those of each reference, None if it is copied.
    A clip of several frames has pixels [frames, height, width, 3].
    """

    pixels: Pixels | None = None
    mask: Pixels | None = None
    reason: str = ""
    detail: str = ""
    worse: Pixels | None = None
    references: tuple[Pixels | None, ...] = ()

    def entries(self) -> dict[str, Pixels]:
        """Return the pixels of all images that were read, by their entries."""
        references = {reference_entry(number): pixels for number, pixels in enumerate(self.references)}
        images = {IMAGE: self.pixels, REJECTED: self.worse, **references}
        return {entry: pixels for entry, pixels in images.items() if pixels is not None}


CRASHED_PROBE = Probe(reason="decoder_crashed", detail="while its header was read")
CRASHED_DECODE = Decoded(reason="decoder_crashed")


def probe_images(locations: Sequence[SampleLocation]) -> list[Probe]:
    """Read each image once and return its size and hash; decode it if its thumbnail is wanted."""
    return [_probe(location) for location in locations]


def _probe(location: SampleLocation) -> Probe:
    try:
        video = None if location.fps is None else _probe_video(location, location.fps)
        if video is not None:
            return video
        image = location.image.read()
        mask = _read(location.mask)
        worse = _read(location.rejected)
        references = tuple(content_digest(reference.read()) for reference in location.references)
        width, height = probe(image)
        thumbnail = make_thumbnail(image, mask) if location.with_thumbnail else b""
    except Reject as reject:
        return Probe(reason=reject.reason, detail=reject.detail)
    except OSError as error:
        return Probe(reason="unreadable", detail=str(error))
    return Probe(
        width,
        height,
        content_digest(image),
        thumbnail,
        mask_digest=_digest_or_none(mask),
        rejected_digest=_digest_or_none(worse),
        reference_digests=references,
    )


def _probe_video(location: SampleLocation, fps: float) -> Probe | None:
    """Return the probe of a video; None if it is not one."""
    with open_location(location.image) as file:
        if not is_video(file):
            return None
        size = count_frames(file, fps or None)
        mask_digest = _digest_or_none(_read(location.mask))
        digest = _video_digest(file, fps)
        return Probe(size.width, size.height, digest, mask_digest=mask_digest, frames=size.frames, fps=fps)


def _video_digest(file: BinaryIO, fps: float) -> str:
    """Return a hash of a video and its rate."""
    digest = blake2b(f"video at {fps!r}".encode(), digest_size=16)
    file.seek(0)
    while piece := file.read(_PIECE):
        digest.update(piece)
    file.seek(0)
    return digest.hexdigest()


def decode_images(tasks: Sequence[DecodeTask]) -> list[Decoded]:
    """Decode images and resize them to their buckets."""
    return [_decode(task) for task in tasks]


def _decode(task: DecodeTask) -> Decoded:
    resize = resize_for(task.probe.width, task.probe.height, task.bucket)
    try:
        if task.probe.frames:
            return _decode_video(task, resize)
        location = task.location
        probed = task.probe
        image = None if "image" in task.copied else _read_unchanged(location.image, probed.digest)
        weights = _mask_weights(task, resize)
        worse = None if "rejected" in task.copied else _read_unchanged(location.rejected, probed.rejected_digest)
        pixels = None if image is None else fit(decode(image), resize)
        references = tuple(_decode_reference(task, number) for number in range(len(location.references)))
        return Decoded(pixels, weights, worse=_fit_other(worse, task.bucket), references=references)
    except Reject as reject:
        return Decoded(reason=reject.reason, detail=reject.detail)
    except OSError as error:
        return Decoded(reason="unreadable", detail=str(error))


def _decode_reference(task: DecodeTask, number: int) -> Pixels | None:
    """Return the pixels of a reference, cropped on its own; None if it is copied."""
    if reference_entry(number) in task.copied:
        return None
    data = _read_unchanged(task.location.references[number], task.probe.reference_digests[number])
    return _fit_other(data, task.seen_at or task.bucket)


def _fit_other(data: bytes | None, bucket: Bucket) -> Pixels | None:
    """Return the pixels of another image of a sample, cropped on its own to the bucket."""
    return None if data is None else fit(decode(data), resize_for(*probe(data), bucket))


def read_fitted(path: Path, bucket: Bucket) -> Image.Image:
    """Return an image file as the cache stage resizes and crops it. Raises UserError if it cannot be read."""
    try:
        data = FileBytes(str(path)).read()
        return Image.fromarray(fit(decode(data), resize_for(*probe(data), bucket)))
    except (Reject, OSError) as error:
        raise UserError(f"{path} cannot be read as an image: {error}") from error


def _decode_video(task: DecodeTask, resize: Resize) -> Decoded:
    pixels = None if "image" in task.copied else _decode_frames(task, resize)
    weights = _mask_weights(task, resize)
    return Decoded(pixels[0] if pixels is not None and task.bucket.frames == 1 else pixels, weights)


def _decode_frames(task: DecodeTask, resize: Resize) -> Pixels:
    with open_location(task.location.image) as file:
        if _video_digest(file, task.probe.fps) != task.probe.digest:
            raise Reject("changed_meanwhile")
        try:
            return decode_video(file, resize, task.bucket.frames, task.probe.fps or None)
        except Reject as reject:
            # the bytes are the same: packets that probing counted have no frame
            raise Reject("broken_video", reject.detail) if reject.reason == "changed_meanwhile" else reject from reject


class NodeError(UserError):
    """A user error that names the node of a cluster on which it occurred."""


def run_on_node(work: Callable[[Sequence[Any]], list[Any]], roots: Sequence[DataLocation], batch: Sequence[Any]) -> Any:
    """Return ``work(batch)``. If images cannot be read because this node has not all sources, raise a NodeError."""
    results = work(batch)
    if roots and any(result.reason == "unreadable" for result in results):
        node = socket.gethostname()
        for root in roots:
            if not exists(root):
                raise NodeError(f"{root} does not exist on the node {node}; every node needs it at the same path")
    return results


def _read(location: Location | None) -> bytes | None:
    return None if location is None else location.read()


def _read_unchanged(location: Location | None, digest: str) -> bytes | None:
    """Return the bytes that were probed. Raises Reject if they have changed."""
    data = _read(location)
    if data is not None and content_digest(data) != digest:
        raise Reject("changed_meanwhile")
    return data


def _mask_weights(task: DecodeTask, resize: Resize) -> Pixels | None:
    """Return the mask at latent resolution; None if there is none, or it is copied."""
    data = None if MASK in task.copied else _read_unchanged(task.location.mask, task.probe.mask_digest)
    return None if data is None else fit_mask(decode_mask(data), resize, task.mask_factor)


def content_digest(data: bytes) -> str:
    """Return a hash of a file's bytes."""
    return blake2b(data, digest_size=16).hexdigest()


def _digest_or_none(data: bytes | None) -> str:
    return "" if data is None else content_digest(data)
