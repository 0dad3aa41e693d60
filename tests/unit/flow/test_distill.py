"""What a distilled model is trained towards: the teacher's guided velocity, and where its path arrives."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from sd3_light.core.batch import Batch
from sd3_light.core.objective import Prediction
from sd3_light.export.lora_merge import truncated
from sd3_light.flow.distill import GuidanceDistillation, StepDistillation
from sd3_light.flow.objective import interpolate, velocity
from sd3_light.model.training_adapter import TrainingAdapter
from sd3_light.randomness import occurrence_words

SHAPE = (4, 2, 4, 4)


@dataclass
class Linear:
    """A teacher whose velocity is ``rate`` times the latents, plus the text; it counts its passes."""

    rate: float
    step: int = 0
    passes: int = 0

    def infer(self, batch: Batch, taps: Sequence[int] = ()) -> Prediction:
        raise NotImplementedError

    def predict(self, batch: Batch, taps: Sequence[int] = ()) -> Prediction:
        return Prediction(torch.zeros_like(batch["noisy"]))

    def teach(self, batch: Batch, taps: Sequence[int] = ()) -> Prediction:
        assert "guidance" not in batch.values, "the teacher runs with its own guidance number"
        self.passes += 1
        return Prediction(self.rate * batch["noisy"] + batch["text"].view(-1, 1, 1, 1))

    def without_text(self, batch: Batch) -> Batch:
        return batch.with_values({"text": torch.zeros_like(batch["text"])})


def batch(epoch: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(epoch)
    clean, noise = (torch.randn(SHAPE, generator=generator) for _ in range(2))
    t = torch.tensor([0.2, 0.4, 0.6, 0.8])
    words = torch.from_numpy(occurrence_words(epoch, 0, np.arange(4))).view(torch.int32)
    values = {"noisy": interpolate(clean, noise, t), "t": t, "target": velocity(clean, noise), "words": words}
    return Batch(4, {**values, "text": torch.tensor([1.0, 2, 3, 4]), "clean": clean, "noise": noise})


def test_the_guided_velocity_is_learnt_at_the_batch_s_own_times() -> None:
    given = batch()
    drawn = GuidanceDistillation(3.0).draw(Linear(1.0), given)
    expected = given["noisy"] + 3 * given["text"].view(-1, 1, 1, 1)
    torch.testing.assert_close(drawn["taught"], expected)
    assert torch.equal(drawn["t"], given["t"])
    assert drawn["guidance"].tolist() == [3.0] * 4
    loss = GuidanceDistillation(3.0).evaluate(Linear(1.0), given)
    torch.testing.assert_close(loss, expected.square().flatten(1).mean(1))


def test_without_guidance_the_student_has_the_number_of_its_teacher() -> None:
    for objective in (GuidanceDistillation(1.0), StepDistillation(lambda _: torch.tensor([1.0, 0]), 2, guidance=1.0)):
        teacher = Linear(1.0)
        drawn = objective.draw(teacher, batch())
        assert "guidance" not in drawn.values
        assert teacher.passes == (2 if isinstance(objective, StepDistillation) else 1)


@pytest.mark.parametrize(
    "objective", [GuidanceDistillation(3.0), StepDistillation(lambda _: torch.tensor([1.0, 0]), 2)]
)
def test_what_a_mask_excludes_is_not_taught(objective: GuidanceDistillation) -> None:
    mask = torch.ones(4, 4, 4)
    mask[:, 1:] = 0
    drawn = objective.draw(Linear(1.0), batch().with_values({"mask": mask}))
    hidden = drawn["taught"].clone()
    hidden[:, :, 1:] += 100
    out = Prediction(torch.zeros(SHAPE))
    losses = [
        objective.losses(out, drawn.with_values({"taught": taught}))["distill"] for taught in (drawn["taught"], hidden)
    ]
    assert torch.equal(*losses)
    torch.testing.assert_close(losses[0], drawn["taught"][:, :, 0].square().flatten(1).mean(1))


def test_a_scale_of_one_takes_no_pass_without_text() -> None:
    teacher = Linear(1.0)
    GuidanceDistillation(1.0).draw(teacher, batch())
    assert teacher.passes == 1
    GuidanceDistillation(1.5).draw(teacher, batch())
    assert teacher.passes == 3
    zero = GuidanceDistillation(0.5, is_guided=lambda scale: scale > 0)
    zero.draw(teacher, batch())
    assert teacher.passes == 5


def test_each_sample_draws_its_own_scale() -> None:
    objective = GuidanceDistillation(2.0, 6.0, seed=1)
    given = batch()
    drawn = objective.draw(Linear(0.0), given)
    scales = drawn["guidance"]
    assert len(set(scales.tolist())) == 4
    assert 2 <= scales.min() <= scales.max() < 6
    torch.testing.assert_close(drawn["taught"][:, 0, 0, 0], scales * given["text"])
    halves = [objective.draw(Linear(0.0), half)["guidance"] for half in given.split(2)]
    assert torch.equal(torch.cat(halves), scales), "a draw belongs to its sample"
    assert not torch.equal(objective.draw(Linear(0.0), batch(1))["guidance"], scales), "and to its epoch"


def times(batch: Batch) -> Tensor:
    return torch.tensor([1.0, 0.5, 0.0])


def test_a_call_arrives_where_the_teacher_does() -> None:
    given = batch()
    drawn = StepDistillation(times, 2000, guidance=1.0).draw(Linear(1.0), given.with_values({"text": torch.zeros(4)}))
    assert set(drawn["t"].tolist()) <= {1.0, 0.5}
    start = interpolate(given["clean"], given["noise"], drawn["t"])
    torch.testing.assert_close(drawn["noisy"], start)
    # dx/dt = x: half of the way back to 0 takes exp(-1/2)
    torch.testing.assert_close(start - 0.5 * drawn["taught"], start * np.exp(-0.5), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(("teacher_steps", "passes"), [(2, 2), (8, 8), (7, 8)])
def test_the_teacher_takes_its_share_of_the_steps(teacher_steps: int, passes: int) -> None:
    teacher = Linear(1.0)
    StepDistillation(times, teacher_steps, guidance=2.0).draw(teacher, batch())
    assert teacher.passes == passes


def test_all_calls_are_trained_equally_often() -> None:
    objective = StepDistillation(times, 2, guidance=1.0)
    drawn = [objective.draw(Linear(1.0), batch(epoch))["t"] for epoch in range(100)]
    share = (torch.cat(drawn) == 1.0).float().mean()
    assert share == pytest.approx(0.5, abs=0.1)


# --- a toy with curved paths: does training by the loss do what it promises? --------------------


class Toy(nn.Module):
    """A denoiser of points [B, 2, 1, 1] with a text of one number; it stands for model, teacher and student alike."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 2))

    def forward(self, noisy: Tensor, t: Tensor, text: Tensor) -> Tensor:
        columns = [noisy.flatten(1), t[:, None], (4 * t[:, None]).sin(), text[:, None]]
        velocity: Tensor = self.net(torch.cat(columns, dim=1))
        return velocity.view_as(noisy)


