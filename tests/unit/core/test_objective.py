"""What an objective may do: heads, a teacher, other networks, drawn batches, a time per token."""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sd3_light.config import EmaConfig, TrainConfig
from sd3_light.config.faults import UserError
from sd3_light.core.batch import Batch
from sd3_light.core.model import TrainedModel, of_denoiser
from sd3_light.core.objective import Network, Objective, Objectives, Observes, Prediction, Predicts
from sd3_light.engines import Launch
from sd3_light.engines.torch import TorchEngine
from sd3_light.flow.objective import flow_loss, interpolate, velocity
from sd3_light.flow.objectives import FlowMatching
from sd3_light.optim.ema import Averages
from sd3_light.randomness import fill_normals, occurrence_words, streams
from sd3_light.train.teacher import teach_by_average

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
WIDTH, SIDE = 6, 4


class Blocks(nn.Module):
    """A denoiser of two blocks over latents [B, 6, 4, 4]; its time is one of the sample, or one of every token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH + 1, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 8), nn.GELU(), nn.Linear(8, WIDTH)) for _ in "ab")

    def forward(self, noisy: Tensor, t: Tensor) -> tuple[Tensor, list[Tensor]]:
        times = t.view(len(t), -1, 1).expand(-1, SIDE**2, 1)
        tokens = self.embed(torch.cat([noisy.flatten(2).transpose(1, 2), times], dim=-1))
        after = []
        for block in self.blocks:
            tokens = tokens + block(tokens)
            after.append(tokens)
        return tokens.transpose(1, 2).view_as(noisy), after


class Model(TrainedModel):
    passes = 0

    def predict(self, batch: Batch, taps: Sequence[int] = ()) -> Prediction:
        self.passes += 1
        out, after = self.denoiser(batch["noisy"], batch["t"])
        return Prediction(out, {tap: after[tap - 1] for tap in taps})


def make(*parts: Objective, **keys: Any) -> tuple[Model, TorchEngine]:
    torch.manual_seed(0)
    model = Model(Blocks(), Objectives(parts))
    table = {"output_dir": "out", "dataset": "data.toml", "max_steps": 1, "model": {"diffusers_path": "m"}, **keys}
    config = TrainConfig.model_validate(table, context={"base": Path()})
    return model, TorchEngine(model, config, Launch(), CPU)


def batch(seed: int = 0, size: int = 4) -> Batch:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    latents = {name: draw(size, WIDTH, SIDE, SIDE) for name in ("noisy", "target", "other")}
    words = torch.from_numpy(occurrence_words(0, 0, range(seed * size, (seed + 1) * size))).view(torch.int32)
    return Batch(size, {**latents, "t": torch.rand(size, generator=generator), "dino": draw(size, 3), "words": words})


def train(engine: TorchEngine, steps: range) -> Iterator[float]:
    for step in steps:
        engine.module.begin(step)
        numbers = engine.train_step(batch(step).split(2), 1e-2).read()
        assert numbers.taken
        yield numbers.losses["loss"]


def snapshot(engine: TorchEngine) -> dict[str, Tensor]:
    return {piece.name: piece.values.clone() for piece in engine.pieces()}


def require_exact_resume(build: Callable[[], tuple[Model, TorchEngine]]) -> dict[str, Tensor]:
    """Compare four steps with two, a checkpoint, and two more; return the state after all."""
    _, whole = build()
    losses = list(train(whole, range(4)))
    _, first = build()
    list(train(first, range(2)))
    saved = snapshot(first)
    _, second = build()
    for piece in second.pieces():
        piece.values.copy_(saved[piece.name])
    assert list(train(second, range(2, 4))) == losses[2:]
    expected, resumed = snapshot(whole), snapshot(second)
    assert list(expected) == list(resumed)
    assert all(torch.equal(expected[name], resumed[name]) for name in expected)
    return expected


class Projector(nn.Module):
    """A head whose list of layers looks like that of a denoiser's blocks."""

    def __init__(self, width: int, features: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(width, 16), nn.SiLU(), nn.Linear(16, features))])

    def forward(self, tokens: Tensor) -> Any:
        return self.layers[0](tokens)


