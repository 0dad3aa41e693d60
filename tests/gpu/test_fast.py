"""The fast blocks on a GPU: kernels against their reference, training against the stock blocks, prefetching."""

import mmap
from collections.abc import Generator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sd3_light.config import SIZES, TrainConfig
from sd3_light.core.batch import Batch
from sd3_light.engines import Launch
from sd3_light.engines.prefetch import pin_host_memory, prefetch_steps
from sd3_light.engines.torch import TorchEngine
from sd3_light.families.sd3.fast import reference
from sd3_light.families.sd3.fast.fp8 import E4M3, Fp8Rows, Fp8Weight, multiply
from sd3_light.families.sd3.fast.row_layout import RowLayout, make_layout
from sd3_light.families.sd3.fast.sample_attention import attend
from sd3_light.families.sd3.module import SD3TrainingModule
from sd3_light.families.sd3.random_weights import new_transformer

pytest.importorskip("triton")
from sd3_light.families.sd3.fast import kernels

CUDA = torch.device("cuda")
HEADS, UNITS = 6, 64
WIDTH = HEADS * UNITS


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(CUDA, dtype)


def assert_near(actual: Any, expected: Any, limit: float) -> None:
    if isinstance(expected, Tensor):
        distance = float((actual.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-9))
        assert distance < limit, distance
    elif isinstance(expected, Fp8Rows):
        assert_near(actual.plain, expected.plain, limit)
        torch.testing.assert_close(actual.scale, expected.scale, rtol=1e-2, atol=0.0)
        assert_near(actual.values.float(), expected.values.float(), 6e-3)  # halfway values may round to either side
    elif expected is not None:
        for actual_part, expected_part in zip(actual, expected, strict=True):
            assert_near(actual_part, expected_part, limit)


@pytest.fixture(params=["padded", "real"])
def layout(request: Any) -> RowLayout:
    return make_layout(4, 70, 90, None if request.param == "padded" else [5, 90, 33, 1], CUDA)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 6e-3)])
def test_kernels_match_their_reference(layout: RowLayout, dtype: torch.dtype, limit: float) -> None:
    count = layout.image.count + layout.text.count
    streams = tuple(normal(rows.count, 3 * WIDTH, dtype=dtype) for rows in (layout.image, layout.text))
    norms = (normal(UNITS), normal(UNITS, seed=1))
    joined = [ops.join(streams, (norms, norms), HEADS, layout) for ops in (kernels, reference)]
    assert_near([part[:count] for part in joined[0]], [part[:count] for part in joined[1]], limit)
    grads = tuple(normal(layout.capacity, HEADS, UNITS, dtype=dtype, seed=s) for s in range(3))
    for rows, stream in zip((layout.image, layout.text), streams, strict=True):
        modulation = normal(layout.samples, 5 * WIDTH, dtype=dtype)
        shift, scale, gate = modulation.chunk(5, dim=1)[:3]
        x, y, dh = (normal(rows.count, WIDTH, dtype=dtype, seed=s) for s in range(3))
        pending = (y, normal(WIDTH), gate)
        u, dg = normal(rows.count, 4 * WIDTH, dtype=dtype), normal(rows.count, 4 * WIDTH, dtype=dtype, seed=1)
        for name, args in (
            ("residual_norm", (x, pending, scale, shift, rows)),
            ("residual_norm_backward", (dh, y, x, pending, scale, rows, shift)),
            ("gelu_backward", (dg, u, True)),
            ("join_backward", (grads, stream, norms, HEADS, rows)),
            ("gather_rows", (joined[1][0], rows)),
        ):
            assert_near(getattr(kernels, name)(*args), getattr(reference, name)(*args), limit)


needs_fp8 = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="this GPU has no fp8 support"
)


