"""The training verb: from a cache to checkpoints and exports."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sd3_light.checkpoint.progress import Progress
from sd3_light.checkpoint.requests import RunRequests
from sd3_light.checkpoint.store import checkpoint_name
from sd3_light.config import LoadedConfig, TrainConfig, batch_size_for
from sd3_light.config.faults import Stopped
from sd3_light.core.cost import Layout
from sd3_light.core.registry import family_of, starting_weights, with_family_values
from sd3_light.cost.device_peaks import peak_flops
from sd3_light.data.loader import LoadTimes
from sd3_light.data.order import Order
from sd3_light.engines import Launch, deepspeed
from sd3_light.engines.blocks import require_blocks
from sd3_light.engines.cpu_threads import use_training_threads
from sd3_light.engines.errors import explain_runtime_errors
from sd3_light.engines.feed import TrainingData, flops_counter, order_facts, placeholder_steps, training_steps
from sd3_light.engines.protocol import StepStream
from sd3_light.evaluate.rewards import Reward
from sd3_light.evaluate.truths import load_truths
from sd3_light.evaluate.validation_loss import Evaluator
from sd3_light.export.background_saves import EXPORT, FOLDERS
from sd3_light.export.best import restore_best
from sd3_light.export.card_facts import SAMPLES
from sd3_light.optim.schedules import learning_rate
from sd3_light.runlog import info
from sd3_light.sample.in_training import SampledCache, Sampler
from sd3_light.sample.loop import Denoise
from sd3_light.train.context import RunContext, open_context
from sd3_light.train.driver import Driver, HookSchedule, RunHooks
from sd3_light.train.folder import RunFolder
from sd3_light.train.idle import DeviceGaps, IdleAdvice, watch_updates
from sd3_light.train.loop import Run, every
from sd3_light.train.measurement import Measurer, caption_requests
from sd3_light.train.memory_hint import memory_hint
from sd3_light.train.meter import Meter
from sd3_light.train.resume import (
    Resume,
    changed_keys,
    is_own_checkpoint,
    load_checkpoint,
    order_review,
    rate_settings,
    require_start,
)
from sd3_light.train.rollouts import drawn_samples
from sd3_light.train.state import MakeObjective, TrainState, describe_start, make_train_state

__all__ = ["OnSample", "Resume", "order_review", "require_start", "run"]

OnSample = Callable[[Progress, Sampler, Denoise], None]
"""Draws with the weights in the model: ``sampler.draw(denoise)`` returns the images of the config's prompts."""


