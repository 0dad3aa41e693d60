"""Decide whether a run uses the fast blocks; `check` and training share these rules."""

import importlib.util

from sd3_light.config import ModelSize, TrainConfig

FP8_MULTIPLE = 16
"""Both widths of an fp8 product must be a multiple of this."""
FP8_CAPABILITY = (8, 9)
"""Compute capability of the first GPUs whose tensor cores multiply e4m3 numbers."""


def why_stock_by_config(
    config: TrainConfig, size: ModelSize, world_size: int = 1, by_deepspeed: bool = False
) -> str | None:
    """Return why this config runs the stock blocks, or None if it allows the fast ones."""
    if config.fast is False:
        return "fast = false"
    if config.compile is True:
        return "compile = true"
    if config.adapter is not None:
        return "an adapter is trained"
    if config.model.training_adapter is not None:
        return "the fast blocks do not run a training adapter"
    if config.model.references:
        return "the fast blocks see no references"
    if config.gradient_release:
        return "gradient_release = true"
    if config.optimizer.weight_dtype == "bfloat16":
        return 'optimizer.weight_dtype = "bfloat16"'
    if config.pipeline_stages > 1:
        return "pipeline stages run the stock layers"
    if by_deepspeed and config.zero_stage == 3:
        return "ZeRO-3 shards the weights"
    if config.fp8 and config.parallel == "fsdp2" and world_size > 1:
        return 'parallel = "fsdp2" shards the weights, which fp8 products copy as a whole'
    if size.dual_attention_layers:
        return "the denoiser has SD3.5's second attention"
    if size.head_dim & (size.head_dim - 1):
        return f"the head width {size.head_dim} is not a power of two"
    if config.fast == "auto" and config.model.transformer_dtype != "bfloat16":
        return f'transformer_dtype = "{config.model.transformer_dtype}"'
    return None


def why_stock_on_device(config: TrainConfig, device: str) -> str | None:
    """Return why this machine cannot run the fast blocks, or None. `fast = true` runs a torch reference on CPUs."""
    if device == "cuda":
        return None if importlib.util.find_spec("triton") else "Triton is not installed"
    return None if config.fast is True else "there is no GPU"


def why_no_fp8(size: ModelSize, capability: tuple[int, int] | None) -> str | None:
    """Return why the fast blocks cannot multiply in fp8, or None; ``capability`` is the GPU's, None without a GPU."""
    if size.width % FP8_MULTIPLE:
        return f"the width {size.width} is not a multiple of {FP8_MULTIPLE}"
    if capability is not None and capability < FP8_CAPABILITY:
        return f"this GPU (sm_{capability[0]}{capability[1]}) has no fp8 support, which needs sm_89 or newer"
    return None
