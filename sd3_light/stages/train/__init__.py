"""The training stage: from a cache to checkpoints and exports."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from sd3_light.checkpoint.state import Progress
from sd3_light.config import LoadedConfig, TrainConfig
from sd3_light.config.faults import Stopped, UserError
from sd3_light.data.loader import worker_fault
from sd3_light.data.order import Order
from sd3_light.engines import Launch, deepspeed
from sd3_light.engines.processes import Agreement, lost_peer
from sd3_light.model.peaks import peak_flops
from sd3_light.model.start import where_weights_start
from sd3_light.optim.schedules import learning_rate
from sd3_light.stages.train.duties import Duties, make_sampler
from sd3_light.stages.train.folder import RunFolder
from sd3_light.stages.train.learner import Learner, make_learner, require_blocks, what_starts
from sd3_light.stages.train.restore import Restored, Resume, require_start
from sd3_light.stages.train.scene import Scene, open_scene
from sd3_light.training.feed import flops_counter, training_steps
from sd3_light.training.loop import Run, train
from sd3_light.training.meter import Meter
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
    require_blocks(loaded.train, launch, by_deepspeed)
    if launch.device().type == "cuda":
        torch.cuda.set_device(launch.device())
    with RunFolder(loaded, launch.is_main) as folder, _faults_in_words():
        scene = open_scene(loaded, launch, folder, resume, by_deepspeed)
        # before the engine takes the GPU: prompts that the cache does not have are encoded now
        sampler = make_sampler(scene)
        learner, saved, start = make_learner(scene), scene.saved, resume or Resume()
        restored = saved.load(learner.engine, learner.averages, scene.order, start) if saved else Restored()
        training = _plan(scene, learner, restored)
        progress, total = restored.progress, training.total_steps
        scene.announce(what_starts(scene.config), progress, total)
        with training.watch, Duties(scene, learner, sampler, training) as duties:
            training.duties = duties.of_run(total)
            if scene.config.eval_before_first_step and progress.step == 0:
                duties.evaluate(progress)
            if saved and saved.is_own(folder.path) and progress.position:
                duties.catch_up(progress)
            done = train(training)
            duties.finish(done)
    _require_progress(progress, done)
    _require_end(training.watch, done, total)
    return done


def _plan(scene: Scene, learner: Learner, restored: Restored) -> Run:
    """The run that the loop will walk, without its duties."""
    config, launch, device, order = scene.config, scene.launch, scene.device, scene.order
    engine, share = learner.engine, scene.share
    total = total_steps(config, order, restored.progress)
    place = scene.folder.path if launch.is_main else None
    ahead = device if device.type == "cuda" and engine.in_turn else None
    dropout = learner.module.dropout
    return Run(
        engine=engine,
        steps=training_steps(
            config, scene.data, order, share, engine, learner.pipeline.preparer, ahead, launch.is_fed(scene.stages)
        ),
        samples_in=order.batch_size,
        learning_rate=lambda step: rate(config, step, total),
        total_steps=total,
        progress=restored.progress,
        averages=learner.averages,
        log=scene.folder.log,
        meter=Meter(launch.world, _peak(device, config), restored.window),
        watch=Watch(place, config.checkpoint_every_n_minutes, Agreement(scene.groups.control, NUM_WISHES)),
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
