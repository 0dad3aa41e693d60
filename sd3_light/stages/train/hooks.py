"""The driver's hooks in the train stage: evaluation sets, sample grids and exports, and when they are due."""

from collections.abc import Callable
from pathlib import Path

from sd3_light.checkpoint.progress import Progress
from sd3_light.checkpoint.store import checkpoint_name
from sd3_light.config import TrainConfig
from sd3_light.stages.train.context import RunContext
from sd3_light.stages.train.train_state import TrainState
from sd3_light.training.driver import HookSchedule, RunHooks
from sd3_light.training.evaluation import Evaluator
from sd3_light.training.loop import every
from sd3_light.training.samples import Sampler


def make_sampler(context: RunContext) -> Sampler | None:
    """Return the sampler of the config's prompts; None if there are none."""
    if not context.config.sampling.prompts:
        return None
    cache_dir = context.loaded.dataset.cache_dir
    return Sampler.of_config(context.config, cache_dir, context.data, context.launch, context.device, context.stages)


def make_hooks(context: RunContext, state: TrainState, sampler: Sampler | None) -> RunHooks:
    """Return the hooks of the train stage."""
    loaded, launch, stages = context.loaded, context.launch, context.stages
    evaluator = Evaluator(loaded, launch, state.engine, state.pipeline.preparer, stages)
    return RunHooks(
        evaluate=evaluator.losses if loaded.eval_datasets else None,
        evaluate_all=True,
        sample=None if sampler is None else _grids(context, state, sampler),
        export=state.saver.save_model,
    )


def _grids(context: RunContext, state: TrainState, sampler: Sampler) -> Callable[[Progress, str], Path | None]:
    def sample(progress: Progress, weights: str) -> Path | None:
        path = context.folder.path / "samples" / f"{checkpoint_name(progress.step)}.png"
        facts = {**progress.counts(), "weights": weights}
        grid = sampler.sample(state.engine.denoise, path, facts, context.groups.control)
        if grid is None:
            return None
        context.folder.log_image(grid, progress, weights)
        return path

    return sample


def make_schedule(config: TrainConfig, steps_per_epoch: int) -> HookSchedule:
    """Return the schedule of the intervals in a config."""
    c = config
    return HookSchedule(
        evaluate=every(c.eval_every_n_steps, c.eval_every_n_epochs, c.eval_every_n_examples, steps_per_epoch),
        sample=every(c.sampling.every_n_steps),
        checkpoint=every(c.checkpoint_every_n_steps, c.checkpoint_every_n_epochs, steps_per_epoch=steps_per_epoch),
        export=every(c.save_every_n_steps, c.save_every_n_epochs, c.save_every_n_examples, steps_per_epoch),
    )
