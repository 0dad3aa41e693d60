"""SD3's fast blocks on a device. torch is imported where it is used: `check` asks whether there are such blocks."""

from typing import TYPE_CHECKING, Any

from sd3_light.config import TrainConfig
from sd3_light.core.fast_blocks import FastBlocks
from sd3_light.families.sd3.fast.choice import why_stock_on_device

if TYPE_CHECKING:
    import torch
    from torch import nn


class SD3FastBlocks(FastBlocks):
    """See `FastBlocks`."""

    def why_not(self, config: TrainConfig, device: "torch.device", denoiser: "nn.Module | None") -> str | None:
        """See `FastBlocks.why_not`."""
        from sd3_light.families.sd3.fast.forward import why_stock

        reason = why_stock_on_device(config, device.type)
        return reason or (why_stock(denoiser) if denoiser is not None else None)

    def kernel_problem(
        self, config: TrainConfig, device: "torch.device", denoiser: "nn.Module", fp8: bool
    ) -> str | None:
        """See `FastBlocks.kernel_problem`; a CPU runs the kernels' reference."""
        from sd3_light.families.sd3.fast.self_check import KernelShape, kernel_problem

        if device.type != "cuda":
            return None
        model: Any = denoiser.config
        shape = KernelShape(model.num_attention_heads, model.attention_head_dim, config.model.transformer_dtype, fp8)
        return kernel_problem(shape, device)
