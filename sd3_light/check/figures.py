"""The numbers of a check for programs: bytes and seconds by command."""

from typing import Any

from sd3_light.check.conclusion import Line, Target, drawing_memory, export_memory, run_space, what_does_not_fit
from sd3_light.check.estimate import RunEstimate
from sd3_light.config import TrainConfig
from sd3_light.cost.disk_space import DTYPE_BYTES, export_bytes
from sd3_light.cost.host_memory import cache_host, export_command_host, export_seconds, train_host
from sd3_light.model.folder import TRANSFORMER, components, count_converted


def figures(train: TrainConfig, estimate: RunEstimate, target: Target, conclusion: list[Line]) -> dict[str, Any]:
    """Return what `cache`, `train`, `export` and `sample` need, and the resources that the run exceeds.

    GPU memory of training is what torch allocates; the context of CUDA is beside it. Host memory is that of a process
    and its children, without mapped files; there is none for `cache` and `train` on a CPU.
    """
    setup = estimate.setup
    export = export_memory(train, estimate)
    caches = sum(data.cache.value for data in (estimate.data, *estimate.evals))
    disk, _ = run_space(train, estimate)
    commands: dict[str, dict[str, float]] = {
        "cache": {"disk_bytes": caches},
        "train": {"disk_bytes": disk},
        "export": {
            "host_bytes": export_command_host(setup, DTYPE_BYTES[train.save_dtype]),
            "disk_bytes": export_bytes(train, setup),
            "seconds": round(export_seconds(setup), 1),
        },
        "sample": {},
    }
    if not target.on_cpu:
        memory = estimate.gpu
        workers = train.num_dataloader_workers
        folder = train.model.diffusers_path
        parts = [folder / name for name in components(folder) if name not in (TRANSFORMER.name, "vae")]
        encoders = DTYPE_BYTES[train.model.dtype] * sum(count_converted(part, train.model.dtype) for part in parts)
        commands["cache"]["host_bytes"] = cache_host(encoders, train.caching_num_workers)
        commands["train"]["host_bytes"] = train_host(setup, estimate.host.value, workers, export)
        commands["train"]["gpu_bytes"] = memory.state.value + memory.step.value
        commands["train"]["gpu_context_bytes"] = memory.context.value
        commands["sample"]["gpu_bytes"] = drawing_memory(train, estimate, target)["bfloat16"]
    return {**commands, "does_not_fit": what_does_not_fit(conclusion)}