class Student:
    """Trains a toy; its teacher has a frozen one."""

    step = 0

    def __init__(self, student: Toy, teacher: Toy) -> None:
        self.student = student
        self.teacher = teacher

    def predict(self, batch: Batch, taps: Sequence[int] = ()) -> Prediction:
        return Prediction(self.student(batch["noisy"], batch["t"], batch["text"]))

    def infer(self, batch: Batch, taps: Sequence[int] = ()) -> Prediction:
        raise NotImplementedError

    @torch.no_grad()
    def teach(self, batch: Batch, taps: Sequence[int] = ()) -> Prediction:
        return Prediction(self.teacher(batch["noisy"], batch["t"], batch["text"]))

    def without_text(self, batch: Batch) -> Batch:
        return batch.with_values({"text": torch.zeros_like(batch["text"])})


def toy_batch(epoch: int, size: int = 256) -> Batch:
    """Points of two clusters: text 1 is at (2, 0), text -1 at (-2, 0), and without text (0) both."""
    generator = torch.Generator().manual_seed(epoch)
    text = torch.randint(0, 2, (size,), generator=generator) * 2.0 - 1
    shape = (size, 2, 1, 1)
    clean = 0.3 * torch.randn(shape, generator=generator)
    clean[:, 0, 0, 0] += 2 * text
    noise = torch.randn(shape, generator=generator)
    t = torch.rand(size, generator=generator)
    words = torch.from_numpy(occurrence_words(epoch, 0, np.arange(size))).view(torch.int32)
    values = {"noisy": interpolate(clean, noise, t.view(-1, 1, 1, 1)), "t": t, "target": velocity(clean, noise)}
    dropped = torch.where(torch.rand(size, generator=generator) < 0.2, 0.0, text)
    return Batch(size, {**values, "words": words, "text": dropped, "noise": noise})


def fit(model: Toy, loss: Callable[[Batch], Tensor], steps: int, batches: Callable[[int], Batch] = toy_batch) -> Toy:
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * (1 - step / steps)
        optimizer.zero_grad()
        loss(batches(step)).mean().backward()
        optimizer.step()
    return model


