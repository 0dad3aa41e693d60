"""`check`: whether a task fits, how long it takes and how much disk it needs, before anything is trained.

A sample of each bucket is prepared, and its pass is counted without memory.
"""

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch import Tensor, nn
from torch.utils.data import Dataset

from sd3_light.check.conclusion import Line, Target, resources, what_does_not_fit
from sd3_light.check.counted_cost import DenoiserCost, layer_sizes
from sd3_light.check.denoiser_count import NOTHING, Counts, FewOfEachBlock
from sd3_light.check.estimate import BucketEstimate, DatasetEstimate, Estimator, RunEstimate
from sd3_light.check.render import render
from sd3_light.config import AdapterConfig
from sd3_light.config.faults import UserError
from sd3_light.core.batch import Batch
from sd3_light.core.columns import Bucket
from sd3_light.core.cost import Compute, Layout, TextTokens, Tokens
from sd3_light.core.start import WeightsStart
from sd3_light.cost.amount import Amount, format_bytes
from sd3_light.cost.data_bytes import resident_index_bytes
from sd3_light.cost.disk_space import DOES_NOT_FIT
from sd3_light.engines.errors import TASK_OUT_OF_MEMORY, as_user_error
from sd3_light.runlog.tables import print_table
from sd3_light.sources.records import Rejects
from sd3_light.system import Gpu, visible_gpus
from sd3_light.tasks.call import TaskCall
from sd3_light.tasks.logger import ModelLogger
from sd3_light.tasks.models import TaskModel
from sd3_light.tasks.module import DiffusionTrainingModule
from sd3_light.tasks.prepare import QUANTILE, SamplePreparer, rows_of
from sd3_light.tasks.processed import ProcessedDataset
from sd3_light.tasks.settings import TaskSettings


@dataclass(frozen=True)
class SampledBucket:
    """One sample of a bucket: its latent size, its tokens, the bytes of its batch, and what its pass reads."""

    bucket: Bucket
    tokens: Tokens
    nbytes: int
    inputs: Batch


UNKNOWN = SampledBucket(Bucket(0, 0), Tokens(0, 0), 0, Batch(1))
"""Stands for a bucket of a module that is not counted."""


class TaskCost(DenoiserCost):
    """See `Cost`. Tokens are positions of latents and rows of padded values; only those of ``buckets`` are known.

    ``why_not_counted``: the activations of the module are unknown, and count as nothing.
    """

    text = TextTokens(0, True, "")

    def __init__(self, model: TaskModel, buckets: Sequence[SampledBucket], why_not_counted: str | None = None) -> None:
        self._model = model
        self.buckets = buckets
        self.why_not_counted = why_not_counted
        self._counts: dict[tuple[Tokens, str], Counts] = {}
        super().__init__(model.denoiser, type(model.denoiser).__name__)
        trained = {id(weight) for weight in model.trained_weights()}
        self.trained = layer_sizes(model.denoiser, lambda weight: id(weight) in trained)
        self.frozen = layer_sizes(model.denoiser, lambda weight: id(weight) not in trained)

    @property
    def layer_parameters(self) -> tuple[int, ...]:
        """See `Cost.layer_parameters`; where some weights are frozen, those that train count as an adapter."""
        return self.frozen if any(self.frozen) else self.trained

    def adapter_parameters(self, adapter: AdapterConfig) -> tuple[int, ...]:
        """Return the trained parameters of each layer."""
        return self.trained

    def tokens(self, bucket: Bucket) -> Tokens:
        """Return the most tokens of a sample."""
        return max((sampled.tokens for sampled in self.buckets), key=lambda tokens: tokens.joint, default=Tokens(0, 0))

    def block_kinds(self, adapter: AdapterConfig | None) -> Sequence[int]:
        """See `DenoiserCost.block_kinds`."""
        return self._half_frozen.kinds if self.why_not_counted is None else [0] * self.num_blocks

    @cached_property
    def _half_frozen(self) -> FewOfEachBlock:
        """The denoiser of the task, where only its trained weights get gradients."""
        return FewOfEachBlock(_meta_copy(self._model.denoiser), most=2)

    @cached_property
    def _all_trained(self) -> FewOfEachBlock:
        return FewOfEachBlock(_meta_copy(self._model.denoiser).requires_grad_(True), most=2)

    def counts(self, tokens: Tokens, dtype: str, adapter: AdapterConfig | None = None) -> Counts:
        """See `DenoiserCost.counts`: bytes are those of the weights that the task trains, FLOPs those of all."""
        if self.why_not_counted is not None:
            return NOTHING
        inputs = next((sampled.inputs for sampled in self.buckets if sampled.tokens == tokens), None)
        if inputs is None:
            return replace(NOTHING, blocks=NOTHING.blocks * len(self._half_frozen.blocks))
        key = (tokens, dtype)
        if key not in self._counts:
            every = self._all_trained.count(self._pass, inputs, dtype)
            own = self._half_frozen.count(self._pass, inputs, dtype)
            self._counts[key] = replace(own, forward_flops=every.forward_flops, input_flops=every.input_flops)
        return self._counts[key]

    def image_tokens(self, width: int, height: int) -> int:
        """Not known: sizes are those of samples."""
        raise NotImplementedError

    def batch_tokens(self, batch: Batch) -> Mapping[Tokens, int]:
        """Not known: a step's FLOPs are not logged."""
        raise NotImplementedError

    def _pass(self, denoiser: nn.Module, batch: Batch) -> Tensor:
        """Return the losses of a batch, or the prediction that an objective gets, by a copy of the denoiser."""
        module: DiffusionTrainingModule = self._model.module
        own = module.transformer
        module.transformer = denoiser
        try:
            inputs = module.with_gradient_units({**batch.host, **batch.values})
            if module.objective is None:
                return module.losses(inputs)
            noisy = module.noisy_batch(inputs)
            return module.denoise(noisy["noisy"], noisy["t"], {**noisy.host, **noisy.values})
        finally:
            module.transformer = own


