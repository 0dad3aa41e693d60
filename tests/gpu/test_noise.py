"""Noise on a GPU: the host's bits from kernel and reference, and the host's inputs to rounding."""

from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sd3_light.config import ModelConfig
from sd3_light.core.batch import Batch
from sd3_light.encoding.vae import LatentScale
from sd3_light.engines.prefetch import prefetch_steps
from sd3_light.families.sd3.prepare import InputPreparer
from sd3_light.flow.noise import DeviceNoise, draw_normals
from sd3_light.randomness import fill_normals, normal_table, occurrence_words, round_keys, sample_id, streams

CUDA = torch.device("cuda")
SHAPES = {"clip_l": (7, 96), "clip_g": (7, 128), "t5": (5, 256), "clip_l.pooled": (96,), "clip_g.pooled": (128,)}


def occurrences(count: int) -> np.ndarray:
    ids = [2**63 - 1, *(sample_id(f"{number}") for number in range(1, count))]
    return occurrence_words(np.arange(count) % 3, np.arange(count) % 5, ids[:count])


def on_the_host(seed: int, purpose: str, words: np.ndarray, shape: tuple[int, ...]) -> Tensor:
    values = np.empty((len(words), *shape), dtype=np.float32)
    for row, draw in zip(values, streams(seed, purpose, words), strict=True):
        fill_normals(draw, row)
    return torch.from_numpy(values)


@pytest.mark.parametrize("seed", [0, 2**64 - 5])
@pytest.mark.parametrize(("count", "shape"), [(1, (7,)), (3, (16, 4, 6)), (64, (16, 32, 32)), (1024, (16, 8, 8))])
def test_a_gpu_draws_the_hosts_bits(seed: int, count: int, shape: tuple[int, ...]) -> None:
    words = occurrences(count)
    drawn = DeviceNoise(seed, CUDA).normals("posterior", torch.from_numpy(words).to(CUDA), shape)
    assert torch.equal(drawn.cpu(), on_the_host(seed, "posterior", words, shape))


def test_the_kernel_is_used_and_its_reference_draws_the_same() -> None:
    pytest.importorskip("triton")
    from sd3_light.flow.noise_kernel import draw_normals as kernel

    noise = DeviceNoise(7, CUDA)
    assert noise._draw is kernel
    words, table = torch.from_numpy(occurrences(33)).to(CUDA), torch.from_numpy(normal_table()).to(CUDA)
    inputs = torch.tensor(round_keys(7, "noise")).to(CUDA), words, 4099, table
    assert torch.equal(kernel(*inputs), draw_normals(*inputs))


def preparer(**keys: Any) -> InputPreparer:
    table = {"train_type": "sd3_light_pretrain", "size": "tiny2", "diffusers_path": ".", **keys}
    return InputPreparer(5, ModelConfig.model_validate(table, context={"base": Path()}), LatentScale(1.5, 0.06), None)


def cached(first: int, count: int = 8) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(first)
    number = torch.arange(first, first + count)
    return {
        "sample_id": number * 7919,
        "epoch": number % 2,
        "repeat": number % 3,
        "moments": torch.randn(count, 32, 16, 24, generator=generator).half(),
        "mask": torch.arange(count * 16 * 24).view(count, 16, 24).to(torch.uint8),
        **{name: torch.randn(count, *shape, generator=generator).bfloat16() for name, shape in SHAPES.items()},
    }


def test_inputs_on_a_gpu_are_the_hosts_to_rounding() -> None:
    """Text, times and masks exactly; latents and targets to a few units in the last place."""
    prepare = preparer(enable_uncond_text_dropout=True)

    def source() -> Generator[Batch, None, None]:
        for number in range(6):
            yield prepare.prepare_clean(cached(8 * number)).map_tensors(Tensor.pin_memory)

    steps = prefetch_steps(source(), 2, CUDA, prepare.noise_adder(CUDA))
    number = 0
    for step in steps:
        for batch in step:
            expected = prepare.prepare_inputs(cached(8 * number))
            assert batch.values.keys() == expected.values.keys()
            for name, value in batch.values.items():
                if name in ("noisy", "target"):
                    assert value.dtype == torch.float32
                    torch.testing.assert_close(value.cpu(), expected[name], rtol=1e-6, atol=2e-6)
                else:
                    assert torch.equal(value.cpu(), expected[name])
            number += 1
    assert number == 6
