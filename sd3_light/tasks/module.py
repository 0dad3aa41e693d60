"""`DiffusionTrainingModule`: any denoiser with the units before it and the loss after it, for custom scripts."""

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from accelerate.utils import send_to_device
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn

from sd3_light.config import AdapterConfig
from sd3_light.config.faults import UserError
from sd3_light.config.load import adapter_from_arguments
from sd3_light.core.batch import Batch
from sd3_light.core.objective import Objective
from sd3_light.engines.errors import as_user_error
from sd3_light.export.trainable import put_adapter
from sd3_light.flow.losses import FlowMatchSFTLoss
from sd3_light.flow.objective import interpolate, velocity
from sd3_light.flow.timesteps import FixedTime
from sd3_light.model.adapter_layers import without_adapter
from sd3_light.model.device_copy import to_device
from sd3_light.model.lora_layers import target_layers
from sd3_light.model.quantized import quantize_base
from sd3_light.randomness import stream
from sd3_light.tasks.prepare import (
    POINT,
    QUANTILE,
    RESERVED,
    WORDS,
    Missing,
    Sample,
    SamplePreparer,
    batch_values,
    common_names,
    fill_noise,
    rows_of,
    sample_ids,
    sample_values,
    stack_column,
)
from sd3_light.tasks.units import (
    Draw,
    PipelineUnit,
    ProcessUnit,
    UnitSplit,
    Values,
    adapt_units,
    run_unit,
    split_units,
    units_to_run,
)


