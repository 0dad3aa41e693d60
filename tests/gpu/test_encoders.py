"""The same on a GPU: copies that fly while the device works arrive whole, and parts that were put away come back."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sd3_light.encoders.frozen_parts import FrozenParts
from sd3_light.encoders.host_copies import AsyncHostCopies

pytestmark = pytest.mark.gpu
CAPTIONS = [f"a {'small ' * (number % 7)}red circle number {number}" for number in range(150)]


def make(folder: Path, device: str, **settings: Any) -> FrozenParts:
    usual = {"text_dtype": torch.float32, "t5_max_length": 16, "text_tokens": "real", "batch_size": 4}
    return FrozenParts(folder, torch.device(device), **{**usual, **settings})


def encode(parts: FrozenParts) -> dict[str, torch.Tensor]:
    pixels = np.random.default_rng(0).integers(0, 256, (30, 64, 96, 3), dtype=np.uint8)
    with parts:
        found = {"moments": parts.encode_images(pixels, True), **parts.encode_captions(CAPTIONS)}
        parts.finish()
    return found


@pytest.mark.parametrize("kind", ["real", "padded"])
def test_a_gpu_gives_what_a_cpu_gives(demo_parts: Path, kind: str) -> None:
    one, two, wanted = (encode(make(demo_parts, device, text_tokens=kind)) for device in ("cuda", "cuda", "cpu"))
    for name, values in wanted.items():
        assert torch.equal(one[name], two[name]), name
        assert torch.allclose(one[name].float(), values.float(), atol=3e-2, rtol=3e-2), name


def test_one_at_a_time_gives_the_same(demo_parts: Path) -> None:
    one, two = (encode(make(demo_parts, "cuda", one_at_a_time=choice)) for choice in (True, False))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_close_gives_memory_back(demo_parts: Path) -> None:
    before = torch.cuda.memory_allocated()
    encode(make(demo_parts, "cuda"))
    assert torch.cuda.memory_allocated() == before


def test_many_copies_through_few_buffers_arrive_in_their_places() -> None:
    device = torch.device("cuda")
    copies = AsyncHostCopies(device, buffers=2)
    found = torch.zeros(64, 1 << 16)
    for number in range(64):
        copies.submit(torch.full((1 << 16,), float(number), device=device), found[number].copy_)
    copies.hand_over()()
    copies.close()
    assert torch.equal(found, torch.arange(64.0)[:, None].expand_as(found))


def test_a_failed_store_is_raised() -> None:
    copies = AsyncHostCopies(torch.device("cuda"))

    def fail(_: torch.Tensor) -> None:
        raise KeyError("no place")

    copies.submit(torch.zeros(1, device="cuda"), fail)
    with pytest.raises(KeyError):
        copies.hand_over()()
    copies.close()
