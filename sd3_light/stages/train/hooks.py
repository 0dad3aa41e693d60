"""What a run does now and then besides training: evaluate, draw, save."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError
from torch import Tensor

from sd3_light.checkpoint.background import (
    BackgroundWorker,
    CheckpointFailed,
    CheckpointKeeper,
    CheckpointSaved,
    JobResult,
)
from sd3_light.checkpoint.progress import EMA, Progress, track_kind
from sd3_light.checkpoint.store import checkpoint_name
from sd3_light.config.faults import UserError
from sd3_light.engines.protocol import TensorPiece
from sd3_light.export.diffusers_folder import ExportError
from sd3_light.export.proof import ProofError
from sd3_light.optim.post_hoc_ema import power_tracks, snapshot_interval, snapshot_metadata
from sd3_light.runlog import info
from sd3_light.stages.train.context import RunContext
from sd3_light.stages.train.resume import rate_settings
from sd3_light.stages.train.train_state import TrainState
from sd3_light.training.data import order_facts
from sd3_light.training.evaluation import Evaluator
from sd3_light.training.loop import Hook, Run, every
from sd3_light.training.samples import Sampler

RAW = "raw"
CHECKPOINT, SNAPSHOT, EXPORT = "checkpoint", "snapshot", "export"


def make_sampler(context: RunContext) -> Sampler | None:
    """What draws the config's prompts; None where there are none."""
    if not context.config.sampling.prompts:
        return None
    place = context.loaded.dataset.cache_dir
    return Sampler.of_config(context.config, place, context.data, context.launch, context.device, context.stages)