class Alignment(Objective):
    """The angle between a projection of a block's mean token and cached features of the image."""

    taps = (1,)
    reads = ("dino",)

    def __init__(self, width: int, features: int) -> None:
        self.weights = {"alignment": 0.5}
        self.heads = {"projector": Projector(width, features)}

    def losses(self, out: Prediction, batch: Batch) -> dict[str, Tensor]:
        projected = self.head("projector", out.features[1]).float().mean(1)
        return {"alignment": 1 - nn.functional.cosine_similarity(projected, batch["dino"].float())}


def test_heads_train_and_are_checkpointed_but_belong_to_no_average_or_export() -> None:
    def build() -> tuple[Model, TorchEngine]:
        return make(FlowMatching(), Alignment(WIDTH, 3), optimizer={"type": "muon"})

    model, engine = build()
    names = [name for name, _ in model.denoiser.named_parameters()]
    heads = [f"heads.projector.layers.0.{layer}.{kind}" for layer in (0, 2) for kind in ("weight", "bias")]
    assert list(model.trainable()) == [*names, *heads]
    assert list(of_denoiser(engine.weights)) == names
    averages = Averages(of_denoiser(engine.weights), EmaConfig(enable=True))
    pieces = [piece.name for piece in engine.like_weights("ema", averages.tracks["ema"].shadow)]
    assert pieces == [f"ema/{name}" for name in names]
    assert list(engine.gather(averages.tracks["ema"].shadow) or ()) == names
    state = require_exact_resume(build)
    assert "momentum_buffer/blocks.0.0.weight" in state
    for name in heads:
        assert f"exp_avg/{name}" in state, "heads train by AdamW"
        assert not torch.equal(state[f"param/{name}"], dict(model.trainable())[name].detach().flatten())


def test_a_head_follows_its_features_into_bfloat16() -> None:
    objective = Alignment(WIDTH, 3)
    tokens = torch.randn(2, 5, WIDTH)
    assert objective.head("projector", tokens).dtype == torch.float32
    assert objective.head("projector", tokens.bfloat16()).dtype == torch.bfloat16
    objective.heads["projector"].bfloat16()  # as FSDP2 gathers it
    assert objective.head("projector", tokens).dtype == torch.bfloat16


class Critic(Objective):
    """A critic tells predictions from targets, every second step and at its own rate; the denoiser deceives it."""

    def __init__(self) -> None:
        self.weights = {"deceit": 0.1}
        self.networks = {"critic": Network(nn.Linear(WIDTH, 1), lr=0.05, every=2)}

    def _score(self, latents: Tensor) -> Tensor:
        each: Tensor = self.networks["critic"].module(latents.mean((-2, -1)))[:, 0]
        return each

    def losses(self, out: Prediction, batch: Batch) -> dict[str, Tensor]:
        return {"deceit": -self._score(out.velocity)}

    def network_losses(self, model: Observes, batch: Batch) -> dict[str, Tensor]:
        drawn = model.infer(batch).velocity
        return {"critic": self._score(drawn) - self._score(batch["target"]) + self._score(drawn) ** 2}


def test_a_second_network_has_its_own_optimizer_rate_and_interval() -> None:
    def build() -> tuple[Model, TorchEngine]:
        return make(FlowMatching(), Critic())

    model, engine = build()
    critic = model.objective.networks["critic"].module.weight
    seen = [critic.clone()]
    for _ in train(engine, range(4)):
        seen.append(critic.clone())
    changes = [(after - before).abs().max().item() for before, after in pairwise(seen)]
    assert [change > 0 for change in changes] == [False, True, False, True]
    assert changes[1] == pytest.approx(0.05, rel=1e-3), "AdamW's first update is the rate"
    assert "network/critic.weight" in snapshot(engine)
    assert "network.exp_avg/critic.bias" in snapshot(engine)
    assert not any("critic" in name for name in engine.weights)
    assert critic.grad is None
    require_exact_resume(build)


class Distillation(Objective):
    """The distance from the average's prediction."""

    teacher = "average"

    def __init__(self) -> None:
        self.weights = {"distance": 1.0}

    def draw(self, model: Observes, batch: Batch) -> Batch:
        return batch.with_values({"taught": model.teach(batch).velocity})

    def losses(self, out: Prediction, batch: Batch) -> dict[str, Tensor]:
        return {"distance": flow_loss(out.velocity, batch["taught"])}