@needs_fp8
def test_fp8_kernels_match_their_reference(layout: RowLayout) -> None:
    dtype, norms = torch.bfloat16, (normal(UNITS), normal(UNITS, seed=1))
    grads = tuple(normal(layout.capacity, HEADS, UNITS, dtype=dtype, seed=s) for s in range(3))
    for rows in (layout.image, layout.text):
        shift, scale, gate = normal(layout.samples, 5 * WIDTH, dtype=dtype).chunk(5, dim=1)[:3]
        x, y, dh = (normal(rows.count, WIDTH, dtype=dtype, seed=s) for s in range(3))
        odd = y * torch.logspace(-30, 30, rows.count, device=CUDA).bfloat16()[:, None]
        odd[0] = 0.0
        pending = (y, normal(WIDTH), gate)
        u, dg = normal(rows.count, 4 * WIDTH, dtype=dtype), normal(rows.count, 4 * WIDTH, dtype=dtype, seed=1)
        for name, args in (
            ("residual_norm", (x, pending, scale, shift, rows, "both")),
            ("residual_norm", (x, None, scale, shift, rows, "fp8")),
            ("residual_norm_backward", (dh, x, x, (dh, *pending[1:]), scale, rows, shift, "both")),
            ("gelu", (u, "both")),
            ("gelu", (u, "fp8")),
            ("gelu_backward", (dg, u, True, "both")),
            ("join_backward", (grads, normal(rows.count, 3 * WIDTH, dtype=dtype), norms, HEADS, rows, "both")),
            ("gather_rows", (grads[0], rows, "both")),
            ("round_rows", (odd,)),
        ):
            assert_near(getattr(kernels, name)(*args), getattr(reference, name)(*args), 6e-3)


def empty_fp8(outputs: int, inputs: int) -> Fp8Weight:
    shapes = ((outputs, inputs), (inputs, outputs))
    parts = [Fp8Rows(torch.zeros(n, k, device=CUDA).to(E4M3), torch.zeros(n, 1, device=CUDA)) for n, k in shapes]
    return Fp8Weight(parts[0], parts[1])


@needs_fp8
def test_fp8_products_match_products_of_the_rounded_numbers() -> None:
    weights = [normal(WIDTH, 4 * WIDTH, seed=s) * (1 + s) for s in range(3)]
    results = [empty_fp8(3 * WIDTH, 4 * WIDTH) for _ in range(2)]
    kernels.round_weight(weights, results[0])
    reference.round_weight(weights, results[1])
    assert_near((results[0].forward, results[0].backward), (results[1].forward, results[1].backward), 1e-5)
    x = (normal(333, 4 * WIDTH) * torch.logspace(-9, 3, 333, device=CUDA)[:, None]).bfloat16()
    rows, bias = kernels.round_rows(x), normal(3 * WIDTH, dtype=torch.bfloat16)
    for fast_sums, limit in ((False, 4e-3), (True, 1e-2)):
        for added in (None, bias):
            actual = multiply(rows, results[0].forward, added, torch.bfloat16, fast_sums).double()
            expected = rows.dequantized().double() @ results[0].forward.dequantized().double().t() + (
                0 if added is None else added.double()
            )
            assert float(((actual - expected).norm(dim=1) / expected.norm(dim=1)).max()) < limit
    x[5, 7] = float("nan")
    actual = multiply(kernels.round_rows(x), results[0].forward, None, torch.bfloat16, True)
    is_lost = ~torch.isfinite(actual).all(1)
    assert is_lost.nonzero().flatten().tolist() == [5], "a non-finite value affects only its row"


@needs_fp8
@pytest.mark.parametrize("checkpointing", [False, "selective", True])
def test_training_in_fp8_follows_bf16(checkpointing: Any) -> None:
    curves = []
    for fp8 in (False, True):
        config = make_config(model={"text_tokens": "real"}, activation_checkpointing=checkpointing, fp8=fp8)
        transformer = new_transformer(SIZES["tiny3"].transformer_config(), 0)
        engine = TorchEngine(SD3TrainingModule(transformer, config, True), config, Launch(), CUDA)
        batches = (micro_batch(True, seed % 4) for seed in range(60))
        numbers = [engine.train_step(step, 2e-3).read() for step in prefetch_steps(batches, 2, CUDA)]
        assert all(step.taken for step in numbers)
        curves.append([*(step.losses["loss"] for step in numbers), float(engine.evaluate(micro_batch(True, 0))[0])])
    assert curves[1] == pytest.approx(curves[0], rel=0.15)
    assert float(np.mean(curves[1])) == pytest.approx(float(np.mean(curves[0])), rel=0.03)
    assert curves[1] != curves[0]
    assert curves[1][-2] < 0.9 * curves[1][0], "the loss falls"


