"""The torch engine in one process: accumulation, clipping, skipped steps, and a state that resumes bit for bit."""

import math
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import SD3Transformer2DModel
from torch import Tensor, nn

from sd3_light.config import SIZES, TrainConfig
from sd3_light.config.faults import UserError
from sd3_light.core.batch import Batch
from sd3_light.core.model import TrainedModel
from sd3_light.core.objective import Prediction
from sd3_light.engines import Launch
from sd3_light.engines.processes import start_process_group
from sd3_light.engines.torch import TorchEngine
from sd3_light.families.sd3.module import SD3TrainingModule
from sd3_light.flow.objectives import FlowMatching
from tests.tiny_sd3 import perturbed

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
MODEL = {"diffusers_path": "folder", "train_type": "sd3_light_pretrain", "size": "tiny2", "dtype": "float32"}


def config(folder: Path, **keys: Any) -> TrainConfig:
    table = {"output_dir": "out", "dataset": "data.toml", "max_steps": 10, "model": MODEL, **keys}
    return TrainConfig.model_validate(table, context={"base": folder})


class Line(TrainedModel):
    """y = W x + b with a mean squared loss: every gradient has a closed form."""

    def __init__(self) -> None:
        layer = nn.Linear(3, 2)
        nn.init.constant_(layer.weight, 0.5)
        nn.init.zeros_(layer.bias)
        super().__init__(layer, FlowMatching())

    def predict(self, batch: Batch, taps: Sequence[int] = ()) -> Prediction:
        return Prediction(self.denoiser(batch["noisy"]))


def line_batch(seed: int = 0, count: int = 8) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    values, target = torch.randn(count, 3, generator=generator), torch.randn(count, 2, generator=generator)
    return Batch(count, {"noisy": values, "t": torch.linspace(0.01, 0.99, count), "target": target})


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., TorchEngine]:
    def line(**keys: Any) -> TorchEngine:
        return TorchEngine(Line(), config(tmp_path, **keys), Launch(), CPU)

    return line


def snapshot(engine: TorchEngine) -> dict[str, Tensor]:
    return {piece.name: piece.values.clone().reshape(piece.shape) for piece in engine.pieces()}


def fill(engine: TorchEngine, state: dict[str, Tensor]) -> None:
    """Load a state into live memory, as a checkpoint does."""
    for piece in engine.pieces():
        piece.values.copy_(state[piece.name].reshape(-1))


def gradients(engine: TorchEngine) -> dict[str, Tensor]:
    named = engine.module.denoiser.named_parameters()
    return {name: parameter.grad for name, parameter in named if parameter.grad is not None}


def equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return set(first) == set(second) and all(torch.equal(first[name], second[name]) for name in first)


def real_engine(folder: Path, fast: bool = False) -> TorchEngine:
    """Return an engine with a tiny denoiser without zero weights, so that every weight trains."""
    transformer = perturbed(SIZES["tiny2"].transformer_config())
    # a large eps keeps Adam from amplifying the rounding of gradients near zero
    settings = config(folder, optimizer={"eps": 1e-3, "lr": 1e-3})
    return TorchEngine(SD3TrainingModule(transformer, settings, fast), settings, Launch(), CPU)


def real_batch(count: int = 4) -> Batch:
    generator = torch.Generator().manual_seed(2)
    shapes = [(count, 16, 4, 6), (count,), (count, 5, 256), (count, 224)]
    noisy, times, prompt, pooled = (torch.randn(shape, generator=generator) for shape in shapes)
    target = torch.randn(count, 16, 4, 6, generator=generator)
    values = {"noisy": noisy, "t": times.sigmoid(), "prompt": prompt, "pooled": pooled, "target": target}
    return Batch(count, values)


def test_an_update_is_announced_when_all_gradients_are_there(tmp_path: Path) -> None:
    """Also with several micro-batches: once per step, before a weight changes."""
    engine = real_engine(tmp_path)
    before = snapshot(engine)
    seen = []
    engine.optimizer.before_update = lambda: seen.append((len(gradients(engine)), equal(snapshot(engine), before)))
    engine.train_step(real_batch().split(2), 1e-3)
    assert seen == [(len(engine.weights), True)]


