"""The one driver of training: the loop with its checkpoints, evaluation, sampling, exports and reports.

The train verb and the task launcher both use it. What differs between them is passed in as `RunHooks`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from sd3_light.checkpoint.progress import EMA, Progress, track_kind
from sd3_light.checkpoint.store import checkpoint_name
from sd3_light.config.faults import UserError
from sd3_light.core.model import of_denoiser
from sd3_light.engines import Launch
from sd3_light.engines.errors import COMMON_ERRORS, explain_runtime_errors
from sd3_light.engines.processes import ProcessGroups
from sd3_light.engines.protocol import TensorPiece, ToHost, to_host
from sd3_light.export.background_saves import CHECKPOINT, EXPORT, FOLDERS, SNAPSHOT, BackgroundSaves
from sd3_light.export.best import METRICS_EVENT, mark_best
from sd3_light.export.of_run import RAW
from sd3_light.files import disk_error
from sd3_light.optim.post_hoc_ema import power_tracks, snapshot_interval, snapshot_metadata
from sd3_light.runlog import info
from sd3_light.train.loop import Due, Hook, Run, every, never, train

if TYPE_CHECKING:  # it loads models of features, which most runs do not need
    from sd3_light.train.measurement import Measurement

_FIRST_SAVE_FAILED = "the first save failed"


@dataclass(frozen=True)
class RunHooks:
    """What the train verb and a task do differently. A hook that is None never runs.

    ``evaluate()`` yields (name, losses) of each evaluation set for the weights in the model: of all averages and the
    raw weights with ``evaluate_all``, otherwise of the weights to save. ``sample(progress, weights)`` draws with the
    weights in the model and returns the path of the image that it wrote, if any. ``measure(step)`` compares images of
    the weights to save with true ones. ``save(progress)`` saves in the loop, with the weights to save in the model.
    ``export(trained, weights, progress)`` writes an export in a background thread; ``to_host(name, tensor)`` copies a
    weight for it. ``finish(progress)`` runs after the last step, with the weights to save in the model. ``autocast``
    makes the model compute as in a training step.
    """

    evaluate: Callable[[], Iterable[tuple[str, Mapping[str, float]]]] | None = None
    evaluate_all: bool = False
    sample: Callable[[Progress, str], Path | None] | None = None
    measure: Callable[[int], "Measurement | None"] | None = None
    save: Callable[[Progress], None] | None = None
    export: Callable[[dict[str, Tensor], str, Progress], Path] | None = None
    to_host: ToHost = to_host
    finish: Callable[[Progress], None] = lambda progress: None
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext


@dataclass(frozen=True)
class HookSchedule:
    """When the hooks run. The last step adds an evaluation, a checkpoint and an export, requests from outside a
    checkpoint."""

    evaluate: Due = never
    sample: Due = never
    measure: Due = never
    save: Due = never
    checkpoint: Due = never
    export: Due = never


@dataclass
class Driver:
    """Trains a `Run` and does everything around its steps, inside `running`.

    ``facts`` are written into every checkpoint. ``out_of_memory`` and ``resume_hint`` end the messages about a full GPU
    and about what was saved after an error. ``stop_if_first_save_fails`` ends a run that could not be resumed.
    """

    run: Run
    launch: Launch
    groups: ProcessGroups
    folder: Path
    hooks: RunHooks
    schedule: HookSchedule
    facts: Mapping[str, Any]
    keep_last: int
    out_of_memory: str
    resume_hint: str
    stop_if_first_save_fails: bool = True
    saves: BackgroundSaves = field(init=False)
    _checkpointed_at: int = -1
    _exported_at: int = -1
    _best_at: int = -1

    def __post_init__(self) -> None:
        writers = self.run.engine.writers
        self.saves = BackgroundSaves(self.folder, self.launch.rank, writers, self.groups, self.keep_last, self._log)
        self.saves.checkpoints.prepare(self.pieces())
        self.run.hooks = self._make_hooks()

    def _log(self, event: str, **fields: Any) -> None:
        self.run.log(event, **fields)  # looked up at each event: a task opens its log after the driver is made

    @contextmanager
    def running(self) -> Iterator[Self]:
        """Handle signals inside the block; afterwards wait for all saves and end their threads."""
        with self.run.requests.handling_signals():
            try:
                yield self
            except BaseException:
                if self.launch.world_size == 1:  # otherwise other processes may be gone, and a save would wait for them
                    self.saves.close()
                raise
            self.saves.close()

    def _make_hooks(self) -> list[Hook]:
        hooks = self.hooks
        schedule = self.schedule
        requests = self.run.requests
        last = every(steps=self.run.total_steps)
        ema = self.run.averages.config
        snapshot = every(snapshot_interval(ema, self.run.total_steps))
        scheduled = [
            (True, Hook("report", lambda old, new: self.saves.has_reports(), lambda _: self.report())),
            (hooks.evaluate, Hook("evaluate", lambda *at: schedule.evaluate(*at) | last(*at), self.evaluate)),
            (hooks.sample, Hook("sample", schedule.sample, self.sample)),
            (hooks.measure, Hook("measure", lambda *at: schedule.measure(*at) | last(*at), self.measure)),
            (hooks.save, Hook("save", schedule.save, self.save)),
            (True, Hook(CHECKPOINT, lambda *at: schedule.checkpoint(*at) | last(*at) | requests.save, self.checkpoint)),
            (power_tracks(ema), Hook(SNAPSHOT, lambda *at: snapshot(*at) | last(*at), self.snapshot)),
            (hooks.export, Hook(EXPORT, lambda *at: schedule.export(*at) | last(*at), self.export)),
        ]
        return [hook for enabled, hook in scheduled if enabled]

    # --- the run ---------------------------------------------------------------------------------

    def train(self) -> Progress:
        """Train to the end, or until asked to stop, and wait until everything is saved; return the final progress.

        After an error in a run of one process the last complete step is checkpointed before the error is raised. So it
        is in a run of several if a loader's worker ended: see `RunRequests.fail`.
        """
        start = self.run.progress
        try:
            with explain_runtime_errors(self.out_of_memory):
                train(self.run)
                self.finish(start)
        except (UserError, *COMMON_ERRORS) as error:
            self.run.log("stop", **self.run.progress.counts(), reason=str(error) or type(error).__name__)
            if not self._save_after_error(start):
                raise
            if isinstance(error, UserError):
                raise UserError(f"{error} ({self._saved()})") from error
            info(self._saved())
            raise
        return self.run.progress

    def _saved(self) -> str:
        return f"step {self.run.progress.step} is saved: {self.resume_hint} continues from there"

    def finish(self, start: Progress) -> None:
        """Wait for all saves; raise if one kind or a rank failed, or if no step was taken since ``start``."""
        if pending := self.saves.pending():
            verified = ", which is verified by reloading it" if EXPORT in pending else ""
            info(f"step {self.run.progress.step}: writing the last {' and '.join(pending)}{verified}")
        # together: a launcher may end all processes when the first one exits
        self.groups.wait_for_all(self.saves.is_idle)
        self.saves.wait()
        end = self.run.progress
        steps = self.run.progress.step - start.step
        if problem := self.groups.first_problem(self._failed_save()):
            raise UserError(problem)
        if steps and steps == end.skipped - start.skipped:
            raise UserError(
                f"none of {steps} steps was taken: loss or gradient was never finite; lower the learning rate or check "
                "the data"
            )
        if self.run.requests.failed and end.step < self.run.total_steps:
            failures = enumerate(self.groups.gathered(self.run.requests.failure))
            rank, failure = next((rank, failure) for rank, failure in failures if failure is not None)
            raise UserError(f"rank {rank}: {failure} ({self._saved()})")
        if end.step >= self.run.total_steps:
            with self.using_weights(self.main_weights):
                self.hooks.finish(end)
        self.run.log("stop", **end.counts(), reason=self.run.requests.reason or "finished")

    def _failed_save(self) -> str | None:
        """Return which save failed last, or stopped the run by being the first, and what to do; None if all is well."""
        # a failed checkpoint first: the remedy of an export names the checkpoint
        failures = [self.saves.failures[kind] for kind in FOLDERS if kind in self.saves.failures]
        failure = failures[0] if failures else None
        if self.run.requests.reason == _FIRST_SAVE_FAILED and self.run.progress.step < self.run.total_steps:
            failure = failure or self.saves.first_failure
        return None if failure is None else failure.advice(self.folder, self.saves.has_checkpoint)

    def _save_after_error(self, start: Progress) -> bool:
        """Checkpoint the last complete step if the weights are valid; return whether it is saved."""
        now = self.run.progress
        nothing_learned = now.step - start.step == now.skipped - start.skipped
        if self.launch.world_size > 1 or nothing_learned or self.run.is_updating or self.run.has_diverged:
            return False
        try:
            if self._checkpointed_at != now.step:
                self.checkpoint(now)
        except RuntimeError as failure:  # a failed device cannot copy its weights
            info(f"step {now.step} cannot be saved: {str(failure).partition(chr(10))[0]}")
            return False
        self.saves.wait()
        return CHECKPOINT not in self.saves.failures

    # --- weights ---------------------------------------------------------------------------------

    @property
    def main_weights(self) -> str:
        """The weights to sample from and to save: the main average if there is one."""
        return EMA if EMA in self.run.averages.tracks else RAW

    @contextmanager
    def using_weights(self, weights: str) -> Iterator[None]:
        """Put these weights into the model inside the block."""
        engine = self.run.engine
        swapped = nullcontext() if weights == RAW else self.run.averages.in_place_of(weights, engine.weights)
        with swapped, self.hooks.autocast():  # in this order: autocast caches weights
            yield

    def pieces(self) -> Iterator[TensorPiece]:
        """Yield everything that a checkpoint holds of this rank."""
        engine = self.run.engine
        yield from engine.pieces()
        for name, track in self.run.averages.tracks.items():
            yield from engine.like_weights(track_kind(name), track.shadow)

    # --- hooks -----------------------------------------------------------------------------------

    def report(self) -> None:
        """Report the saves that ended; stop all ranks if the first one failed, after another attempt to save."""
        self.saves.report()
        if self.stop_if_first_save_fails and self.saves.first_failure and not self.saves.has_checkpoint:
            self.run.requests.stop(_FIRST_SAVE_FAILED)

    def evaluate(self, progress: Progress) -> None:
        """Compute and log the validation loss of every evaluation set."""
        assert self.hooks.evaluate is not None
        for weights in (RAW, *self.run.averages.tracks) if self.hooks.evaluate_all else (self.main_weights,):
            with self.using_weights(weights):
                for name, losses in self.hooks.evaluate():
                    title = "eval" if name == "eval" else f"eval {name}"
                    info(f"{title} ({weights}) at step {progress.step}: flow loss {losses['flow']:.4f}")
                    self.run.log("eval", **progress.counts(), set=name, weights=weights, **losses)

    def sample(self, progress: Progress) -> None:
        """Draw and log a sample image; one that cannot be written is reported, and training continues."""
        assert self.hooks.sample is not None
        try:
            with self.using_weights(self.main_weights):
                path = self.hooks.sample(progress, self.main_weights)
        except OSError as error:
            if disk_error(error) is None:
                raise
            info(f"the sample at step {progress.step} failed: {error.strerror}")
            self.run.log("sample_failed", step=progress.step, reason=error.strerror)
            return
        if path is not None:
            file = path.relative_to(self.folder).as_posix()
            self.run.log("sample", **progress.counts(), weights=self.main_weights, file=file)

    def measure(self, progress: Progress) -> None:
        """Compare with true images and log it; export the best weights so far, and end a run without gains."""
        assert self.hooks.measure is not None
        with self.using_weights(self.main_weights):
            measurement = self.hooks.measure(progress.step)
        if measurement is None:
            return
        info(f"metrics ({self.main_weights}) at step {progress.step}: {measurement.text}")
        self.run.log(METRICS_EVENT, **progress.counts(), weights=self.main_weights, **measurement.fields)
        if measurement.is_best and self.hooks.export is not None:
            self._best_at = progress.step
            self.export(progress)
        if measurement.stop is not None:
            self.run.requests.stop(measurement.stop)

    def save(self, progress: Progress) -> None:
        """Run the ``save`` hook with the weights to save in the model."""
        assert self.hooks.save is not None
        with self.using_weights(self.main_weights):
            self.hooks.save(progress)

    def checkpoint(self, progress: Progress) -> None:
        """Copy everything that the run needs to resume, and write it in the background."""
        requests = self.run.requests
        requests.announce()
        facts = {"progress": progress.as_dict(), **self.facts, "window": asdict(self.run.meter.window)}
        self.groups.wait_for_all(self.saves.checkpoints.is_idle)
        if self.saves.has_reports():  # the earlier save ended: its failure is reported before the next one begins
            self.report()
        self._checkpointed_at = progress.step
        self.saves.checkpoints.save(progress.step, self.pieces(), facts)
        requests.checkpoint_saved()

    def snapshot(self, progress: Progress) -> None:
        """Write the power-function averages; an average of any length can be rebuilt from several of them."""
        ema = self.run.averages.config
        tracks = self.run.averages.tracks
        dtype = getattr(torch, ema.snapshot_dtype)
        pieces = (
            replace(piece, values=piece.values.to(dtype))
            for name in power_tracks(ema)
            for piece in self.run.engine.like_weights(track_kind(name), tracks[name].shadow)
        )
        facts = {**snapshot_metadata(ema, progress.step), "progress": progress.as_dict()}
        facts |= {name: self.facts[name] for name in ("model",) if name in self.facts}
        self.groups.wait_for_all(self.saves.snapshots.is_idle)
        self.saves.snapshots.save(progress.step, pieces, facts)

    def export(self, progress: Progress) -> None:
        """Gather the weights and export them in the background."""
        export = self.hooks.export
        weights = self.main_weights
        engine = self.run.engine
        assert export is not None
        if progress.skipped == progress.step or self._exported_at == progress.step:
            return  # nothing was learned, and the run ends with an error that says so; or it is exported as the best
        self._exported_at = progress.step
        is_best = self._best_at == progress.step
        self.groups.wait_for_all(self.saves.exports.is_idle)  # an export holds a copy of all weights: one at a time
        raw = of_denoiser(engine.weights)
        held = raw if weights == RAW else self.run.averages.tracks[weights].shadow
        trained = engine.gather(held, self.hooks.to_host)
        if trained is None:
            return

        def write() -> Path:
            path = export(trained, weights, progress)
            if is_best:
                mark_best(path)
            return path

        self.saves.submit_export(progress, weights, write)

    def catch_up(self, progress: Progress) -> None:
        """Write the snapshot and the export that were due with the checkpoint of a resumed run and are missing.

        The earlier process was killed after its checkpoint and before they were written.
        """
        name = checkpoint_name(progress.step)
        paths = {kind: self.folder / FOLDERS[kind] / name for kind in (SNAPSHOT, EXPORT)}
        missing = self.groups.decide_on_rank_0(lambda: [kind for kind, path in paths.items() if not path.exists()])
        samples = progress.samples - self.run.samples_in(progress.position - 1)
        before = replace(progress, step=progress.step - 1, position=progress.position - 1, samples=samples)
        for hook in self.run.hooks:
            if hook.name in missing and hook.due(before, progress):
                hook.act(progress)