def run(
    loaded: LoadedConfig,
    launch: Launch | None = None,
    resume: Resume | None = None,
    by_deepspeed: bool = False,
    on_sample: OnSample | None = None,
    objective: MakeObjective | None = None,
    reward: Reward | None = None,
) -> Progress:
    """Train to the end of the config's epochs or steps, with torch's engine or DeepSpeed's, on an existing cache.

    With ``on_sample`` the run is only measured: it is called in place of writing sample grids, and nothing is exported.
    ``objective`` takes the denoiser and returns what it is trained for, in place of [objective]. ``reward`` scores
    images in place of `reward.score`.
    Raises `Stopped` if a signal stopped the run; the checkpoint to resume from is saved.
    """
    launch = launch or Launch()
    loaded = with_family_values(loaded)
    deepspeed.require(loaded.train, launch, by_deepspeed)
    start = starting_weights(loaded.train.model)
    device = launch.device()
    cost = family_of(loaded.train.model).cost(start, loaded.train.model)
    require_blocks(loaded.train, cost, launch, device, by_deepspeed)  # raises before anything is opened
    if device.type == "cuda":
        torch.cuda.set_device(device)
    layout = Layout(launch.world_size, by_deepspeed)
    hint = memory_hint(loaded.train, layout)
    with RunFolder(loaded, launch.is_main) as folder, explain_runtime_errors(hint):
        context = open_context(loaded, start, launch, folder, resume, by_deepspeed)
        if device.type == "cpu":
            _use_cpu(context)
        # before the engine fills the GPU: prompts that are not in the cache are encoded now
        sampler = _make_sampler(context)
        measurer = _make_measurer(context)
        state = make_train_state(context, objective, reward)
        resumed = context.resumed
        options = resume or Resume()
        progress = Progress()
        window = None
        if resumed is not None:
            changes = changed_keys(replace(loaded, train=context.config), resumed)
            progress, window = load_checkpoint(resumed, state.engine, state.averages, context.order, options, changes)
        if measurer is not None:
            measurer.resume(folder.path / "log.jsonl", progress.step)
            if launch.is_main:
                restore_best(folder.path / FOLDERS[EXPORT], measurer.best)
        training = _make_run(context, state, progress, window)
        context.announce(
            describe_start(context.start, context.cost, context.config.adapter), progress, training.total_steps
        )
        has_graphs = getattr(state.engine, "graphs", None) is not None
        driver = Driver(
            run=training,
            launch=launch,
            groups=context.groups,
            folder=folder.path,
            hooks=_make_hooks(context, state, sampler, measurer, on_sample, training.requests),
            schedule=_make_schedule(context.config, context.order.steps_per_epoch, training.total_steps),
            facts={
                "order": order_facts(context.order),
                "settings": rate_settings(context.config),
                "model": context.model_facts.as_dict(),
            },
            keep_last=context.config.keep_last_n_checkpoints,
            out_of_memory=memory_hint(context.config, layout, has_graphs, context.residence),
            resume_hint="--resume",
            stop_if_first_save_fails=context.config.stop_if_first_save_fails,
        )
        with driver.running():
            if driver.hooks.evaluate and context.config.eval_before_first_step and progress.step == 0:
                driver.evaluate(progress)
            if driver.hooks.sample and context.config.sampling.before_first_step and progress.step == 0:
                driver.sample(progress)
            if resumed and is_own_checkpoint(resumed.path, folder.path) and progress.position:
                driver.catch_up(progress)
            end = driver.train()
    requests = training.requests
    total = training.total_steps
    stopped = f"{requests.reason} at step {end.step} of {total}; the checkpoint is saved: resume to continue"
    if requests.is_interrupted and end.step < total:
        raise Stopped(stopped)
    if end.step < total:
        info(f"stopped: {stopped}")
    elif end.step > progress.step:
        info(f"finished: {total:,} steps, {end.samples:,} samples; the run is in {folder.path}")
    return end


def _use_cpu(context: RunContext) -> None:
    """Choose the CPU threads of the run for its largest micro-batch."""
    threads = use_training_threads(context.largest_flops, context.launch.local_world_size)
    if threads is not None:
        info(f"CPU threads: {threads} (OMP_NUM_THREADS sets another number)")


def _make_run(context: RunContext, state: TrainState, progress: Progress, window: Mapping[str, Any] | None) -> Run:
    """Return the run that the loop trains, without its hooks."""
    config = context.config
    launch = context.launch
    device = context.device
    order = context.order
    engine = state.engine
    share = context.share
    micro = config.gradient_accumulation_steps
    total = total_steps(config, order, progress)
    folder = context.folder.path if launch.is_main else None
    prefetch_to = None
    peak = None
    gaps = None
    advice = None
    times = LoadTimes()
    if device.type == "cuda":
        prefetch_to = device if engine.sequential_micro_batches else None
        peak = peak_flops(torch.cuda.get_device_name(device), config.model.transformer_dtype)
        gaps = DeviceGaps()
        advice = IdleAdvice(config.num_dataloader_workers, times)
        watch_updates(engine, gaps)
    requests = RunRequests(folder, config.checkpoint_every_n_minutes, context.groups.control)
    samples_in: Callable[[int], int] = order.batch_size
    if config.reward is not None:  # the objective draws the samples
        size = batch_size_for(config.micro_batch_size_per_gpu, context.bucket.resolution)
        samples_in = partial(drawn_samples, size * micro * share.world_size)
    steps: Callable[[int], StepStream] = partial(placeholder_steps, samples_in, share.world_size, micro)
    if config.reward is None and launch.reads_data(context.stages):
        source = TrainingData(config, context.data, order, share, context.resident, context.by_segment)
        steps = training_steps(source, engine, state.preparer, prefetch_to, times, requests.on_lost_worker)
    return Run(
        engine=engine,
        steps=steps,
        samples_in=samples_in,
        learning_rate=lambda step: rate(config, step, total),
        total_steps=total,
        progress=progress,
        averages=state.averages,
        log=context.folder.log,
        meter=Meter(launch.world_size, peak, window, gaps, times),
        requests=requests,
        flops_in=flops_counter(context.cost, share.world_size, config.adapter is not None, config.terms),
        steps_per_epoch=order.steps_per_epoch,
        max_nonfinite_steps=config.max_nonfinite_steps,
        logging_steps=config.logging_steps,
        steps_per_print=config.steps_per_print,
        begin_step=state.begin_step,
        idle_advice=advice,
    )


