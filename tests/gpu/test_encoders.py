"""Encoders on a GPU: asynchronous copies are complete, and offloaded encoders are restored."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sd3_light.config import ModelConfig
from sd3_light.config.faults import UserError
from sd3_light.encoding.host_copies import AsyncHostCopies
from sd3_light.families.sd3.encoders import FrozenParts

pytestmark = pytest.mark.gpu
CAPTIONS = [f"a {'small ' * (number % 7)}red circle number {number}" for number in range(150)]


def make(
    folder: Path, device: str, text_tokens: str = "real", one_at_a_time: bool | None = None, vae_dtype: str = "float32"
) -> FrozenParts:
    keys: dict[str, Any] = {"dtype": "float32", "t5_max_length": 16, "text_tokens": text_tokens, "vae_dtype": vae_dtype}
    model = ModelConfig.model_construct(diffusers_path=folder, **keys)
    return FrozenParts(model, torch.device(device), 4, one_at_a_time)


def encode(parts: FrozenParts) -> dict[str, torch.Tensor]:
    pixels = np.random.default_rng(0).integers(0, 256, (30, 64, 96, 3), dtype=np.uint8)
    with parts:
        encoded = {**parts.encode_images(pixels, True), **parts.encode_captions(CAPTIONS)}
        parts.synchronize()
    return encoded


@pytest.mark.parametrize("kind", ["real", "padded"])
def test_gpu_results_match_cpu_results(demo_parts: Path, kind: str) -> None:
    one, two, expected = (encode(make(demo_parts, device, text_tokens=kind)) for device in ("cuda", "cuda", "cpu"))
    for name, values in expected.items():
        assert torch.equal(one[name], two[name]), name
        assert torch.allclose(one[name].float(), values.float(), atol=3e-2, rtol=3e-2), name


def test_one_at_a_time_gives_the_same_results(demo_parts: Path) -> None:
    separate, together = (encode(make(demo_parts, "cuda", one_at_a_time=choice)) for choice in (True, False))
    assert all(torch.equal(separate[name], together[name]) for name in separate)


def test_close_frees_gpu_memory(demo_parts: Path) -> None:
    before = torch.cuda.memory_allocated()
    encode(make(demo_parts, "cuda"))
    assert torch.cuda.memory_allocated() == before


def test_many_copies_through_few_buffers_are_stored_correctly() -> None:
    device = torch.device("cuda")
    copies = AsyncHostCopies(device, buffers=2)
    stored = torch.zeros(64, 1 << 16)
    for number in range(64):
        copies.submit(torch.full((1 << 16,), float(number), device=device), stored[number].copy_, "a test")
    copies.waiter()()
    copies.close()
    assert torch.equal(stored, torch.arange(64.0)[:, None].expand_as(stored))


def test_a_failed_store_is_raised() -> None:
    copies = AsyncHostCopies(torch.device("cuda"))

    def fail(_: torch.Tensor) -> None:
        raise KeyError("full")

    copies.submit(torch.zeros(1, device="cuda"), fail, "a test")
    with pytest.raises(KeyError):
        copies.waiter()()
    copies.close()


def test_a_result_that_is_not_finite_is_an_error() -> None:
    """Also after a larger result, whose buffer is reused."""
    copies = AsyncHostCopies(torch.device("cuda"), buffers=1)
    stored = torch.zeros(8)
    copies.submit(torch.ones(1 << 16, device="cuda"), lambda _: None, "a test")
    copies.submit(torch.ones(8, device="cuda"), stored.copy_, "a test")
    copies.waiter()()
    copies.submit(torch.full((8,), float("inf"), device="cuda", dtype=torch.bfloat16), stored.copy_, "the encoder")
    with pytest.raises(UserError, match="the encoder returned NaN or infinity"):
        copies.waiter()()
    copies.close()
    assert torch.equal(stored, torch.ones(8))
