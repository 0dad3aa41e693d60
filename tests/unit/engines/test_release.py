"""Weights in bfloat16, gradients that are freed in the backward pass, and weights in host memory: the same steps."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sd3_light.config import SIZES, EmaConfig, TrainConfig
from sd3_light.config.faults import UserError
from sd3_light.core.batch import Batch
from sd3_light.core.model import denoiser_blocks
from sd3_light.cost.training_setup import swapped_blocks
from sd3_light.engines import Launch
from sd3_light.engines.torch import TorchEngine
from sd3_light.families.sd3.module import SD3TrainingModule
from sd3_light.model import block_swap, host_inputs
from sd3_light.model.block_swap import BlockSwap
from sd3_light.model.wide_products import compute_in_float32
from sd3_light.optim import chunks
from sd3_light.optim.ema import Averages
from tests.poisoned import poison
from tests.tiny_sd3 import perturbed

CPU = torch.device("cpu")
MODEL = {"diffusers_path": "folder", "train_type": "sd3_light_pretrain", "size": "tiny2"}
TYPES = ("adamw", "adamw8bit", "adafactor")
KINDS = {"adamw": False, "adamw8bit": True, "adafactor": True, "adamw-narrow": True, "adamw8bit-wide": False}
"""Optimizers, and whether weights are in bfloat16."""


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(chunks.split_into_chunks, "__defaults__", (2**17,))


def settings(folder: Path, kind: str = "adamw", narrow: bool = False, **keys: Any) -> TrainConfig:
    optimizer = {"type": kind, "lr": 1e-3, "weight_dtype": "bfloat16" if narrow else "float32"}
    table = {"output_dir": "out", "dataset": "data.toml", "max_steps": 10, "model": MODEL, "optimizer": optimizer}
    return TrainConfig.model_validate({**table, "gradient_clipping": 0.0, **keys}, context={"base": folder})


def make(folder: Path, kind: str = "adamw", narrow: bool = False, **keys: Any) -> TorchEngine:
    """Return an engine with a tiny denoiser without zero weights, so that every weight trains."""
    config = settings(folder, kind, narrow, **keys)
    transformer = perturbed(SIZES["tiny2"].transformer_config())
    if narrow:
        narrow_weights(transformer)
    return TorchEngine(SD3TrainingModule(transformer, config), config, Launch(), CPU)


def narrow_weights(transformer: nn.Module) -> None:
    """Round matrices to bfloat16, as a run with bfloat16 weights does."""
    for parameter in transformer.parameters():
        if parameter.dim() > 1:
            parameter.data = parameter.data.bfloat16()
    compute_in_float32(transformer)


def batch(seed: int = 2) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"noisy": (2, 16, 4, 6), "prompt": (2, 5, 256), "pooled": (2, 224), "target": (2, 16, 4, 6)}
    values = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return Batch(2, {**values, "t": torch.tensor([0.2, 0.7])})


def run_steps(engine: TorchEngine, first: int, last: int) -> list[Any]:
    results = []
    for step in range(first, last):
        engine.module.begin(step)
        results.append(engine.train_step([batch(step)], 1e-3).read())
    return results


def state(engine: TorchEngine) -> dict[str, Tensor]:
    return {piece.name: piece.values.clone() for piece in engine.pieces()}


def assert_equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("keys", [{}, {"activation_checkpointing": True}, {"narrow": True}])
def test_released_gradients_take_the_same_steps(tmp_path: Path, kind: str, keys: dict[str, Any]) -> None:
    plain, released = make(tmp_path, kind, **keys), make(tmp_path, kind, gradient_release=True, **keys)
    assert len(released.optimizer.chunks) > 4
    for one, other in zip(run_steps(plain, 0, 3), run_steps(released, 0, 3), strict=True):
        assert one.losses == other.losses
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-5)
        assert other.taken
    assert_equal(state(plain), state(released))


def most_gradient_bytes(engine: TorchEngine) -> int:
    """Return the most bytes of gradients that exist at a time in a step."""
    weights = list(engine.module.trainable().values())
    most = 0

    def count(_: nn.Parameter) -> None:
        nonlocal most
        most = max(most, sum(weight.grad.nbytes for weight in weights if weight.grad is not None))

    for weight in weights:
        weight.register_post_accumulate_grad_hook(count)
    run_steps(engine, 0, 1)
    return most


def test_gradients_never_exist_all_at_once(tmp_path: Path) -> None:
    all_bytes = sum(weight.nbytes for weight in make(tmp_path).weights.values())
    assert most_gradient_bytes(make(tmp_path)) == all_bytes
    engine = make(tmp_path, gradient_release=True)
    assert most_gradient_bytes(engine) < 0.4 * all_bytes
    assert all(weight.grad is None for weight in engine.module.trainable().values())


def test_gradients_that_are_missing_or_not_finite(tmp_path: Path) -> None:
    engine = make(tmp_path, gradient_release=True)
    before = state(engine)
    block = engine.module.denoiser.transformer_blocks[0]
    weight = block.attn.to_q.weight
    handle = weight.register_hook(lambda gradient: gradient * float("inf"))
    result = engine.train_step([batch()], 1e-3).read()
    handle.remove()
    assert not result.taken
    after = state(engine)
    assert all(torch.isfinite(values.float()).all() for values in after.values())
    changed = [name for name in after if name.startswith("param/") and not torch.equal(after[name], before[name])]
    assert any("proj_out" in name for name in changed), "its gradient was known first"
    assert "param/transformer_blocks.0.attn.to_q.weight" not in changed
    assert run_steps(engine, 1, 2)[0].taken
    engine = make(tmp_path, gradient_release=True)
    engine.module.trainable()["proj_out.bias"].requires_grad_(False)
    with pytest.raises(UserError, match=r"no gradient reached proj_out\.bias"):
        run_steps(engine, 0, 1)


@pytest.mark.parametrize("kind", TYPES)
def test_weights_in_bfloat16_follow_those_in_float32(tmp_path: Path, kind: str) -> None:
    narrow, wide = make(tmp_path, kind, narrow=True), make(tmp_path, kind)
    start = {name: weight.clone() for name, weight in wide.weights.items()}
    assert {weight.dtype for weight in narrow.weights.values()} == {torch.float32, torch.bfloat16}
    assert all((weight.dtype == torch.bfloat16) == (weight.dim() > 1) for weight in narrow.weights.values())
    for one, other in zip(run_steps(narrow, 0, 4), run_steps(wide, 0, 4), strict=True):
        assert one.losses["loss"] == pytest.approx(other.losses["loss"], rel=0.02)
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=0.05)
    name = "transformer_blocks.0.attn.to_q.weight"
    exact = (wide.weights[name] - start[name]).flatten()
    rounded = (narrow.weights[name].float() - start[name].bfloat16().float()).flatten()
    assert torch.nn.functional.cosine_similarity(exact, rounded, dim=0) > 0.3  # most of the rest is rounding
    assert (rounded @ exact) / (exact @ exact) == pytest.approx(1.0, abs=0.15), "right on average"


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("release", [False, True])
def test_a_run_resumes_bit_for_bit(tmp_path: Path, kind: str, release: bool) -> None:
    unbroken = make(tmp_path, kind, narrow=True, gradient_release=release)
    run_steps(unbroken, 0, 2)
    saved = state(unbroken)
    resumed = make(tmp_path, kind, narrow=True, gradient_release=release)
    for piece in resumed.pieces():
        piece.values.copy_(saved[piece.name])
    run_steps(unbroken, 2, 4)
    run_steps(resumed, 2, 4)
    assert_equal(state(unbroken), state(resumed))


def test_weights_in_bfloat16_hold_no_memory_and_round_by_step(tmp_path: Path) -> None:
    engine = make(tmp_path, narrow=True)
    run_steps(engine, 0, 1)
    for chunk in engine.optimizer.chunks:
        for name, held in chunk.held.items():
            if held is not chunk.weights[name]:
                assert held.untyped_storage().nbytes() == 4
                assert held.grad is None
    engine = make(tmp_path, narrow=True)
    averages = Averages(engine.weights, EmaConfig(enable=True, update_every=1, decay=0.5))
    expected = {name: weight.float().clone() for name, weight in engine.weights.items()}
    for step in range(3):
        run_steps(engine, step, step + 1)
        averages.update(engine.weights, step + 1)
        share = 1 - averages.tracks["ema"].decay_at(step + 1)
        expected = {name: value.lerp(engine.weights[name].float(), share) for name, value in expected.items()}
    shadow = averages.tracks["ema"].shadow
    assert {tensor.dtype for tensor in shadow.values()} == {torch.float32}
    assert_equal(shadow, expected)
    before = {name: weight.clone() for name, weight in engine.weights.items()}
    with averages.in_place_of("ema", engine.weights):
        assert not torch.equal(engine.weights["proj_out.weight"], before["proj_out.weight"])
    assert_equal(dict(engine.weights), before)
    first, second = make(tmp_path, narrow=True), make(tmp_path, narrow=True)
    first.module.begin(0)
    second.module.begin(1)
    for engine in (first, second):
        engine.train_step([batch()], 1e-3)
    name = "proj_out.weight"
    assert not torch.equal(first.weights[name], second.weights[name])
    assert torch.equal(first.weights["proj_out.bias"], second.weights["proj_out.bias"])


def make_hosted(folder: Path, kind: str = "adamw", trained: tuple[str, ...] = ("",), **keys: Any) -> TorchEngine:
    """Return an engine with a denoiser of five blocks, some of them in host memory, that releases its gradients.

    Weights whose names contain one of ``trained`` train.
    """
    narrow = KINDS[kind]
    config = settings(folder, kind.split("-")[0], narrow, gradient_release=True, **keys)
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
    resident = make_hosted(tmp_path, kind, activation_checkpointing=level if level != "host" else True)
    expected = losses(run_steps(resident, 0, 3))
    evaluated = resident.evaluate(batch(9))
    for number, count in enumerate(counts):
        if number:
            poison(monkeypatch)
        hosted = make_hosted(tmp_path, kind, swap_blocks=count, **keys)
        assert losses(run_steps(hosted, 0, 3)) == expected
        assert torch.equal(hosted.evaluate(batch(9)), evaluated)
        assert torch.equal(hosted.weight_norm(), resident.weight_norm())
        assert_equal(state(hosted), state(resident))


def test_a_small_part_is_on_the_device(tmp_path: Path) -> None:
    engine = make_hosted(tmp_path, swap_blocks="all")
    swap, blocks = block_swap.trained_blocks(engine.module.denoiser) or pytest.fail("nothing is swapped")
    own = [sum(weight.nbytes for weight in block.parameters()) for block in blocks]
    alignment = 512 * sum(1 for block in blocks for _ in block.parameters())
    assert swap.host_bytes == pytest.approx(sum(own), abs=alignment)
    assert swap.device_bytes == pytest.approx(2 * max(own), abs=alignment)
    assert swap._state.host_bytes == pytest.approx(2 * sum(own), abs=3 * alignment)
    assert swap._state.device_bytes == pytest.approx(4 * max(own), abs=3 * alignment)
    engine.optimizer.prepare_state()
    optimizers = [each.optimizer for chunk in engine.optimizer.chunks for each in chunk.optimizers]
    tensors = [value for optimizer in optimizers for value in all_state(optimizer)]
    buffers = {buffer.untyped_storage().data_ptr() for buffer in (*swap._buffers, *swap._state._buffers)}
    outside = sum(value.nbytes for value in tensors if value.untyped_storage().data_ptr() not in buffers)
    resident = sum(weight.numel() for weight in engine.module.trainable().values()) - sum(own) // 4
    assert outside == pytest.approx(8 * resident, rel=0.01)


def all_state(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for own in optimizer.state.values():
        yield from (value for value in own.values() if isinstance(value, Tensor))


@pytest.mark.parametrize(("kind", "counts"), [("adamw", ("all", 0)), ("adamw", (0, 3)), ("adamw8bit", (2, "all"))])
def test_a_run_resumes_with_other_blocks_in_host_memory(tmp_path: Path, kind: str, counts: tuple[Any, Any]) -> None:
    unbroken = make_hosted(tmp_path, kind)
    run_steps(unbroken, 0, 4)
    first, second = (make_hosted(tmp_path, kind, swap_blocks=count) for count in counts)
    run_steps(first, 0, 2)
    saved = state(first)
    run_steps(second, 5, 7)  # what it has trained is replaced, on the device too
    for piece in second.pieces():
        piece.values.copy_(saved[piece.name])
    run_steps(second, 2, 4)
    assert_equal(state(second), state(unbroken))


@pytest.mark.parametrize("kind", ["adamw", "adamw8bit"])
def test_averages_are_in_host_memory(tmp_path: Path, kind: str) -> None:
    engines = [make_hosted(tmp_path, kind, swap_blocks=count) for count in (0, 4)]
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
    engines = [make_hosted(tmp_path, swap_blocks=count) for count in (0, 3)]
    gathered = []
    for engine in engines:
        run_steps(engine, 0, 2)
        gathered.append(engine.gather(engine.weights) or {})
    run_steps(engines[1], 2, 3)
    assert_equal(*gathered)
    engine = make_hosted(tmp_path, "adamw8bit", swap_blocks="all")
    run_steps(engine, 0, 1)
    before = state(engine)
    bad = batch()
    bad["target"].fill_(float("nan"))
    assert not engine.train_step([bad], 1e-3).read().taken
    assert_equal(state(engine), before)
    assert run_steps(engine, 1, 2)[0].taken
    trained = ("1.attn.to_q", "4.ff", "proj_out")
    engines = [make_hosted(tmp_path, trained=trained, swap_blocks=count) for count in (0, "all")]
    results = [losses(run_steps(engine, 0, 3)) for engine in engines]
    assert results[0] == results[1]
    assert_equal(*map(state, engines))


@pytest.mark.parametrize(("level", "swapped"), [(False, 3), (True, "all")])
def test_compiled_blocks_find_their_weights(tmp_path: Path, monkeypatch: Any, level: bool, swapped: Any) -> None:
    found = []
    for count in (0, swapped):
        torch.compiler.reset()
        engine = make_hosted(tmp_path, swap_blocks=count, activation_checkpointing=level)
        for block in engine.module.blocks():
            block.forward = torch.compile(block.forward, backend="aot_eager")  # type: ignore[method-assign]
        found.append((losses(run_steps(engine, 0, 3)), state(engine)))
        poison(monkeypatch)
    assert found[1][0] == found[0][0]
    assert_equal(found[1][1], found[0][1])


def test_what_is_written_back_is_what_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_hosted(tmp_path, swap_blocks="all")
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
