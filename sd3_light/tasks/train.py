"""`launch_training_task`: a user's module and data set through the one loop, with the run's own checkpoints."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.utils.data import Dataset

from sd3_light.checkpoint.background import CheckpointFailed, CheckpointKeeper, CheckpointSaved
from sd3_light.checkpoint.lock import lock_folder
from sd3_light.checkpoint.progress import EMA, Progress, track_kind
from sd3_light.checkpoint.store import incomplete_checkpoints, newest_checkpoint, open_checkpoint
from sd3_light.config.faults import Stopped, UserError
from sd3_light.data.processed import ProcessedDataset
from sd3_light.engines import Engine, Launch
from sd3_light.engines.processes import ProcessGroups, SharedFlags, abort_process_group, start_process_group
from sd3_light.engines.protocol import TensorPiece
from sd3_light.metrics.validation import QUANTILES, validate
from sd3_light.model.adapter_layers import AdapterDropout, cast_frozen_linears
from sd3_light.optim.ema import Averages
from sd3_light.runlog import RunLog, info, set_main_process
from sd3_light.tasks import setup
from sd3_light.tasks.batches import Samples, TaskBatches, length_of, steps_of
from sd3_light.tasks.logger import ModelLogger
from sd3_light.tasks.module import DiffusionTrainingModule
from sd3_light.tasks.recipe import require_same_recipe
from sd3_light.tasks.settings import TaskSettings
from sd3_light.training.data import order_facts
from sd3_light.training.errors import as_user_error, explain_runtime_errors
from sd3_light.training.loop import Hook, Run, every, train
from sd3_light.training.meter import Meter
from sd3_light.training.requests import NUM_FLAGS, RunRequests


@contextmanager
def leaving_on_fault() -> Iterator[None]:
    """After a fault this process leaves the others without a word: they may be in the middle of something.

    Whoever is asked to stop does so at the same step as all of them.
    """
    together = False
    try:
        yield
        together = True
    except Stopped:
        together = True
        raise
    finally:
        if not together and dist.is_initialized() and dist.get_world_size() > 1:
            abort_process_group()


@leaving_on_fault()
@explain_runtime_errors()
def launch_training_task(
    accelerator: Accelerator | None,
    dataset: Dataset[Any],
    model: DiffusionTrainingModule,
    model_logger: ModelLogger,
    learning_rate: float = 1e-5,
    weight_decay: float = 1e-2,
    num_workers: int = 1,
    save_steps: int | None = None,
    num_epochs: int = 1,
    args: Any = None,
    **settings: Any,
) -> Progress:
    """Train ``model`` on ``dataset``: AdamW over what trains, a learning rate that is constant unless said otherwise,
    saves by ``model_logger`` every ``save_steps`` optimizer steps (None: after every epoch). Returns where it ended.

    ``settings`` are further fields of `TaskSettings`; attributes of ``args`` that are not None override all of them.
    The log, checkpoints and pictures lie in ``model_logger.output_path``. With several processes all call it alike.
    """
    given: dict[str, Any] = {"learning_rate": learning_rate, "weight_decay": weight_decay, "num_workers": num_workers}
    given |= {"save_steps": save_steps, "num_epochs": num_epochs}
    wishes = TaskSettings.of({**given, **settings}, args)
    require_parts(model, model_logger)
    with _folder(model_logger.output_path) as take:
        task = _Task.of(accelerator, dataset, model, model_logger, wishes, take)
        with task.log_open(), task.run.requests:
            return task.train()


def require_parts(model: Any, logger: Any) -> None:
    """A fault where a task was given something else in place of its module or its logger."""
    if not isinstance(model, DiffusionTrainingModule):
        raise UserError(f"the model is a {type(model).__name__}; derive it from DiffusionTrainingModule")
    if not isinstance(logger, ModelLogger):
        raise UserError(f"the logger is a {type(logger).__name__}; give ModelLogger(output_path)")


@contextmanager
def _folder(path: Path) -> Iterator[Callable[[], None]]:
    """Gives the function that takes the folder for this task alone; it is let go at the end."""
    held: list[int | None] = []
    try:
        yield lambda: held.append(lock_folder(path, "output_path"))
    finally:
        for handle in held:
            if handle is not None:
                os.close(handle)


@dataclass
class _Task:
    """The parts of a task that is about to train."""

    accelerator: Accelerator | None
    model: DiffusionTrainingModule
    logger: ModelLogger
    wishes: TaskSettings
    launch: Launch
    groups: ProcessGroups
    engine: Engine
    samples: Samples
    averages: Averages
    run: Run
    keeper: CheckpointKeeper
    log: RunLog | None = None
    _kept_at: int = -1
    _failed: str | None = None  # of the last save that ended

    @staticmethod
    def of(
        accelerator: Accelerator | None,
        dataset: Dataset[Any],
        model: DiffusionTrainingModule,
        logger: ModelLogger,
        wishes: TaskSettings,
        take: Callable[[], None],
    ) -> "_Task":
        """Put the parts together; ``take`` the folder first, on the one process that writes there."""
        launch, device = setup.place_of(accelerator, wishes)
        set_main_process(launch.is_main)
        groups = start_process_group(launch, device, 600.0, all_write=wishes.engine == "deepspeed")
        groups.decide_on_rank_0(launch.is_main, lambda: _begin(dataset, model, logger, wishes, take))
        micro = setup.accumulation_of(accelerator, wishes)
        samples = Samples(dataset, wishes.seed, wishes.batch_size * micro * launch.world, wishes.bucket_of)
        model.seed = wishes.seed
        model.freeze_the_rest()
        if model.adapter is not None and model.adapter.dropout > 0:
            model.dropout = AdapterDropout(model.transformer, wishes.seed, launch.rank)
        if model.adapter is not None and setup.computes_in_bf16(accelerator, wishes):
            cast_frozen_linears(model.transformer, torch.bfloat16)
        engine = setup.engine_of(model, wishes, micro, launch, device, accelerator, groups)
        batches = TaskBatches(dataset, samples, launch.rank, launch.world, micro)
        total = wishes.num_epochs * samples.order.steps_per_epoch
        total = total if wishes.max_steps is None else min(total, wishes.max_steps)
        place = logger.output_path if launch.is_main else None
        averages = Averages(engine.weights, wishes.ema_table)
        run = Run(
            engine=engine,
            steps=steps_of(batches, wishes.num_workers),
            samples_in=samples.order.batch_size,
            learning_rate=lambda step: setup.rate_of(wishes, step, total),
            total_steps=total,
            averages=averages,
            requests=RunRequests(place, None, SharedFlags(groups.control, NUM_FLAGS)),
            begin_step=model.dropout.begin if model.dropout is not None else lambda step: None,
            steps_per_epoch=samples.order.steps_per_epoch,
            max_nonfinite_steps=wishes.max_nonfinite_steps,
            logging_steps=wishes.logging_steps,
            faster_data=f"raise num_workers (now {wishes.num_workers})" if device.type == "cuda" else "",
        )
        folder, keep = logger.output_path / "checkpoints", wishes.keep_last_n_checkpoints
        keeper = CheckpointKeeper(folder, launch.rank, engine.writers, groups.saving, keep)
        task = _Task(accelerator, model, logger, wishes, launch, groups, engine, samples, averages, run, keeper)
        window = task._resume() if wishes.resume else None
        run.meter = Meter(launch.world, window=window)
        keeper.prepare(task.pieces())
        return task

    @contextmanager
    def log_open(self) -> Iterator[None]:
        """Inside the block steps are logged to ``log.jsonl``."""
        if self.launch.is_main:
            self.log = RunLog(self.logger.output_path)
            self.run.log = self.log.event
        try:
            yield
        finally:
            if self.log is not None:
                self.log.close()

    def train(self) -> Progress:
        """The loop with its duties, and what is left to do at its end."""
        begun, total = self.run.progress, self.run.total_steps
        self.logger.num_steps = begun.step
        facts = {"total": total, "steps_per_epoch": self.run.steps_per_epoch, "world": self.launch.world}
        self.run.log("resume" if begun.step else "start", **begun.as_dict(), **facts, engine=self.wishes.engine)
        self.run.hooks = self._hooks(total)
        try:
            with explain_runtime_errors():
                done = train(self.run)
        except UserError as fault:
            told = self._saved_from(fault, begun)
            if told is fault:
                raise
            raise told from fault
        self._finish(begun, done, total)
        return done

    def _saved_from(self, fault: UserError, begun: Progress) -> UserError:
        """The fault that ended the task, after what it has done is saved where one process can do so alone."""
        now = self.run.progress
        self.run.log("stop", **now.counts(), reason=str(fault))
        if self.launch.world > 1 or now.step == begun.step or now.step - begun.step == now.skipped - begun.skipped:
            return fault
        try:
            if self._kept_at != now.step:
                self.checkpoint(now)
        except RuntimeError as error:  # a device that has failed does not give its weights back
            info(f"step {now.step} cannot be saved: {str(error).partition(chr(10))[0]}")
            return fault
        self.tell(self.keeper.wait())
        self.keeper.close()
        saved = f"{fault} (step {now.step} is saved: resume=True goes on from there)"
        return fault if self._failed else UserError(saved)

    # --- duties ----------------------------------------------------------------------------------

    def _hooks(self, total: int) -> list[Hook]:
        wishes, per_epoch, requests = self.wishes, self.run.steps_per_epoch, self.run.requests
        own_hook = type(self.logger).on_step_end is not ModelLogger.on_step_end
        save = every(1 if own_hook else wishes.save_steps)  # a hook of the user's own is called after every step
        check, judge, draw = every(wishes.checkpoint_steps), every(wishes.eval_steps), every(wishes.draw_steps)
        epoch, last = every(epochs=1, steps_per_epoch=per_epoch), every(steps=total)
        return [
            Hook("tell", lambda a, b: self.keeper.has_results(), lambda _: self.tell(self.keeper.poll())),
            Hook("evaluate", lambda a, b: wishes.eval_dataset is not None and judge(a, b), self.evaluate),
            Hook("draw", lambda a, b: wishes.draw is not None and draw(a, b), self.draw),
            Hook("save", lambda a, b: wishes.save_steps is not None and save(a, b), self.save_step),
            Hook("epoch", lambda a, b: wishes.save_steps is None and epoch(a, b), self.save_epoch),
            Hook("checkpoint", lambda a, b: check(a, b) | last(a, b) | requests.save, self.checkpoint),
        ]

    @contextmanager
    def best(self) -> Iterator[None]:
        """The model has the average's weights inside the block, where there is one, and computes as in a step."""
        averaged = EMA in self.averages.tracks
        weights = self.averages.in_place_of(EMA, self.engine.weights) if averaged else nullcontext()
        with weights, setup.autocast_of(self.accelerator, self.wishes):  # in this order: autocast caches weights
            yield

    def save_step(self, progress: Progress) -> None:
        """By the logger, which counts optimizer steps."""
        self.logger.num_steps = progress.step - 1
        with self.best():
            self.logger.on_step_end(self.accelerator, self.model, self.wishes.save_steps)

    def save_epoch(self, progress: Progress) -> None:
        """By the logger, after the epoch that just ended."""
        self.logger.num_steps = progress.step
        with self.best():
            self.logger.on_epoch_end(self.accelerator, self.model, progress.position // self.run.steps_per_epoch - 1)

    def evaluate(self, progress: Progress) -> None:
        """The validation loss at fixed times with fixed noise, of the weights that would be saved."""
        dataset = self.wishes.eval_dataset
        assert dataset is not None
        samples = Samples(dataset, 0, self.wishes.batch_size * self.launch.world, self.wishes.bucket_of)
        batches = TaskBatches(dataset, samples, self.launch.rank, self.launch.world, 1)
        items: Any = ((batches[at], q) for at in range(samples.order.steps_per_epoch) for q in QUANTILES)
        with self.best():
            losses = validate(items, self.engine.evaluate, self.engine.sum_over_ranks)
        info(f"eval at step {progress.step}: flow loss {losses['flow']:.4f}")
        self.run.log("eval", **progress.counts(), set="eval", weights=self._words, **losses)

    def draw(self, progress: Progress) -> None:
        """The picture that the user's function gives, on the main process; with cut weights all call it."""
        assert self.wishes.draw is not None
        with self.best(), torch.no_grad(), as_user_error("draw(model)"):
            picture = self.wishes.draw(self.model)
        if picture is not None and not hasattr(picture, "save"):
            raise UserError(f"draw(model) gave a {type(picture).__name__}; return a PIL picture, or None")
        if self.launch.is_main and picture is not None:
            path = self.logger.output_path / "samples" / f"step-{progress.step:08d}.png"
            path.parent.mkdir(exist_ok=True)
            picture.save(path)
            self.run.log("sample", **progress.counts(), weights=self._words, file=f"samples/{path.name}")

    @property
    def _words(self) -> str:
        return EMA if EMA in self.averages.tracks else "raw"

    # --- checkpoints -----------------------------------------------------------------------------

    def pieces(self) -> Iterator[TensorPiece]:
        """All that a checkpoint holds of this rank."""
        shadows = (
            self.engine.like_weights(track_kind(name), track.shadow) for name, track in self.averages.tracks.items()
        )
        return chain(self.engine.pieces(), chain.from_iterable(shadows))

    def checkpoint(self, progress: Progress) -> None:
        """Copy all that the task needs to go on, and write it while it goes on."""
        facts = {"progress": progress.as_dict(), "order": order_facts(self.samples.order)}
        facts["window"] = self.run.meter.window.as_dict()
        self.groups.wait_for_all(self.keeper.is_idle)
        self._kept_at = progress.step
        self.keeper.save(progress.step, self.pieces(), facts)

    def tell(self, ended: Sequence[CheckpointSaved | CheckpointFailed]) -> None:
        """Say and log which saves failed. Training goes on: the next one may succeed."""
        for item in ended:
            self._failed = None
            if isinstance(item, CheckpointFailed):
                self._failed = f"the checkpoint at step {item.step} failed: {item.reason}"
                info(self._failed)
                self.run.log("checkpoint_failed", step=item.step, reason=item.reason)
            elif item.warning:
                info(item.warning)

    def _resume(self) -> dict[str, Any] | None:
        folder = self.logger.output_path / "checkpoints"
        path = self.groups.decide_on_rank_0(self.launch.is_main, lambda: _text(newest_checkpoint(folder)))
        for broken in incomplete_checkpoints(folder) if self.launch.is_main else ():
            info(f"ignoring {broken}: it is not whole (a save was cut short)")
        if path is None:
            info(f"no checkpoint under {folder} yet: starting from the beginning")
            return None
        saved = open_checkpoint(Path(path))
        if saved.facts["order"] != order_facts(self.samples.order):
            raise UserError(f"{path} was trained on other data, in other batches or with another seed; restore them")
        saved.load_into(self.pieces())
        self.run.progress = Progress(**saved.facts["progress"])
        window: dict[str, Any] = saved.facts["window"]
        return window

    def _finish(self, begun: Progress, done: Progress, total: int) -> None:
        self.groups.wait_for_all(self.keeper.is_idle)
        self.tell(self.keeper.wait())
        self.keeper.close()
        if self._failed:
            raise UserError(f"{self._failed}; make room, then resume")
        if done.step < total:
            self.run.log("stop", **done.counts(), reason=self.run.requests.reason)
            raise Stopped(f"{self.run.requests.reason} at step {done.step} of {total}; resume=True goes on from there")
        if (steps := done.step - begun.step) and steps == done.skipped - begun.skipped:
            raise UserError(
                f"none of {steps} steps was taken: loss or gradient was never finite; lower the learning rate or look "
                "at the data"
            )
        self.logger.num_steps = done.step
        with self.best():
            self.logger.on_training_end(self.accelerator, self.model, self.wishes.save_steps)
        self.run.log("stop", **done.counts(), reason="finished")


def _begin(
    dataset: Any, model: DiffusionTrainingModule, logger: ModelLogger, wishes: TaskSettings, take: Callable[[], None]
) -> None:
    """What the main process looks at before anything is done: the folder, and whether processed data fit the units."""
    take()
    newest = newest_checkpoint(logger.output_path / "checkpoints")
    if newest is not None and not wishes.resume:
        raise UserError(
            f"{logger.output_path} holds a task ({newest.name}); go on with resume=True, or choose another output_path"
        )
    if wishes.eval_dataset is not None:
        length_of(wishes.eval_dataset)
    if isinstance(dataset, ProcessedDataset):
        require_same_recipe(dataset, model)


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)
