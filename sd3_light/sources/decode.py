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
    """An image's upright size, hashes of the bytes of its sample, or the reason why it was rejected."""

    width: int = 0
    height: int = 0
    digest: str = ""
    thumbnail: bytes = b""
    reason: str = ""
    detail: str = ""
    mask_digest: str = ""
    rejected_digest: str = ""


@dataclass(frozen=True, slots=True)
class DecodeTask:
    """A probed sample and its bucket; entries in ``copied`` ("image", "mask", "rejected") are not read."""

    location: SampleLocation
    probe: Probe
    bucket: Bucket
    copied: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Decoded:
    """Pixels [height, width, 3] and the mask at latent resolution, or the reason why they were rejected.

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
        image = location.image.read()
        mask = _read(location.mask)
        worse = _read(location.rejected)
        width, height = probe(image)
        thumbnail = make_thumbnail(image, mask) if location.with_thumbnail else b""
    except Reject as reject:
        return Probe(reason=reject.reason, detail=reject.detail)
    mask_digest, rejected_digest = ("" if data is None else content_digest(data) for data in (mask, worse))
    digests = {"mask_digest": mask_digest, "rejected_digest": rejected_digest}
    return Probe(width, height, content_digest(image), thumbnail, **digests)


def decode_images(tasks: Sequence[DecodeTask]) -> list[Decoded]:
    """Decode images and resize them to their buckets."""
    return [_decode(task) for task in tasks]


def _decode(task: DecodeTask) -> Decoded:
    try:
        location, probed = task.location, task.probe
        image, mask, worse = (
            _read(None if name in task.copied else source)
            for name, source in (("image", location.image), ("mask", location.mask), ("rejected", location.rejected))
        )
        digests = (probed.digest, probed.mask_digest, probed.rejected_digest)
        for data, digest in zip((image, mask, worse), digests, strict=True):
            if data is not None and content_digest(data) != digest:
                raise Reject("changed_meanwhile")
        resize = plan(probed.width, probed.height, task.bucket)
        pixels = None if image is None else fit(decode(image), resize)
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


def _read(location: Location | None) -> bytes | None:
    return None if location is None else location.read()


def content_digest(data: bytes) -> str:
    """Return a hash of a file's bytes."""
    return blake2b(data, digest_size=16).hexdigest()
