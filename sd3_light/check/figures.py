"""The numbers of a check for programs: bytes and seconds by command."""

from typing import Any

from sd3_light.check.conclusion import Line, Target, drawing_memory, run_space, what_does_not_fit
from sd3_light.check.estimate import RunEstimate
from sd3_light.config import TrainConfig


def figures(train: TrainConfig, estimate: RunEstimate, target: Target, conclusion: list[Line]) -> dict[str, Any]:
    """Return what `cache`, `train` and `sample` need, and the resources that the run exceeds.

    GPU memory of training is what torch allocates; the context of CUDA is beside it.
    """
    gpu = {} if target.on_cpu else _gpu(train, estimate, target)
    disk, _ = run_space(train, estimate)
    return {
        "cache": {"disk_bytes": sum(data.cache.value for data in (estimate.data, *estimate.evals))},
        "train": {**gpu.get("train", {}), "host_bytes": estimate.host.value, "disk_bytes": disk},
        "sample": gpu.get("sample", {}),
        "does_not_fit": what_does_not_fit(conclusion),
    }


def _gpu(train: TrainConfig, estimate: RunEstimate, target: Target) -> dict[str, dict[str, int]]:
    memory = estimate.gpu
    allocated = memory.state.value + memory.step.value
    drawn = drawing_memory(train, estimate, target)["bfloat16"]
    return {
        "train": {"gpu_bytes": allocated, "gpu_context_bytes": memory.context.value},
        "sample": {"gpu_bytes": drawn},
    }
