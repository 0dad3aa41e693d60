"""The byte formulas against real tensors, and the loader's against its measured memory."""

import ctypes
import json
import multiprocessing
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sd3_light.config import ModelConfig
from sd3_light.core.columns import Bucket, Column
from sd3_light.core.registry import family_named
from sd3_light.cost.amount import Amount
from sd3_light.cost.data_bytes import (
    MALLOC_CACHE_BYTES,
    ReaderMemory,
    batch_bytes,
    caption_bytes,
    image_bytes,
    latent_bytes,
    loader_bytes,
    open_shard_bytes,
    sample_bytes,
)
from sd3_light.data.loader import PipelineDataLoader
from sd3_light.data.manifest import SHARDS, Manifest, ShardEntry
from sd3_light.data.order import open_shards
from sd3_light.data.reader import ShardReader
from sd3_light.data.shards import Origin, ShardContent, write_shard
from sd3_light.data.store import LocalStore
from sd3_light.data.stream import CachedDataset, MicroBatches
from sd3_light.encoding.vae import LatentScale
from sd3_light.families.sd3.prepare import InputPreparer
from sd3_light.model.folder import TextShape
from tests.shards import sd3_content

TEXT = TextShape(clip_tokens=7, t5_tokens=5, clip_l_width=6, clip_g_width=10, t5_width=32, pooled_width=16)
WIDE = TextShape(clip_tokens=77, t5_tokens=64, clip_l_width=256, clip_g_width=256, t5_width=1024, pooled_width=512)
BUCKET = Bucket(64, 48)
OPEN_SHARDS = open_shards(16, 1)


def content(
    count: int, captions: int = 1, variants: int = 1, mask: bool = False, text: TextShape = TEXT
) -> ShardContent:
    """A shard whose captions are all distinct."""
    total = count * captions
    encoders = {
        "clip_l": (text.clip_tokens, text.clip_l_width),
        "clip_g": (text.clip_tokens, text.clip_g_width),
        "t5": (text.t5_tokens, text.t5_width),
    }
    features = {}
    for name, (tokens, width) in encoders.items():
        features[f"{name}.tokens"] = torch.zeros(total * tokens, width, dtype=torch.bfloat16)
        features[f"{name}.start"] = torch.arange(total + 1) * tokens
        if name != "t5":
            features[f"{name}.pooled"] = torch.zeros(total, width, dtype=torch.bfloat16)
    return sd3_content(
        torch.arange(count),
        torch.zeros(count, variants, 32, 6, 8, dtype=torch.float16),
        torch.arange(count + 1) * captions,
        torch.arange(total),
        features,
        torch.ones(count, 6, 8, dtype=torch.uint8) if mask else None,
    )


def prepared(text: TextShape = TEXT, real: bool = False) -> Sequence[Column]:
    """The columns of a prepared batch."""
    model: Any = SimpleNamespace(text_tokens="real" if real else "padded", references=0)
    return family_named("sd3").prepared_columns(model, content(1, text=text).columns)


def written(folder: Path, content: ShardContent, name: str = "one") -> ShardEntry:
    (folder / SHARDS).mkdir(parents=True, exist_ok=True)
    entry = ShardEntry(f"{name}.safetensors", str(BUCKET), (64, 48), "toy#0", 0, 0, "", name)
    return write_shard(folder / SHARDS, entry, content, [Origin("", "", 64, 48, ("",))] * len(content.sample_id))


@pytest.mark.parametrize(("captions", "variants", "mask"), [(1, 1, False), (3, 2, True), (1, 1, True)])
def test_sample_bytes_match_a_shard(captions: int, variants: int, mask: bool) -> None:
    tensors = content(1, captions, variants, mask).tensors()
    stored = sum(tensor.nbytes for tensor in tensors.values() if tensor.dtype != torch.int64)
    columns = content(1).columns
    assert image_bytes(columns, variants, mask).value + captions * caption_bytes(columns).value == stored
    if captions == variants == 1:
        assert sample_bytes(columns, mask) == stored


def test_an_open_shard_holds_ids_and_offsets(tmp_path: Path) -> None:
    entry = written(tmp_path, content(10))
    reader = ShardReader(tmp_path / SHARDS / entry.file, entry)
    held = sum(values.nbytes for values in reader.index.values())
    assert 0 <= held - open_shard_bytes(10) <= 8 * 4  # each list of offsets has one more entry


