"""The cost of a script's module: a sample of each bucket is prepared, and its pass is counted without memory."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass

from accelerate.utils import send_to_device
from torch import Tensor, nn

from sd3_light.check.counted_cost import DenoiserCost, layer_sizes
from sd3_light.check.denoiser_count import NOTHING, Counts
from sd3_light.config import AdapterConfig
from sd3_light.config.faults import UserError
from sd3_light.core.batch import Batch
from sd3_light.core.columns import Bucket
from sd3_light.core.cost import Compute, TextTokens, Tokens
from sd3_light.engines.errors import as_user_error
from sd3_light.tasks.call import TaskCall
from sd3_light.tasks.models import TaskModel
from sd3_light.tasks.module import DiffusionTrainingModule
from sd3_light.tasks.prepare import QUANTILE, SamplePreparer, rows_of


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

    def reduced_copy(self) -> nn.Module:
        """Return a copy of the denoiser on the meta device, all of whose weights train."""
        denoiser = self._model.denoiser
        copies: dict[int, Tensor] = {id(weight): nn.Parameter(weight.to("meta")) for weight in denoiser.parameters()}
        copies |= {id(buffer): buffer.to("meta") for buffer in denoiser.buffers()}
        return deepcopy(denoiser, copies)

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

    @property
    def block_kinds(self) -> Sequence[int]:
        """See `DenoiserCost.block_kinds`."""
        return super().block_kinds if self.why_not_counted is None else [0] * self.num_blocks

    def counts(self, tokens: Tokens, dtype: str) -> Counts:
        """See `DenoiserCost.counts`."""
        inputs = next((sampled.inputs for sampled in self.buckets if sampled.tokens == tokens), None)
        if self.why_not_counted is not None or inputs is None:
            return NOTHING
        key = (tokens, dtype)
        if key not in self._counts:
            self._counts[key] = self.reduced.count(self._pass, inputs, dtype, backward=True)
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