def test_attention_stays_within_a_sample(layout: RowLayout) -> None:
    count = layout.image.count + layout.text.count
    parts = [normal(layout.capacity, HEADS, UNITS, dtype=torch.bfloat16, seed=s).requires_grad_() for s in range(3)]
    grad = normal(layout.capacity, HEADS, UNITS, dtype=torch.bfloat16, seed=9)
    actual = attend(parts[0], parts[1], parts[2], layout)
    grads = torch.autograd.grad(actual, parts, grad)
    exact = [part.detach().float().requires_grad_() for part in parts]
    starts = layout.starts.tolist()
    alone = [
        torch.nn.functional.scaled_dot_product_attention(
            *(part[a:b].transpose(0, 1)[None] for part in exact)
        )[0].transpose(0, 1)
        for a, b in pairwise(starts)
    ]  # fmt: skip
    expected = torch.cat(alone)
    assert_near(actual[:count], expected, 1e-2)
    assert_near(
        [g[:count] for g in grads],
        [g[:count] for g in torch.autograd.grad(expected, exact, grad[:count].float())],
        2e-2,
    )


def make_config(**keys: Any) -> TrainConfig:
    model = {"train_type": "sd3_light_pretrain", "diffusers_path": "model", "size": "tiny3", **keys.pop("model", {})}
    settings = {"output_dir": "run", "dataset": "data.toml", "max_steps": 1, "model": model, **keys}
    return TrainConfig.model_validate(settings, context={"base": Path.cwd()})


TOKEN_KEYS: dict[str, Any] = {"routing": {}, "layer_sync": {}, "position_crop_side": 8}


def micro_batch(real: bool, seed: int, drawn: bool = False) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    noisy, target = torch.randn(2, 8, 16, 8, 8, generator=generator)
    prompt, pooled = torch.randn(8, 20, 256, generator=generator), torch.randn(8, 224, generator=generator)
    values = {"noisy": noisy, "t": torch.rand(8, generator=generator), "target": target}
    values |= {"prompt": prompt.bfloat16(), "pooled": pooled.bfloat16()}
    host = {"prompt.length": torch.randint(1, 21, (8,), generator=generator)} if real else {}
    if drawn:
        values["kept"] = torch.rand(8, 16, generator=generator).argsort(1)[:, :8].int()
        values["corners"] = torch.randint(4, 9, (8, 2), generator=generator).int()
    return Batch(8, values, host)


@pytest.mark.parametrize("checkpointing", [False, "selective", True])
@pytest.mark.parametrize("real", [False, True])
@pytest.mark.parametrize("drawn", [False, True])
def test_training_matches_the_stock_blocks(real: bool, drawn: bool, checkpointing: Any) -> None:
    recon = {"text_recon_gamma": 0.1, "text_recon_target_layer": 1}
    model = {"text_tokens": "real" if real else "padded", **recon, **(TOKEN_KEYS if drawn else {})}
    config = make_config(model=model, activation_checkpointing=checkpointing)
    curves = []
    for fast in (False, True):
        transformer = new_transformer(SIZES["tiny3"].transformer_config(), 0)
        engine = TorchEngine(SD3TrainingModule(transformer, config, fast), config, Launch(), CUDA)
        batches = (micro_batch(real, seed % 4, drawn) for seed in range(40))
        numbers = [engine.train_step(step, 2e-3).read() for step in prefetch_steps(batches, 2, CUDA)]
        assert all(step.taken for step in numbers)
        curves.append([*(step.losses["loss"] for step in numbers), float(engine.evaluate(micro_batch(real, 0))[0])])
        assert bool(torch.isfinite(engine.denoise(micro_batch(real, 0))).all())
    assert curves[1] == pytest.approx(curves[0], rel=0.02)
    assert curves[0][-2] < 0.9 * curves[0][0], "the loss falls"


def test_host_memory_is_pinned_and_unpinned() -> None:
    memory = torch.from_numpy(np.frombuffer(mmap.mmap(-1, 1 << 20), dtype=np.uint8))  # as the loader's slots are
    undo = pin_host_memory(memory.data_ptr(), len(memory))
    assert undo is not None
    assert memory.is_pinned()
    undo()
    assert not memory.is_pinned()


def test_prefetched_batches_are_intact_however_far_the_host_runs_ahead() -> None:
    big = torch.randn(4096, 4096, device=CUDA)

    def source() -> Generator[Batch, None, None]:
        for number in range(30):
            yield Batch(3, {"noisy": torch.full((3, 1 << 18), float(number)).pin_memory()})

    sums = []
    for step in prefetch_steps(source(), 3, CUDA):
        for batch in step:
            values = batch["noisy"]
            for _ in range(20):  # keep the device busy long before it reads
                big = torch.nn.functional.normalize(big @ big)
            sums.append((values.min(), values.max()))
    assert [(int(low), int(high)) for low, high in sums] == [(number, number) for number in range(30)]
