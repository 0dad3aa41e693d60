"""Whether the fast blocks may run, from the config alone: what `check` foretells and training does."""

import importlib.util

from sd3_light.config import ModelSize, TrainConfig

MULTIPLE = 16
"""What both widths of a product in 8 bits must be a multiple of."""
FIRST_FP8 = (8, 9)
"""Compute capability of the first GPUs whose tensor cores multiply e4m3 numbers."""


def why_stock_by_config(config: TrainConfig, size: ModelSize, world: int = 1, by_deepspeed: bool = False) -> str | None:
    """Why a run computes with the stock blocks, in words; None where it takes the fast ones."""
    if config.fast is False:
        return "fast = false"
    if config.compile:
        return "compile = true"
    if config.adapter is not None:
        return "an adapter is trained"
    if config.pipeline_stages > 1:
        return "pipeline stages run the stock layers"
    if by_deepspeed and config.zero_stage == 3:
        return "ZeRO-3 cuts the weights"
    if config.parallel == "fsdp2" and world > 1:
        return 'parallel = "fsdp2" cuts the weights'
    if size.dual_attention_layers:
        return "the denoiser has SD3.5's second attention"
    if config.fast == "auto" and config.model.transformer_dtype != "bfloat16":
        return f'transformer_dtype = "{config.model.transformer_dtype}"'
    return None


def why_stock_on_device(config: TrainConfig, device: str) -> str | None:
    """Return why this machine cannot run the fast blocks, or None.

    With ``fast = true`` a CPU runs their torch reference: slower than the stock blocks, for tests.
    """
    if device == "cuda":
        return None if importlib.util.find_spec("triton") else "Triton is not installed"
    return None if config.fast is True else "there is no GPU"


def why_no_fp8(size: ModelSize, capability: tuple[int, int] | None) -> str | None:
    """Why the fast blocks cannot multiply in 8 bits; ``capability`` is the GPU's, None without one (for tests)."""
    if size.width % MULTIPLE:
        return f"the width {size.width} is no multiple of {MULTIPLE}"
    if capability is not None and capability < FIRST_FP8:
        return f"this GPU (sm_{capability[0]}{capability[1]}) is older than sm_89 and knows no fp8"
    return None