class DiffusionTrainingModule(nn.Module):
    """``module(batch)`` returns the loss of a batch, a list of samples (or one sample): ordered units, then the loss.

    A subclass defines ``denoise(noisy, t, inputs)``, which predicts the velocity with ``self.transformer``, and names
    the inputs that it uses in ``reads`` (an argument here, or a class attribute). Other parts (a VAE, encoders) are
    attributes; everything outside ``transformer`` is frozen. Noise and time belong to the sample (law 1): they are
    drawn from ``seed``, its index and the epoch, so the loss does not depend on the batch or on the number of
    processes.

    ``objective`` computes the losses in place of ``loss``, which then only draws the times: it reads a `Batch` with the
    tensors that ``denoise`` gets, ``noisy``, ``t`` and ``target``, and may ask for the features of blocks.

    A subclass may instead call ``super().__init__()`` without a transformer and override ``forward(data, inputs=None)``
    to return the loss of one sample; its parts are attributes, and what requires gradients trains (`CustomForward`).
    """

    reads: tuple[str, ...] = ()
    pads: tuple[str, ...] = ()
    """Values [L, ...] of unequal length: a batch has them padded with zeros, and a mask [B, L] under ``NAME_mask``."""
    _split: UnitSplit | None = None

    def __init__(
        self,
        transformer: nn.Module | None = None,
        units: Sequence[PipelineUnit] = (),
        loss: FlowMatchSFTLoss | None = None,
        seed: int = 0,
        reads: Sequence[str] | None = None,
        objective: Objective | None = None,
    ) -> None:
        super().__init__()
        if transformer is not None:
            if not isinstance(transformer, nn.Module):
                raise UserError(f"the denoiser is a {type(transformer).__name__}; give a torch module")
            self.transformer = transformer
        self.has_custom_forward = transformer is None and type(self).forward is not DiffusionTrainingModule.forward
        if reads is not None:
            self.reads = tuple(reads)
        self.units = tuple(units)
        self.loss = loss or FlowMatchSFTLoss()
        self.seed = seed
        self.adapter: AdapterConfig | None = None
        self.objective = objective

    def denoise(self, noisy: Tensor, t: Tensor, inputs: Values) -> Tensor:
        """Return the velocity at ``noisy`` and time t [B] in (0, 1)."""
        raise UserError(
            f"{type(self).__name__} has no denoise(noisy, t, inputs); write one that calls self.transformer"
        )

    # --- what trains -----------------------------------------------------------------------------

    def train_adapter(self, **keys: Any) -> tuple[str, ...]:
        """Train an adapter, with the keys of `[adapter]`, instead of the denoiser; return the adapted layers."""
        adapter = adapter_from_arguments(keys, "train_adapter")
        if self.adapter is not None:
            raise UserError("train_adapter: the denoiser already has an adapter; create the module again")
        target_layers(self.transformer, adapter.target_modules)  # raises before anything is changed
        quantize_base(self.transformer, adapter.base_bits)
        names = put_adapter(self.transformer, adapter, self.seed)
        self.adapter = adapter
        return names

    def trainable_modules(self) -> Iterator[nn.Parameter]:
        """Yield the parameters that train, for an optimizer: of ``transformer``, if it trains alone."""
        parameters = (self if self.has_custom_forward else self.transformer).parameters()
        return (parameter for parameter in parameters if parameter.requires_grad)

    def require_transformer(self) -> None:
        """Raise unless the module has a denoiser."""
        if not isinstance(getattr(self, "transformer", None), nn.Module):
            raise UserError(
                f"{type(self).__name__} has no transformer; pass one to super().__init__(transformer, ...), or "
                "override forward(data, inputs=None) to return the loss"
            )

    def freeze_the_rest(self) -> None:
        """Freeze everything outside ``transformer``."""
        self.require_transformer()
        for name, parameter in self.named_parameters():
            if not name.startswith("transformer."):
                parameter.requires_grad_(False)

    def split(self) -> UnitSplit:
        """Return the units by when they must run; see `split_units`."""
        if self._split is not None:
            return self._split
        self.freeze_the_rest()
        if not all(hasattr(self.loss, name) for name in ("reads", "latents")):
            raise UserError(
                "a loss names the values it needs in `reads` and `latents`; derive it from FlowMatchSFTLoss"
            )
        return split_units(self, adapt_units(self.units), (*self.loss.reads, *self.reads))

    @contextmanager
    def fixed_units(self) -> Iterator[None]:
        """Split the units once for all batches inside the block; otherwise each call does it."""
        self._split = self.split()
        try:
            yield
        finally:
            self._split = None

    def preparer(self, pin: bool = False) -> SamplePreparer:
        """Return what workers need to prepare batches; ``pin`` is for a trainer without workers."""
        split = self.split()
        units = (*split.cached, *split.drawn, *split.gradient)
        names = [*(name for unit in units for name in (*unit.reads, *unit.writes)), *self._reads(split)]
        kept = frozenset(name.rstrip("?") for name in (*names, self.loss.latents))
        if taken := sorted(kept & set(RESERVED)):
            raise UserError(f"a value is named {taken[0]!r}, which batches have themselves; give it another name")
        return SamplePreparer(self.seed, kept, self.loss.latents, tuple(self.pads), pin)

    # --- a batch ---------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """The denoiser's device."""
        return next(self.transformer.parameters()).device

    def forward(self, batch: Sample | Sequence[Sample]) -> Tensor:
        """Return the mean loss of the batch, with its gradient."""
        return self.each(batch).mean()

    def each(self, batch: Sample | Sequence[Sample], quantile: float | None = None) -> Tensor:
        """Return the loss of each sample; with ``quantile`` as in validation: at that time, with fixed noise.

        A `FixedTime` in its place is the time itself.
        """
        return self.losses(self.inputs(self.preparer().prepare_inputs(rows_of(batch), quantile)))

    def losses(self, inputs: Values) -> Tensor:
        """Return the loss of each sample, from the inputs of a batch."""
        with as_user_error(f"the loss {type(self.loss).__name__}"):
            each: Any = self._loss_at(inputs)(self._denoise, inputs, self._reference)
        count = len(inputs[QUANTILE])
        if not isinstance(each, Tensor) or each.shape != (count,):
            kind = tuple(each.shape) if isinstance(each, Tensor) else type(each).__name__
            raise UserError(f"the loss returned {kind} for {count} samples; return one number per sample: shape [B]")
        losses_B: Tensor = each
        if torch.is_grad_enabled() and not losses_B.requires_grad:
            raise UserError("the loss depends on no weight that trains; does denoise call self.transformer?")
        return losses_B

    def times(self, inputs: Values) -> Tensor:
        """Return t [B] of a batch."""
        return self._loss_at(inputs).times(inputs[QUANTILE], inputs[self.loss.latents])

    def _loss_at(self, inputs: Values) -> FlowMatchSFTLoss:
        return self.loss.at_fixed_times() if isinstance(inputs[POINT], FixedTime) else self.loss

    def noisy_batch(self, inputs: Values) -> Batch:
        """Return what an `Objective` reads: noisy latents, times, targets and inputs; ``host`` has other values."""
        tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
        others = {name: value for name, value in inputs.items() if name not in tensors}
        clean = inputs[self.loss.latents].float()
        noise = inputs["noise"].float()
        t = self.times(inputs)
        values = {**tensors, "noisy": interpolate(clean, noise, t), "t": t, "target": velocity(clean, noise)}
        return Batch(len(clean), values, others)

    def _denoise(self, noisy: Tensor, t: Tensor, inputs: Values) -> Tensor:
        with as_user_error(f"denoise of {type(self).__name__}"):
            return self.denoise(noisy, t, inputs)

    def inputs(self, batch: Batch) -> Values:
        """Return the loss's inputs: all that the units write for the batch, and each sample's noise and quantile."""
        return self.with_gradient_units(self.values(batch))

    def with_gradient_units(self, inputs: Values) -> Values:
        """Return the inputs with what gradient units write."""
        for unit in self.split().gradient:
            inputs = run_unit(unit, self, inputs)
        return inputs

    def values(self, batch: Batch) -> dict[str, Any]:
        """Return the inputs of a batch without those that gradient units write."""
        split = self.split()
        reads = self._reads(split)
        batch = batch.to(self.device)
        names = common_names(batch)
        absent = any(is_required and name not in names for name, is_required in reads.items())
        written: dict[str, list[Any]] = {}
        if split.drawn or absent or "noise" not in names or units_to_run(split.cached, names, split.stored):
            written = self._written(batch, split, reads)
        inputs: dict[str, Any] = {QUANTILE: batch.host[QUANTILE], POINT: batch.host[POINT]}
        for name in reads:
            if name in written:
                inputs |= stack_column(name, written[name], self.pads)
            else:
                inputs |= batch_values(batch, name, self.pads, self.device)
        inputs["noise"] = self._noise(batch, inputs[self.loss.latents])
        return inputs

    def _noise(self, batch: Batch, clean: Tensor) -> Tensor:
        noise = batch.get("noise")
        if noise is not None and noise.shape == clean.shape:
            return noise
        drawn = torch.empty(clean.shape)
        fill_noise(drawn, self.seed, "noise", batch.host)
        return to_device(drawn, self.device)

    @torch.no_grad()
    def _written(self, batch: Batch, split: UnitSplit, reads: dict[str, bool]) -> dict[str, list[Any]]:
        """Run the cached and drawn units on each sample; return a value per sample of what they write."""
        samples = [self._sample_values(batch, at, split) for at in range(batch.size)]
        for number, values in zip(sample_ids(batch), samples, strict=True):
            self._require_values(values, reads, number)
        names = {name.rstrip("?") for unit in (*split.cached, *split.drawn) for name in unit.writes}
        names.add("is_evaluation")
        return {name: [values.get(name, Missing.VALUE) for values in samples] for name in names}

    def _sample_values(self, batch: Batch, at: int, split: UnitSplit) -> dict[str, Any]:
        """Return the values of one sample with those that the units write."""
        number = sample_ids(batch)[at]
        values = self._cached(sample_values(batch, at, self.device), split, number)
        values["is_evaluation"] = batch.host[POINT] is not None
        draw = self._draw(batch.host, at)
        for unit in split.drawn:
            values = run_unit(unit, self, values, draw)
        return values

    def _require_values(self, values: Values, reads: dict[str, bool], number: int) -> None:
        clean = values.get(self.loss.latents)
        if not isinstance(clean, Tensor) or not clean.is_floating_point():
            kind = "missing" if clean is None else getattr(clean, "dtype", type(clean).__name__)
            raise UserError(
                f"sample {number}: {self.loss.latents!r}, which the loss compares with, is {kind}; provide "
                "a floating-point tensor in the data or from a unit"
            )
        for name, is_required in reads.items():
            if is_required and name not in values:
                raise UserError(
                    f"sample {number}: {name!r} is read, but it is neither in the data nor written by a unit"
                )

    @torch.no_grad()
    def process(self, data: Values, data_id: int = 0) -> dict[str, Any]:
        """Return what the cached units write for one item, as far as the rest of the training reads it."""
        split = self.split()
        on_device = {
            name: to_device(value, self.device) if isinstance(value, Tensor) else value for name, value in data.items()
        }
        values = self._cached(on_device, split, data_id)
        if missing := [name for name in split.required if name not in values]:
            raise UserError(
                f"sample {data_id}: training will read {missing[0]!r}, which is neither in the data nor written by a "
                "unit; add a unit that writes it"
            )
        return {name: values[name] for name in split.stored if name in values}

    def _cached(self, values: dict[str, Any], split: UnitSplit, data_id: int) -> dict[str, Any]:
        for unit in units_to_run(split.cached, values, split.stored):  # processed data already has their results
            seed = int(stream(self.seed, f"unit-{unit.label}", 0, 0, data_id).integers(2**63))
            with seeded(seed, self.device) if isinstance(unit, ProcessUnit) else nullcontext():
                values = run_unit(unit, self, values)
        return values

    def _reads(self, split: UnitSplit) -> dict[str, bool]:
        """Return the values that gradient units, the loss and `denoise` read, and whether samples must have them."""
        written = {"noise", QUANTILE, *(name.rstrip("?") for unit in split.gradient for name in unit.writes)}
        names = [name for unit in split.gradient for name in unit.reads]
        reads: dict[str, bool] = {}
        for name in (*names, *self.loss.reads, *self.reads):
            plain = name.rstrip("?")
            reads[plain] = reads.get(plain, False) or (plain == name and plain not in written)
        return reads

    def _draw(self, host: dict[str, Any], at: int) -> Draw:
        """Return what draws the normals of a sample; ``host`` is that of its batch."""
        own = {WORDS: host[WORDS][at : at + 1], POINT: host[POINT]}

        def draw(purpose: str, shape: tuple[int, ...], on_host: bool = False) -> Tensor:
            numbers = torch.empty(1, *shape)
            fill_noise(numbers, self.seed, purpose, own)
            return numbers[0] if on_host else to_device(numbers[0], self.device)

        return draw

    # --- before training -------------------------------------------------------------------------

    def _reference(self, noisy: Tensor, t: Tensor, inputs: Values) -> Tensor:
        """Return the velocity of the model under its adapter, as it was before training."""
        if self.adapter is None:
            raise UserError("this loss compares with the model before training; train an adapter (train_adapter)")
        with without_adapter(self.transformer), torch.no_grad():
            return self._denoise(noisy, t, inputs)

    # --- DiffSynth's helpers of a custom forward -----------------------------------------------------

    def trainable_param_names(self) -> set[str]:
        """Return the names of the parameters that train."""
        return {name for name, parameter in self.named_parameters() if parameter.requires_grad}

    def export_trainable_state_dict(
        self, state_dict: Mapping[str, Tensor], remove_prefix: str | None = None
    ) -> dict[str, Tensor]:
        """Return what trains of a state dict; ``remove_prefix`` is removed from the names that have it."""
        names = self.trainable_param_names()
        return {name.removeprefix(remove_prefix or ""): state_dict[name] for name in state_dict if name in names}

    def transfer_data_to_device(self, data: Any, device: Any, torch_float_dtype: torch.dtype | None = None) -> Any:
        """Return nested data with its tensors on ``device``, floating-point ones in ``torch_float_dtype``."""
        target = (device, torch_float_dtype)
        if isinstance(data, Mapping):
            return {name: self.transfer_data_to_device(value, *target) for name, value in data.items()}
        if isinstance(data, list | tuple):
            return type(data)(self.transfer_data_to_device(value, *target) for value in data)
        moved = send_to_device(data, device)
        is_float = isinstance(moved, Tensor) and moved.is_floating_point()
        return moved.to(torch_float_dtype) if is_float and torch_float_dtype is not None else moved

    def add_lora_to_model(
        self,
        model: nn.Module,
        target_modules: str | list[str],
        lora_rank: int,
        lora_alpha: float | None = None,
        upcast_dtype: torch.dtype | None = None,
    ) -> nn.Module:
        """Put a LoRA into a part of the module and freeze the rest of the part; return the part."""
        targets = target_modules.split(",") if isinstance(target_modules, str) else target_modules
        config = LoraConfig(r=lora_rank, lora_alpha=lora_alpha or lora_rank, target_modules=targets)
        adapted: nn.Module = inject_adapter_in_model(config, model)
        for parameter in adapted.parameters():
            if parameter.requires_grad and upcast_dtype is not None:
                parameter.data = parameter.data.to(upcast_dtype)
        return adapted


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed the global generators of torch, numpy and Python inside the block, and restore them after it."""
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)
