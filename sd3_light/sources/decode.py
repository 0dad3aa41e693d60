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
    """Where a sample's images and mask are stored, and whether probing makes a thumbnail of them."""

    image: Location
    mask: Location | None
    with_thumbnail: bool = False
    rejected: Location | None = None


@dataclass(frozen=True, slots=True)
class Probe:
    """An image's upright size and a hash of all bytes of its sample, or the reason why it was rejected."""

    width: int = 0
    height: int = 0
    digest: str = ""
    thumbnail: bytes = b""
    reason: str = ""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class DecodeTask:
    """A probed image and its bucket."""

    location: SampleLocation
    probe: Probe
    bucket: Bucket


@dataclass(frozen=True, slots=True)
class Decoded:
    """Pixels [height, width, 3] and the mask at latent resolution, or the reason why the image was rejected.

    ``worse`` are the pixels of the other image of a pair.
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
        image, mask, worse = _read(location)
        width, height = probe(image)
        thumbnail = make_thumbnail(image, mask) if location.with_thumbnail else b""
    except Reject as reject:
        return Probe(reason=reject.reason, detail=reject.detail)
    return Probe(width, height, content_digest(image, mask, worse), thumbnail)


def decode_images(tasks: Sequence[DecodeTask]) -> list[Decoded]:
    """Decode images and resize them to their buckets."""
    return [_decode(task) for task in tasks]


def _decode(task: DecodeTask) -> Decoded:
    try:
        image, mask, worse = _read(task.location)
        if content_digest(image, mask, worse) != task.probe.digest:
            raise Reject("changed_meanwhile")
        resize = plan(task.probe.width, task.probe.height, task.bucket)
        pixels = fit(decode(image), resize)
        weights = None if mask is None else fit_mask(decode_mask(mask), resize)
        if worse is None:
            return Decoded(pixels, weights)
        return Decoded(pixels, weights, worse=fit(decode(worse), plan(*probe(worse), task.bucket)))
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
