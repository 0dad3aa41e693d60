"""What a config asks of an engine that only the launch tells: `--deepspeed`, and the number of processes."""

from sd3_light.config.schema_train import TrainConfig


def deepspeed_problem(config: TrainConfig, world: int) -> str | None:
    """Why ``world`` processes of the DeepSpeed engine cannot train so, with the remedy; None where they can."""
    stages = config.pipeline_stages
    if config.optimizer.type != "adamw":
        return f"--deepspeed trains with AdamW only; optimizer.type is {config.optimizer.type!r}: write 'adamw'"
    if config.adapter is not None and config.adapter.base_bits < 16 and config.zero_stage != 2:
        return "adapter.base_bits under 16 needs whole weights; write zero_stage = 2, or base_bits = 16"
    if config.parallel != "ddp":
        hint = "start without --deepspeed, or write zero_stage = 3 in its place"
        return f"parallel = {config.parallel!r} is for torch's own engine; {hint}"
    if world % stages:
        return f"{world} processes cannot form pipelines of {stages} stages; start a multiple of pipeline_stages"
    return None