def test_a_prepared_batch_is_latents_in_fp32_and_text_in_bf16() -> None:
    latents, target = torch.zeros(3, 16, 6, 8), torch.zeros(3, 16, 6, 8)
    prompt, pooled = torch.zeros(3, 12, 32, dtype=torch.bfloat16), torch.zeros(3, 16, dtype=torch.bfloat16)
    time, mask = torch.zeros(3), torch.zeros(3, 6, 8)
    weight = sum(tensor.nbytes for tensor in (latents, target, prompt, pooled, time))
    assert batch_bytes(prepared(), 3).value == weight
    assert batch_bytes(prepared(), 3, mask=True).value == weight + mask.nbytes
    assert latent_bytes(prepared(), 3) == latents.nbytes + target.nbytes
    assert latent_bytes(prepared(), 3, mask=True) == latents.nbytes + target.nbytes + mask.nbytes
    longest = batch_bytes(prepared(real=True), 3)
    assert longest.value == weight + torch.zeros(3, dtype=torch.int64).nbytes, "lengths"
    assert longest.formula.startswith("at most B·")


def test_the_loader_holds_prefetched_used_and_prepared_batches() -> None:
    batch = Amount(1000, "x")
    indices = OPEN_SHARDS * open_shard_bytes(512)
    malloc = MALLOC_CACHE_BYTES
    reader = ReaderMemory(512, OPEN_SHARDS)
    assert loader_bytes(batch, workers=0, prefetch=4, reader=reader).value == 1000 + indices + malloc
    assert loader_bytes(batch, workers=3, prefetch=2, reader=reader).value == 8000 + 3 * (indices + malloc)
    reader = ReaderMemory(512, open_shards(4, 3), latents=10, read=70)
    more = loader_bytes(batch, 2, 1, reader, in_use=4)
    assert more.value == 7000 + 2 * (30 + 70 + malloc + 24 * open_shard_bytes(512))
    remote = loader_bytes(batch, 2, 1, replace(reader, downloads=5 << 20), in_use=4)
    assert remote.value - more.value == 10 << 20
    assert remote.formula.endswith(" + 5 MiB downloads)")


def test_formulas_list_their_terms() -> None:
    columns = content(1).columns
    assert image_bytes(columns, 2, True).formula == "2 variants·32·6·8·2 B + 6·8·1 B mask"
    assert caption_bytes(columns).formula == "(7·6 + 7·10 + 5·32 + 6 + 10)·2 B"
    formula = "at most B·((16·6·8 + 16·6·8)·4 B + 6·8·4 B mask + (12·32 + 16)·2 B)"
    assert batch_bytes(prepared(real=True), 3, mask=True).formula == formula
    mixed = [*columns, Column("score", "caption", "float32", (), ()), Column("depth", "image", "uint8", (6, 8), ())]
    assert image_bytes(mixed).formula == "32·6·8·2 B + 6·8·1 B"
    assert caption_bytes(mixed).value == caption_bytes(columns).value + 4
    reader = ReaderMemory(512, OPEN_SHARDS, latents=1 << 19, read=1 << 20)
    formula = loader_bytes(Amount(1000, "x"), 2, 3, reader, in_use=4).formula
    batches = "(2 workers·3 prefetched + 4 in use + 1 in copy)·micro-batch"
    process = "3·0.5 MiB latents + 1.0 MiB read + 64 MiB malloc"
    assert formula == f"{batches} + 2·({process} + 32 open shards·24.0 KiB)"


# --- measured -----------------------------------------------------------------------------------


def anonymous_bytes() -> int:
    """The private memory of this process."""
    with open("/proc/self/status") as about:
        return 1024 * next(int(line.split()[1]) for line in about if line.startswith("RssAnon"))


def preparer() -> InputPreparer:
    keys = {
        "train_type": "sd3_light_pretrain",
        "size": "tiny2",
        "diffusers_path": ".",
        "enable_uncond_text_dropout": True,
    }
    model = ModelConfig.model_validate(keys, context={"base": Path("folder")})
    return InputPreparer(0, model, LatentScale(1.5, 0.06), None)


class Measuring:
    """SD3's preparer, recording each worker's peak private memory above its start."""

    def __init__(self, workers: int) -> None:
        self.peaks = multiprocessing.get_context("fork").Array("q", max(1, workers))
        self.start: int | None = None
        self.preparer = preparer()

    def prepare_inputs(self, batch: dict[str, Any], timestep_quantile: float | None = None) -> Any:
        return self.preparer.prepare_inputs(batch)

    def prepare_into(self, batch: dict[str, Any], empty: Any) -> Any:
        prepared = self.preparer.prepare_into(batch, empty)
        info = torch.utils.data.get_worker_info()
        assert info is not None
        self.peaks[info.id] = max(self.peaks[info.id], anonymous_bytes() - (self.start or 0))
        return prepared


class Started(MicroBatches):
    """Records a worker's private memory before its first batch."""

    measuring: Measuring

    def fetch(self, item: int, allocate: Any) -> Any:
        if self.measuring.start is None:
            self.measuring.start = anonymous_bytes()
        return super().fetch(item, allocate)


LOADERS = ((1, 1, 2), (2, 3, 1))  # workers, prefetch, accumulation
MICRO = SHARD_SIZE = 96


