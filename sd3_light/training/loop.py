"""The one loop: take a batch, step, average, log, and do what is due."""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from sd3_light.checkpoint.progress import Progress
from sd3_light.config.faults import UserError
from sd3_light.engines.processes import SharedFlags
from sd3_light.engines.protocol import Engine, MicroBatch, StepNumbers, StepStream
from sd3_light.optim.ema import Averages
from sd3_light.runlog import Bar, info
from sd3_light.runlog import progress as progress_bar
from sd3_light.training.meter import Meter
from sd3_light.training.requests import NUM_FLAGS, RunRequests

STARVATION_WINDOW = 50
"""Steps that are looked at to say whether data come too late."""


@dataclass(frozen=True)
class Hook:
    """Something to do now and then: ``act(progress)`` whenever ``due(before, after)`` a step."""

    name: str
    due: Callable[[Progress, Progress], bool]
    act: Callable[[Progress], None]


def _nobody() -> RunRequests:
    return RunRequests(None, None, SharedFlags(None, NUM_FLAGS))


@dataclass
class Run:
    """All that a training run is made of. ``steps(first)`` yields the micro-batches of step after step of the data,
    ``samples_in(position)`` their number over all processes, and ``flops_in`` the arithmetic of a step's.
    ``begin_step`` is told how many steps are done before each. ``faster_data`` is the remedy to name where the device
    often waits for data; where it is empty nobody looks."""

    engine: Engine
    steps: Callable[[int], StepStream]
    samples_in: Callable[[int], int]
    learning_rate: Callable[[int], float]
    total_steps: int
    progress: Progress = field(default_factory=Progress)
    averages: Averages | None = None
    hooks: Sequence[Hook] = ()
    log: Callable[..., None] = lambda *args, **fields: None
    meter: Meter = field(default_factory=Meter)
    requests: RunRequests = field(default_factory=_nobody)
    flops_in: Callable[[Sequence[MicroBatch]], int] = lambda batches: 0
    begin_step: Callable[[int], None] = lambda step: None
    steps_per_epoch: int = 1
    max_nonfinite_steps: int = 10
    logging_steps: int = 1
    steps_per_print: int = 1
    faster_data: str = ""
    _skipped_in_a_row: int = 0
    _late: deque[bool] = field(default_factory=lambda: deque(maxlen=STARVATION_WINDOW))


def train(run: Run) -> Progress:
    """Train from ``run.progress`` to ``run.total_steps``, or until somebody asks to stop; returns where it ended."""
    coming: Sequence[MicroBatch] | None = None
    with (
        closing(run.steps(run.progress.position)) as batches,
        progress_bar("train", run.total_steps, "steps", done=run.progress.step) as bar,
    ):
        while run.progress.step < run.total_steps and not run.requests.quit:
            before = run.progress
            micro_batches, coming = coming or _next_step(run, batches), None
            lr = run.learning_rate(before.step)

            run.begin_step(before.step)
            result = run.engine.train_step(micro_batches, lr)
            if run.averages is not None:
                run.averages.update(run.engine.weights, before.step + 1)

            samples = run.samples_in(before.position)
            run.progress = before.after(samples)
            run.meter.add(run.progress.step, result, samples, run.flops_in(micro_batches))
            run.requests.ask()
            due = [hook for hook in run.hooks if hook.due(before, run.progress)]
            is_last = run.progress.step == run.total_steps
            record = run.progress.step % run.logging_steps == 0 or is_last
            try:
                if record and not due and not is_last:  # a record waits: the next batch travels meanwhile
                    coming = _next_step(run, batches)
            finally:
                _settle(run, wait=record or bool(due))
                if record:
                    _log_step(run, lr, bar)
            with run.meter.excluded():
                for hook in due:
                    hook.act(run.progress)
    return run.progress


def _next_step(run: Run, batches: StepStream) -> Sequence[MicroBatch]:
    """What the next step learns from."""
    with run.meter.waiting():
        found = next(batches)
    _warn_if_data_starved(run)
    return found


def _warn_if_data_starved(run: Run) -> None:
    """Say once where data come too late more often than not; when workers start they always do."""
    if run.faster_data:
        run._late.append(run.meter.is_idle)
        if len(run._late) == STARVATION_WINDOW and sum(run._late) > STARVATION_WINDOW / 2:
            times = f"in {sum(run._late)} of the last {STARVATION_WINDOW} steps"
            info(f"the GPU was done before its next data came, {times}: {run.faster_data}")
            run.faster_data = ""


def _settle(run: Run, wait: bool) -> None:
    """Count the steps that were not taken; too many in a row end the run."""
    for step, numbers in run.meter.settle(wait):
        if numbers.taken:
            run._skipped_in_a_row = 0
            continue
        run._skipped_in_a_row += 1
        run.progress = run.progress.with_skipped(1)
        _log_skip(run, step, numbers)
        if run._skipped_in_a_row > run.max_nonfinite_steps:
            raise UserError(
                f"loss or gradient was not finite in {run._skipped_in_a_row} steps in a row (at step {step}); lower "
                "the learning rate or look at the data, then resume"
            )


def _log_skip(run: Run, step: int, numbers: StepNumbers) -> None:
    run.log("skip", step=step, loss=numbers.losses["loss"], grad_norm=numbers.grad_norm)


def _log_step(run: Run, lr: float, bar: Bar) -> None:
    """One record of all that was measured since the last. Every process comes here, as some of it is asked of all."""
    progress = run.progress
    fields: dict[str, Any] = {**run.meter.record(), "param_norm": run.engine.weight_norm()}
    if run.averages is not None:
        fields["ema_decay"] = run.averages.decays(progress.step)
    epoch = progress.position / run.steps_per_epoch
    run.log("step", **progress.counts(), skipped=progress.skipped, epoch=epoch, lr=lr, **fields)
    if progress.step % run.steps_per_print < run.logging_steps or progress.step == run.total_steps:
        speed = fields["samples_per_second"]
        bar.advance(progress.step - bar.done, loss=fields["loss"], samples_per_second=speed, lr=lr)


def every(
    steps: int | None = None,
    epochs: int | None = None,
    examples: int | None = None,
    steps_per_epoch: int = 1,
) -> Callable[[Progress, Progress], bool]:
    """Due when any of the given intervals is passed; an interval that is None never is."""

    def due(before: Progress, after: Progress) -> bool:
        return any(
            interval is not None and past // interval < now // interval
            for interval, past, now in (
                (steps, before.step, after.step),
                (epochs, before.position // steps_per_epoch, after.position // steps_per_epoch),
                (examples, before.samples, after.samples),
            )
        )

    return due
