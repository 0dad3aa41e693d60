"""Copies to a device that do not stop the host."""

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor on the device.

    To a GPU it is copied from pinned memory: a copy from pageable memory waits for all queued work of the device.
    """
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
