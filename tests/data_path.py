"""The data path on made-up samples: list, probe, plan, build and read a cache, without the cost of encoders."""

import io
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from sd3_light.assets import DEMO
from sd3_light.cache import verb as cache
from sd3_light.cache.identity import decides_shards
from sd3_light.config import LoadedConfig, load_config
from sd3_light.data.cache_plan import make_cache_plan
from sd3_light.data.loader import PipelineDataLoader
from sd3_light.data.stream import MicroBatches
from sd3_light.engines import Launch
from sd3_light.engines.feed import make_order, open_cache
from sd3_light.sources.catalogue import Catalogue, Listing, make_sources
from sd3_light.sources.claims import Claims

PARTS = ("list", "look", "plan", "build", "again", "stale", "read")
"""Steps of the data path in their order: `again` when nothing changed, `stale` when mirrored images are needed too."""
ROWS = 50
"""Samples per shard."""
_SAMPLES_PER_TAR = 100
_SIZES = ((16, 16), (32, 16), (16, 32))
_VARIANTS = 4
_WIDTHS = {"clip_l": 96, "clip_g": 128, "t5": 256}  # the demo's
_TRAIN = f"""
output_dir = "run"
dataset = "data.toml"
cache_dir = "cache"
max_steps = 1
save_every_n_steps = 1
micro_batch_size_per_gpu = 64
caching_num_workers = 0
sd3_shard_size = {ROWS}
shuffle_window = 1
[model]
train_type = "sd3_light_pretrain"
diffusers_path = "{DEMO}"
size = "tiny2"
t5_max_length = 16
text_tokens = "real"
"""
_DATA = f'size_buckets = {[list(size) for size in _SIZES]}\n[[directory]]\npath = "set"\n'


def write_samples(folder: Path, count: int) -> None:
    """Write a dataset of ``count`` samples in tars, and the config."""
    (folder / "set").mkdir(parents=True)
    images = [png(size, seed) for size in _SIZES for seed in range(_VARIANTS)]
    for first in range(0, count, _SAMPLES_PER_TAR):
        with open(folder / "set" / f"{first // _SAMPLES_PER_TAR:05d}.tar", "wb") as file:
            for number in range(first, min(first + _SAMPLES_PER_TAR, count)):
                file.write(member(f"{number:09d}.png", images[number * 7 % len(images)]))
                file.write(member(f"{number:09d}.txt", f"a synthetic caption, number {number}".encode()))
            file.write(bytes(2 * tarfile.BLOCKSIZE))
    (folder / "train.toml").write_text(_TRAIN, encoding="utf-8")


def png(size: tuple[int, int], seed: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8) // 64 * 64
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


def member(name: str, data: bytes) -> bytes:
    """Return a file in tar format."""
    info = tarfile.TarInfo(name)
    info.size = len(data)
    return info.tobuf(tarfile.USTAR_FORMAT) + data + bytes(-len(data) % tarfile.BLOCKSIZE)


class ZeroEncoders:
    """Replaces `FrozenParts`: returns zeros of the right shapes."""

    latent_channels = 16
    device = torch.device("cpu")
    vae_dtype = torch.float32

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def reconstruct(self, pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
        return pixels

    def encode_images(self, pixels: NDArray[np.uint8], flip: bool) -> dict[str, Tensor]:
        count, height, width, _ = pixels.shape
        shape = (count, 1 + flip, 2 * self.latent_channels, height // 8, width // 8)
        return {"moments": torch.zeros(shape, dtype=torch.float16)}

    def tokenize(self, captions: Sequence[str]) -> int:
        return len(captions)

    def encode_captions(self, captions: Sequence[str] | int, columns: Any = None) -> dict[str, Tensor]:
        count = captions if isinstance(captions, int) else len(captions)
        text = {f"{name}.tokens": (count, width) for name, width in _WIDTHS.items()}
        text |= {f"{name}.pooled": (count, _WIDTHS[name]) for name in ("clip_l", "clip_g")}
        starts = {f"{name}.start": torch.arange(count + 1) for name in _WIDTHS}
        return {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in text.items()} | starts

    def encode_empty(self) -> dict[str, Tensor]:
        return self.encode_captions([""])

    def synchronize(self) -> None:
        pass

    def waiter(self) -> Callable[[], None]:
        return self.synchronize

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class PassThrough:
    """A model that returns batches unchanged."""

    def prepare_inputs(self, batch: Any, timestep_quantile: float | None = None) -> Any:
        return (batch,), ()


def run_part(part: str, folder: Path) -> None:
    """Run one part of the data path on the results of the earlier parts in ``folder``; encoders are replaced."""
    flip = "flip = true\n" if part == "stale" else ""
    (folder / "data.toml").write_text(_DATA + flip, encoding="utf-8")
    loaded = load_config(folder / "train.toml")
    if part in ("list", "look", "plan"):
        prepare(part, loaded)
    elif part == "read":
        read(loaded)
    else:
        cache.run(loaded, options=cache.CacheOptions(dry_run=part == "stale"))


def prepare(part: str, loaded: LoadedConfig) -> None:
    """List, probe or plan; earlier parts are already done."""
    folder, train = Path(loaded.dataset.cache_dir), loaded.train
    folder.mkdir(parents=True, exist_ok=True)
    with Claims(folder / "claims") as claims:
        catalogue = Catalogue(folder, claims)
        listings: list[Listing] = catalogue.refresh(make_sources(loaded.dataset.directories), lambda _: None)
        if part == "look":
            catalogue.probe_images(listings, train.caching_num_workers, lambda _: None)
        if part == "plan":
            make_cache_plan(catalogue, listings, decides_shards(cache.make_identity(train.model)), train.sd3_shard_size)


def read(loaded: LoadedConfig) -> None:
    """Read one epoch in training order."""
    data = open_cache(loaded.dataset, loaded.train, Launch())
    order = make_order(data, loaded, Launch())
    batches, steps = MicroBatches(data, order, 0, 1, 1), range(order.steps_per_epoch)
    num_samples = 0
    for (batch,), _ in PipelineDataLoader(batches, None, 1, PassThrough(), num_dataloader_workers=0, items=steps):
        num_samples += len(batch["sample_id"])
    assert num_samples >= data.manifest.counts["used"]