def test_a_teacher_is_the_average_of_the_run() -> None:
    model, engine = make(FlowMatching(), Distillation())
    averages = Averages(of_denoiser(engine.weights), EmaConfig(enable=True, update_every=1, decay=0.9))
    teach_by_average(model, engine, averages)
    start = model.infer(batch()).velocity
    assert torch.equal(model.teach(batch()).velocity, start)
    for step, _ in enumerate(train(engine, range(3)), start=1):
        averages.update(engine.weights, step)
    before = {name: weight.clone() for name, weight in engine.weights.items()}
    taught = model.teach(batch()).velocity
    assert all(torch.equal(before[name], weight) for name, weight in engine.weights.items())
    live = model.infer(batch()).velocity
    with averages.in_place_of("ema", engine.weights):
        assert torch.equal(model.infer(batch()).velocity, taught)
    assert not torch.equal(taught, live)
    assert not torch.equal(taught, start)
    with pytest.raises(UserError, match=r"there is none; write ema\.enable = true"):
        teach_by_average(model, engine, Averages({}, EmaConfig()))


class SeveralPasses(Distillation):
    """Takes several passes of the average, with one of the model between them."""

    def draw(self, model: Observes, batch: Batch) -> Batch:
        taught = [model.teach(batch).velocity for _ in range(3)]
        live = model.infer(batch).velocity
        again = model.teach(batch).velocity
        assert all(torch.equal(each, again) for each in taught)
        return batch.with_values({"taught": again, "live": live})


def test_the_average_stays_in_place_between_the_passes_of_a_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    model, engine = make(FlowMatching(), SeveralPasses())
    averages = Averages(of_denoiser(engine.weights), EmaConfig(enable=True, update_every=1, decay=0.9))
    with torch.no_grad():
        for tensor in averages.tracks["ema"].shadow.values():
            tensor.mul_(0.5)
    teach_by_average(model, engine, averages)
    swaps = []
    in_place_of = Averages.in_place_of

    def counted(self: Averages, *given: Any) -> Any:
        swaps.append(given[0])
        return in_place_of(self, *given)

    monkeypatch.setattr(Averages, "in_place_of", counted)
    before = {name: weight.clone() for name, weight in engine.weights.items()}
    live = model.infer(batch()).velocity
    drawn = model.draw(batch())
    assert len(swaps) == 2, "one for three passes, and one after the model's own"
    assert torch.equal(drawn["live"], live)
    assert not torch.equal(drawn["taught"], live)
    assert all(torch.equal(before[name], weight) for name, weight in engine.weights.items())

    def broken(self: SeveralPasses, model: Observes, batch: Batch) -> Batch:
        model.teach(batch)
        raise RuntimeError("broken")

    monkeypatch.setattr(SeveralPasses, "draw", broken)
    with pytest.raises(RuntimeError, match="broken"):
        model.draw(batch())
    assert all(torch.equal(before[name], weight) for name, weight in engine.weights.items())


class Rewarded(Objective):
    """Trains on what the model itself draws before the step, weighted by a reward."""

    reads = ("words",)

    def __init__(self) -> None:
        self.weights = {"rewarded": 1.0}

    def draw(self, model: Observes, batch: Batch) -> Batch:
        noise = batch["noisy"].new_empty(batch["noisy"].shape)
        for row, generator in zip(noise, streams(7, f"rollout {model.step}", words(batch)), strict=True):
            fill_normals(generator, row.numpy())
        ones = torch.ones_like(batch["t"])
        clean = noise - model.infer(batch.with_values({"noisy": noise, "t": ones})).velocity
        values = {"noisy": interpolate(clean, noise, batch["t"]), "target": velocity(clean, noise)}
        return batch.with_values({**values, "reward": clean.mean((1, 2, 3)).sigmoid()})

    def losses(self, out: Prediction, batch: Batch) -> dict[str, Tensor]:
        return {"rewarded": batch["reward"] * flow_loss(out.velocity, batch["target"])}


def words(batch: Batch) -> Any:
    return batch["words"].view(torch.int64).numpy()


