"""The DeepSpeed engines, for `train.py --deepspeed`: pipeline stages times data parallel, with ZeRO.

DeepSpeed is an optional extra, so it is imported only when an engine is created.
"""

import importlib.util

import torch

from sd3_light.config import TrainConfig, UserError
from sd3_light.config.cross_checks import deepspeed_problem, one_process_problem
from sd3_light.core.model import TrainedModel
from sd3_light.engines.protocol import Engine
from sd3_light.launch import Launch


def require(config: TrainConfig, launch: Launch, wanted: bool) -> None:
    """Raise a one-line `UserError` if the config does not fit the engine; ``wanted``: ``--deepspeed`` was given."""
    stages = config.pipeline_stages
    if problem := one_process_problem(config, launch.world_size, wanted):
        raise UserError(problem)
    if not wanted:
        if stages > 1:
            raise UserError(f"pipeline_stages = {stages} needs the DeepSpeed engine; add --deepspeed, or set it to 1")
        return
    require_installed("--deepspeed")
    if problem := deepspeed_problem(config, launch.world_size):
        raise UserError(problem)


def require_installed(option: str) -> None:
    """Raise a one-line `UserError` if DeepSpeed is not installed, which ``option`` needs."""
    if importlib.util.find_spec("deepspeed") is None:
        raise UserError(f"{option} needs DeepSpeed, which is not installed; run `pip install 'sd3-light[deepspeed]'`")


def all_write(config: TrainConfig) -> bool:
    """Whether every process holds unique state and so writes a part of each checkpoint."""
    return config.pipeline_stages > 1 or config.zero_stage > 0


def engine_name(config: TrainConfig, launch: Launch) -> str:
    """Return a short name of engine and layout, for the log."""
    stages = config.pipeline_stages
    return f"deepspeed pp{stages} dp{launch.world_size // stages} zero{config.zero_stage}"


def make_engine(
    module: TrainedModel, config: TrainConfig, launch: Launch, device: torch.device, writers: int = 1
) -> Engine:
    """Return the engine for ``pipeline_stages`` and ``zero_stage``; all processes must call it together.

    ZeRO 0 and 1 run as a pipeline, of one stage or more. ZeRO 2 and 3 run the module as a whole, and so does ZeRO 1 if
    its objective needs that or the model has no layers for a pipeline.
    """
    whole = module.objective.why_whole()
    if whole is not None and (config.pipeline_stages > 1 or config.zero_stage == 0):
        layout = "pipeline stages do" if config.pipeline_stages > 1 else "ZeRO 0 does"
        raise UserError(
            f"the objective has {whole}, which {layout} not run; write pipeline_stages = 1 and zero_stage = 1, 2 or 3"
        )
    from sd3_light.engines.deepspeed.runtime import prepare

    has_layers = type(module).pipeline_layers is not TrainedModel.pipeline_layers
    if not has_layers and config.zero_stage == 0:
        raise UserError("zero_stage = 0 needs a model with layers for a pipeline; write zero_stage = 1")
    prepare(launch, device)
    if has_layers and whole is None and config.zero_stage < 2:
        from sd3_light.engines.deepspeed.pipeline import PipelineEngine

        if launch.world_size == 1 and config.zero_stage == 1:  # nothing to shard: copies would only cost time
            config = config.model_copy(update={"zero_stage": 0})
        return PipelineEngine(module, config, launch, device, writers)
    from sd3_light.engines.deepspeed.zero import ZeroEngine

    return ZeroEngine(module, config, launch, device)
