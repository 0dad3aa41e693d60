"""The footprint formulas against real tensors."""

import torch

from sd3_light.data.buckets import Bucket
from sd3_light.data.footprint import (
    MAX_OPEN_SHARDS,
    batch_bytes,
    caption_bytes,
    loader_bytes,
    open_shard_bytes,
    picture_bytes,
    sample_bytes,
)
from sd3_light.data.shards import Sample, pack
from sd3_light.data.stream import MAX_OPEN_SHARDS as REALLY_OPEN
from sd3_light.model.cost import Amount
from sd3_light.model.folder import TextShape

TEXT = TextShape(clip_tokens=7, t5_tokens=5, clip_l_width=6, clip_g_width=10, t5_width=32, pooled_width=16)
BUCKET = Bucket(64, 48)


def sample(captions: int, variants: int, mask: bool) -> Sample:
    features = {
        "clip_l": torch.zeros(7, 6),
        "clip_g": torch.zeros(7, 10),
        "t5": torch.zeros(5, 32),
        "clip_l.pooled": torch.zeros(6),
        "clip_g.pooled": torch.zeros(10),
    }
    weights = torch.ones(6, 8, dtype=torch.uint8) if mask else None
    return Sample(1, torch.zeros(variants, 32, 6, 8), [features] * captions, weights)


def test_a_sample_weighs_what_a_shard_keeps_of_it() -> None:
    for captions, variants, mask in ((1, 1, False), (3, 2, True), (1, 1, True)):
        tensors = pack([sample(captions, variants, mask)])
        kept = {name: tensor for name, tensor in tensors.items() if not name.endswith(("start", "sample_id"))}
        weight = sum(tensor.nbytes for tensor in kept.values())
        assert sample_bytes(BUCKET, TEXT, captions, variants, mask).value == weight


def test_an_open_shard_holds_ids_and_starts() -> None:
    tensors = pack([sample(2, 1, False) for _ in range(10)])
    held = sum(tensor.nbytes for name, tensor in tensors.items() if name.endswith(("start", "sample_id")))
    assert 0 <= held - open_shard_bytes(10, captions=2) <= 8 * 4  # each list of starts has one more entry


def test_a_prepared_batch_is_latents_in_fp32_and_text_in_bf16() -> None:
    latents, target = torch.zeros(3, 16, 6, 8), torch.zeros(3, 16, 6, 8)
    prompt, pooled = torch.zeros(3, 12, 32, dtype=torch.bfloat16), torch.zeros(3, 16, dtype=torch.bfloat16)
    time, mask = torch.zeros(3), torch.zeros(3, 6, 8)
    weight = sum(tensor.nbytes for tensor in (latents, target, prompt, pooled, time))
    assert batch_bytes(BUCKET, TEXT, 3).value == weight
    assert batch_bytes(BUCKET, TEXT, 3, mask=True).value == weight + mask.nbytes


def test_the_loader_holds_what_its_workers_prepare_ahead() -> None:
    prepared = Amount(1000, "x")
    indices = MAX_OPEN_SHARDS * open_shard_bytes(512)
    assert loader_bytes(prepared, workers=0, prefetch=4, shard_size=512).value == 1000 + indices
    assert loader_bytes(prepared, workers=3, prefetch=2, shard_size=512).value == 7000 + 3 * indices


def test_formulas_say_what_was_counted() -> None:
    assert picture_bytes(BUCKET, 2, True).formula == "2 variants·2·16·h·w·2 B + h·w mask"
    assert caption_bytes(TEXT).formula == "(7·(6+10) + 5·32 + 16 pooled)·2 B"


def test_the_number_of_open_shards_is_the_streams() -> None:
    assert MAX_OPEN_SHARDS == REALLY_OPEN