def taken(folder: Path, workers: int, prefetch: int, accumulation: int) -> list[int]:
    """The bytes of a loader's slots, and of each worker's peak private memory."""
    data = CachedDataset(LocalStore(folder))
    order = data.order(0, {"toy#0": 1.0}, lambda resolution: MICRO * accumulation)
    dataset, model = Started(data, order, 0, 1, accumulation), Measuring(workers)
    dataset.measuring = model
    keys: dict[str, Any] = {"num_dataloader_workers": workers, "prefetch_batches_per_worker": prefetch}
    keys |= {"items": range(12 * accumulation), "prepare_into": model.prepare_into}
    loader = PipelineDataLoader(dataset, None, accumulation, model, **keys)
    for step in loader.steps():
        assert len(step) == accumulation
    return [sum(os.fstat(file).st_blocks * 512 for file in loader._items.pool._files), *model.peaks]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, ...], list[float]]:
    """The memory of each loader, in another process that returns freed memory at once.

    By default malloc keeps some, and a process that ran other tests already holds some.
    """
    folder = tmp_path_factory.mktemp("cache")
    entries = tuple(written(folder, content(SHARD_SIZE, text=WIDE), f"{at}") for at in range(3))
    Manifest({"text_tokens": "padded"}, entries, replace(entries[0])).save(folder)
    # torch's builds for ARM use mimalloc, which reads its options when a process starts
    exact = {"MIMALLOC_PURGE_DELAY": "0", "MIMALLOC_ARENA_EAGER_COMMIT": "0"} if platform.machine() != "x86_64" else {}
    environment = {**os.environ, **exact, "PYTHONPATH": str(Path(__file__).parents[3])}
    command = [sys.executable, __file__, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, timeout=240)
    return dict(zip((*LOADERS, ()), json.loads(done.stdout), strict=True))


@pytest.mark.parametrize(("workers", "prefetch", "accumulation"), LOADERS)
def test_the_loader_needs_no_more_memory_than_the_formula(
    measured: dict[tuple[int, ...], list[float]], workers: int, prefetch: int, accumulation: int
) -> None:
    batch = batch_bytes(prepared(WIDE), MICRO)
    read = MICRO * sample_bytes(content(1, text=WIDE).columns)
    reader = ReaderMemory(SHARD_SIZE, OPEN_SHARDS, latent_bytes(prepared(WIDE), MICRO), read)
    formula = loader_bytes(batch, workers, prefetch, reader, accumulation)
    tensors = formula.value - workers * MALLOC_CACHE_BYTES
    # no device copies the next batch here, so one slot stays free
    assert 0.7 * tensors < sum(measured[workers, prefetch, accumulation]) <= tensors


def return_freed_memory() -> None:
    """Make malloc return freed memory at once; set in the environment, these options would slow the imports."""
    libc = ctypes.CDLL(None)
    for trim_mmap_or_arenas, value in ((-1, 1 << 16), (-3, 1 << 16), (-8, 1)):
        assert libc.mallopt(trim_mmap_or_arenas, value) == 1
    libc.malloc_trim(0)


def peak_of_preparing(mask: bool) -> float:
    """Peak memory while large latents are prepared, as a multiple of their size."""

    def status(name: str) -> int:
        with open("/proc/self/status") as about:
            return 1024 * next(int(line.split()[1]) for line in about if line.startswith(name))

    count, side = 32, 1024
    number = torch.arange(count)
    batch: dict[str, Any] = dict.fromkeys(("sample_id", "epoch", "repeat"), number)
    batch["moments"] = torch.zeros(count, 32, side // 8, side // 8, dtype=torch.float16)
    shapes = {"clip_l": (2, 8), "clip_g": (2, 8), "t5": (2, 32), "clip_l.pooled": (8,), "clip_g.pooled": (8,)}
    batch |= {name: torch.ones(count, *shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    batch |= {"mask": torch.ones(count, side // 8, side // 8, dtype=torch.uint8)} if mask else {}
    prepare = preparer()
    prepare.prepare_inputs({name: values[:1] for name, values in batch.items()})
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    before = status("VmRSS")
    prepare.prepare_inputs(batch)
    latents = 2 * batch["moments"].numel() // 2 * 4 + (4 * batch["mask"].numel() if mask else 0)
    return (status("VmHWM") - before) / latents


def test_preparing_needs_three_times_the_latents(measured: dict[tuple[int, ...], list[float]]) -> None:
    for peak in measured[()]:
        assert 2.8 < peak <= 3.05


if __name__ == "__main__":
    return_freed_memory()
    peaks = [[peak_of_preparing(mask) for mask in (False, True)]]
    print(json.dumps([taken(Path(sys.argv[1]), *loader) for loader in LOADERS] + peaks))