def test_batches_that_the_run_draws_are_exact_on_resume() -> None:
    require_exact_resume(lambda: make(Rewarded()))
    model, _ = make(Rewarded())
    model.begin(3)
    drawn = model.draw(batch())
    parts = [model.draw(part) for part in batch().split(2)]
    assert torch.equal(drawn["noisy"], torch.cat([part["noisy"] for part in parts])), "a draw belongs to its sample"
    model.begin(4)
    assert not torch.equal(model.draw(batch())["noisy"], drawn["noisy"])
    assert not drawn["reward"].requires_grad


class TokenTimes(Objective):
    """Every token has its own time: those of the upper half are the sample's, the others are clean."""

    def __init__(self) -> None:
        self.weights = {"flow": 1.0}

    def draw(self, model: Observes, batch: Batch) -> Batch:
        t = batch["t"][:, None]
        clean = batch["noisy"] - t[..., None, None] * batch["target"]
        is_noisy = torch.arange(SIDE**2) < SIDE**2 // 2
        times = torch.where(is_noisy, t, 0.0)
        return batch.with_values({"t": times, "noisy": interpolate(clean, clean + batch["target"], times)})

    def losses(self, out: Prediction, batch: Batch) -> dict[str, Tensor]:
        return {"flow": flow_loss(out.velocity, batch["target"], (batch["t"] > 0).float().view(-1, SIDE, SIDE))}


def test_a_time_per_token() -> None:
    model, engine = make(TokenTimes())
    drawn = model.draw(batch())
    assert drawn["t"].shape == (4, SIDE**2)
    lower = batch()["noisy"] - batch()["t"].view(-1, 1, 1, 1) * batch()["target"]
    torch.testing.assert_close(drawn["noisy"][:, :, : SIDE // 2], batch()["noisy"][:, :, : SIDE // 2])
    assert torch.equal(drawn["noisy"][:, :, SIDE // 2 :], lower[:, :, SIDE // 2 :])
    result = engine.train_step([batch()], 1e-3).read()
    assert sum(result.band_counts) == 4, "a sample is in the band of its mean time"
    video = interpolate(torch.zeros(1, 2, 3, 4, 6), torch.ones(1, 2, 3, 4, 6), torch.arange(18.0)[None])
    assert video[0, 1, 1].tolist() == [[6.0, 6, 7, 7, 8, 8]] * 2 + [[9.0, 9, 10, 10, 11, 11]] * 2


class Twice(Objective):
    """Reads the batch's own prediction and one of another batch."""

    def __init__(self) -> None:
        self.weights = {"twice": 1.0}

    def losses(self, out: Prediction, batch: Batch) -> dict[str, Tensor]:
        raise NotImplementedError

    def __call__(self, model: Predicts, batch: Batch) -> dict[str, Tensor]:
        other = batch.with_values({"noisy": batch["other"]})
        return {"twice": flow_loss(model.predict(batch).velocity, model.predict(other).velocity)}


def test_objectives_share_the_pass_of_their_batch() -> None:
    model, _ = make(FlowMatching(), Twice(), Alignment(WIDTH, 3))
    losses = model(batch())
    assert list(losses) == ["loss", "flow", "twice", "alignment", "each"]
    assert model.passes == 2
    assert torch.equal(model.evaluate(batch()), losses["each"])


def test_what_pipelines_cannot_run() -> None:
    assert Objectives([FlowMatching()]).why_whole() is None
    reasons = {"heads": Alignment(WIDTH, 3), "other networks": Critic(), "a teacher": Distillation()}
    reasons |= {"its own batches": Rewarded(), "several passes": Twice()}
    for reason, part in reasons.items():
        assert Objectives([FlowMatching(), part]).why_whole() == reason


def test_parts_with_equal_names_and_two_teachers_are_refused() -> None:
    with pytest.raises(UserError, match="two objectives have losses of the name 'flow'; rename one"):
        Objectives([FlowMatching(), FlowMatching()])
    other = Distillation()
    other.weights = {"other": 1.0}
    other.teacher = "start"
    with pytest.raises(UserError, match="one teacher, not average and start; keep one"):
        Objectives([Distillation(), other])
