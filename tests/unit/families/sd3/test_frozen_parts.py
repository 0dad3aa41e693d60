"""The encoders: batched results equal those of each caption and image encoded alone."""

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sd3_light.config import ModelConfig
from sd3_light.encoding import image_encoders
from sd3_light.encoding.vae import load_vae, raw_moments
from sd3_light.families.sd3 import encoders as frozen_parts
from sd3_light.families.sd3.encoders import FrozenParts
from sd3_light.families.sd3.text import TEXT_ENCODERS, encode_clip, encode_t5, load_text_model, load_tokenizer
from sd3_light.world import draw_image

CPU = torch.device("cpu")
CAPTIONS = [
    "a red circle",
    "",
    "a small red circle to the left of a large blue square",
    "三个绿色的星星",
    "one word and then so many others that no tokenizer of sixteen places could ever hold all of them to the very end",
    "red",
    "a!b?c <pad> </s> <|endoftext|>",
    *(f"a {colour} {shape} on a grey background" for colour in ("red", "blue") for shape in ("ring", "star", "cross")),
]


def make(
    folder: Path, batch_size: int = 4, one_at_a_time: bool | None = None, text_tokens: Any = "real"
) -> FrozenParts:
    model = ModelConfig.model_construct(diffusers_path=folder, t5_max_length=16, text_tokens=text_tokens)
    return FrozenParts(model, CPU, batch_size, one_at_a_time)


@pytest.fixture(scope="module")
def real(demo_parts: Path) -> Iterator[FrozenParts]:
    with make(demo_parts) as parts:
        yield parts


@pytest.fixture(scope="module")
def padded(demo_parts: Path) -> Iterator[FrozenParts]:
    with make(demo_parts, text_tokens="padded") as parts:
        yield parts


@pytest.fixture(scope="module")
def pixels() -> np.ndarray[Any, Any]:
    """Seven wide images of the demo world, uint8 [B, H, W, 3]."""
    return np.stack([np.asarray(draw_image(1 + 4 * index, seed=0)[0]) for index in range(7)])


def test_text_tensors_have_the_names_dtypes_and_shapes_of_a_shard(real: FrozenParts) -> None:
    encoded = real.encode_captions(CAPTIONS)
    real.synchronize()
    assert set(encoded) == {f"{name}.{kind}" for name in TEXT_ENCODERS for kind in ("tokens", "start", "pooled")} - {
        "t5.pooled"
    }
    for name, width in (("clip_l", 96), ("clip_g", 128), ("t5", 256)):
        tokens, start = encoded[f"{name}.tokens"], encoded[f"{name}.start"]
        assert (tokens.dtype, start.dtype) == (torch.bfloat16, torch.int64)
        assert start[0] == 0
        assert len(start) == len(CAPTIONS) + 1
        assert tokens.shape == (int(start[-1]), width)
        if name != "t5":
            assert encoded[f"{name}.pooled"].dtype == torch.bfloat16
            assert encoded[f"{name}.pooled"].shape == (len(CAPTIONS), width)
    assert not any(values.is_inference() for values in encoded.values()), "results are ordinary tensors"


@pytest.mark.parametrize("batch_size", [1, 4, 100])
@torch.no_grad()
def test_real_rows_equal_those_of_each_caption_alone(demo_parts: Path, batch_size: int, monkeypatch: Any) -> None:
    """In float32, to compare to 1e-5."""
    monkeypatch.setattr(frozen_parts, "STORED_DTYPE", torch.float32)
    monkeypatch.setattr("sd3_light.encoding.batching.SMALL_BATCH_TOKENS", 20)
    parts = make(demo_parts, batch_size=batch_size)
    encoded = parts.encode_captions(CAPTIONS)
    parts.synchronize()
    for name in TEXT_ENCODERS:
        model = load_text_model(name, demo_parts, CPU, torch.float32)
        ids = load_tokenizer(name, demo_parts, 16)(CAPTIONS, padded=False)
        start = encoded[f"{name}.start"].tolist()
        assert np.diff(start).tolist() == [len(row) for row in ids]
        for number, row in enumerate(ids):
            rows = encoded[f"{name}.tokens"][start[number] : start[number + 1]]
            if name == "t5":
                alone = encode_t5(model, torch.tensor([row]))
            else:
                alone, pooled = encode_clip(model, torch.tensor([row]))
                assert torch.allclose(encoded[f"{name}.pooled"][number], pooled[0], atol=1e-5), (name, number)
            assert torch.allclose(rows, alone[0], atol=1e-5), (name, number)


