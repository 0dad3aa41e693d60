"""`DiffusionTrainingModule`: any denoiser with the units before it and the loss after it, for custom scripts."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from sd3_light.config import AdapterConfig
from sd3_light.config.faults import UserError
from sd3_light.config.load import adapter_from_arguments
from sd3_light.engines.errors import as_user_error
from sd3_light.export.trainable import put_adapter
from sd3_light.flow.losses import FlowMatchSFTLoss
from sd3_light.flow.objective import sum_by_band
from sd3_light.flow.timesteps import FixedTime, open_interval
from sd3_light.model.adapter_layers import AdapterDropout
from sd3_light.model.device_copy import to_device
from sd3_light.model.lora_layers import target_layers
from sd3_light.model.quantized import quantize_base
from sd3_light.randomness import stream
from sd3_light.tasks.helpers import ModuleHelpers, seeded
from sd3_light.tasks.process_unit import ProcessUnit, adapt_units
from sd3_light.tasks.stacking import (
    Batch,
    Sample,
    SampleStacker,
    StackedSamples,
    draw_quantile,
    join_samples,
    samples_of,
)
from sd3_light.tasks.units import Draw, PipelineUnit, UnitSplit, Values, run_unit, split_units, units_to_run


class DiffusionTrainingModule(ModuleHelpers):
    """``module(batch)`` returns the loss of a batch, a list of samples (or one sample): ordered units, then the loss.

    A subclass defines ``denoise(noisy, t, inputs)``, which predicts the velocity with ``self.transformer``, and names
    the inputs that it uses in ``reads`` (an argument here, or a class attribute). Other parts (a VAE, encoders) are
    attributes; everything outside ``transformer`` is frozen. Noise and time belong to the sample (law 1): they are
    drawn from ``seed``, its index and the epoch, so the loss does not depend on the batch or on the number of
    processes.

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
    ) -> None:
        super().__init__()
        if transformer is not None:
            if not isinstance(transformer, nn.Module):
                raise UserError(f"the denoiser is a {type(transformer).__name__}; give a torch module")
            self.transformer = transformer
        self.has_custom_forward = transformer is None and type(self).forward is not DiffusionTrainingModule.forward
        if reads is not None:
            self.reads = tuple(reads)
        self.units, self.loss, self.seed = tuple(units), loss or FlowMatchSFTLoss(), seed
        self.adapter: AdapterConfig | None = None
        self.dropout: AdapterDropout | None = None
        self.bands: Tensor | None = None  # losses of the last batch by bands of timesteps, for the log

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
        """Yield the parameters that train, for an optimizer."""
        return (parameter for _, parameter in self.named_trainable())

    def named_trainable(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield (name, parameter) of what trains; names are those inside ``transformer``, if it trains alone."""
        parameters = (self if self.has_custom_forward else self.transformer).named_parameters()
        return ((name, parameter) for name, parameter in parameters if parameter.requires_grad)

    def freeze_the_rest(self) -> None:
        """Freeze everything outside ``transformer``."""
        if not isinstance(getattr(self, "transformer", None), nn.Module):
            raise UserError(
                f"{type(self).__name__} has no transformer; pass one to super().__init__(transformer, ...), or "
                "override forward(data, inputs=None) to return the loss"
            )
        for name, parameter in self.named_parameters():
            if not name.startswith("transformer."):
                parameter.requires_grad_(False)

    def split(self) -> UnitSplit:
        """Return the units by when they must run; see `split_units`."""
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

    def stacker(self, pin: bool = False) -> SampleStacker:
        """Return what workers need to prepare batches for `forward`; ``pin`` as there."""
        split = self._split or self.split()
        units = (*split.cached, *split.drawn, *split.gradient)
        names = [*(name for unit in units for name in (*unit.reads, *unit.writes)), *self._reads(split)]
        kept = frozenset(name.rstrip("?") for name in (*names, self.loss.latents))
        return SampleStacker(self.seed, kept, self.loss.latents, tuple(self.pads), pin)

    # --- a batch ---------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """The denoiser's device."""
        return next(self.transformer.parameters()).device

    def forward(self, batch: Batch) -> Tensor:
        """Return the mean loss of the batch, with its gradient."""
        if self.dropout is not None:
            self.dropout.forward(self.device)
        values = self._values(batch, None)
        each = self._losses(values)
        if torch.is_grad_enabled() and not each.requires_grad:
            raise UserError("the loss depends on no weight that trains; does denoise call self.transformer?")
        if hasattr(self.loss, "times"):
            self.bands = sum_by_band(each, self.loss.times(values["quantile"], values[self.loss.latents]))
        return each.mean()

    def each(self, batch: Sample | Sequence[Sample], quantile: float | None = None) -> Tensor:
        """Return the loss of each sample; with ``quantile`` as in validation: at that time, with fixed noise.

        A `FixedTime` in its place is the time itself.
        """
        return self._losses(self._values(batch, quantile), isinstance(quantile, FixedTime))

    def _losses(self, values: Values, at_fixed_times: bool = False) -> Tensor:
        loss = self.loss.at_fixed_times() if at_fixed_times else self.loss
        with as_user_error(f"the loss {type(self.loss).__name__}"):
            each: Any = loss(self._denoise, values, self._reference)
        count = len(values["quantile"])
        if not isinstance(each, Tensor) or each.shape != (count,):
            kind = tuple(each.shape) if isinstance(each, Tensor) else type(each).__name__
            raise UserError(f"the loss returned {kind} for {count} samples; return one number per sample: shape [B]")
        losses_B: Tensor = each
        return losses_B

    def _denoise(self, noisy: Tensor, t: Tensor, inputs: Values) -> Tensor:
        with as_user_error(f"denoise of {type(self).__name__}"):
            return self.denoise(noisy, t, inputs)

    def _values(self, batch: Batch, quantile: float | None) -> dict[str, Any]:
        """Return the loss's inputs: all that the units write for the batch, and each sample's noise and quantile."""
        split = self._split or self.split()
        reads = self._reads(split)
        values = self._stacked_values(batch, split, reads) if isinstance(batch, StackedSamples) else None
        if values is None:
            sources, evaluation = samples_of(batch), quantile is not None
            samples = [self._sample_values(source, split, reads, evaluation) for source in sources]
            values = join_samples(batch, sources, samples, self.pads)
            quantiles = [self._quantile(source) if quantile is None else open_interval(quantile) for source in sources]
            values["quantile"] = torch.tensor(quantiles, dtype=torch.float64)
        for unit in split.gradient:
            values = run_unit(unit, self, values)
        return values

    @torch.no_grad()
    def process(self, data: Values, data_id: int = 0) -> dict[str, Any]:
        """Return what the cached units write for one item, as far as the rest of the training reads it."""
        split = self._split or self.split()
        values = self._cached(data, split, data_id)
        if missing := [name for name in split.required if name not in values]:
            raise UserError(
                f"sample {data_id}: training will read {missing[0]!r}, which is neither in the data nor written by a "
                "unit; add a unit that writes it"
            )
        return {name: values[name] for name in split.stored if name in values}

    def _cached(self, data: Values, split: UnitSplit, data_id: int) -> dict[str, Any]:
        values = self._to_device(data)
        for unit in units_to_run(split.cached, values, split.stored):  # processed data already has their results
            seed = int(stream(self.seed, f"unit-{unit.label}", 0, 0, data_id).integers(2**63))
            with seeded(seed, self.device) if isinstance(unit, ProcessUnit) else nullcontext():
                values = run_unit(unit, self, values)
        return values

    def _reads(self, split: UnitSplit) -> dict[str, bool]:
        """Return the values that gradient units, the loss and `denoise` read, and whether samples must have them."""
        written = {"noise", "quantile", *(name.rstrip("?") for unit in split.gradient for name in unit.writes)}
        names = [name for unit in split.gradient for name in unit.reads]
        reads: dict[str, bool] = {}
        for name in (*names, *self.loss.reads, *self.reads):
            plain = name.rstrip("?")
            reads[plain] = reads.get(plain, False) or (plain == name and plain not in written)
        return reads

    def _stacked_values(self, batch: StackedSamples, split: UnitSplit, reads: dict[str, bool]) -> dict[str, Any] | None:
        """Return the loss's inputs as a worker stacked them; None if units must run first."""
        names = batch.common_names()
        missing = any(is_required and name not in names for name, is_required in reads.items())
        if not names or missing or split.drawn or "is_evaluation" in reads:
            return None
        if units_to_run(split.cached, names, split.stored):
            return None
        device = self.device
        return batch.map_tensors(lambda tensor: to_device(tensor, device)).inputs(reads, self.pads)

    @torch.no_grad()
    def _sample_values(
        self, sample: Sample, split: UnitSplit, reads: dict[str, bool], evaluation: bool
    ) -> dict[str, Any]:
        """Return the values of one sample, with its noise, before it is stacked with the others."""
        values, draw = self._cached(sample["data"], split, sample["data_id"]), self._draw(sample, evaluation)
        values["is_evaluation"] = evaluation
        for unit in split.drawn:
            values = run_unit(unit, self, values, draw)
        clean = values.get(self.loss.latents)
        if not isinstance(clean, Tensor) or not clean.is_floating_point():
            kind = "missing" if clean is None else getattr(clean, "dtype", type(clean).__name__)
            raise UserError(
                f"sample {sample['data_id']}: {self.loss.latents!r}, which the loss compares with, is {kind}; provide "
                "a floating-point tensor in the data or from a unit"
            )
        noise = sample.get("noise")  # from a worker; a unit may have changed the shape of the latents since
        if noise is not None and noise.shape == clean.shape:
            values["noise"] = to_device(noise, self.device)
        else:
            values["noise"] = draw("noise", tuple(clean.shape))
        for name, is_required in reads.items():
            if is_required and name not in values:
                raise UserError(
                    f"sample {sample['data_id']}: {name!r} is read, but it is neither in the data nor written by a unit"
                )
        return {name: values[name] for name in (*reads, "noise") if name in values}

    def _quantile(self, sample: Sample) -> float:
        return sample.get("quantile") or draw_quantile(self.seed, sample)

    def _draw(self, sample: Sample, evaluation: bool) -> Draw:
        def draw(purpose: str, shape: tuple[int, ...], on_host: bool = False) -> Tensor:
            epoch, repeat = (0, 0) if evaluation else (sample["epoch"], sample["repeat"])
            purpose = f"eval-{purpose}" if evaluation else purpose
            generator = stream(self.seed, purpose, epoch, repeat, sample["data_id"])
            numbers = torch.from_numpy(generator.standard_normal(shape, dtype=np.float32))
            return numbers if on_host else to_device(numbers, self.device)

        return draw

    def _to_device(self, values: Values) -> dict[str, Any]:
        device = self.device
        return {
            name: to_device(value, device) if isinstance(value, Tensor) else value for name, value in values.items()
        }

    # --- before training -------------------------------------------------------------------------

    def _reference(self, noisy: Tensor, t: Tensor, inputs: Values) -> Tensor:
        """Return the velocity of the model under its adapter, as it was before training."""
        if self.adapter is None:
            raise UserError("this loss compares with the model before training; train an adapter (train_adapter)")
        with without_adapter(self.transformer), torch.no_grad():
            return self._denoise(noisy, t, inputs)


@contextmanager
def without_adapter(transformer: nn.Module) -> Iterator[None]:
    """Disable the adapter inside the block."""
    layers = [module for module in transformer.modules() if isinstance(module, BaseTunerLayer)]
    assert layers, "no adapter"
    for layer in layers:
        layer._disable_adapters = True  # `enable_adapters` would change what requires gradients
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False
