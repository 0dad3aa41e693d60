"""Where the parts of a pipeline are while it draws images."""

from typing import TYPE_CHECKING

import torch
from torch import nn

from sd3_light.encoding.residence import all_fit, free_memory
from sd3_light.runlog import info

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline


def move_to(pipe: "DiffusionPipeline", device: torch.device) -> None:
    """Move a pipeline to the device; on a GPU that cannot hold all of its parts, each is there only while it runs."""
    modules = [part for part in pipe.components.values() if isinstance(part, nn.Module)]
    weights = [sum(tensor.nbytes for tensor in (*part.parameters(), *part.buffers())) for part in modules]
    if device.type != "cuda" or all_fit(weights, 1, free_memory(device)):
        pipe.to(device)
        return
    info("the parts of the model do not fit on the GPU together: each is there only while it runs")
    pipe.enable_model_cpu_offload(device=device)