@torch.no_grad()
def test_padded_rows_equal_those_of_the_stock_pipeline(stock: Any, padded: FrozenParts) -> None:
    encoded = padded.encode_captions(CAPTIONS)
    padded.synchronize()
    count = len(CAPTIONS)
    for start in range(0, count, 4):  # the stock pipeline in the same batches, for equal bits
        part = slice(start, min(start + 4, count))
        tokens, _, pooled, _ = stock.encode_prompt(
            CAPTIONS[part], None, None, do_classifier_free_guidance=False, max_sequence_length=16
        )
        clip_l, clip_g, t5 = (encoded[f"{name}.tokens"].view(count, 16, -1)[part] for name in TEXT_ENCODERS)
        assert torch.equal(torch.cat([clip_l, clip_g], dim=-1), tokens[:, :16, : 96 + 128].bfloat16())
        assert torch.equal(t5, tokens[:, 16:].bfloat16())
        ours = torch.cat([encoded["clip_l.pooled"][part], encoded["clip_g.pooled"][part]], dim=-1)
        assert torch.equal(ours, pooled.bfloat16())
    assert encoded["t5.start"].tolist() == [16 * number for number in range(count + 1)]


def test_a_tokenizer_is_never_used_by_two_threads(demo_parts: Path, monkeypatch: Any) -> None:
    """A fast tokenizer raises "Already borrowed" if it is."""
    parts = make(demo_parts)
    locked: list[bool] = []

    def tokenizer(*_: object) -> Any:
        return lambda captions, padded: locked.append(parts._tokenizer_lock.locked()) or [[0]]

    monkeypatch.setattr(frozen_parts, "load_tokenizer", tokenizer)
    parts.tokenize(["a"])
    assert locked == [True] * 3


@pytest.mark.parametrize("flip", [False, True])
def test_images_are_encoded_to_the_moments_of_each_variant(
    real: FrozenParts, demo_parts: Path, pixels: Any, flip: bool
) -> None:
    encoded = real.encode_images(pixels, flip)["moments"]
    real.synchronize()
    vae = load_vae(demo_parts, CPU, torch.float32)
    variants = [pixels, np.ascontiguousarray(pixels[:, :, ::-1])][: 1 + flip]
    assert encoded.shape == (7, 1 + flip, 32, 6, 10)
    assert encoded.dtype == torch.float16
    for number, images in enumerate(variants):
        expected = raw_moments(vae, torch.from_numpy(images))
        assert torch.allclose(encoded[:, number].float(), expected.float(), atol=2e-3, rtol=2e-3)
    again = real.encode_images(torch.from_numpy(pixels), flip)["moments"]
    assert torch.equal(encoded, again), "a tensor is accepted too"


def test_image_batches_depend_on_the_area(real: FrozenParts, pixels: Any, monkeypatch: Any) -> None:
    sizes: list[int] = []
    raw = image_encoders.raw_moments
    monkeypatch.setattr(
        image_encoders, "raw_moments", lambda vae, images, flip: sizes.append(len(images)) or raw(vae, images, flip)
    )
    whole = real.encode_images(pixels, False)["moments"]
    assert sizes == [4, 3]
    sizes.clear()
    monkeypatch.setattr("sd3_light.encoding.batching.REFERENCE_PIXELS", pixels.shape[1] * pixels.shape[2] // 2)
    parts = real.encode_images(pixels, False)["moments"]
    real.synchronize()
    assert sizes == [2, 2, 2, 1]
    assert torch.allclose(whole.float(), parts.float(), atol=2e-3, rtol=2e-3)


def test_encoders_are_loaded_on_first_use(demo_parts: Path, tmp_path: Path, pixels: Any) -> None:
    """A folder with only a VAE can encode images."""
    assert make(demo_parts)._modules is None
    (tmp_path / "vae").symlink_to(demo_parts / "vae")
    with make(tmp_path, one_at_a_time=False) as parts:
        assert len(parts.encode_images(pixels, False)["moments"]) == 7
    gc.disable()  # so that only `close` can free them
    try:
        with make(demo_parts, one_at_a_time=False) as parts:  # with little free memory only one would be loaded
            parts.encode_images(pixels, False)
            parts.encode_captions(["a"])
            modules = {name: weakref.ref(parts.part(name)) for name in ("vae", *TEXT_ENCODERS)}
            assert all(module() is not None for module in modules.values())
        assert [name for name, module in modules.items() if module() is not None] == []
    finally:
        gc.enable()


@pytest.mark.parametrize(("free", "one_at_a_time"), [(None, False), (6 << 30, False), (4 << 30, True)])
def test_free_memory_decides_between_all_and_one_at_a_time(
    demo_parts: Path, monkeypatch: Any, free: int | None, one_at_a_time: bool
) -> None:
    monkeypatch.setattr(image_encoders, "free_memory", lambda device: free)
    assert make(demo_parts).one_at_a_time is one_at_a_time
    assert make(demo_parts, one_at_a_time=not one_at_a_time).one_at_a_time is not one_at_a_time


def test_one_at_a_time_gives_the_same_results(demo_parts: Path, real: FrozenParts, pixels: Any) -> None:
    expected = {**real.encode_images(pixels, False), **real.encode_captions(CAPTIONS)}
    with make(demo_parts, one_at_a_time=True) as parts:
        encoded = {**parts.encode_images(pixels, False), **parts.encode_captions(CAPTIONS)}
        assert list(parts._modules._modules) == ["t5"]
        parts.synchronize()
    assert all(torch.equal(encoded[name], expected[name]) for name in expected)
