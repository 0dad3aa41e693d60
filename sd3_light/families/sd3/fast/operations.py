"""Select the code that runs the operations between a block's matrix products."""

from types import ModuleType

import torch

from sd3_light.families.sd3.fast import reference


def operations(device: torch.device) -> ModuleType:
    """Return the Triton kernels on CUDA, and their torch reference elsewhere."""
    if device.type == "cuda":
        from sd3_light.families.sd3.fast import kernels

        return kernels
    return reference