class RunHooks:
    """The duties of a run, over its parts. Writing goes on in the background while the run trains."""

    def __init__(self, context: RunContext, state: TrainState, sampler: Sampler | None, training: Run) -> None:
        self.context, self.sampler, self.training = context, sampler, training
        self.config, self.folder, self.groups, self.order = (
            context.config,
            context.folder,
            context.groups,
            context.order,
        )
        self.engine, self.averages, self.saver = state.engine, state.averages, state.saver
        engine, launch, path = state.engine, context.launch, context.folder.path
        self.evaluator = Evaluator(context.loaded, launch, engine, state.pipeline.preparer, context.stages)
        keep = self.config.keep_last_n_checkpoints
        self.keeper = CheckpointKeeper(path / "checkpoints", launch.rank, engine.writers, self.groups.saving, keep)
        self.keeper.prepare(self.pieces())
        self.snapshots = CheckpointKeeper(path / "ema", launch.rank, engine.writers, self.groups.snapshots)
        self.exports = BackgroundWorker("exports")
        self._order_facts = order_facts(self.order)  # once: it looks at every shard
        self._news: list[CheckpointSaved | CheckpointFailed | JobResult] = []
        self._failed: dict[str, str] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        # after a fault the others may be gone: a save would wait for them
        if kind is None or self.context.launch.world == 1:
            for part in (self.keeper, self.snapshots, self.exports):
                part.close()

    def of_run(self, total: int) -> list[Hook]:
        """All duties and when they are due; what is asked for from outside, and the end, make a checkpoint too."""
        c, per_epoch, requests = self.config, self.order.steps_per_epoch, self.training.requests
        last = every(steps=total)
        save = every(c.save_every_n_steps, c.save_every_n_epochs, c.save_every_n_examples, per_epoch)
        check = every(c.checkpoint_every_n_steps, c.checkpoint_every_n_epochs, steps_per_epoch=per_epoch)
        judge = every(c.eval_every_n_steps, c.eval_every_n_epochs, c.eval_every_n_examples, per_epoch)
        draw, snap = every(c.sampling.every_n_steps), every(snapshot_interval(c.ema, total))
        return [
            Hook("tell", lambda a, b: self._has_news(), lambda _: self.tell()),
            Hook("evaluate", lambda a, b: bool(self.context.loaded.eval_datasets) and judge(a, b), self.evaluate),
            Hook("sample", lambda a, b: self.sampler is not None and draw(a, b), self.sample),
            Hook("checkpoint", lambda a, b: check(a, b) | last(a, b) | requests.save, self.checkpoint),
            Hook("snapshot", lambda a, b: bool(power_tracks(c.ema)) and snap(a, b) | last(a, b), self.snapshot),
            Hook("export", lambda a, b: save(a, b) | last(a, b), self.export),
        ]

    # --- weights -------------------------------------------------------------------------------

    @property
    def best(self) -> str:
        """The weights to show and export: the main average, where there is one."""
        return EMA if EMA in self.averages.tracks else RAW

    def held(self, weights: str) -> Mapping[str, Tensor]:
        """What this rank holds of some weights."""
        return self.engine.weights if weights == RAW else self.averages.tracks[weights].shadow

    @contextmanager
    def shown(self, weights: str) -> Iterator[None]:
        """The model has these weights inside the block."""
        if weights == RAW:
            yield
            return
        with self.averages.in_place_of(weights, self.engine.weights):
            yield

    # --- seeing --------------------------------------------------------------------------------

    def evaluate(self, progress: Progress) -> None:
        """The validation loss of every evaluation set, with the weights themselves and every average of them."""
        for weights in (RAW, *self.averages.tracks):
            with self.shown(weights):
                for name, losses in self.evaluator.losses():
                    info(f"eval {name} ({weights}) at step {progress.step}: flow loss {losses['flow']:.4f}")
                    self.folder.log("eval", **progress.counts(), set=name, weights=weights, **losses)

    def sample(self, progress: Progress) -> None:
        """A grid of the config's prompts, of which every rank draws its share."""
        assert self.sampler is not None
        path, weights = self.folder.path / "samples" / f"{checkpoint_name(progress.step)}.png", self.best
        facts = {**progress.counts(), "weights": weights}
        with self.shown(weights):
            drawn = self.sampler.sample(self.engine.denoise, path, facts, self.groups.control)
        if drawn is not None:
            self.folder.picture(*drawn, progress, weights)

    # --- saving --------------------------------------------------------------------------------

    def pieces(self) -> Iterator[TensorPiece]:
        """All that a checkpoint holds of this rank."""
        yield from self.engine.pieces()
        for name, track in self.averages.tracks.items():
            yield from self.engine.like_weights(track_kind(name), track.shadow)

    def facts(self, progress: Progress) -> dict[str, Any]:
        """What a checkpoint says besides its tensors."""
        return {
            "progress": progress.as_dict(),
            "order": self._order_facts,
            "settings": rate_settings(self.config),
            "window": self.training.meter.window.as_dict(),
        }

    def checkpoint(self, progress: Progress) -> None:
        """Copy all that the run needs to go on, and write it while the run goes on."""
        self.training.requests.tell()
        self.groups.wait_for_all(self.keeper.is_idle)
        self.keeper.save(progress.step, self.pieces(), self.facts(progress))
        self.training.requests.saved()

    def snapshot(self, progress: Progress) -> None:
        """The power-function averages as they are now: an average of any length is rebuilt from several of these."""
        dtype = getattr(torch, self.config.ema.snapshot_dtype)
        pieces = (
            replace(piece, values=piece.values.to(dtype))
            for name in power_tracks(self.config.ema)
            for piece in self.engine.like_weights(track_kind(name), self.averages.tracks[name].shadow)
        )
        facts = {**snapshot_metadata(self.config.ema, progress.step), "progress": progress.as_dict()}
        self.groups.wait_for_all(self.snapshots.is_idle)
        self.snapshots.save(progress.step, pieces, facts)

    def export(self, progress: Progress) -> None:
        """A proven diffusers folder, of the averaged weights where there are any, made while the run goes on."""
        if progress.skipped == progress.step:
            return  # nothing was learned; the run will end by saying so
        weights = self.best
        self.groups.wait_for_all(self.exports.is_idle)  # it holds a whole copy of the weights: one at a time
        trained = self.engine.gather(self.held(weights))
        if trained is not None:
            # named by its step: a failure may be told when the next one is under way
            self.exports.submit(
                str(progress.step), lambda: (progress, self.saver.save_model(trained, weights, progress))
            )

    def catch_up(self, progress: Progress) -> None:
        """Write what was due with the checkpoint that the run goes on from and is not there: it was killed before."""
        places = {"snapshot": "ema", "export": "exports"}
        name = checkpoint_name(progress.step)

        def missing() -> str:
            return " ".join(hook for hook, place in places.items() if not (self.folder.path / place / name).exists())

        wanted = (self.groups.decide_on_rank_0(self.context.launch.is_main, missing) or "").split()
        samples = progress.samples - self.order.batch_size(progress.position - 1)
        before = replace(progress, step=progress.step - 1, position=progress.position - 1, samples=samples)
        for hook in self.training.hooks:
            if hook.name in wanted and hook.due(before, progress):
                hook.act(progress)

    # --- what the background has done ----------------------------------------------------------

    def _has_news(self) -> bool:
        self._news += [*self.keeper.poll(), *self.snapshots.poll(), *self.exports.poll()]
        return bool(self._news)

    def tell(self) -> None:
        """Say and log what was written since the last time, and what could not be."""
        news, self._news = self._news, []
        for item in news:
            if isinstance(item, CheckpointSaved):
                self._tell_saved(item)
            elif isinstance(item, CheckpointFailed):
                self._tell_failure(_kind(item), item.step, item.reason)
            else:
                self._tell_export(item)

    def _tell_saved(self, saved: CheckpointSaved) -> None:
        if saved.warning:
            info(saved.warning)
        kind, progress = _kind(saved), Progress(**saved.facts["progress"])
        numbers = {"stall_seconds": saved.stall_seconds, "seconds": saved.seconds, "bytes": saved.bytes}
        self.folder.log(kind, **progress.counts(), file=saved.path.name, **numbers)
        self._failed.pop(kind, None)

    def _tell_export(self, done: JobResult) -> None:
        if done.error is None:
            progress, path = done.result
            info(f"export at step {progress.step}, proven with stock diffusers: {path}")
            self.folder.log(EXPORT, **progress.counts(), file=path.name, weights=self.best, seconds=done.seconds)
            self._failed.pop(EXPORT, None)
        elif isinstance(done.error, ExportError | ProofError | OSError | SafetensorError):
            self._tell_failure(EXPORT, int(done.name), f"{done.error}")
        else:
            raise done.error

    def _tell_failure(self, kind: str, step: int, reason: str) -> None:
        """Training goes on: the next one may succeed."""
        info(f"{kind} at step {step} failed: {reason}")
        self.folder.log(f"{kind}_failed", step=step, reason=reason)
        self._failed[kind] = f"the {kind} at step {step} failed: {reason}"

    def finish(self, progress: Progress) -> None:
        """Wait until all is written. The last of each kind must have been: a run does not end well without it."""
        # together: a launcher may end all processes when the first one leaves
        writing = (self.keeper, self.snapshots, self.exports)
        self.groups.wait_for_all(lambda seconds: all(part.is_idle(seconds) for part in writing))
        self._news += [*self.keeper.wait(), *self.snapshots.wait()]
        self._news += self.exports.wait()
        self.tell()
        for failure in self._failed.values():
            raise UserError(f"{failure}; what was saved before is intact: make room, then resume")
        self.folder.log("stop", **progress.counts(), reason=self.training.requests.reason or "finished")


def _kind(item: CheckpointSaved | CheckpointFailed) -> str:
    """A snapshot says which tracks it holds; a checkpoint says more."""
    return SNAPSHOT if "tracks" in item.facts else CHECKPOINT
