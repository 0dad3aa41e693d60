"""The work of decoder processes: probing images (size, content hash, thumbnail) and resizing them to their buckets.

This module does not import torch, so that worker processes are small and start quickly.
"""

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from sd3_light.config.base import DataLocation
from sd3_light.config.faults import UserError
from sd3_light.sources.access import exists
from sd3_light.sources.buckets import Bucket, plan
from sd3_light.sources.preprocess import Pixels, Reject, decode, decode_mask, fit, fit_mask, make_thumbnail, probe
from sd3_light.sources.records import Location


@dataclass(frozen=True, slots=True)
class SampleLocation:
    """Where a sample's image and mask are stored, and whether probing makes a thumbnail of them."""

    image: Location
    mask: Location | None
    with_thumbnail: bool = False


@dataclass(frozen=True, slots=True)
class Probe:
    """An image's upright size, hashes of its bytes and of its mask's, or the reason why it was rejected."""

    width: int = 0
    height: int = 0
    digest: str = ""
    thumbnail: bytes = b""
    reason: str = ""
    detail: str = ""
    mask_digest: str = ""


@dataclass(frozen=True, slots=True)
class DecodeTask:
    """A probed image and its bucket; ``with_pixels`` off: only its mask is read."""

    location: SampleLocation
    probe: Probe
    bucket: Bucket
    with_pixels: bool = True


@dataclass(frozen=True, slots=True)
class Decoded:
    """Pixels [height, width, 3] and the mask at latent resolution, or the reason why they were rejected."""

    pixels: Pixels | None = None
    mask: Pixels | None = None
    reason: str = ""
    detail: str = ""


CRASHED_PROBE = Probe(reason="decoder_crashed", detail="while its header was read")
CRASHED_DECODE = Decoded(reason="decoder_crashed")


def probe_images(locations: Sequence[SampleLocation]) -> list[Probe]:
    """Read each image once and return its size and hash; decode it if its thumbnail is wanted."""
    return [_probe(location) for location in locations]


def _probe(location: SampleLocation) -> Probe:
    try:
        image = location.image.read()
        mask = _read_mask(location)
        width, height = probe(image)
        thumbnail = make_thumbnail(image, mask) if location.with_thumbnail else b""
    except Reject as reject:
        return Probe(reason=reject.reason, detail=reject.detail)
    return Probe(
        width, height, content_digest(image), thumbnail, mask_digest="" if mask is None else content_digest(mask)
    )


def decode_images(tasks: Sequence[DecodeTask]) -> list[Decoded]:
    """Decode images and resize them to their buckets."""
    return [_decode(task) for task in tasks]


def _decode(task: DecodeTask) -> Decoded:
    try:
        image = task.location.image.read() if task.with_pixels else None
        mask = _read_mask(task.location)
        for data, digest in ((image, task.probe.digest), (mask, task.probe.mask_digest)):
            if data is not None and content_digest(data) != digest:
                raise Reject("changed_meanwhile")
        resize = plan(task.probe.width, task.probe.height, task.bucket)
        pixels = None if image is None else fit(decode(image), resize)
        return Decoded(pixels, None if mask is None else fit_mask(decode_mask(mask), resize))
    except Reject as reject:
        return Decoded(reason=reject.reason, detail=reject.detail)


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


def _read_mask(location: SampleLocation) -> bytes | None:
    return None if location.mask is None else location.mask.read()


def content_digest(data: bytes) -> str:
    """Return a hash of a file's bytes."""
    return blake2b(data, digest_size=16).hexdigest()
