"""`launch_training_task`: train a user's module on a user's dataset."""

import atexit
import signal
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.utils.data import Dataset

from sd3_light import __version__
from sd3_light.checkpoint.lock import locked_folder
from sd3_light.checkpoint.progress import EMA, Progress
from sd3_light.checkpoint.reading import open_checkpoint
from sd3_light.checkpoint.requests import SIGNALS, RunRequests
from sd3_light.checkpoint.store import checkpoint_name
from sd3_light.config.faults import RESUMABLE, Stopped, UserError
from sd3_light.config.schema_tables import MonitoringConfig
from sd3_light.core.model import of_denoiser
from sd3_light.data.loader import PipelineDataLoader
from sd3_light.engines import Engine, deepspeed
from sd3_light.engines.accelerate import accelerated
from sd3_light.engines.errors import TASK_OUT_OF_MEMORY, as_user_error, explain_runtime_errors
from sd3_light.engines.feed import order_facts
from sd3_light.engines.processes import ProcessGroups, abort_process_group, start_process_group
from sd3_light.engines.torch import TorchEngine
from sd3_light.evaluate.validation import EvalPreparer, QuantileBatches, eval_points, validate
from sd3_light.export.background_saves import checkpoint_to_resume, newest_usable
from sd3_light.export.trainable import swap_loaded
from sd3_light.files import OWN_FILES, sweep_files
from sd3_light.model.adapter_layers import AdapterDropout, cast_frozen_linears
from sd3_light.optim.ema import Averages
from sd3_light.optim.schedules import learning_rate
from sd3_light.runlog import RunLog, info, open_trackers, set_main_process
from sd3_light.sources.video import write_video
from sd3_light.tasks.batches import length_of
from sd3_light.tasks.call import TaskCall
from sd3_light.tasks.identity import require_same_identity
from sd3_light.tasks.logger import ModelLogger, call_on_step_end
from sd3_light.tasks.models import CustomForward, UnitModel
from sd3_light.tasks.module import DiffusionTrainingModule
from sd3_light.tasks.processed import ProcessedDataset
from sd3_light.tasks.residence import cost_beside_shards, place_shards, require_shards, training_steps
from sd3_light.tasks.settings import TaskSettings
from sd3_light.train.driver import Driver, HookSchedule, RunHooks
from sd3_light.train.idle import DeviceGaps, IdleAdvice, watch_updates
from sd3_light.train.loop import Run, every
from sd3_light.train.meter import Meter
from sd3_light.train.resume import load_averages
from sd3_light.train.teacher import start_of_adapter, teach_by_average

_DAMAGED_REMEDY = "restore one from a copy, or choose another output_path"


class TaskStopped(Stopped, SystemExit):
    """`Stopped` that ends a script which does not catch it with exit code ``code``, without a traceback."""

    def __init__(self, reason: str, code: int) -> None:
        super().__init__(reason)
        self.code = code


@contextmanager
def aborting_on_error() -> Iterator[None]:
    """Abort the process group after an error: the other processes may be in the middle of a collective.

    A request to stop ends all processes at the same step, so it aborts nothing.
    """
    try:
        yield
    except Stopped:
        raise
    except BaseException:
        if dist.is_initialized() and dist.get_world_size() > 1:
            abort_process_group()
        raise


@aborting_on_error()
@explain_runtime_errors()
def launch_training_task(
    accelerator: Accelerator | None,
    dataset: Dataset[Any],
    model: nn.Module,
    model_logger: ModelLogger,
    learning_rate: float = 1e-5,
    weight_decay: float = 1e-2,
    num_workers: int = 1,
    save_steps: int | None = None,
    num_epochs: int = 1,
    args: Any = None,
    **settings: Any,
) -> Progress:
    """Train ``model`` on ``dataset`` with AdamW and a constant learning rate by default; return the final progress.

    ``model`` is a `DiffusionTrainingModule`, or any torch module with ``forward(data)``, which returns the loss of a
    sample, and ``trainable_modules()``. ``model_logger`` is a `ModelLogger`, or an object with its methods.

    ``model_logger`` saves every ``save_steps`` optimizer steps (None: after every epoch). ``settings`` are further
    fields of `TaskSettings`; attributes of ``args`` that are not None override all of them. The log, checkpoints and
    sample images are in ``model_logger.output_path``. With several processes all call it with the same arguments.
    The last step is always saved.

    Raises `Stopped` on all processes if a signal or the file `save_quit` ended the task early. A script that does not
    catch it ends with exit code 75 after a signal, or 0 after the file.
    """
    documented: dict[str, Any] = {"learning_rate": learning_rate, "weight_decay": weight_decay}
    documented |= {"num_workers": num_workers, "save_steps": save_steps, "num_epochs": num_epochs}
    resolved = TaskSettings.of({**documented, **settings}, args)
    task = TaskCall.of(accelerator, dataset, model, model_logger, resolved)
    with ExitStack() as stack:
        driver = _make_driver(task, stack)
        if driver.launch.is_main:
            monitoring = getattr(model_logger, "monitoring", MonitoringConfig())
            trackers = open_trackers(monitoring, driver.folder, resolved.plain_values())
            driver.run.log = stack.enter_context(closing(RunLog(driver.folder, trackers=trackers))).event
        end = _train(stack.enter_context(driver.running()), model_logger, resolved.engine)
    _require_finished(driver.run)
    return end


