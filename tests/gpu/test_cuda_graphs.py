"""Steps that replay CUDA graphs compute the same bits as steps that launch their kernels one by one."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sd3_light.config import SIZES, EmaConfig, TrainConfig
from sd3_light.core.batch import Batch
from sd3_light.engines import Launch
from sd3_light.engines.protocol import StepNumbers
from sd3_light.engines.torch import TorchEngine
from sd3_light.families.sd3.module import SD3TrainingModule
from sd3_light.families.sd3.random_weights import new_transformer
from sd3_light.optim.ema import Averages

CUDA = torch.device("cuda", 0)
MODEL = {"diffusers_path": "folder", "train_type": "sd3_light_pretrain", "size": "tiny2"}
SIDES = ((8, 8), (4, 12))
CASES: dict[str, tuple[bool, dict[str, Any], dict[str, Any]]] = {
    "fast": (True, {}, {}),
    "stock": (False, {}, {}),
    "fast, recomputed": (True, {"activation_checkpointing": True}, {}),
    "fast, selective": (True, {"activation_checkpointing": "selective"}, {}),
    "fast, text reconstruction": (True, {}, {"text_recon_gamma": 0.1, "text_recon_target_layer": 0}),
}
Make = Callable[..., TorchEngine]


@pytest.fixture(autouse=True)
def repeatable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convolutions may otherwise sum gradients in any order."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


@pytest.fixture(params=CASES)
def make(tmp_path: Path, request: Any) -> Make:
    fast, keys, model = CASES[request.param]
    return lambda graphs: _engine(tmp_path, fast, graphs, keys, model)


def _engine(
    folder: Path,
    fast: bool,
    graphs: bool,
    keys: dict[str, Any],
    model: dict[str, Any],
    shape: Mapping[str, Any] = SIZES["tiny2"].transformer_config(),
) -> TorchEngine:
    table = {"output_dir": "out", "dataset": "data.toml", "max_steps": 10, "model": {**MODEL, **model}, **keys}
    config = TrainConfig.model_validate(table, context={"base": folder})
    transformer = new_transformer(shape, 0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():  # without zero weights, so that every weight trains
        for parameter in transformer.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    engine = TorchEngine(SD3TrainingModule(transformer, config, fast), config, Launch(), CUDA)
    if graphs:
        engine.use_graphs()
    return engine


def batch(seed: int, sides: tuple[int, int], poison: float = 0.0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(6, 16, *sides), (6,), (6, 12, 256), (6, 224), (6, 16, *sides)]
    noisy, times, prompt, pooled, target = (torch.randn(shape, generator=generator).to(CUDA) for shape in shapes)
    values = {"noisy": noisy, "t": times.sigmoid(), "prompt": prompt.bfloat16(), "pooled": pooled.bfloat16()}
    mask = torch.rand(6, *sides, generator=generator).to(CUDA) if seed % 3 else None
    return Batch(6, values).with_values({"target": target + poison, "mask": mask})


@pytest.mark.parametrize("fast", [False, True], ids=["stock", "fast"])
def test_real_text_is_recorded_in_few_graphs(tmp_path: Path, fast: bool) -> None:
    """Lengths differ in every batch. The fillers change only the rounding."""
    generator = torch.Generator().manual_seed(3)
    lengths = [torch.randint(1, 13, (6,), generator=generator) for _ in range(8)]
    losses = []
    for graphs in (False, True):
        engine = _engine(tmp_path, fast, graphs, {}, {"text_tokens": "real"})
        steps = []
        for seed, counts in enumerate(lengths):
            some = batch(3 * seed, SIDES[0])
            cut = some.with_values({"prompt": some["prompt"][:, : int(counts.max())]})
            steps.append(engine.train_step([replace(cut, host={"prompt.length": counts})], 1e-4).read().losses["loss"])
        losses.append(steps)
    assert 1 <= engine.graphs.count <= 4
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)


def train(engine: TorchEngine, averages: Averages, first: int, last: int) -> list[StepNumbers]:
    """Train steps of two micro-batches; buckets alternate, and some micro-batches have masks."""
    results = []
    for step in range(first, last):
        batches = [batch(2 * step + number, SIDES[step % 2]) for number in range(2)]
        results.append(engine.train_step(batches, 1e-3 / (1 + step)))
        averages.update(engine.weights, step + 1)
    return [result.read() for result in results]


def averages_of(engine: TorchEngine) -> Averages:
    return Averages(engine.weights, EmaConfig(enable=True, update_every=1))


def state(engine: TorchEngine, averages: Averages) -> dict[str, Tensor]:
    shadow = {f"ema/{name}": tensor.clone() for name, tensor in averages.tracks["ema"].shadow.items()}
    return {piece.name: piece.values.clone() for piece in engine.pieces()} | shadow


def differences(first: dict[str, Tensor], second: dict[str, Tensor]) -> list[str]:
    return [name for name in first if not torch.equal(first[name], second[name])]


def test_ten_steps_have_the_same_bits(make: Make) -> None:
    engines = [make(graphs=False), make(graphs=False), make(graphs=True)]
    averages = [averages_of(engine) for engine in engines]
    expected, again, graphed = (train(*pair, 0, 10) for pair in zip(engines, averages, strict=True))
    states = [state(*pair) for pair in zip(engines, averages, strict=True)]
    assert again == expected, "the kernels themselves do not repeat"
    assert differences(states[1], states[0]) == [], "the kernels themselves do not repeat"
    assert graphed == expected
    assert differences(states[2], states[0]) == []
    assert engines[2].graphs is not None
    assert engines[2].graphs.count == 4


def test_evaluation_and_a_resumed_run_agree_too(make: Make) -> None:
    plain, graphed = make(graphs=False), make(graphs=True)
    plain_averages, graphed_averages = averages_of(plain), averages_of(graphed)
    train(plain, plain_averages, 0, 4)
    for piece, saved in zip(graphed.pieces(), list(plain.pieces()), strict=True):
        piece.values.copy_(saved.values)
    for name, shadow in graphed_averages.tracks["ema"].shadow.items():
        shadow.copy_(plain_averages.tracks["ema"].shadow[name])
    for first, last in ((4, 7), (7, 10)):
        assert train(graphed, graphed_averages, first, last) == train(plain, plain_averages, first, last)
        with plain_averages.in_place_of("ema", plain.weights), graphed_averages.in_place_of("ema", graphed.weights):
            held_out = batch(99, SIDES[0])
            assert torch.equal(graphed.evaluate(held_out), plain.evaluate(held_out))
    assert differences(state(graphed, graphed_averages), state(plain, plain_averages)) == []


def test_a_replayed_step_never_synchronizes(make: Make) -> None:
    engine = make(graphs=True)
    steps = [[batch(seed, SIDES[0]), batch(seed + 3, SIDES[0])] for seed in (0, 3, 6)]
    engine.train_step(steps[0], 1e-3).read()
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        results = [engine.train_step(step, 1e-3) for step in steps]
    finally:
        torch.cuda.set_sync_debug_mode(before)
    assert all(result.read().taken for result in results)


def test_a_non_finite_step_is_skipped(make: Make) -> None:
    engine = make(graphs=True)
    averages = averages_of(engine)
    engine.train_step([batch(0, SIDES[0])], 1e-3)
    before = state(engine, averages)
    assert not engine.train_step([batch(3, SIDES[0], poison=float("nan"))], 1e-3).read().taken
    assert differences(state(engine, averages), before) == []
    assert engine.train_step([batch(6, SIDES[0])], 1e-3).read().taken


def test_a_step_that_waits_for_the_device_is_not_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a failed recording the stream and the random generator are as before, and training continues."""
    plain, graphed = (_engine(tmp_path, True, graphs, {}, {}) for graphs in (False, True))
    total = SD3TrainingModule.total

    def waits(self: SD3TrainingModule, each: dict[str, Tensor]) -> dict[str, Tensor]:
        made = total(self, each)
        made["loss"].item()
        return made

    monkeypatch.setattr(SD3TrainingModule, "total", waits)
    assert train(graphed, averages_of(graphed), 0, 4) == train(plain, averages_of(plain), 0, 4)
    assert graphed.graphs.count == 0
    assert "CUDA graphs: recording failed" in capsys.readouterr().err
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert torch.rand(3, device=CUDA).shape == (3,)
    assert differences(state(graphed, averages_of(graphed)), state(plain, averages_of(plain))) == []


def test_memory_does_not_grow_with_steps_or_shapes(tmp_path: Path) -> None:
    engine = _engine(tmp_path, True, True, {}, {})
    averages = averages_of(engine)
    train(engine, averages, 0, 6)
    torch.cuda.synchronize()
    before = torch.cuda.memory_reserved()
    train(engine, averages, 6, 40)
    assert torch.cuda.memory_reserved() <= before + (4 << 20)


def test_gradients_exist_once(tmp_path: Path) -> None:
    """Weights, two moments and one set of gradients; a small batch needs little beside them."""
    keys = {"activation_checkpointing": True}
    engine = _engine(tmp_path, False, True, keys, {}, {**SIZES["tiny2"].transformer_config(), "num_layers": 100})
    weights = sum(weight.nbytes for weight in engine.module.parameters())
    torch.cuda.reset_peak_memory_stats(CUDA)
    before = torch.cuda.memory_allocated(CUDA) - weights
    for seed in (0, 3):
        engine.train_step([batch(seed, SIDES[0])], 1e-3).read()
    assert torch.cuda.max_memory_allocated(CUDA) - before < 4 * weights + (128 << 20)