def test_losses_are_means_over_the_ranks(make: Callable[..., TorchEngine]) -> None:
    alone, first_of_two = make(), make()
    first_of_two.world_size = 2
    first_of_two.sum_over_ranks = lambda numbers: 2 * numbers  # type: ignore[method-assign]
    expected, averaged = (engine.train_step([line_batch()], 1e-2).read() for engine in (alone, first_of_two))
    assert averaged.losses == pytest.approx(expected.losses)


def test_accumulation_does_not_change_the_step(tmp_path: Path) -> None:
    whole, parts = real_engine(tmp_path), real_engine(tmp_path)
    for _ in range(2):
        single = whole.train_step([real_batch()], 1e-3).read()
        accumulated = parts.train_step(real_batch().split(4), 1e-3).read()
        assert accumulated.losses["loss"] == pytest.approx(single.losses["loss"], rel=1e-6)
        assert accumulated.grad_norm == pytest.approx(single.grad_norm, rel=1e-5)
    start = real_engine(tmp_path).weights
    largest_change = max(float((weight - start[name]).detach().abs().max()) for name, weight in whole.weights.items())
    assert largest_change > 1e-4
    for name, weight in whole.weights.items():
        torch.testing.assert_close(parts.weights[name], weight, rtol=0, atol=1e-6)


def test_losses_are_means_of_micro_batches_and_of_bands(make: Callable[..., TorchEngine]) -> None:
    engine, batch = make(), line_batch()
    losses = [float(engine.evaluate(piece)[0] / engine.evaluate(piece)[1]) for piece in batch.split(4)]
    assert len(set(losses)) == 4
    result = engine.train_step(batch.split(4), 1e-3).read()
    assert result.losses["loss"] == pytest.approx(sum(losses) / 4, rel=1e-6)
    assert result.losses["flow"] == result.losses["loss"]
    assert result.taken
    batch = line_batch(count=8)
    engine = make()
    each = engine.module(batch)["each"]
    result = engine.train_step(batch.split(4), 0.0).read()
    bands = (10 * batch["t"]).long()
    for band in range(10):
        in_band = bands == band
        count = 4 * result.band_counts[band]  # counts are divided by the four micro-batches
        assert count == pytest.approx(int(in_band.sum()))
        assert 4 * result.bands[band] == pytest.approx(float(each[in_band].sum()), rel=1e-5)


def test_one_step_matches_the_adamw_formula(make: Callable[..., TorchEngine]) -> None:
    engine = make(gradient_clipping=0.0, optimizer={"weight_decay": 0.1, "betas": [0.8, 0.9], "eps": 1e-6})
    batch = line_batch()
    values, target = batch["noisy"], batch["target"]
    before = {name: weight.detach().clone() for name, weight in engine.weights.items()}
    residual = (values @ before["weight"].T + before["bias"] - target) * 2 / target.numel()
    expected = {"weight": residual.T @ values, "bias": residual.sum(0)}
    engine.train_step([batch], lr=0.01)
    for name, gradient in expected.items():
        decayed = before[name] * (1 - 0.01 * (0.1 if name == "weight" else 0.0))
        # after one step the bias-corrected moments are the gradient and its square
        after = decayed - 0.01 * gradient / (gradient.abs() + 1e-6)
        torch.testing.assert_close(engine.weights[name].detach(), after, rtol=1e-5, atol=1e-7)


def test_clipping_uses_the_norm_over_all_weights(make: Callable[..., TorchEngine]) -> None:
    """Over all parameters and after accumulation: once per step, not once per micro-batch or tensor."""
    batch = line_batch()
    free, clipped = make(gradient_clipping=0.0), make(gradient_clipping=0.05)
    norm = free.train_step(batch.split(2), 0.0).read().grad_norm
    expected = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients(free).values()))
    assert norm == pytest.approx(expected, rel=1e-6)
    assert norm > 0.05
    logged = clipped.train_step(batch.split(2), 0.0).read().grad_norm
    assert logged == pytest.approx(norm, rel=1e-6), "logged before clipping"
    for name, gradient in gradients(clipped).items():
        torch.testing.assert_close(gradient, gradients(free)[name] * 0.05 / norm, rtol=1e-4, atol=1e-8)
    free, clipped = make(gradient_clipping=0.0), make(gradient_clipping=1e6)
    for engine in (free, clipped):
        engine.train_step([line_batch()], 1e-2)
    assert equal(snapshot(free), snapshot(clipped))