def _train(driver: Driver, logger: ModelLogger, engine: str) -> Progress:
    run = driver.run
    start = driver.run.progress
    logger.num_steps = start.step
    facts = {"total": run.total_steps, "steps_per_epoch": run.steps_per_epoch, "world": driver.launch.world_size}
    kind = "resume" if start.step else "start"
    run.log(kind, **start.as_dict(), **facts, engine=engine, version=__version__)
    return driver.train()


def _require_finished(run: Run) -> None:
    """Raise `TaskStopped` if the run was asked to stop before its last step."""
    step = run.progress.step
    requests = run.requests
    if step >= run.total_steps:
        return
    stopped = f"{requests.reason} at step {step} of {run.total_steps}; resume=True continues from there"
    info(f"stopped: {stopped}")
    if requests.is_interrupted:
        atexit.register(_ignore_signals)
    raise TaskStopped(stopped, RESUMABLE if requests.is_interrupted else 0)


def _ignore_signals() -> None:
    """Ignore later signals while the interpreter exits: it would restore the defaults, which change the exit code."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


# --- setting up ----------------------------------------------------------------------------------


def _make_driver(task: TaskCall, stack: ExitStack) -> Driver:
    """Build the run and its driver. First the main process locks the folder; ``stack`` releases it."""
    settings = task.settings
    launch = task.launch
    device = task.device
    model = task.model
    set_main_process(launch.is_main)
    all_write = settings.engine == "deepspeed" or settings.parallel == "fsdp2"
    groups = start_process_group(launch, device, 600.0, all_write)
    groups.decide_on_rank_0(lambda: _check_start(task, stack))
    order = task.samples.order
    _prepare_module(task, stack)
    cost = cost_beside_shards(task)
    engine = _make_engine(task, groups)
    if isinstance(task.dataset, ProcessedDataset):
        stack.callback(setattr, task.dataset, "resident", None)
    place_shards(task, groups, cost)  # after the engine, which moves the module to the GPU
    averages = Averages(of_denoiser(engine.weights), task.config.ema)
    teach_by_average(model, engine, averages)
    total = task.total_steps
    requests = RunRequests(task.folder if launch.is_main else None, group=groups.control)
    run = Run(
        engine=engine,
        steps=training_steps(task, requests.on_lost_worker),
        samples_in=order.batch_size,
        learning_rate=lambda step: learning_rate(step, total, settings.learning_rate, settings),
        total_steps=total,
        averages=averages,
        requests=requests,
        begin_step=model.begin,
        steps_per_epoch=order.steps_per_epoch,
        max_nonfinite_steps=settings.max_nonfinite_steps,
        logging_steps=settings.logging_steps,
        idle_advice=IdleAdvice(settings.num_workers, workers_key="num_workers", batch_key="batch_size"),
    )
    hooks = _TaskHooks(task, task.hooks_accelerator(), groups, run)
    driver = Driver(
        run=run,
        launch=launch,
        groups=groups,
        folder=task.folder,
        hooks=hooks.run_hooks(),
        schedule=_make_schedule(settings, task.logger, order.steps_per_epoch),
        facts={"order": order_facts(order)},
        keep_last=settings.keep_last_n_checkpoints,
        out_of_memory=TASK_OUT_OF_MEMORY,
        resume_hint="resume=True",
        stop_if_first_save_fails=settings.stop_if_first_save_fails,
    )
    gaps = None
    if device.type == "cuda":
        gaps = DeviceGaps()
        watch_updates(engine, gaps)
    run.meter = Meter(launch.world_size, window=_resume(driver) if settings.resume else None, gaps=gaps)
    return driver


def _make_engine(task: TaskCall, groups: ProcessGroups) -> Engine:
    """Return the engine that the settings name, with the module in it."""
    if task.config.zero_stage:
        deepspeed.require_installed('engine="deepspeed"')
        return deepspeed.make_engine(task.model, task.config, task.launch, task.device, groups.writers)
    lay_out = None
    if task.running is not None:
        lay_out = partial(accelerated, accelerator=task.running, launch=task.launch, writers=groups.writers)
    return TorchEngine(task.model, task.config, task.launch, task.device, groups.writers, lay_out)


def _check_start(task: TaskCall, stack: ExitStack) -> None:
    """Lock the folder; raise if it holds another task, or if processed data does not fit the units."""
    folder = task.folder
    settings = task.settings
    stack.enter_context(locked_folder(folder, "output_path"))
    sweep_files(folder, OWN_FILES)
    newest = newest_usable(folder, _DAMAGED_REMEDY)
    if newest is not None and not settings.resume:
        raise UserError(
            f"{folder} holds a task ({newest.name}); continue it with resume=True, or choose another output_path"
        )
    require_shards(task)
    if settings.eval_dataset is not None:
        length_of(settings.eval_dataset)
    if isinstance(task.dataset, ProcessedDataset) and isinstance(task.model, UnitModel):
        require_same_identity(task.dataset, task.model.module)


def _prepare_module(task: TaskCall, stack: ExitStack) -> None:
    model = task.model
    seed = task.settings.seed
    if task.settings.swap_blocks and getattr(model.module, "adapter", None) is None:
        raise UserError("swap_blocks: only frozen weights under an adapter are swapped; call train_adapter, or use 0")
    if isinstance(model, CustomForward):
        model.seed = seed
        model.freeze_the_rest()
        return
    module: DiffusionTrainingModule = model.module
    module.seed = seed
    stack.enter_context(module.fixed_units())
    if module.adapter is not None and module.adapter.dropout > 0:
        model.dropout = AdapterDropout(module.transformer, seed, task.launch.rank)
    if module.objective is not None and module.objective.teacher not in (None, "average"):
        if module.objective.teacher != "start" or module.adapter is None:
            raise UserError('the objective\'s teacher is not "average" or "start"; the start needs train_adapter(...)')
        model.teacher = partial(start_of_adapter, model)
    if module.adapter is not None and task.is_bf16:
        cast_frozen_linears(module.transformer, torch.bfloat16)
    if task.settings.swap_blocks:
        swap_loaded(module.transformer, task.settings.swap_blocks, task.device)


def _make_schedule(settings: TaskSettings, logger: ModelLogger, steps_per_epoch: int) -> HookSchedule:
    save = every(settings.save_steps)
    if type(logger).on_step_end is not ModelLogger.on_step_end:
        save = every(1)  # a custom on_step_end is called after every step
    elif settings.save_steps is None:
        save = every(epochs=1, steps_per_epoch=steps_per_epoch)
    return HookSchedule(
        evaluate=every(settings.eval_steps),
        sample=every(settings.draw_steps),
        save=save,
        checkpoint=every(settings.checkpoint_steps),
    )


def _resume(driver: Driver) -> dict[str, Any] | None:
    """Load the newest checkpoint, if there is one; return the sums since its last log record."""
    run = driver.run
    path = driver.groups.decide_on_rank_0(lambda: checkpoint_to_resume(driver.folder, _DAMAGED_REMEDY))
    if path is None:
        return None
    saved = open_checkpoint(path)
    if saved.facts["order"] != driver.facts["order"]:
        raise UserError(f"{path} was trained on other data, in other batches or with another seed; restore them")
    saved.load_into(run.engine.pieces())
    load_averages(saved, run.engine, run.averages)
    run.progress = saved.progress
    window: dict[str, Any] = saved.facts["window"]
    return window


# --- hooks ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _TaskHooks:
    """What a task does between steps: the logger's saves, the user's evaluation set and images."""

    task: TaskCall
    accelerator: Accelerator | None
    groups: ProcessGroups
    run: Run

    @property
    def settings(self) -> TaskSettings:
        """The settings of the task."""
        return self.task.settings

    @property
    def logger(self) -> Any:
        """The logger that saves: a `ModelLogger`, or an object with its methods."""
        return self.task.logger

    @property
    def model(self) -> nn.Module:
        """The user's module."""
        model: nn.Module = self.task.model.module
        return model

    def run_hooks(self) -> RunHooks:
        """Return the hooks for the driver."""
        if self.settings.eval_at_fixed_t and not hasattr(getattr(self.model, "loss", None), "at_fixed_times"):
            raise UserError(
                "eval_at_fixed_t needs a loss that draws times from quantiles, such as FlowMatchSFTLoss; leave it out"
            )
        return RunHooks(
            evaluate=self.evaluate if self.task.evaluates else None,
            evaluate_all=len(self.run.averages.tracks) > 1,
            sample=None if self.settings.draw is None else self.draw,
            save=self.save,
            finish=self.finish,
            autocast=nullcontext if self.task.running is None else self.task.running.autocast,
        )

    def evaluate(self) -> Iterable[tuple[str, Mapping[str, float]]]:
        """Yield the validation loss at fixed times with fixed noise."""
        task = self.task
        engine = self.run.engine
        points = eval_points(self.settings.eval_at_fixed_t)
        for name, batches in task.evaluation_batches():
            items = QuantileBatches(batches, batches.samples.order.steps_per_epoch, points)
            prepared = PipelineDataLoader(items, None, 1, EvalPreparer(task.model.preparer()))
            yield name, validate(prepared, engine.evaluate, engine.sum_over_ranks, points)

    def draw(self, progress: Progress, weights: str) -> Path | None:
        """Write what the user's function returns; all processes call it, as sharded weights need."""
        assert self.settings.draw is not None
        layout = getattr(self.run.engine, "layout", None)
        whole = nullcontext() if layout is None else layout.whole()
        with whole, torch.no_grad(), as_user_error("draw(model)"):
            drawn = self.settings.draw(self.model)
        frames = drawn if isinstance(drawn, list | tuple) else [drawn]
        if drawn is not None and not (frames and all(hasattr(frame, "save") for frame in frames)):
            kind = type(drawn).__name__
            raise UserError(f"draw(model) returned a {kind}; return a PIL image, a list of them (a video), or None")
        if drawn is None or not self.task.launch.is_main:
            return None
        stem = self.task.folder / "samples" / checkpoint_name(progress.step)
        if frames is drawn:
            return write_video(stem.with_suffix(".gif"), frames)
        stem.parent.mkdir(exist_ok=True)
        drawn.save(stem.with_suffix(".png"))
        return stem.with_suffix(".png")

    def save(self, progress: Progress) -> None:
        """Call the logger after a step, and after an epoch where ``save_steps`` is None."""
        self.logger.num_steps = progress.step - 1  # the logger counts optimizer steps itself
        assert self.run.last_result is not None
        loss = self.run.last_result.first
        call_on_step_end(self.logger, self.accelerator, self.model, self.settings.save_steps, loss)
        if self.settings.save_steps is None and progress.position % self.run.steps_per_epoch == 0:
            self.logger.on_epoch_end(self.accelerator, self.model, progress.position // self.run.steps_per_epoch - 1)

    def finish(self, progress: Progress) -> None:
        """Save, through the logger, what its intervals left out: the last step always has a file."""
        self.logger.num_steps = progress.step
        name = self._missing_file(progress)
        if name is not None and hasattr(self.logger, "save_model"):
            self.logger.save_model(self.accelerator, self.model, name)
        self.logger.on_training_end(self.accelerator, self.model, self.settings.save_steps)
        averages = self.run.averages
        weights = self.run.engine.weights
        for track in [name for name in averages.tracks if name != EMA and hasattr(self.logger, "save_model")]:
            with averages.in_place_of(track, weights):
                self.logger.save_model(self.accelerator, self.model, f"{self._label(progress)}.{track}.safetensors")

    def _label(self, progress: Progress) -> str:
        """Return the name of a step's file: its epoch if saves are by epoch and it ends one."""
        epoch, rest = divmod(progress.step, self.run.steps_per_epoch)
        return f"epoch-{epoch - 1}" if self.settings.save_steps is None and not rest else f"step-{progress.step}"

    def _missing_file(self, progress: Progress) -> str | None:
        """Return the file of the last step that the logger has not written and `on_training_end` does not write.

        Resuming a finished task takes no step; then the file may be there or not.
        """
        save_steps = self.settings.save_steps
        is_due = progress.step % (save_steps or self.run.steps_per_epoch) == 0
        has_stepped = self.run.last_result is not None
        if (is_due and has_stepped) or (save_steps is not None and not is_due):
            return None
        path = self.task.folder / f"{self._label(progress)}.safetensors"
        exists = not has_stepped and self.groups.decide_on_rank_0(path.exists)
        return None if exists else path.name
