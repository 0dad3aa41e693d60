"""Weights in bfloat16 and released gradients on a GPU: the same steps, with less memory."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from sd3_light.config import SIZES, EmaConfig, TrainConfig
from sd3_light.core.batch import Batch
from sd3_light.core.compiling import compile_blocks
from sd3_light.core.model import denoiser_blocks
from sd3_light.cost.training_setup import swapped_blocks
from sd3_light.engines import Launch
from sd3_light.engines.protocol import StepNumbers
from sd3_light.engines.torch import TorchEngine
from sd3_light.families.sd3.module import SD3TrainingModule
from sd3_light.families.sd3.random_weights import new_transformer
from sd3_light.model.block_swap import BlockSwap, HostRing
from sd3_light.optim import chunks
from sd3_light.optim.ema import Averages

CUDA = torch.device("cuda", 0)
MODEL = {"diffusers_path": "folder", "train_type": "sd3_light_pretrain", "size": "tiny2"}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks.split_into_chunks, "__defaults__", (2**17,))


def make(
    folder: Path, narrow: bool, release: bool, compiled: bool = False, kind: str = "adamw8bit", **more: Any
) -> TorchEngine:
    optimizer = {"type": kind, "weight_dtype": "bfloat16" if narrow else "float32"}
    table = {"output_dir": "out", "dataset": "data.toml", "max_steps": 10, "model": MODEL, "optimizer": optimizer}
    keys: dict[str, Any] = {"gradient_clipping": 0.0, "gradient_release": release, **more}
    config = TrainConfig.model_validate({**table, **keys}, context={"base": folder})
    transformer = new_transformer({**SIZES["tiny2"].transformer_config(), "num_layers": 6}, 0)
    for parameter in transformer.parameters():
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
        parameter.data = parameter.data.bfloat16() if narrow and parameter.dim() > 1 else parameter.data
    blocks = denoiser_blocks(transformer)
    swap = BlockSwap(CUDA, trained=True)
    for number in swapped_blocks(config.swap_blocks, len(blocks)):
        swap.add(blocks[number])
    if config.swap_blocks:
        swap.start()
    if compiled:
        compile_blocks(transformer)
    return TorchEngine(SD3TrainingModule(transformer, config), config, Launch(), CUDA)


def run_steps(engine: TorchEngine, count: int = 4) -> list[StepNumbers]:
    results = []
    for step in range(count):
        generator = torch.Generator().manual_seed(step)
        shapes = {"noisy": (4, 16, 8, 8), "prompt": (4, 5, 256), "pooled": (4, 224), "target": (4, 16, 8, 8)}
        values = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        engine.module.begin(step)
        results.append(engine.train_step([Batch(4, {**values, "t": torch.rand(4, generator=generator)})], 1e-3).read())
    return results


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_released_gradients_take_the_same_steps(tmp_path: Path, narrow: bool, compiled: bool) -> None:
    plain = make(tmp_path, narrow, release=False, compiled=compiled)
    released = make(tmp_path, narrow, release=True, compiled=compiled)
    for one, other in zip(run_steps(plain), run_steps(released), strict=True):
        assert one.losses["loss"] == pytest.approx(other.losses["loss"], rel=1e-3)
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-2)
        assert other.taken


def test_weights_in_bfloat16_follow_those_in_float32(tmp_path: Path) -> None:
    wide, narrow = make(tmp_path, narrow=False, release=True), make(tmp_path, narrow=True, release=True)
    for one, other in zip(run_steps(wide), run_steps(narrow), strict=True):
        assert one.losses["loss"] == pytest.approx(other.losses["loss"], rel=0.03)


def test_released_gradients_hold_no_memory(tmp_path: Path) -> None:
    peaks = {}
    for release in (False, True):
        engine = make(tmp_path, narrow=False, release=release)
        run_steps(engine, 1)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() - sum(
            weight.grad.nbytes for weight in engine.module.trainable().values() if weight.grad is not None
        )
        run_steps(engine, 1)
        peaks[release] = torch.cuda.max_memory_allocated() - before
        del engine
    assert peaks[True] < peaks[False]


@pytest.fixture
def slow_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every copy begin late: what does not wait for it computes something else."""
    copy = HostRing._copy

    def late(ring: HostRing, target: Tensor, source: Tensor, to_host: bool) -> None:
        with torch.cuda.stream(ring._streams.to_host if to_host else ring._streams.to_device):
            torch.cuda._sleep(2_000_000)
        copy(ring, target, source, to_host)

    monkeypatch.setattr(HostRing, "_copy", late)


def facts(engine: TorchEngine) -> tuple[list[float], list[Tensor], dict[str, Tensor]]:
    """Losses and norms, evaluations with and without an average, and all that a checkpoint has."""
    averages = Averages(engine.weights, EmaConfig(enable=True, update_every=1, decay=0.5))
    numbers: list[float] = []
    outputs: list[Tensor] = []
    inputs = Batch(4, {"noisy": torch.ones(4, 16, 8, 8), "prompt": torch.ones(4, 5, 256), "pooled": torch.ones(4, 224)})
    inputs = Batch(4, {**inputs.values, "t": torch.full((4,), 0.5)})
    with sdpa_kernel(SDPBackend.MATH):  # whose gradients are the same every time
        for step in range(3):
            result = run_steps(engine, step + 1)[-1]
            averages.update(engine.weights, step + 1)
            numbers += [result.losses["loss"], result.grad_norm, engine.weight_norm().item()]
            with averages.in_place_of("ema", engine.weights):
                outputs.append(engine.denoise(inputs))
            outputs.append(engine.denoise(inputs))
    return numbers, outputs, {piece.name: piece.values.to("cpu", copy=True) for piece in engine.pieces()}


@pytest.mark.usefixtures("slow_copies")
@pytest.mark.parametrize(
    ("narrow", "kind", "keys"),
    [
        (False, "adamw", {}),
        (False, "adamw8bit", {"activation_checkpointing": True}),
        (True, "adamw8bit", {"activation_checkpointing": True}),
        (True, "adamw8bit", {"compiled": True}),
        (True, "adafactor", {"activation_checkpointing": "selective"}),
    ],
    ids=str,
)
def test_trained_blocks_in_host_memory_have_the_same_bits(
    tmp_path: Path, narrow: bool, kind: str, keys: dict[str, Any]
) -> None:
    found = []
    for count in (0, "all", 4):
        torch.compiler.reset()
        found.append(facts(make(tmp_path, narrow, True, kind=kind, swap_blocks=count, **keys)))
    for numbers, outputs, state in found[1:]:
        assert numbers == found[0][0]
        assert all(torch.equal(*pair) for pair in zip(outputs, found[0][1], strict=True))
        assert state.keys() == found[0][2].keys()
        assert [name for name in state if not torch.equal(state[name], found[0][2][name])] == []


def test_trained_blocks_in_host_memory_leave_the_gpu(tmp_path: Path) -> None:
    held = []
    for count in (0, "all"):
        before = torch.cuda.memory_allocated()
        engine = make(tmp_path, narrow=False, release=True, kind="adamw", swap_blocks=count)
        run_steps(engine, 1)
        held.append(torch.cuda.memory_allocated() - before)
        blocks = sum(weight.nbytes for block in engine.module.blocks() for weight in block.parameters())
        hosted = [piece for piece in engine.pieces() if piece.hosted]
        assert bool(hosted) == bool(count)
        assert all(piece.values.is_pinned() for piece in hosted)
        del engine, hosted
        gc.collect()
    assert held[0] - held[1] == pytest.approx(12 / 4 * blocks * (1 - 2 / 6), rel=0.1)