def test_gradients_are_reset_between_steps(make: Callable[..., TorchEngine]) -> None:
    engine, fresh = make(), make()
    engine.train_step([line_batch(0)], lr=0.0)
    engine.train_step([line_batch(1)], lr=0.0)
    fresh.train_step([line_batch(1)], lr=0.0)
    assert equal(gradients(engine), gradients(fresh))
    with pytest.raises(AssertionError, match="equal"):
        make().train_step([line_batch(0, 8), line_batch(0, 4)], 1e-3)


@pytest.mark.parametrize(("poison", "where"), [(float("nan"), 0), (float("inf"), -1)])
def test_a_non_finite_loss_changes_nothing(make: Callable[..., TorchEngine], poison: float, where: int) -> None:
    engine, undisturbed = make(), make()
    for each in (engine, undisturbed):
        each.train_step([line_batch(0)], 1e-2)
    before = snapshot(engine)
    bad = line_batch(1).split(2)
    bad[where]["noisy"][0, 0] = poison
    result = engine.train_step(bad, 1e-2).read()
    assert not result.taken
    assert not math.isfinite(result.losses["loss"])
    assert equal(snapshot(engine), before)
    # training continues as if the step had not happened
    for each in (engine, undisturbed):
        assert each.train_step([line_batch(2)], 1e-2).read().taken
    assert equal(snapshot(engine), snapshot(undisturbed))
    # nor does a gradient
    before = snapshot(engine)
    engine.module.denoiser.weight.register_hook(lambda gradient: gradient * float("inf"))
    result = engine.train_step([line_batch()], 1e-2).read()
    assert math.isfinite(result.losses["loss"])
    assert not math.isfinite(result.grad_norm)
    assert not result.taken
    assert equal(snapshot(engine), before)


def test_the_state_is_named_exists_early_and_resumes_bit_for_bit(make: Callable[..., TorchEngine]) -> None:
    """Runs at least two steps after loading: a lost moment only shows in the second."""
    uninterrupted, resumed = make(), make()
    for number in range(3):
        uninterrupted.train_step([line_batch(number)], 1e-2)
    saved = snapshot(uninterrupted)
    fill(resumed, saved)
    for number in range(3, 7):
        expected, actual = (engine.train_step([line_batch(number)], 1e-2).read() for engine in (uninterrupted, resumed))
        assert actual == expected
    assert equal(snapshot(uninterrupted), snapshot(resumed))
    kinds = ("param", "step", "exp_avg", "exp_avg_sq")
    for engine in (stepped := make(), make()):
        if engine is stepped:
            engine.train_step([line_batch()], 1e-2)
        state = {piece.name: piece for piece in engine.pieces()}
        assert set(state) == {f"{kind}/{name}" for kind in kinds for name in ("weight", "bias")}
        assert {piece.values.dtype for piece in state.values()} == {torch.float32}
        assert all(piece.writes and piece.start == 0 and piece.values.dim() == 1 for piece in state.values())
        assert (state["param/weight"].shape, state["step/weight"].shape) == ((2, 3), ())
    # a checkpoint of step 0 creates the optimizer state; the first step stays the same.
    created, plain = make(), make()
    list(created.pieces())
    for engine in (created, plain):
        engine.train_step([line_batch()], 1e-2)
    assert equal(snapshot(created), snapshot(plain))


