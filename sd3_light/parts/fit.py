"""The training loop of one part: steps until a number, a time or a plateau, with averaged weights, and resumable.

The learning rate warms up, stays constant, and decays over the last fifth of the steps. The end is a step number: given
as such, or decided once 80% of the time is spent or the score has stopped rising. Every draw is a function of the step,
so a run that was interrupted ends with the same bits as one that was not.
"""

import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from sd3_light.config import EmaConfig
from sd3_light.config.faults import Stopped, UserError
from sd3_light.files import atomic_file, sweep_leftovers
from sd3_light.formats import duration
from sd3_light.inputs import require_regular
from sd3_light.optim.ema import MAIN_TRACK, Averages
from sd3_light.optim.schedules import learning_rate
from sd3_light.parts.discriminator import Discriminator
from sd3_light.runlog import Bar, info, progress
from sd3_light.runlog.bars import Field
from sd3_light.tensor_file import open_tensors

STATE_FILE = "state.safetensors"
COOLDOWN = 0.2
"""Share of the steps with a decaying learning rate."""
_SAVE_SECONDS = 60.0
_LOG_EVERY = 20
_USABLE_STEPS = 2000
_FAR = 1 << 60
_ADVERSARY_BETAS = (0.5, 0.9)  # as in latent diffusion: the other side changes from step to step


class Interrupted(Exception):
    """A step or an evaluation was abandoned; the weights are those of the step before."""


def interrupt_between_layers(model: nn.Module, reason: Callable[[], str | None]) -> None:
    """Abandon a forward or backward pass of the model once ``reason`` returns a text: on a CPU one may take minutes."""

    def check(*_: Any) -> None:
        if text := reason():
            raise Interrupted(text)

    for module in model.modules():
        module.register_forward_pre_hook(check)
    for weight in model.parameters():
        if weight.requires_grad:
            weight.register_hook(check)


def saved_identity(folder: Path) -> dict[str, Any]:
    """Return what determines the training that was started in ``folder``, {} if there is none."""
    path = folder / STATE_FILE
    if not path.is_file():
        return {}
    identity: dict[str, Any] = json.loads(open_tensors(path)[1]["identity"])
    return identity


