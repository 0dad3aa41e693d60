"""Samples of the cache: their decoded latents, beside the originals cropped as for the cache."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import pyarrow as pa
import torch
from diffusers import AutoencoderKL
from PIL import Image
from safetensors import SafetensorError
from torch import Tensor

from sd3_light.config.faults import UserError
from sd3_light.core.columns import MASK, named_bucket
from sd3_light.data.manifest import SHARDS, Manifest, ShardEntry
from sd3_light.data.reader import ShardReader
from sd3_light.data.shards import Origin, read_origins
from sd3_light.encoding.vae import decode_moments, load_vae, psnr
from sd3_light.pages import data_uri, tint_masked
from sd3_light.report.inspect.cache_stats import SampleRef
from sd3_light.report.inspect.source_images import image_location
from sd3_light.runlog import progress
from sd3_light.sources.buckets import Resize, resize_for
from sd3_light.sources.preprocess import Pixels, Reject, fit
from sd3_light.sources.video import open_still

_MOST_PIXELS = 1 << 20  # per decoded batch
_MOST_SAMPLES = 16

_CachedSample = tuple[SampleRef, Origin, dict[str, Tensor]]
"""A sample, its origin, and its values that are not those of captions."""


@dataclass(frozen=True)
class SampleCard:
    """A sample on the page. Images are data URIs, "" where they cannot be shown; ``psnr`` compares both, in dB."""

    ref: SampleRef
    origin: Origin
    resize: Resize
    original: str = ""
    decoded: str = ""
    masked: str = ""
    problem: str = ""
    psnr: float | None = None

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels."""
        bucket = named_bucket(self.ref.entry.bucket)
        return bucket.width, bucket.height

    @property
    def psnr_text(self) -> str:
        """`, 36 dB`, or "" where there is nothing to compare."""
        return "" if self.psnr is None else f", {self.psnr:.0f} dB"

    @property
    def resize_text(self) -> str:
        """`640x480 → 288x224, 3% cropped`"""
        parts = [f"{self.resize.source[0]}x{self.resize.source[1]} → {self.ref.entry.bucket}"]
        if self.resize.cropped_fraction > 0:
            parts.append(f"{max(self.resize.cropped_fraction, 0.01):.0%} cropped")
        if self.resize.enlarged:
            parts.append("enlarged")
        return ", ".join(parts)


def open_vae(places: Mapping[str, str], vae: Path | None) -> tuple[AutoencoderKL | None, str]:
    """Return the VAE in ``vae``, which must be usable, or the one that built the cache, and why there is none."""
    folder = vae or (Path(places["diffusers_path"]) if "diffusers_path" in places else None)
    if folder is None:
        return None, "The cache does not record which VAE built it; pass its diffusers folder with --vae FOLDER."
    if folder.name == "vae" and (folder / "config.json").is_file():
        folder = folder.parent
    problem = f"{folder} has no vae/config.json"
    if (folder / "vae" / "config.json").is_file():
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        try:
            return load_vae(folder, device, torch.float32), ""
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            problem = f"the VAE of {folder} cannot be loaded: {str(error).splitlines()[0]}"
    if vae is not None:
        raise UserError(f"--vae: {problem}; pass a diffusers folder with the VAE of the cache")
    return None, f"The VAE that built the cache is not available ({problem}); pass its folder with --vae FOLDER."


def load_samples(
    folder: Path, manifest: Manifest, refs: Sequence[SampleRef], vae: AutoencoderKL | None, notes: list[str]
) -> list[SampleCard]:
    """Load samples as far as they can be shown; a shard that cannot be read is added to ``notes``.

    ``refs`` must be ordered by bucket and shard, as `draw_samples` returns them. Memory holds one batch of decoded
    images beside the cards.
    """
    cards: list[SampleCard] = []
    shards = _Shards(folder, notes)
    with progress("inspect", len(refs), "samples") as bar:
        for batch in _batches(refs):
            samples = [sample for ref in batch if (sample := shards.read(ref)) is not None]
            decoded = _decode([values for _, _, values in samples], vae, notes)
            for (ref, origin, values), pixels in zip(samples, decoded, strict=True):
                cards.append(_card(manifest.places, ref, origin, values.get(MASK), pixels))
            bar.advance(len(batch))
    return cards