def _meta_copy(denoiser: nn.Module) -> nn.Module:
    """Return a copy of a denoiser on the meta device."""
    copies: dict[int, Tensor] = {}
    for weight in denoiser.parameters():
        copies[id(weight)] = nn.Parameter(weight.to("meta"), weight.requires_grad)
    for buffer in denoiser.buffers():
        copies[id(buffer)] = buffer.to("meta")
    return deepcopy(denoiser, copies)


def cost_of(task: TaskCall) -> TaskCost:
    """Return the cost of a task. Cached and drawn units run on one sample of each bucket, where the module is."""
    model = task.model
    preparer = model.preparer()
    if not isinstance(preparer, SamplePreparer):
        return TaskCost(model, (), "of a custom forward")
    if (adapter := model.module.adapter) is not None and adapter.base_bits < 16:
        return TaskCost(model, (), f"of weights of {adapter.base_bits} bits")
    buckets = []
    for segments in task.samples.buckets:
        number = segments[0][0]
        sample = {"data": task.read(task.dataset, number), "data_id": number, "epoch": 0, "repeat": 0}
        buckets.append(_sampled(model.module, preparer.prepare_inputs(rows_of(sample))))
    cost = TaskCost(model, buckets)
    try:
        with as_user_error("a pass without memory"):
            for sampled in buckets:
                cost.sample_bytes(sampled.tokens, Compute("stock", task.config.model.transformer_dtype))
    except UserError as error:  # code that reads values of tensors has no such values here
        return TaskCost(model, buckets, f"as they cannot be counted ({error})")
    return cost


def _sampled(module: DiffusionTrainingModule, batch: Batch) -> SampledBucket:
    values = send_to_device(dict(module.values(batch)), "cpu")
    latents: Tensor = values[module.loss.latents]
    frames, height, width = (1, 1, 1, *latents.shape[2:])[-3:]
    text = sum(values[name].shape[1] for name in module.pads if name in values)
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor) and name != QUANTILE}
    others = {name: value for name, value in values.items() if name not in tensors}
    nbytes = sum(tensor.nbytes for tensor in batch.tensors())
    tokens = Tokens(frames * height * width, text)
    return SampledBucket(Bucket(width, height, frames), tokens, nbytes, Batch(1, tensors, others))


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
    layout = Layout(task.launch.world_size, task.settings.engine == "deepspeed")
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