def test_pieces_averages_and_norms_are_those_of_the_weights(make: Callable[..., TorchEngine]) -> None:
    engine = make()
    (piece,) = [piece for piece in engine.pieces() if piece.name == "param/bias"]
    piece.values.fill_(3.0)
    assert engine.module.denoiser.bias.tolist() == [3.0, 3.0]
    assert engine.weights["bias"].tolist() == [3.0, 3.0]
    engine = make()
    average = {name: weight + 1 for name, weight in engine.weights.items()}
    assert [piece.name for piece in engine.like_weights("ema", average)] == ["ema/weight", "ema/bias"]
    gathered = engine.gather(average)
    assert equal(gathered, average)
    gathered["bias"].zero_()
    assert average["bias"].tolist() == [1.0, 1.0], "a copy"
    assert float(make().weight_norm()) == pytest.approx(math.sqrt(6 * 0.25))


def test_weights_are_float32_stock_and_perhaps_frozen(tmp_path: Path) -> None:
    """AdamW in bfloat16 loses most updates."""
    with pytest.raises(AssertionError, match="float32"):
        TorchEngine(Line().bfloat16(), config(tmp_path), Launch(), CPU)
    module = Line()
    module.denoiser.bias.requires_grad_(False)
    engine = TorchEngine(module, config(tmp_path), Launch(), CPU)
    assert set(engine.weights) == {"weight"}
    engine.train_step([line_batch()], 1e-2)
    assert not module.denoiser.bias.any()
    with torch.device("meta"):
        stock = SD3Transformer2DModel(**SIZES["tiny2"].transformer_config())
    assert list(real_engine(tmp_path).weights) == [name for name, _ in stock.named_parameters()]


def test_evaluation_changes_no_weight_and_ignores_padding(make: Callable[..., TorchEngine]) -> None:
    engine = make()
    engine.train_step([line_batch()], 1e-2)
    before = snapshot(engine)
    assert torch.equal(engine.evaluate(line_batch(3)), engine.evaluate(line_batch(3)))
    assert equal(snapshot(engine), before)
    engine, batch = make(), line_batch(count=8)
    whole = engine.evaluate(Batch(5, {name: value[:5] for name, value in batch.values.items()}))
    padded = engine.evaluate(batch.with_values({"weight": torch.tensor([1.0] * 5 + [0.0] * 3)}))
    assert padded.tolist() == pytest.approx(whole.tolist(), rel=1e-6)
    assert whole[1] == 5
    # a weight without gradient is named: some engines would decay it anyway
    engine.module.denoiser.bias.requires_grad_(False)
    with pytest.raises(UserError, match=r"no gradient reached bias"):
        engine.train_step([line_batch()], 1e-2)


def test_a_single_process_joins_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    joined: list[tuple[str, float]] = []

    def join(backend: str, timeout: timedelta, device_id: Any) -> None:
        joined.append((backend, timeout.total_seconds()))

    monkeypatch.setattr(torch.distributed, "init_process_group", join)
    monkeypatch.setattr(torch.distributed, "new_group", lambda *args, **options: (args, options["backend"]))
    monkeypatch.setattr(torch.distributed, "broadcast", lambda *args: None)
    assert start_process_group(Launch(), CPU, 60).control is None
    assert joined == []
    groups: Any = start_process_group(Launch(1, 1, 2), CPU, 60)
    for gpus in (2, 1):  # NCCL refuses processes that share a GPU
        monkeypatch.setattr(torch.cuda, "device_count", lambda number=gpus: number)
        start_process_group(Launch(1, 1, 2), torch.device("cuda", 1 % gpus), 90)
    assert joined == [("gloo", 60), ("nccl", 90), ("gloo", 90)]
    assert (groups.control, groups.saving, groups.writers) == (((), "gloo"), (([0, 1],), "gloo"), 2)
    # this process runs on a machine with 5 processes; the first machine, which has 3, sets the writers
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "5")
    monkeypatch.setattr(torch.distributed, "broadcast", lambda tensor, source, group: tensor.fill_(3))
    for all_write, writers in ((False, 3), (True, 8)):
        groups = start_process_group(Launch(7, 4, 8), CPU, 60, all_write)
        assert (groups.writers, groups.saving) == (writers, ((list(range(writers)),), "gloo"))
