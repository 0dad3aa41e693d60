"""The work of decoder processes: probing images (size, content hash, thumbnail) and resizing them to their buckets.

This module does not import torch, so that worker processes are small and start quickly.
"""

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, BinaryIO

from sd3_light.config.base import DataLocation
from sd3_light.config.faults import UserError
from sd3_light.sources.access import exists
from sd3_light.sources.buckets import Bucket, ResizePlan, plan
from sd3_light.sources.preprocess import Pixels, Reject, decode, decode_mask, fit, fit_mask, make_thumbnail, probe
from sd3_light.sources.records import Location, open_location
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


@dataclass(frozen=True, slots=True)
class Probe:
    """An image's upright size and a hash of all bytes of its sample, or the reason why it was rejected.

    A video has ``frames`` at the rate ``fps`` (0: its own), which is part of the hash; an image has none. Videos are
    not compared by thumbnails: different ones may start alike.
    """

    width: int = 0
    height: int = 0
    digest: str = ""
    thumbnail: bytes = b""
    reason: str = ""
    detail: str = ""
    frames: int = 0
    fps: float = 0.0


@dataclass(frozen=True, slots=True)
class DecodeTask:
    """A probed image and its bucket."""

    location: SampleLocation
    probe: Probe
    bucket: Bucket


@dataclass(frozen=True, slots=True)
class Decoded:
    """Pixels [height, width, 3] and the mask at latent resolution, or the reason why the image was rejected.

    ``worse`` are the pixels of the other image of a pair. A clip of several frames has pixels [frames, height, width,
    3].
    """

    pixels: Pixels | None = None
    mask: Pixels | None = None
    reason: str = ""
    detail: str = ""
    worse: Pixels | None = None


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
        image, mask, worse = _read(location)
        width, height = probe(image)
        thumbnail = make_thumbnail(image, mask) if location.with_thumbnail else b""
    except Reject as reject:
        return Probe(reason=reject.reason, detail=reject.detail)
    except OSError as error:
        return Probe(reason="unreadable", detail=str(error))
    return Probe(width, height, content_digest(image, mask, worse), thumbnail)


def _probe_video(location: SampleLocation, fps: float) -> Probe | None:
    """Return the probe of a video; None if it is not one."""
    with open_location(location.image) as file:
        if not is_video(file):
            return None
        size = count_frames(file, fps or None)
        return Probe(size.width, size.height, _video_digest(location, file, fps), frames=size.frames, fps=fps)


def _video_digest(location: SampleLocation, file: BinaryIO, fps: float) -> str:
    """Return a hash of a video, its rate and its mask."""
    digest = blake2b(f"video at {fps!r}".encode(), digest_size=16)
    file.seek(0)
    while piece := file.read(_PIECE):
        digest.update(piece)
    file.seek(0)
    if location.mask is not None:
        digest.update(b"mask" + location.mask.read())
    return digest.hexdigest()


def decode_images(tasks: Sequence[DecodeTask]) -> list[Decoded]:
    """Decode images and resize them to their buckets."""
    return [_decode(task) for task in tasks]


def _decode(task: DecodeTask) -> Decoded:
    resize = plan(task.probe.width, task.probe.height, task.bucket)
    try:
        if task.probe.frames:
            return _decode_video(task, resize)
        image, mask, worse = _read(task.location)
        if content_digest(image, mask, worse) != task.probe.digest:
            raise Reject("changed_meanwhile")
        pixels = fit(decode(image), resize)
        weights = None if mask is None else fit_mask(decode_mask(mask), resize)
        if worse is None:
            return Decoded(pixels, weights)
        return Decoded(pixels, weights, worse=fit(decode(worse), plan(*probe(worse), task.bucket)))
    except Reject as reject:
        return Decoded(reason=reject.reason, detail=reject.detail)
    except OSError as error:
        return Decoded(reason="unreadable", detail=str(error))


def _decode_video(task: DecodeTask, resize: ResizePlan) -> Decoded:
    location = task.location
    with open_location(location.image) as file:
        if _video_digest(location, file, task.probe.fps) != task.probe.digest:
            raise Reject("changed_meanwhile")
        try:
            pixels = decode_video(file, resize, task.bucket.frames, task.probe.fps or None)
        except Reject as reject:
            # the bytes are the same: packets that probing counted have no frame
            raise Reject("broken_video", reject.detail) if reject.reason == "changed_meanwhile" else reject from reject
    weights = None if location.mask is None else fit_mask(decode_mask(location.mask.read()), resize)
    return Decoded(pixels[0] if task.bucket.frames == 1 else pixels, weights)


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


def _read(location: SampleLocation) -> tuple[bytes, bytes | None, bytes | None]:
    """Return the bytes of image, mask and rejected image."""
    mask, rejected = (None if other is None else other.read() for other in (location.mask, location.rejected))
    return location.image.read(), mask, rejected


def content_digest(image: bytes, mask: bytes | None, rejected: bytes | None = None) -> str:
    """Return a hash of a sample's files; an empty mask differs from no mask."""
    digest = blake2b(len(image).to_bytes(8, "little"), digest_size=16)
    digest.update(image)
    if mask is not None:
        digest.update(b"mask" + mask)
    if rejected is not None:
        digest.update(b"rejected" + rejected)
    return digest.hexdigest()
