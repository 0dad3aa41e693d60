"""The training stage: from a cache to checkpoints and exports."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from sd3_light.budget.device_peaks import peak_flops
from sd3_light.checkpoint.progress import Progress
from sd3_light.config import LoadedConfig, TrainConfig
from sd3_light.config.faults import Stopped, UserError
from sd3_light.data.loader import worker_exit_error
from sd3_light.data.order import Order
from sd3_light.engines import Launch, deepspeed
from sd3_light.engines.processes import SharedFlags, lost_peer
from sd3_light.model.start import where_weights_start
from sd3_light.optim.schedules import learning_rate
from sd3_light.stages.train.context import RunContext, open_context
from sd3_light.stages.train.folder import RunFolder
from sd3_light.stages.train.hooks import RunHooks, make_sampler
from sd3_light.stages.train.resume import Restored, Resume, require_start
from sd3_light.stages.train.train_state import TrainState, make_train_state, require_blocks, what_starts
from sd3_light.training.data import flops_counter, training_steps
from sd3_light.training.loop import Run, train
from sd3_light.training.meter import Meter
from sd3_light.training.requests import NUM_FLAGS, SAVE_QUIT, RunRequests

__all__ = ["Resume", "require_start", "run"]


def run(
    loaded: LoadedConfig, launch: Launch | None = None, resume: Resume | None = None, by_deepspeed: bool = False
) -> Progress:
    """Train to the end of the config's epochs or steps, by torch's engine or DeepSpeed's; the cache must be there.

    Raises `Stopped` when a signal asked to stop and the checkpoint to go on from is saved.
    """
    launch = launch or Launch()
    deepspeed.require(loaded.train, launch, by_deepspeed)
    require_blocks(loaded.train, launch, by_deepspeed)
    if launch.device().type == "cuda":
        torch.cuda.set_device(launch.device())
    with RunFolder(loaded, launch.is_main) as folder, _faults_in_words():
        context = open_context(loaded, launch, folder, resume, by_deepspeed)
        # before the engine takes the GPU: prompts that the cache does not have are encoded now
        sampler = make_sampler(context)
        state, saved, start = make_train_state(context), context.saved, resume or Resume()
        restored = saved.load(state.engine, state.averages, context.order, start) if saved else Restored()
        training = _plan(context, state, restored)
        progress, total = restored.progress, training.total_steps
        context.announce(what_starts(context.config), progress, total)
        with training.requests, RunHooks(context, state, sampler, training) as hooks:
            training.hooks = hooks.of_run(total)
            if context.config.eval_before_first_step and progress.step == 0:
                hooks.evaluate(progress)
            if saved and saved.is_own(folder.path) and progress.position:
                hooks.catch_up(progress)
            done = train(training)
            hooks.finish(done)
    _require_progress(progress, done)
    _require_end(training.requests, done, total)
    return done


def _plan(context: RunContext, state: TrainState, restored: Restored) -> Run:
    """The run that the loop will walk, without its duties."""
    config, launch, device, order = context.config, context.launch, context.device, context.order
    engine, share = state.engine, context.share
    total = total_steps(config, order, restored.progress)
    place = context.folder.path if launch.is_main else None
    ahead = device if device.type == "cuda" and engine.sequential_micro_batches else None
    dropout = state.module.dropout
    return Run(
        engine=engine,
        steps=training_steps(
            config,
            context.data,
            order,
            share,
            engine,
            state.pipeline.preparer,
            ahead,
            launch.reads_data(context.stages),
        ),
        samples_in=order.batch_size,
        learning_rate=lambda step: rate(config, step, total),
        total_steps=total,
        progress=restored.progress,
        averages=state.averages,
        log=context.folder.log,
        meter=Meter(launch.world, _peak(device, config), restored.window),
        requests=RunRequests(place, config.checkpoint_every_n_minutes, SharedFlags(context.groups.control, NUM_FLAGS)),
        flops_in=flops_counter(where_weights_start(config.model), share.world, config.adapter is not None),
        steps_per_epoch=order.steps_per_epoch,
        max_nonfinite_steps=config.max_nonfinite_steps,
        logging_steps=config.logging_steps,
        steps_per_print=config.steps_per_print,
        begin_step=dropout.begin if dropout is not None else lambda step: None,
        faster_data=_faster_data(config) if device.type == "cuda" else "",
    )


def _faster_data(config: TrainConfig) -> str:
    now = f"now {config.num_dataloader_workers} a process"
    return f"raise num_dataloader_workers ({now}) while there are idle cores, or put the cache on a faster disk"


@contextmanager
def _faults_in_words() -> Iterator[None]:
    """Too little GPU memory, a dead worker and a lost process are the user's to mend: one line each."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise UserError(
            "the GPU is out of memory; lower micro_batch_size_per_gpu (and raise gradient_accumulation_steps), or "
            "write activation_checkpointing = true, compile = true or, on several GPUs, parallel = 'fsdp2'; "
            "`sd3-light check` foretells the need"
        ) from error
    except RuntimeError as error:
        if fault := worker_exit_error(error) or lost_peer(error):
            raise fault from error
        raise


def total_steps(config: TrainConfig, order: Order, progress: Progress) -> int:
    """The step that ends the run: `max_steps`, or what is left of the epochs since the data began."""
    by_epochs = None
    if config.epochs:
        by_epochs = progress.step + max(0, config.epochs * order.steps_per_epoch - progress.position)
    return min(limit for limit in (by_epochs, config.max_steps) if limit is not None)


def rate(config: TrainConfig, step: int, total: int) -> float:
    """The learning rate of a step."""
    if config.force_constant_lr is not None:
        return config.force_constant_lr
    return learning_rate(
        step,
        peak=config.optimizer.lr,
        schedule=config.lr_scheduler,
        warmup=config.warmup_steps,
        total=total,
        step_size=config.lr_step_size,
        step_gamma=config.lr_step_gamma,
    )


def _peak(device: torch.device, config: TrainConfig) -> float | None:
    if device.type != "cuda":
        return None
    return peak_flops(torch.cuda.get_device_name(device), config.model.transformer_dtype)


def _require_end(requests: RunRequests, done: Progress, total: int) -> None:
    if requests.quit and requests.reason != SAVE_QUIT and done.step < total:
        raise Stopped(f"{requests.reason} at step {done.step} of {total}; the checkpoint is saved: resume to go on")


def _require_progress(before: Progress, after: Progress) -> None:
    """A run in which no step was taken has trained nothing, and must not pass for one that has."""
    steps, skipped = after.step - before.step, after.skipped - before.skipped
    if steps and steps == skipped:
        raise UserError(
            f"none of {steps} steps was taken: loss or gradient was never finite; lower the learning rate or look at "
            "the data"
        )