class Task(Protocol):
    """What is trained. ``score`` names the result of `evaluate` that a plateau is judged by; higher is better."""

    device: torch.device
    score: str

    @property
    def model(self) -> nn.Module:
        """Everything with weights."""
        ...

    def loss(self, step: int) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the loss of a step, and values to show. Every random draw depends on the step alone."""
        ...

    def evaluate(self) -> dict[str, float]:
        """Measure the model, whose weights are the averaged ones during the call."""
        ...


@dataclass(frozen=True)
class FitOptions:
    """How to train. ``steps`` and ``minutes`` limit the whole training, over all runs; ``plateau`` ends it when that
    many evaluations in a row bring less than ``min_gain`` (0: never)."""

    steps: int | None = None
    minutes: float | None = None
    lr: float = 1e-3
    weight_decay: float = 0.0
    warmup: int = 200
    ema: float = 0.999
    evaluate_every: int = 500
    plateau: int = 6
    min_gain: float = 0.05


@dataclass
class Progress:
    """The state besides tensors: steps done, seconds of training, the last step once it is decided, evaluations."""

    step: int = 0
    seconds: float = 0.0
    end: int | None = None
    history: list[dict[str, float]] = field(default_factory=list)

    def is_done(self) -> bool:
        """Whether the last step has been taken."""
        return self.end is not None and self.step >= self.end


class Fit:
    """One training in ``folder``. ``identity`` describes everything that determines it, as plain values."""

    def __init__(self, title: str, task: Task, options: FitOptions, folder: Path, identity: Mapping[str, Any]) -> None:
        self.title = title
        self.task = task
        self.options = options
        self.folder = folder
        self.identity = json.loads(json.dumps({**identity, "lr": options.lr}))
        self.weights = {name: value for name, value in task.model.named_parameters() if value.requires_grad}
        cuda = task.device.type == "cuda"
        self.optimizer = torch.optim.AdamW(
            self._groups(), lr=options.lr, betas=(0.9, 0.99), weight_decay=options.weight_decay, fused=cuda
        )
        self.averages = Averages(self.weights, EmaConfig(enable=True, decay=options.ema, update_every=1))
        self.progress = Progress(end=options.steps)
        self._load()

    def _groups(self) -> list[dict[str, Any]]:
        """Return the weights that are updated and clipped together: those of an adversary apart from all others."""
        adversaries = [module for module in self.task.model.modules() if isinstance(module, Discriminator)]
        apart = {weight for module in adversaries for weight in module.parameters() if weight.requires_grad}
        groups: list[dict[str, Any]] = [{"params": [each for each in self.weights.values() if each not in apart]}]
        if apart:
            own = [each for each in self.weights.values() if each in apart]
            groups.append({"params": own, "betas": _ADVERSARY_BETAS, "weight_decay": 0.0})
        return groups

    def run(self, should_stop: Callable[[], str | None]) -> Progress:
        """Train to the end. ``should_stop`` returns why to stop early, or None; the state is then saved."""
        with progress(self.title, self.progress.end, "steps", done=self.progress.step) as bar:
            try:
                self._run(should_stop, bar)
            except Interrupted as error:
                if not self.progress.step:
                    raise Stopped(f"{error}; {self.title} has not finished a step") from error
                self._save()
                raise Stopped(f"{error}; {self.title} is saved at step {self.progress.step:,}") from error
        return self.progress

    def _run(self, should_stop: Callable[[], str | None], bar: Bar) -> None:
        state = self.progress
        first = state.step
        saved = time.monotonic()
        started = saved - state.seconds
        self._evaluate_if_due(bar)  # an earlier run may have been interrupted there
        while not state.is_done():
            begin = time.monotonic()
            values = self._step()
            state.seconds = time.monotonic() - started
            self._show(bar, values)
            if state.step == first + 1:
                self._announce(time.monotonic() - begin)
            self._evaluate_if_due(bar)
            reason = None if state.is_done() else should_stop()
            if reason or state.is_done() or time.monotonic() - saved > _SAVE_SECONDS:
                self._save()
                saved = time.monotonic()
            if reason:
                raise Stopped(f"{reason}; {self.title} is saved at step {state.step:,}")

    def use_averages(self) -> None:
        """Replace the weights by their averages, for good."""
        with torch.no_grad():
            for name, value in self.averages.tracks[MAIN_TRACK].shadow.items():
                self.weights[name].copy_(value)

    def _step(self) -> Mapping[str, Tensor]:
        state = self.progress
        loss, values = self.task.loss(state.step)
        self.optimizer.zero_grad()
        loss.backward()
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate(state.step)
            nn.utils.clip_grad_norm_(group["params"], 1.0)
        self.optimizer.step()
        state.step += 1
        self.averages.update(self.weights, state.step)
        return {"loss": loss.detach(), **values}

    def rate(self, step: int) -> float:
        """Return the learning rate of the step after ``step``."""
        end = self.progress.end
        cooldown = 0 if end is None else max(1, round(COOLDOWN * end))
        warmup = self.options.warmup if end is None else min(self.options.warmup, max(1, end // 10))
        settings = SimpleNamespace(
            lr_scheduler="constant", warmup_steps=warmup, cooldown_steps=cooldown, cooldown_shape="linear"
        )
        return learning_rate(step, end or _FAR, self.options.lr, settings)

    def _show(self, bar: Bar, values: Mapping[str, Tensor]) -> None:
        fields: dict[str, Field] = {}
        if self.progress.step % _LOG_EVERY == 0 or self.progress.is_done():  # reading a value waits for the device
            fields = {name: value.item() for name, value in values.items()}
            if not math.isfinite(float(fields["loss"])):
                raise UserError(
                    f"{self.title}: the loss is not finite at step {self.progress.step:,}; start again in a new folder "
                    "with a lower learning rate"
                )
        bar.advance(1, **fields)

    def _announce(self, seconds: float) -> None:
        """Print what can be expected on a CPU, by the time of one step."""
        if self.task.device.type != "cpu" or self.progress.is_done():
            return
        state = self.progress
        minutes = self.options.minutes
        steps = state.end
        expected = f"{steps:,} steps take about {duration(steps * seconds)}" if steps is not None else ""
        if steps is None and minutes is not None:
            steps = state.step + int(max(0.0, 60 * minutes - state.seconds) / seconds)
            expected = f"{minutes:g} minutes are about {steps:,} steps"
        if steps is not None:
            few = "" if steps >= _USABLE_STEPS else "; a usable model needs thousands, for which a GPU is faster"
            info(f"{self.title}: on this CPU a step takes about {duration(seconds)}: {expected}{few}")

    def _evaluate_if_due(self, bar: Bar) -> None:
        state = self.progress
        is_known = bool(state.history) and state.history[-1]["step"] == state.step
        if state.step and not is_known and (state.step % self.options.evaluate_every == 0 or state.is_done()):
            self._evaluate()
        self._decide_end(bar)

    def _evaluate(self) -> None:
        with self.averages.in_place_of(MAIN_TRACK, self.weights):
            results = self.task.evaluate()
        state = self.progress
        state.history.append({"step": state.step, "seconds": round(state.seconds, 1), **results})
        shown = " · ".join(f"{name} {value:.4g}" for name, value in results.items())
        info(f"{self.title}: step {state.step:,} · {state.seconds:.0f} s · {shown}")

    def _decide_end(self, bar: Bar) -> None:
        """Set the last step once most of the time is spent, or the score has stopped rising."""
        state = self.progress
        minutes = self.options.minutes
        share = 1 - COOLDOWN
        on_time = minutes is not None and state.seconds >= 60 * minutes * share
        if state.end is None and (on_time or self._is_plateau()):
            state.end = math.ceil(state.step / share)
            reason = "most of the time is spent" if on_time else f"{self.task.score} has stopped rising"
            info(f"{self.title}: {reason}; the learning rate decays until step {state.end:,}")
            bar.set_done(bar.done, state.end)

    def _is_plateau(self) -> bool:
        scores = [record[self.task.score] for record in self.progress.history]
        count = self.options.plateau
        if not count or len(scores) <= count or self.progress.history[-1]["step"] != self.progress.step:
            return False
        return max(scores[-count:]) < max(scores[:-count]) + self.options.min_gain

    def _save(self) -> None:
        tensors = {f"weights.{name}": value.detach() for name, value in self.weights.items()}
        for name, value in self.averages.tracks[MAIN_TRACK].shadow.items():
            tensors[f"averages.{name}"] = value
        for name, weight in self.weights.items():
            for key, value in self.optimizer.state[weight].items():
                tensors[f"optimizer.{key}.{name}"] = value
        tensors = {name: value.contiguous().to("cpu") for name, value in tensors.items()}
        metadata = {"progress": json.dumps(asdict(self.progress)), "identity": json.dumps(self.identity)}
        self.folder.mkdir(parents=True, exist_ok=True)
        with atomic_file(self.folder / STATE_FILE) as temporary:
            save_file(tensors, temporary, metadata)

    def _load(self) -> None:
        path = self.folder / STATE_FILE
        sweep_leftovers(path)
        if not path.is_file():
            return
        _, metadata = open_tensors(path)
        self._require_identity(json.loads(metadata["identity"]))
        known = Progress(**json.loads(metadata["progress"]))
        if not known.is_done() and self.options.steps is not None:
            known.end = max(self.options.steps, known.step)
        self.progress = known
        require_regular(path)
        tensors = load_file(path)
        for name, weight in self.weights.items():
            weight.data.copy_(tensors[f"weights.{name}"])
            self.averages.tracks[MAIN_TRACK].shadow[name].copy_(tensors[f"averages.{name}"])
            self.optimizer.state[weight] = {
                key: torch.empty_like(weight).copy_(tensors[f"optimizer.{key}.{name}"]).detach()
                for key in ("exp_avg", "exp_avg_sq")
            }
            count = tensors[f"optimizer.step.{name}"]  # fused kernels count on the device
            self.optimizer.state[weight]["step"] = (
                count.to(weight.device) if self.optimizer.defaults["fused"] else count
            )
        if not known.is_done():
            info(f"{self.title}: resumed from {path} (step {known.step:,})")

    def _require_identity(self, saved: Mapping[str, Any]) -> None:
        """Raise a UserError if the saved training has other options or data."""
        for key, value in self.identity.items():
            if saved.get(key) != value:
                raise UserError(
                    f"{self.folder} was started with {key} = {saved.get(key)!r}, now it is {value!r}; "
                    "continue with the same options and images, or choose another folder"
                )