def total_steps(config: TrainConfig, order: Order, progress: Progress) -> int:
    """Return the step that ends the run: the lower of `max_steps` and the end of the epochs, from the data position."""
    by_epochs = None
    if config.epochs:
        by_epochs = progress.step + max(0, config.epochs * order.steps_per_epoch - progress.position)
    return min(limit for limit in (by_epochs, config.max_steps) if limit is not None)


def rate(config: TrainConfig, step: int, total: int) -> float:
    """Return the learning rate of a step."""
    if config.force_constant_lr is not None:
        return config.force_constant_lr
    return learning_rate(step, total, config.optimizer.lr, config)


# --- hooks -------------------------------------------------------------------------------------


def _make_sampler(context: RunContext) -> Sampler | None:
    """Return the sampler of the config's prompts; None if there are none."""
    if not context.config.sampling.images:
        return None
    return Sampler.of_config(context.config, _sampled_cache(context), context.launch, context.device, context.stages)


def _sampled_cache(context: RunContext) -> SampledCache:
    return SampledCache(context.loaded.dataset.cache_dir, context.data, context.bucket)


def _make_measurer(context: RunContext) -> Measurer | None:
    """Return what measures against true images; None without [metrics]."""
    config = context.config
    table = context.config.metrics
    if table is None:
        return None
    truths = load_truths(table.dataset, table.images)
    sampler = Sampler.of_requests(
        config,
        caption_requests(table, truths),
        _sampled_cache(context),
        context.launch,
        context.device,
        context.stages,
    )
    return Measurer.of_config(table, sampler, truths, context.groups)


def _make_hooks(
    context: RunContext,
    state: TrainState,
    sampler: Sampler | None,
    measurer: Measurer | None,
    on_sample: OnSample | None,
    requests: RunRequests,
) -> RunHooks:
    """Return the hooks of the train verb."""
    loaded = context.loaded
    launch = context.launch
    stages = context.stages
    evaluator = Evaluator(loaded, launch, state.engine, state.preparer, stages, requests.on_lost_worker)
    sample = None
    if sampler is not None:
        sample = _observed(state, sampler, on_sample) if on_sample else _grids(context, state, sampler)
    return RunHooks(
        evaluate=evaluator.losses if loaded.evaluates else None,
        evaluate_all=True,
        sample=sample,
        measure=None if measurer is None else partial(measurer.measure, state.engine.denoise),
        export=None if on_sample else state.saver.save_model,
        to_host=state.saver.to_host,
    )


def _observed(state: TrainState, sampler: Sampler, on_sample: OnSample) -> Callable[[Progress, str], Path | None]:
    def sample(progress: Progress, weights: str) -> Path | None:
        on_sample(progress, sampler, state.engine.denoise)
        return None

    return sample


def _grids(context: RunContext, state: TrainState, sampler: Sampler) -> Callable[[Progress, str], Path | None]:
    def sample(progress: Progress, weights: str) -> Path | None:
        path = context.folder.path / SAMPLES / f"{checkpoint_name(progress.step)}.png"
        facts = {**progress.counts(), "weights": weights}
        grid = sampler.sample(state.engine.denoise, path, facts, context.groups.control)
        if grid is None:
            return None
        context.folder.log_image(grid, progress, weights)
        return path

    return sample


def _make_schedule(config: TrainConfig, steps_per_epoch: int, total_steps: int) -> HookSchedule:
    """Return the schedule of the intervals in a config."""
    c = config
    sample = every(c.sampling.every_n_steps)
    chosen = {*c.sampling.at_steps, *((total_steps,) if c.sampling.after_last_step else ())}
    return HookSchedule(
        evaluate=every(c.eval_every_n_steps, c.eval_every_n_epochs, c.eval_every_n_examples, steps_per_epoch),
        sample=lambda before, after: sample(before, after) or after.step in chosen,
        measure=every(None if c.metrics is None else c.metrics.every_n_steps),
        checkpoint=every(c.checkpoint_every_n_steps, c.checkpoint_every_n_epochs, steps_per_epoch=steps_per_epoch),
        export=every(c.save_every_n_steps, c.save_every_n_epochs, c.save_every_n_examples, steps_per_epoch),
    )
