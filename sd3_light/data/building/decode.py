"""What worker processes do with pictures: look at them (size and content hash), and bring them to their bucket.

Nothing here needs torch, so that a worker is small and starts at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from sd3_light.data.buckets import Bucket, plan
from sd3_light.data.preprocess import Pixels, Reject, decode, decode_mask, fit, fit_mask, probe
from sd3_light.data.sources import Location


@dataclass(frozen=True, slots=True)
class SampleLocation:
    """Where a sample's bytes are."""

    image: Location
    mask: Location | None


@dataclass(frozen=True, slots=True)
class Probe:
    """What one look at a picture tells: its upright size and a hash of its bytes and its mask's, or a reason."""

    width: int = 0
    height: int = 0
    digest: str = ""
    reason: str = ""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class DecodeTask:
    """A picture that was looked at, and the bucket it goes to."""

    place: SampleLocation
    looked: Probe
    bucket: Bucket


@dataclass(frozen=True, slots=True)
class Decoded:
    """Pixels [height, width, 3] and the mask at latent resolution, or a reason."""

    pixels: Pixels | None = None
    mask: Pixels | None = None
    reason: str = ""
    detail: str = ""


def probe_images(places: Sequence[SampleLocation]) -> list[Probe]:
    """Read each picture once."""
    return [_look(place) for place in places]


def _look(place: SampleLocation) -> Probe:
    try:
        image, mask = _read(place)
        width, height = probe(image)
    except Reject as reject:
        return Probe(reason=reject.reason, detail=reject.detail)
    return Probe(width, height, content_digest(image, mask))


def crashed_probe(place: SampleLocation) -> Probe:
    """What is told of a picture whose header killed the process."""
    return Probe(reason="decoder_crashed", detail="while its header was read")


def decode_images(tasks: Sequence[DecodeTask]) -> list[Decoded]:
    """Pictures as their buckets want them."""
    return [_decode(task) for task in tasks]


def _decode(task: DecodeTask) -> Decoded:
    try:
        image, mask = _read(task.place)
        if content_digest(image, mask) != task.looked.digest:
            raise Reject("changed_meanwhile")
        fitting = plan(task.looked.width, task.looked.height, task.bucket)
        pixels = fit(decode(image), fitting)
        return Decoded(pixels, None if mask is None else fit_mask(decode_mask(mask), fitting))
    except Reject as reject:
        return Decoded(reason=reject.reason, detail=reject.detail)


def crashed_decode(task: DecodeTask) -> Decoded:
    """What is told of a picture that killed the process."""
    return Decoded(reason="decoder_crashed")


def _read(place: SampleLocation) -> tuple[bytes, bytes | None]:
    return place.image.read(), None if place.mask is None else place.mask.read()


def content_digest(image: bytes, mask: bytes | None) -> str:
    """A hash of what a sample's files hold; an empty mask file differs from none."""
    digest = blake2b(len(image).to_bytes(8, "little"), digest_size=16)
    digest.update(image)
    if mask is not None:
        digest.update(b"mask" + mask)
    return digest.hexdigest()
