"""The one loop: take a batch, step, average, log, and do what is due."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from sd3_light.checkpoint.state import Progress
from sd3_light.config.faults import UserError
from sd3_light.engines.protocol import Engine, Prepared, StepResult
from sd3_light.optim.ema import Ema
from sd3_light.runlog import progress as progress_bar


@dataclass(frozen=True)
class Duty:
    """Something to do now and then: ``act(progress)`` whenever ``due(before, after)`` a step."""

    name: str
    due: Callable[[Progress, Progress], bool]
    act: Callable[[Progress], None]


@dataclass
class Run:
    """All that a training run is made of. ``steps(first)`` yields the micro-batches of step after step."""

    engine: Engine
    steps: Callable[[int], Iterator[Sequence[Prepared]]]
    samples_in: Callable[[int], int]
    learning_rate: Callable[[int], float]
    total_steps: int
    progress: Progress = field(default_factory=Progress)
    ema: Ema | None = None
    duties: Sequence[Duty] = ()
    log: Callable[..., None] = lambda *args, **fields: None
    max_nonfinite_steps: int = 10
    logging_steps: int = 1
    steps_per_print: int = 1


def train(run: Run) -> Progress:
    """Train from ``run.progress`` to ``run.total_steps``; returns where it ended."""
    batches = run.steps(run.progress.step)
    skipped_in_a_row = 0
    with progress_bar("train", run.total_steps, "steps", done=run.progress.step) as bar:
        while run.progress.step < run.total_steps:
            before, started = run.progress, time.perf_counter()
            micro_batches = next(batches)
            waited = time.perf_counter() - started
            lr = run.learning_rate(before.step)

            result = run.engine.train_step(micro_batches, lr)

            run.progress = before.after(run.samples_in(before.step), result.taken)
            skipped_in_a_row = 0 if result.taken else skipped_in_a_row + 1
            if run.ema is not None and result.taken:
                run.ema.update(run.engine.weights, run.progress.step)
            _log_step(run, result, lr, waited, time.perf_counter() - started)
            if run.progress.step % run.steps_per_print == 0 or run.progress.step == run.total_steps:
                bar.advance(run.progress.step - bar.done, loss=result.losses["loss"], lr=lr)
            if skipped_in_a_row > run.max_nonfinite_steps:
                raise UserError(
                    f"loss or gradient was not finite in {skipped_in_a_row} steps in a row (at step "
                    f"{run.progress.step}); lower the learning rate or look at the data, then resume"
                )
            for duty in run.duties:
                if duty.due(before, run.progress):
                    duty.act(run.progress)
    return run.progress


def _log_step(run: Run, result: StepResult, lr: float, waited: float, seconds: float) -> None:
    step = run.progress.step
    if step % run.logging_steps and result.taken and step != run.total_steps:
        return
    samples = run.samples_in(step - 1)
    run.log(
        "step",
        **run.progress.as_dict(),
        **result.losses,
        lr=lr,
        grad_norm=result.grad_norm,
        taken=result.taken,
        samples_per_second=samples / seconds,
        data_wait=waited / seconds,
    )


def every(
    steps: int | None = None,
    epochs: int | None = None,
    examples: int | None = None,
    minutes: float | None = None,
    steps_per_epoch: int = 1,
) -> Callable[[Progress, Progress], bool]:
    """Due when any of the given intervals is passed; an interval that is None never is."""
    last_time = time.monotonic()

    def due(before: Progress, after: Progress) -> bool:
        nonlocal last_time
        passed = [
            steps is not None and before.step // steps < after.step // steps,
            epochs is not None and _epochs(before, epochs) < _epochs(after, epochs),
            examples is not None and before.samples // examples < after.samples // examples,
            minutes is not None and time.monotonic() - last_time >= 60 * minutes,
        ]
        if any(passed):
            last_time = time.monotonic()
        return any(passed)

    def _epochs(progress: Progress, interval: int) -> int:
        return progress.step // steps_per_epoch // interval

    return due