def _batches(refs: Sequence[SampleRef]) -> Iterator[list[SampleRef]]:
    """Yield samples of one bucket, few enough to decode together."""
    for bucket, group in groupby(refs, key=lambda ref: ref.entry.bucket):
        size = min(_MOST_SAMPLES, max(1, _MOST_PIXELS // named_bucket(bucket).area))
        members = list(group)
        yield from (members[start : start + size] for start in range(0, len(members), size))


class _Shards:
    """Reads samples; the last shard stays open, since samples arrive in the order of shards."""

    def __init__(self, folder: Path, notes: list[str]) -> None:
        self.folder = folder / SHARDS
        self.notes = notes
        self._file = ""
        self._shard: tuple[ShardReader, list[Origin]] | None = None

    def read(self, ref: SampleRef) -> _CachedSample | None:
        """Return a sample, or None and a note where its shard cannot be read."""
        if self._file != ref.entry.file:
            self._shard = self._open(ref.entry)
            self._file = ref.entry.file
        if self._shard is None:
            return None
        reader, origins = self._shard
        return ref, origins[ref.row], reader.images(ref.row, 0)

    def _open(self, entry: ShardEntry) -> tuple[ShardReader, list[Origin]] | None:
        path = self.folder / entry.file
        try:
            reader = ShardReader(path, entry)
            origins = read_origins(path)
        except (UserError, OSError, pa.ArrowException, SafetensorError, LookupError) as error:
            self.notes.append(f"The samples of shard {entry.file} are not shown, it cannot be read: {error}")
            return None
        if len(origins) != entry.count:
            self.notes.append(f"The Arrow file of {entry.file} has {len(origins)} rows instead of {entry.count}.")
            return None
        return reader, origins


def _decode(
    samples: Sequence[Mapping[str, Tensor]], vae: AutoencoderKL | None, notes: list[str]
) -> list[Pixels | None]:
    """Decode samples of one size to [height, width, 3] each: the posterior mean of their moments [2C, (f,) h, w]."""
    if vae is None or not samples:
        return [None] * len(samples)
    latents = {name: len(value) for name, value in samples[0].items() if value.dim() in (3, 4)}
    own = vae.config.get("latent_channels") or vae.config.get("z_dim")
    name = next((name for name, channels in latents.items() if channels == 2 * own), None)
    if name is None:
        cached = " or ".join(str(channels // 2) for channels in latents.values()) or "none"
        note = (
            f"The VAE has {own} latent channels and the cache {cached}; "
            "pass the folder of the VAE that built the cache with --vae FOLDER."
        )
        if note not in notes:
            notes.append(note)
        return [None] * len(samples)
    return list(decode_moments(vae, torch.stack([values[name] for values in samples])))


def _card(
    places: Mapping[str, str], ref: SampleRef, origin: Origin, mask: Tensor | None, decoded: Pixels | None
) -> SampleCard:
    resize = resize_for(origin.width, origin.height, named_bucket(ref.entry.bucket))
    original, problem = _load_original(places, ref, origin, resize)
    base = original if original is not None else decoded
    masked = ""
    if mask is not None and base is not None and bool((mask < 255).any()):
        masked = data_uri(tint_masked(base, mask.numpy()))
    similarity = None
    if original is not None and decoded is not None and original.shape == decoded.shape:
        similarity = psnr(original, decoded)
    return SampleCard(ref, origin, resize, _uri(original), _uri(decoded), masked, problem, similarity)


def _load_original(
    places: Mapping[str, str], ref: SampleRef, origin: Origin, resize: Resize
) -> tuple[Pixels | None, str]:
    """Return the source image, resized and cropped as for the cache, or why it cannot be shown."""
    try:
        image = open_still(image_location(places, ref.entry.directory, origin.image))
    except Reject as error:
        return None, error.detail or error.reason
    if image.size != resize.source:
        now, before = (f"{width}x{height}" for width, height in (image.size, resize.source))
        return None, f"the file has changed: it is {now} now and was {before}"
    return fit(image, resize), ""


def _uri(pixels: Pixels | None) -> str:
    return "" if pixels is None else data_uri(Image.fromarray(pixels))
