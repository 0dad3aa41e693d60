"""Samples out of the cache: what the VAE makes of their latents, beside their originals cropped as the cache did."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from diffusers import AutoencoderKL
from PIL import Image
from safetensors import SafetensorError
from torch import Tensor

from sd3_light.config.faults import UserError
from sd3_light.data.buckets import Bucket, ResizePlan, plan
from sd3_light.data.manifest import SHARDS, Manifest, ShardEntry
from sd3_light.data.preprocess import Pixels, Reject, decode, fit
from sd3_light.data.reader import ShardReader
from sd3_light.data.shards import Origin, read_origins
from sd3_light.encoders.vae import load_vae
from sd3_light.runlog import progress
from sd3_light.runlog.page.pictures import data_uri
from sd3_light.stages.inspect.gather import Pick, sides
from sd3_light.stages.inspect.pictures import location, tinted

_PIXELS_AT_ONCE = 1 << 20
_MOST_AT_ONCE = 16

_Read = tuple[Pick, Origin, Tensor, Tensor | None]


@dataclass(frozen=True)
class ShownSample:
    """A sample for the page. Pictures are data URIs, "" where they cannot be shown; then ``problem`` says why.

    ``closeness`` is the peak signal-to-noise ratio between the two, in dB.
    """

    pick: Pick
    origin: Origin
    fitting: ResizePlan
    original: str = ""
    decoded: str = ""
    masked: str = ""
    problem: str = ""
    closeness: float | None = None


class Decoder:
    """A VAE that turns cached moments into pictures."""

    def __init__(self, vae: AutoencoderKL) -> None:
        self.vae = vae

    @torch.no_grad()
    def __call__(self, moments: Sequence[Tensor]) -> list[Pixels]:
        """[2C, h, w] each, of one size -> height x width x 3 each, from the posterior's mean."""
        means = torch.stack([each.chunk(2)[0] for each in moments])
        images = self.vae.decode(means.to(self.vae.device, self.vae.dtype)).sample
        values = ((images.float().clamp(-1, 1) + 1) * 127.5).round().to("cpu", torch.uint8)
        return list(values.permute(0, 2, 3, 1).numpy())

    def takes(self, moments: Tensor) -> bool:
        """Whether these can be of this VAE."""
        return bool(moments.shape[0] == 2 * self.vae.config.latent_channels)


def open_decoder(places: Mapping[str, str], wish: Path | None) -> tuple[Decoder | None, str]:
    """The VAE that a person names or that made the cache, and why there is none. A named one that cannot be used is
    the person's fault (UserError); that of the cache may have gone."""
    folder = wish or (Path(places["diffusers_path"]) if "diffusers_path" in places else None)
    if folder is None:
        return None, "The cache does not say which VAE made it; name its diffusers folder with --vae FOLDER."
    if folder.name == "vae" and (folder / "config.json").is_file():
        folder = folder.parent
    problem = f"{folder} has no vae/config.json"
    if (folder / "vae" / "config.json").is_file():
        try:
            return Decoder(load_vae(folder, _device(), torch.float32)), ""
        except (OSError, ValueError, RuntimeError, SafetensorError) as fault:
            problem = f"the VAE of {folder} cannot be loaded: {str(fault).splitlines()[0]}"
    if wish is not None:
        raise UserError(f"--vae: {problem}; name a diffusers folder that has the VAE of the cache")
    return None, f"The VAE that made the cache is not there ({problem}); name its diffusers folder with --vae FOLDER."


