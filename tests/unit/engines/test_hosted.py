"""Trained weights and their optimizer state in host memory: the bits of a run that holds all of them on the device."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sd3_light.config import SIZES, EmaConfig, TrainConfig
from sd3_light.core.model import denoiser_blocks
from sd3_light.cost.training_setup import swapped_blocks
from sd3_light.engines import Launch
from sd3_light.engines.torch import TorchEngine
from sd3_light.families.sd3.module import SD3TrainingModule
from sd3_light.model import block_swap, host_inputs
from sd3_light.model.block_swap import BlockSwap
from sd3_light.optim import chunks
from sd3_light.optim.ema import Averages
from tests.poisoned import poison
from tests.tiny_sd3 import perturbed
from tests.unit.engines.test_release import CPU, MODEL, assert_equal, batch, narrow_weights, run_steps, state

KINDS = {"adamw": False, "adamw8bit": True, "adafactor": True, "adamw-narrow": True, "adamw8bit-wide": False}
"""Optimizers, and whether weights are in bfloat16."""


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(chunks.split_into_chunks, "__defaults__", (2**17,))


def make(folder: Path, kind: str = "adamw", trained: tuple[str, ...] = ("",), **keys: Any) -> TorchEngine:
    """Return an engine with a denoiser of five blocks, some of them in host memory, that releases its gradients.

    Weights whose names contain one of ``trained`` train.
    """
    narrow = KINDS[kind]
    optimizer = {"type": kind.split("-")[0], "lr": 1e-3, "weight_dtype": "bfloat16" if narrow else "float32"}
    table = {"output_dir": "out", "dataset": "data.toml", "max_steps": 10, "model": MODEL, "optimizer": optimizer}
    table |= {"gradient_clipping": 0.0, "gradient_release": True, **keys}
    config = TrainConfig.model_validate(table, context={"base": folder})
    denoiser = perturbed({**SIZES["tiny2"].transformer_config(), "num_layers": 5})
    if narrow:
        narrow_weights(denoiser)
    for name, parameter in denoiser.named_parameters():
        parameter.requires_grad_(any(part in name for part in trained))
    blocks = denoiser_blocks(denoiser)
    numbers = swapped_blocks(config.swap_blocks, len(blocks))
    swap = BlockSwap(CPU, trained=True)
    for number in numbers:
        swap.add(blocks[number])
    if numbers:
        swap.start()
    return TorchEngine(SD3TrainingModule(denoiser, config), config, Launch(), CPU)


def losses(results: list[Any]) -> list[tuple[float, float]]:
    return [(result.losses["loss"], result.grad_norm) for result in results]


@pytest.mark.parametrize(
    ("kind", "counts", "level"),
    [
        ("adamw", (1, 2, 3, "all"), False),
        ("adamw", (3, "all"), True),
        ("adamw8bit", (3, "all"), "selective"),
        ("adamw8bit", ("all",), True),
        ("adamw-narrow", (2, "all"), False),
        ("adamw8bit-wide", ("all",), False),
        ("adafactor", ("all",), True),
        ("adamw", ("all",), "host"),
    ],
)
def test_hosted_weights_take_equal_steps(tmp_path: Path, monkeypatch: Any, kind: str, counts: Any, level: Any) -> None:
    monkeypatch.setattr(host_inputs, "_SMALLEST", 1)
    monkeypatch.setattr(block_swap, "_CHUNK", 1 << 12)  # what leaves and what enters a buffer share it
    keys = {"activation_checkpointing": level}
    resident = make(tmp_path, kind, activation_checkpointing=level if level != "host" else True)
    expected = losses(run_steps(resident, 0, 3))
    evaluated = resident.evaluate(batch(9))
    for number, count in enumerate(counts):
        if number:
            poison(monkeypatch)
        hosted = make(tmp_path, kind, swap_blocks=count, **keys)
        assert losses(run_steps(hosted, 0, 3)) == expected
        assert torch.equal(hosted.evaluate(batch(9)), evaluated)
        assert torch.equal(hosted.weight_norm(), resident.weight_norm())
        assert_equal(state(hosted), state(resident))


def test_a_small_part_is_on_the_device(tmp_path: Path) -> None:
    engine = make(tmp_path, swap_blocks="all")
    swap, blocks = block_swap.trained_blocks(engine.module.denoiser) or pytest.fail("nothing is swapped")
    own = [sum(weight.nbytes for weight in block.parameters()) for block in blocks]
    alignment = 512 * sum(1 for block in blocks for _ in block.parameters())
    assert swap.host_bytes == pytest.approx(sum(own), abs=alignment)
    assert swap.device_bytes == pytest.approx(2 * max(own), abs=alignment)
    assert swap._state.host_bytes == pytest.approx(2 * sum(own), abs=3 * alignment)
    assert swap._state.device_bytes == pytest.approx(4 * max(own), abs=3 * alignment)
    engine.optimizer.prepare_state()
    tensors = [
        value for chunk in engine.optimizer.chunks for each in chunk.optimizers for value in all_state(each.optimizer)
    ]
    buffers = {buffer.untyped_storage().data_ptr() for buffer in (*swap._buffers, *swap._state._buffers)}
    outside = sum(value.nbytes for value in tensors if value.untyped_storage().data_ptr() not in buffers)
    resident = sum(weight.numel() for weight in engine.module.trainable().values()) - sum(own) // 4
    assert outside == pytest.approx(8 * resident, rel=0.01)


def all_state(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for own in optimizer.state.values():
        yield from (value for value in own.values() if isinstance(value, Tensor))


@pytest.mark.parametrize(("kind", "counts"), [("adamw", ("all", 0)), ("adamw", (0, 3)), ("adamw8bit", (2, "all"))])
def test_a_run_resumes_with_other_blocks_in_host_memory(tmp_path: Path, kind: str, counts: tuple[Any, Any]) -> None:
    unbroken = make(tmp_path, kind)
    run_steps(unbroken, 0, 4)
    first, second = (make(tmp_path, kind, swap_blocks=count) for count in counts)
    run_steps(first, 0, 2)
    saved = state(first)
    run_steps(second, 5, 7)  # what it has trained is replaced, on the device too
    for piece in second.pieces():
        piece.values.copy_(saved[piece.name])
    run_steps(second, 2, 4)
    assert_equal(state(second), state(unbroken))


@pytest.mark.parametrize("kind", ["adamw", "adamw8bit"])
def test_averages_are_in_host_memory(tmp_path: Path, kind: str) -> None:
    engines = [make(tmp_path, kind, swap_blocks=count) for count in (0, 4)]
    found = []
    for engine in engines:
        averages = Averages(engine.weights, EmaConfig(enable=True, update_every=1, decay=0.5))
        evaluated = []
        for step in range(3):
            run_steps(engine, step, step + 1)
            averages.update(engine.weights, step + 1)
            evaluated.append(engine.evaluate(batch(9)))
            with averages.in_place_of("ema", engine.weights):
                evaluated += [engine.evaluate(batch(9)), engine.denoise(batch(8))]
            evaluated.append(engine.evaluate(batch(9)))
            assert torch.equal(evaluated[-1], evaluated[-4])
        found.append((evaluated, averages.tracks["ema"].shadow, state(engine)))
    assert all(torch.equal(one, other) for one, other in zip(found[0][0], found[1][0], strict=True))
    assert_equal(found[0][1], found[1][1])
    assert_equal(found[0][2], found[1][2])


def test_exports_frozen_weights_and_skipped_steps(tmp_path: Path) -> None:
    engines = [make(tmp_path, swap_blocks=count) for count in (0, 3)]
    gathered = []
    for engine in engines:
        run_steps(engine, 0, 2)
        gathered.append(engine.gather(engine.weights) or {})
    run_steps(engines[1], 2, 3)
    assert_equal(*gathered)
    engine = make(tmp_path, "adamw8bit", swap_blocks="all")
    run_steps(engine, 0, 1)
    before = state(engine)
    bad = batch()
    bad["target"].fill_(float("nan"))
    assert not engine.train_step([bad], 1e-3).read().taken
    assert_equal(state(engine), before)
    assert run_steps(engine, 1, 2)[0].taken
    engines = [make(tmp_path, trained=("1.attn.to_q", "4.ff", "proj_out"), swap_blocks=count) for count in (0, "all")]
    results = [losses(run_steps(engine, 0, 3)) for engine in engines]
    assert results[0] == results[1]
    assert_equal(*map(state, engines))


@pytest.mark.parametrize(("level", "swapped"), [(False, 3), (True, "all")])
def test_compiled_blocks_find_their_weights(tmp_path: Path, monkeypatch: Any, level: bool, swapped: Any) -> None:
    found = []
    for count in (0, swapped):
        torch.compiler.reset()
        engine = make(tmp_path, swap_blocks=count, activation_checkpointing=level)
        for block in engine.module.blocks():
            block.forward = torch.compile(block.forward, backend="aot_eager")  # type: ignore[method-assign]
        found.append((losses(run_steps(engine, 0, 3)), state(engine)))
        poison(monkeypatch)
    assert found[1][0] == found[0][0]
    assert_equal(found[1][1], found[0][1])


def test_what_is_written_back_is_what_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make(tmp_path, swap_blocks="all")
    moved: list[tuple[bool, int | None, int | None]] = []
    exchange = block_swap.HostRing._exchange

    def record(ring: block_swap.HostRing, number: int, leaves: int | None, enters: int | None) -> None:
        moved.append((isinstance(ring, BlockSwap), leaves, enters))
        exchange(ring, number, leaves, enters)

    monkeypatch.setattr(block_swap.HostRing, "_exchange", record)
    run_steps(engine, 0, 1)
    weights = [(leaves, enters) for is_weights, leaves, enters in moved if is_weights]
    moments = [(leaves, enters) for is_weights, leaves, enters in moved if not is_weights]
    forward = [(None, index) for index in range(5)]
    assert weights == [*forward, (4, 2), (3, 1), (2, 0)]
    assert moments == [(None, 4), (None, 3), (4, 2), (3, 1), (2, 0)]
    moved.clear()
    engine.evaluate(batch(9))
    assert [(leaves, enters) for _, leaves, enters in moved] == [(0, 2), (1, 3), (None, 4)]
    moved.clear()
    engine.weights.get("proj_out.weight")
    assert moved == [(False, 0, None), (False, 1, None)]
