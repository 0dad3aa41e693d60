"""`check`: whether a task fits, how long it takes and how much disk it needs, before anything is trained."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch import nn
from torch.utils.data import Dataset

from sd3_light.check.conclusion import Line, Target, resources, what_does_not_fit
from sd3_light.check.estimate import BucketEstimate, DatasetEstimate, Estimator, RunEstimate
from sd3_light.check.render import render
from sd3_light.core.cost import Layout
from sd3_light.core.start import WeightsStart
from sd3_light.cost.amount import Amount, format_bytes
from sd3_light.cost.data_bytes import resident_index_bytes
from sd3_light.cost.disk_space import DOES_NOT_FIT
from sd3_light.engines.errors import TASK_OUT_OF_MEMORY
from sd3_light.runlog.tables import print_table
from sd3_light.sources.rejects import Rejects
from sd3_light.system import Gpu, visible_gpus
from sd3_light.tasks.call import TaskCall
from sd3_light.tasks.cost import UNKNOWN, TaskCost, cost_of
from sd3_light.tasks.logger import ModelLogger
from sd3_light.tasks.processed import ProcessedDataset
from sd3_light.tasks.settings import TaskSettings

_REMEDIES = {
    "GPU memory": TASK_OUT_OF_MEMORY,
    "disk, run": "choose another output_path, or a lower keep_last_n_checkpoints",
    "host memory": 'lower num_workers, or use cache_residence="stream"',
}


def check(
    accelerator: Accelerator | None,
    dataset: Dataset[Any],
    model: nn.Module,
    model_logger: ModelLogger,
    gpu_memory: float | None = None,
    args: Any = None,
    **settings: Any,
) -> list[str]:
    """Print what `launch_training_task` with these arguments needs; return what does not fit, such as "GPU memory".

    The table is that of `sd3-light check`. ``gpu_memory`` in GiB is that of a GPU elsewhere. Units that need no
    gradient run on one sample of each bucket. Of a custom forward the activations are not known.
    """
    task = TaskCall.of(accelerator, dataset, model, model_logger, TaskSettings.of(settings, args))
    cost = cost_of(task)
    estimate = _estimate(task, cost)
    gpus = visible_gpus() if gpu_memory is None else [Gpu("the GPU", int(gpu_memory * 2**30))]
    target = Target(gpus[0] if gpus else None, not gpus, gpu_memory is not None)
    lines = list(_lines(task, cost, estimate, resources(task.config, estimate, target)))
    print_table(render(estimate, lines, explain=False, on_cpu=target.on_cpu))
    return what_does_not_fit(lines)


def _lines(task: TaskCall, cost: TaskCost, estimate: RunEstimate, lines: list[Line]) -> Iterator[Line]:
    """Yield the conclusion for a script: with its remedies, and without what concerns a cache that it does not have."""
    unknown = f"activations {cost.why_not_counted} are not known"
    for label, text in lines:
        if label in ("disk, cache", "cache residence") and not isinstance(task.dataset, ProcessedDataset):
            continue
        if label == "device":
            needed = format_bytes(estimate.gpu.total)
            yield label, f"CPU: no GPU is visible; a GPU needs {needed}, estimated: gpu_memory=GIB says whether it fits"
        elif label == "time" and cost.why_not_counted is not None:
            yield label, f"unknown: {unknown}; the log shows the time left after a few steps"
        elif text.startswith(DOES_NOT_FIT) and label in _REMEDIES:
            yield label, f"{text.rpartition('; ')[0]}; {_REMEDIES[label]}"
        else:
            yield label, text
    if cost.why_not_counted is not None:
        yield "warning", f"{unknown}: GPU memory is that of weights and optimizer alone"


def _estimate(task: TaskCall, cost: TaskCost) -> RunEstimate:
    """Return the numbers of a task, as those of a config."""
    layout = Layout(task.launch.world, task.settings.engine == "deepspeed")
    estimator = Estimator(task.config, cost, layout, task.micro_batches)
    size = task.settings.batch_size
    rows = []
    for number, order in enumerate(task.samples.order.buckets):
        sampled = cost.buckets[number] if cost.buckets else UNKNOWN
        nbytes = size * sampled.nbytes
        rows.append(
            BucketEstimate(
                bucket=sampled.bucket,
                resolution=(sampled.bucket.width, sampled.bucket.height),
                samples=order.length,
                prepared=Amount(nbytes, "bytes of a sample"),
                latents=nbytes,
                read=nbytes,
                **estimator.step(order, sampled.tokens, size),
            )
        )
    samples = sum(row.samples for row in rows)
    shards = getattr(task.dataset, "shards", None)
    data = DatasetEstimate(
        name="train",
        path=Path(type(task.dataset).__name__),
        cache_dir=getattr(task.dataset, "folder", task.folder),
        samples=samples,
        rejects=Rejects(),
        rows=tuple(rows),
        cache=Amount(0 if shards is None else shards.manifest.nbytes, "bytes of the shards"),
        index=resident_index_bytes(samples, samples),
        shapes=len(rows),
    )
    return estimator.run(task.folder, WeightsStart("folder", None, None, type(task.model.denoiser).__name__), data)
