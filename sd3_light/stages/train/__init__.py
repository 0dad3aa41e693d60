"""The training stage: from a cache to checkpoints and exports."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from diffusers import SD3Transformer2DModel

from sd3_light.checkpoint.state import Progress
from sd3_light.config import LoadedConfig, TrainConfig
from sd3_light.config.faults import Stopped, UserError
from sd3_light.data.loader import worker_fault
from sd3_light.data.order import Order
from sd3_light.data.stream import CachedDataset, MicroBatches
from sd3_light.engines import Engine, Launch, deepspeed
from sd3_light.engines.processes import Agreement, Groups, lost_peer, share_patience, start_process_group
from sd3_light.engines.torch import TorchEngine
from sd3_light.model.adapter import AdapterDropout
from sd3_light.model.fast.choice import config_obstacle, device_obstacle
from sd3_light.model.fast.forward import obstacle
from sd3_light.model.layers import compile_blocks
from sd3_light.model.linears import adapter_parameters
from sd3_light.model.peaks import peak_flops
from sd3_light.model.start import where_weights_start
from sd3_light.optim.ema import Averages
from sd3_light.optim.schedules import learning_rate
from sd3_light.runlog import say
from sd3_light.stages.train.duties import Duties, make_sampler
from sd3_light.stages.train.folder import RunFolder
from sd3_light.stages.train.restore import (
    Restored,
    Resume,
    choose_checkpoint,
    open_saved,
    require_start,
    settings_in_force,
)
from sd3_light.training.adapter import choose_what_trains, saver_of
from sd3_light.training.feed import flops_counter, make_order, open_cache, training_steps
from sd3_light.training.light_sd3 import LightSD3Pipeline
from sd3_light.training.loop import Run, train
from sd3_light.training.meter import Meter
from sd3_light.training.module import SD3TrainingModule
from sd3_light.training.watch import NUM_WISHES, SAVE_QUIT, Watch

__all__ = ["Resume", "require_start", "run"]


def run(
    loaded: LoadedConfig, launch: Launch | None = None, resume: Resume | None = None, by_deepspeed: bool = False
) -> Progress:
    """Train to the end of the config's epochs or steps, by torch's engine or DeepSpeed's; the cache must be there.

    Raises `Stopped` when a signal asked to stop and the checkpoint to go on from is saved.
    """
    launch = launch or Launch()
    deepspeed.require(loaded.train, launch, by_deepspeed)
    device, stages = launch.device(), loaded.train.pipeline_stages
    share = launch.of_data(stages)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with RunFolder(loaded, launch.is_main) as folder, _faults_in_words():
        data = open_cache(loaded.dataset, loaded.train, launch, in_memory=not loaded.train.sd3_streaming_dataset)
        all_write = deepspeed.all_write(loaded.train) if by_deepspeed else loaded.train.parallel == "fsdp2"
        groups = start_process_group(launch, device, loaded.train.dist_timeout_sec, all_write)
        saved = open_saved(groups.by_first(launch.is_main, lambda: choose_checkpoint(folder.path, resume)))
        config = settings_in_force(loaded.train, saved, resume)

        order = make_order(data, loaded, share)
        if saved is None:
            MicroBatches(data, order, share.rank, share.world, config.gradient_accumulation_steps).warm(0)
        # before the engine takes the GPU: prompts that the cache does not have are encoded now
        sampler = make_sampler(loaded, config, data, launch, stages)
        pipeline = LightSD3Pipeline(config.model, config.seed, data.empty_text())
        choose_what_trains(pipeline.transformer, config, device)
        saver = saver_of(config, pipeline.transformer, folder.path / "exports")
        if config.compile:
            compile_blocks(pipeline.transformer)
        fast = choose_blocks(config, pipeline.transformer, launch, device, by_deepspeed)
        module = SD3TrainingModule(pipeline.transformer, config, fast)
        if config.adapter is not None and config.adapter.dropout > 0:
            module.dropout = AdapterDropout(pipeline.transformer, config.seed, launch.rank)
        make = deepspeed.make_engine if by_deepspeed else TorchEngine
        engine: Engine = make(module, config, launch, device, groups.writers)
        share_patience(groups, config.dist_timeout_sec)
        saver.live = lambda: engine.whole(engine.weights)
        averages = Averages(engine.weights, config.ema)
        restored = saved.load(engine, averages, order, resume or Resume()) if saved else Restored()

        training = _plan(config, launch, device, groups, folder, data, order, pipeline, engine, averages, restored)
        progress, total = restored.progress, training.total_steps
        name = deepspeed.engine_name(config, launch) if by_deepspeed else TorchEngine.name_of(config, launch)
        source = saved.path if saved else None
        folder.announce(config, _start(config), progress, total, order, launch, device, source, name)
        folder.tell_dropped(data, order)
        if module.dropout is not None:
            training.begin_step = module.dropout.begin
        duties = Duties(
            loaded, config, launch, groups, order, sampler, pipeline.preparer, saver, training, folder, stages
        )
        with training.watch, duties:
            training.duties = duties.of_run(total)
            if config.eval_before_first_step and progress.step == 0:
                duties.evaluate(progress)
            if saved and saved.is_own(folder.path) and progress.position:
                duties.catch_up(progress)
            done = train(training)
            duties.finish(done)
    _require_progress(progress, done)
    _require_end(training.watch, done, total)
    return done


def _plan(
    config: TrainConfig,
    launch: Launch,
    device: torch.device,
    groups: Groups,
    folder: RunFolder,
    data: CachedDataset,
    order: Order,
    pipeline: LightSD3Pipeline,
    engine: Engine,
    averages: Averages,
    restored: Restored,
) -> Run:
    """The run that the loop will walk, without its duties."""
    total = total_steps(config, order, restored.progress)
    share = launch.of_data(config.pipeline_stages)
    place = folder.path if launch.is_main else None
    ahead = device if device.type == "cuda" and engine.in_turn else None
    return Run(
        engine=engine,
        steps=training_steps(config, data, order, share, engine, pipeline.preparer, ahead),
        samples_in=order.batch_size,
        learning_rate=lambda step: rate(config, step, total),
        total_steps=total,
        progress=restored.progress,
        averages=averages,
        log=folder.log,
        meter=Meter(launch.world, _peak(device, config), restored.window),
        watch=Watch(place, config.checkpoint_every_n_minutes, Agreement(groups.control, NUM_WISHES)),
        flops_in=flops_counter(where_weights_start(config.model), share.world, config.adapter is not None),
        steps_per_epoch=order.steps_per_epoch,
        max_nonfinite_steps=config.max_nonfinite_steps,
        logging_steps=config.logging_steps,
        steps_per_print=config.steps_per_print,
    )


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
        if fault := worker_fault(error) or lost_peer(error):
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


def _start(config: TrainConfig) -> str:
    """Where weights start and what trains, in words."""
    start, adapter = where_weights_start(config.model), config.adapter
    if adapter is None:
        return start.sentence
    kind = {"lora": "LoRA", "lokr": "LoKr", "loha": "LoHa"}[adapter.type]
    count = adapter_parameters(start.size, adapter)
    return f"a {kind} of rank {adapter.rank} ({count:,} weights) on the {start.sentence}"


def choose_blocks(
    config: TrainConfig, transformer: SD3Transformer2DModel, launch: Launch, device: torch.device, by_deepspeed: bool
) -> bool:
    """Whether the fast blocks run; says so where a GPU trains, and refuses what the config demands in vain."""
    size = where_weights_start(config.model).size
    reason = (
        config_obstacle(config, size, launch.world, by_deepspeed)
        or device_obstacle(config, device.type)
        or obstacle(transformer)
    )
    if reason is not None and config.fast is True:
        raise UserError(f'fast = true cannot be had: {reason}; write fast = "auto"')
    if device.type == "cuda" and launch.is_main:
        say("blocks: fast kernels" if reason is None else f"blocks: stock ({reason})")
    return reason is None


def _peak(device: torch.device, config: TrainConfig) -> float | None:
    if device.type != "cuda":
        return None
    return peak_flops(torch.cuda.get_device_name(device), config.model.transformer_dtype)


def _require_end(watch: Watch, done: Progress, total: int) -> None:
    if watch.quit and watch.reason != SAVE_QUIT and done.step < total:
        raise Stopped(f"{watch.reason} at step {done.step} of {total}; the checkpoint is saved: resume to go on")


def _require_progress(before: Progress, after: Progress) -> None:
    """A run in which no step was taken has trained nothing, and must not pass for one that has."""
    steps, skipped = after.step - before.step, after.skipped - before.skipped
    if steps and steps == skipped:
        raise UserError(
            f"none of {steps} steps was taken: loss or gradient was never finite; lower the learning rate or look at "
            "the data"
        )
