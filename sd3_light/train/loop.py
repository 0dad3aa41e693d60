"""The one loop: take a batch, step, average, log, and run the hooks that are due."""

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

from sd3_light.checkpoint.progress import Progress
from sd3_light.checkpoint.requests import RunRequests
from sd3_light.config import EmaConfig, UserError
from sd3_light.engines.protocol import Engine, HostCopy, MicroBatch, StepResult, StepStream
from sd3_light.optim.ema import Averages
from sd3_light.runlog import LINE_EVERY, Bar, info
from sd3_light.runlog import progress as progress_bar
from sd3_light.train.idle import IdleAdvice
from sd3_light.train.meter import Mark, Meter

Due = Callable[[Progress, Progress], bool]
"""(progress before a step, progress after it) -> whether something is due."""


@dataclass(frozen=True)
class Hook:
    """Something to do between steps: ``act(progress)`` whenever ``due(before, after)``."""

    name: str
    due: Due
    act: Callable[[Progress], None]


@dataclass(frozen=True)
class _PendingRecord:
    """A record of the log whose numbers have not arrived yet."""

    progress: Progress
    lr: float
    weight_norm: HostCopy
    until: Mark


@dataclass
class Run:
    """Everything that the loop needs.

    ``steps(first)`` yields the micro-batches of one step after another, from position ``first`` of the data on.
    ``samples_in(position)`` is their number over all processes, ``flops_in`` the FLOPs of a step. ``begin_step`` gets
    the number of steps done before each step. ``idle_advice`` names the cause if the GPU is often idle. Without a
    terminal a line is printed every ``steps_per_print`` steps, or by time if it is None.
    """

    engine: Engine
    steps: Callable[[int], StepStream]
    samples_in: Callable[[int], int]
    learning_rate: Callable[[int], float]
    total_steps: int
    progress: Progress = field(default_factory=Progress)
    averages: Averages = field(default_factory=lambda: Averages({}, EmaConfig()))
    hooks: Sequence[Hook] = ()
    log: Callable[..., None] = lambda *args, **fields: None
    meter: Meter = field(default_factory=Meter)
    requests: RunRequests = field(default_factory=RunRequests)
    flops_in: Callable[[Sequence[MicroBatch]], int] = lambda batches: 0
    begin_step: Callable[[int], None] = lambda step: None
    steps_per_epoch: int = 1
    max_nonfinite_steps: int = 10
    logging_steps: int = 1
    steps_per_print: int | None = None
    idle_advice: IdleAdvice | None = None
    last_result: StepResult | None = None
    _updates_before: int | None = None  # the engine's count before the step in progress
    _skipped_in_a_row: int = 0
    _record: _PendingRecord | None = None

    def is_done(self) -> bool:
        """Whether no step follows."""
        return self.progress.step >= self.total_steps or self.requests.quit

    @property
    def is_updating(self) -> bool:
        """Whether an incomplete step has begun to change weights: they and the averages may be of different steps."""
        return self._updates_before is not None and self.engine.updates_started != self._updates_before

    @property
    def has_diverged(self) -> bool:
        """Whether more steps in a row than allowed were not finite."""
        return self._skipped_in_a_row > self.max_nonfinite_steps


def train(run: Run) -> Progress:
    """Train from ``run.progress`` to ``run.total_steps``, or until asked to stop; return the final progress.

    A record is written after the next step is queued, so that the device has work while the host waits and writes.
    """
    line_every = LINE_EVERY if run.steps_per_print is None else 0.0
    with (
        closing(run.steps(run.progress.position)) as batches,
        progress_bar("train", run.total_steps, "steps", run.progress.step, line_every) as bar,
    ):
        try:
            while not run.is_done():
                before = run.progress
                with run.meter.waiting():
                    micro_batches = next(batches)
                lr = run.learning_rate(before.step)

                run.begin_step(before.step)
                run._updates_before = run.engine.updates_started
                with run.meter.launching():
                    result = run.last_result = run.engine.train_step(micro_batches, lr)
                    run.averages.update(run.engine.weights, before.step + 1)
                samples = run.samples_in(before.position)
                run.progress = before.after(samples)
                run._updates_before = None

                run.meter.add(run.progress.step, result, samples, run.flops_in(micro_batches))
                _write_record(run, bar)
                run.requests.poll()
                due = [hook for hook in run.hooks if hook.due(before, run.progress)]
                if run.progress.step % run.logging_steps == 0 or run.progress.step == run.total_steps:
                    norm = HostCopy(run.engine.weight_norm())
                    run._record = _PendingRecord(run.progress, lr, norm, run.meter.mark())
                if due or run.is_done() or result.ready:
                    _write_record(run, bar)
                _count_skipped(run, wait=bool(due))
                if due:
                    with run.meter.excluded():
                        for hook in due:
                            hook.act(run.progress)
        except BaseException:  # raised again
            _write_after_error(run, bar)
            raise
    return run.progress


def _count_skipped(run: Run, wait: bool, until: Mark | None = None) -> None:
    """Count the steps that were not taken; raise if there are too many in a row."""
    for step, numbers in run.meter.collect(wait, until):
        if numbers.taken:
            run._skipped_in_a_row = 0
            continue
        run._skipped_in_a_row += 1
        run.progress = replace(run.progress, skipped=run.progress.skipped + 1)
        run.log("skip", step=step, loss=numbers.losses["loss"], grad_norm=numbers.grad_norm)
        if run.has_diverged:
            raise UserError(
                f"loss or gradient was not finite in {run._skipped_in_a_row} steps in a row (at step {step}); lower "
                "the learning rate or check the data, then resume"
            )


def _write_record(run: Run, bar: Bar) -> None:
    """Write the record that is due, if any, with everything measured since the last one."""
    record = run._record
    run._record = None
    if record is None:
        return
    progress = record.progress
    _count_skipped(run, True, record.until)
    with run.meter.synchronizing():
        weight_norm = record.weight_norm.read()
    fields: dict[str, Any] = {**run.meter.record(record.until), "param_norm": weight_norm}
    fields["ema_decay"] = run.averages.decays(progress.step)
    epoch = progress.position / run.steps_per_epoch
    run.log("step", **progress.counts(), skipped=run.progress.skipped, epoch=epoch, lr=record.lr, **fields)
    if run.idle_advice is not None and (advice := run.idle_advice.of(run.meter.times)) is not None:
        info(advice)
    if progress.step % (run.steps_per_print or 1) < run.logging_steps or progress.step == run.total_steps:
        speed = fields["samples_per_second"]
        bar.advance(progress.step - bar.done, loss=fields["loss"], samples_per_second=speed, lr=record.lr)


def _write_after_error(run: Run, bar: Bar) -> None:
    """Read the numbers of all complete steps and write the pending record.

    With several processes only what has arrived: a step does not end without the others, and they may be gone.
    """
    if run.has_diverged:
        return
    is_alone = run.engine.world_size == 1
    try:
        if is_alone or (run._record is not None and run.meter.has_arrived(run._record.until)):
            _write_record(run, bar)
        _count_skipped(run, wait=is_alone)
    except RuntimeError as failure:  # a failed device has no numbers; the error that is raised says why
        info(f"the numbers of the last steps are missing: {str(failure).partition(chr(10))[0]}")


def every(
    steps: int | None = None, epochs: int | None = None, examples: int | None = None, steps_per_epoch: int = 1
) -> Due:
    """Return a function that returns whether a step passes a multiple of any interval; never without intervals."""

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


never: Due = every()
"""Due at no step."""
