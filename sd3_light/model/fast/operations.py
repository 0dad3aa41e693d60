"""Which code computes what lies between the products."""

from types import ModuleType

import torch

from sd3_light.model.fast import reference


def operations(device: torch.device) -> ModuleType:
    """The kernels where Triton can run, else their reference."""
    if device.type == "cuda":
        from sd3_light.model.fast import kernels

        return kernels
    return reference