def show_samples(
    folder: Path, manifest: Manifest, picks: Sequence[Pick], decoder: Decoder | None, notes: list[str]
) -> list[ShownSample]:
    """The picked samples, shown as far as they can be; a shard that cannot be read goes to ``notes``.

    Memory holds one batch of pictures besides what is shown. ``picks`` come by bucket and shard, as `draw` gives them.
    """
    shown: list[ShownSample] = []
    shards = _Shards(folder, notes)
    with progress("inspect", len(picks), "samples") as bar:
        for batch in _batches(picks):
            read = [found for pick in batch if (found := shards.read(pick)) is not None]
            decoded = _decode([moments for _, _, moments, _ in read], decoder, notes)
            for (pick, origin, _, mask), pixels in zip(read, decoded, strict=True):
                shown.append(_show(manifest.places, pick, origin, mask, pixels))
            bar.advance(len(batch))
    return shown


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _batches(picks: Sequence[Pick]) -> Iterator[list[Pick]]:
    """Runs of one bucket, small enough to decode at once."""
    for bucket, run in groupby(picks, key=lambda pick: pick.entry.bucket):
        size = min(_MOST_AT_ONCE, max(1, _PIXELS_AT_ONCE // math.prod(sides(bucket))))
        together = list(run)
        yield from (together[start : start + size] for start in range(0, len(together), size))


class _Shards:
    """Reads picked samples; the shard of the last one stays open, as picks come by shard."""

    def __init__(self, folder: Path, notes: list[str]) -> None:
        self.folder, self.notes = folder / SHARDS, notes
        self._open: tuple[str, tuple[ShardReader, list[Origin]] | None] = ("", None)

    def read(self, pick: Pick) -> _Read | None:
        """A sample's origin, moments and mask; None, and a note, where its shard cannot be read."""
        if self._open[0] != pick.entry.file:
            self._open = pick.entry.file, self._shard(pick.entry)
        if self._open[1] is None:
            return None
        reader, origins = self._open[1]
        return pick, origins[pick.row], *reader.image(pick.row, 0)

    def _shard(self, entry: ShardEntry) -> tuple[ShardReader, list[Origin]] | None:
        path = self.folder / entry.file
        try:
            reader, origins = ShardReader(path, entry), read_origins(path)
        except (UserError, OSError, pa.ArrowException, SafetensorError, LookupError) as fault:
            self.notes.append(f"The shard {entry.file} cannot be read, its samples are left out: {fault}")
            return None
        if len(origins) != entry.count:
            self.notes.append(f"The Arrow file of {entry.file} has {len(origins)} rows, not {entry.count}.")
            return None
        return reader, origins


def _decode(moments: Sequence[Tensor], decoder: Decoder | None, notes: list[str]) -> list[Pixels | None]:
    if decoder is None or not moments:
        return [None] * len(moments)
    if not decoder.takes(moments[0]):
        note = f"The VAE has {decoder.vae.config.latent_channels} latent channels, the cache {len(moments[0]) // 2}: "
        note += "it is not the one that made it; name that one's diffusers folder with --vae FOLDER."
        if note not in notes:
            notes.append(note)
        return [None] * len(moments)
    return [*decoder(moments)]


def _show(
    places: Mapping[str, str], pick: Pick, origin: Origin, mask: Tensor | None, decoded: Pixels | None
) -> ShownSample:
    fitting = plan(origin.width, origin.height, Bucket(*sides(pick.entry.bucket)))
    original, problem = _original(places, pick, origin, fitting)
    base = original if original is not None else decoded
    masked = ""
    if mask is not None and base is not None and bool((mask < 255).any()):
        masked = data_uri(tinted(base, mask.numpy()))
    closeness = None if original is None or decoded is None else _closeness(original, decoded)
    return ShownSample(pick, origin, fitting, _uri(original), _uri(decoded), masked, problem, closeness)


def _original(places: Mapping[str, str], pick: Pick, origin: Origin, fitting: ResizePlan) -> tuple[Pixels | None, str]:
    """The source picture through the cache's own resize and crop, or why not."""
    try:
        image = decode(location(places, pick.entry.directory, origin.image).read())
    except Reject as reject:
        return None, reject.detail or reject.reason
    if image.size != fitting.source:
        now, then = (f"{width}x{height}" for width, height in (image.size, fitting.source))
        return None, f"the file has changed: it is {now} now and was {then}"
    return fit(image, fitting), ""


def _uri(pixels: Pixels | None) -> str:
    return "" if pixels is None else data_uri(Image.fromarray(pixels))


def _closeness(one: Pixels, other: Pixels) -> float | None:
    if one.shape != other.shape:
        return None
    error = float(np.mean((one.astype(np.float32) - other) ** 2))
    return 10 * math.log10(255**2 / max(error, 1e-2))