@torch.no_grad()
def drawn(model: Toy, given: Batch, calls: int, guidance: float) -> Tensor:
    latents = given["noise"]
    for number in range(calls):
        t = torch.full((given.size,), 1 - number / calls)
        positive = model(latents, t, given["text"])
        negative = model(latents, t, torch.zeros_like(given["text"]))
        latents = latents - (negative + guidance * (positive - negative)) / calls
    return latents


def distance(a: Tensor, b: Tensor) -> float:
    return (a - b).flatten(1).norm(dim=1).mean().item()


def learnt(objective: GuidanceDistillation, teacher: Toy, steps: int) -> Toy:
    student = copy.deepcopy(teacher)
    model = Student(student, teacher)
    return fit(student, lambda given: objective.evaluate(model, given), steps)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_students_arrive_where_their_teacher_does() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    teacher = Toy()

    def flow(given: Batch) -> Tensor:
        predicted = teacher(given["noisy"], given["t"], given["text"])
        return (predicted - given["target"]).square().flatten(1).mean(1)

    fit(teacher, flow, 1500)
    given = toy_batch(10_000)
    given = given.with_values({"text": given["text"].where(given["text"] != 0, torch.ones(given.size))})
    goal = drawn(teacher, given, 32, 2.0)
    without = distance(drawn(teacher, given, 32, 1.0), goal)
    guided = learnt(GuidanceDistillation(2.0), teacher, 800)
    assert distance(drawn(guided, given, 32, 1.0), goal) < without / 3
    for calls in (1, 2):

        def calls_at(batch: Batch, calls: int = calls) -> Tensor:
            return torch.linspace(1, 0, calls + 1)

        student = learnt(StepDistillation(calls_at, 32, guidance=2.0), teacher, 800)
        best = min(distance(drawn(teacher, given, calls, scale), goal) for scale in (1.0, 2.0))
        assert distance(drawn(student, given, calls, 1.0), goal) < best / 3


# --- fine-tuning a model of one call, with and without what undoes its distillation --------------


def moved_word(epoch: int) -> Batch:
    """Points of text 1, which are now around (2, 1), with the same spread."""
    generator = torch.Generator().manual_seed(epoch)
    given = toy_batch(epoch)
    clean = 0.3 * torch.randn(given["noisy"].shape, generator=generator) + torch.tensor([2.0, 1.0]).view(1, 2, 1, 1)
    noisy = interpolate(clean, given["noise"], given["t"].view(-1, 1, 1, 1))
    values = {"noisy": noisy, "target": velocity(clean, given["noise"]), "text": torch.ones(given.size)}
    return given.with_values(values)


def spread(points: Tensor) -> float:
    return points.flatten(1).std(0).mean().item()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_training_adapter_keeps_one_call_in_fine_tuning() -> None:
    """A student of one call is fine-tuned by flow matching. Without the adapter the points of the tuned text shrink to
    their mean, which is what one call of flow matching gives; with it they keep most of their spread."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    teacher = Toy()

    def flow_of(model: Toy) -> Callable[[Batch], Tensor]:
        def loss(given: Batch) -> Tensor:
            predicted = model(given["noisy"], given["t"], given["text"])
            return (predicted - given["target"]).square().flatten(1).mean(1)

        return loss

    fit(teacher, flow_of(teacher), 1500)
    student = learnt(StepDistillation(lambda batch: torch.tensor([1.0, 0.0]), 32, guidance=1.0), teacher, 800)
    undo = {}
    for name, layer in student.named_modules():
        if isinstance(layer, nn.Linear):
            difference = teacher.get_submodule(name).weight - layer.weight
            undo[name], _ = truncated(difference.detach(), min(difference.shape))
    given = toy_batch(10_000)
    new = given.with_values({"text": torch.ones(given.size)})
    old = given.with_values({"text": -torch.ones(given.size)})
    assert spread(drawn(student, old, 1, 1.0)) == pytest.approx(0.3, abs=0.06)
    spreads: dict[bool, tuple[float, float]] = {}
    centres: dict[bool, float] = {}
    for is_undone in (True, False):
        tuned = copy.deepcopy(student)
        for name, parameter in tuned.named_parameters():
            parameter.requires_grad_(name.endswith("weight"))
        adapter = TrainingAdapter(tuned, undo if is_undone else {}, torch.float32, torch.device("cpu"))
        fit(tuned, flow_of(tuned), 300, moved_word)
        with adapter.off():
            points = drawn(tuned, new, 1, 1.0)
            spreads[is_undone] = spread(points), spread(drawn(tuned, old, 1, 1.0))
            centres[is_undone] = distance(points.mean(0, keepdim=True), torch.tensor([2.0, 1.0]).view(1, 2, 1, 1))
    assert max(centres.values()) < 0.3
    assert spreads[True][0] > 0.2 > 0.15 > spreads[False][0]
    assert spreads[True][1] > spreads[False][1], "of the other text"
