"""`DiffusionTrainingModule`: any denoiser with the units before it and the loss after it, for custom scripts."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from sd3_light.config import AdapterConfig
from sd3_light.config.faults import UserError
from sd3_light.config.load import adapter_from_arguments
from sd3_light.flow.losses import FlowMatchSFTLoss
from sd3_light.flow.objective import sum_by_band
from sd3_light.flow.timesteps import open_interval
from sd3_light.model.adapter_layers import AdapterDropout
from sd3_light.model.device_copy import to_device
from sd3_light.model.lora_layers import target_layers
from sd3_light.model.quantized import quantize_base
from sd3_light.randomness import stream
from sd3_light.tasks.helpers import ModuleHelpers, seeded
from sd3_light.tasks.process_unit import ProcessUnit, adapt_units
from sd3_light.tasks.texts import pad_to_longest
from sd3_light.tasks.units import Draw, PipelineUnit, UnitSplit, Values, run_unit, split_units, units_to_run
from sd3_light.training.errors import as_user_error
from sd3_light.training.trainable import put_adapter

Sample = Mapping[str, Any]
"""An item of the dataset with its identity: ``{"data": item, "data_id": int, "epoch": int, "repeat": int}``."""


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

    # --- a batch ---------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """The denoiser's device."""
        return next(self.transformer.parameters()).device

    def forward(self, batch: Sample | Sequence[Sample]) -> Tensor:
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
        """Return the loss of each sample; with ``quantile`` as in validation: at that time, with fixed noise."""
        return self._losses(self._values(batch, quantile))

    def _losses(self, values: Values) -> Tensor:
        with as_user_error(f"the loss {type(self.loss).__name__}"):
            each: Any = self.loss(self._denoise, values, self._reference)
        count = len(values["quantile"])
        if not isinstance(each, Tensor) or each.shape != (count,):
            kind = tuple(each.shape) if isinstance(each, Tensor) else type(each).__name__
            raise UserError(f"the loss returned {kind} for {count} samples; return one number per sample: shape [B]")
        losses_B: Tensor = each
        return losses_B

    def _denoise(self, noisy: Tensor, t: Tensor, inputs: Values) -> Tensor:
        with as_user_error(f"denoise of {type(self).__name__}"):
            return self.denoise(noisy, t, inputs)

    def _values(self, batch: Sample | Sequence[Sample], quantile: float | None) -> dict[str, Any]:
        """Return the loss's inputs: all that the units write for the batch, and each sample's noise and quantile."""
        samples = [_with_identity(sample) for sample in ([batch] if isinstance(batch, Mapping) else batch)]
        split = self.split()
        values = stack_samples([self._sample_values(sample, split, quantile) for sample in samples], self.pads)
        for unit in split.gradient:
            values = run_unit(unit, self, values)
        return values

    @torch.no_grad()
    def process(self, data: Values, data_id: int = 0) -> dict[str, Any]:
        """Return what the cached units write for one item, as far as the rest of the training reads it."""
        split = self.split()
        values = self._cached(data, split, data_id)
        if missing := [name for name in split.required if name not in values]:
            raise UserError(
                f"sample {data_id}: training will read {missing[0]!r}, which is neither in the data nor written by a "
                "unit; add a unit that writes it"
            )
        return {name: values[name] for name in split.stored if name in values}

    def _cached(self, data: Values, split: UnitSplit, data_id: int) -> dict[str, Any]:
        values = {name: self._to_device(value) for name, value in data.items()}
        for unit in units_to_run(split.cached, values, split.stored):  # processed data already has their results
            seed = int(stream(self.seed, f"unit-{unit.label}", 0, 0, data_id).integers(2**63))
            with seeded(seed, self.device) if isinstance(unit, ProcessUnit) else nullcontext():
                values = run_unit(unit, self, values)
        return values

    @torch.no_grad()
    def _sample_values(self, sample: Sample, split: UnitSplit, quantile: float | None) -> dict[str, Any]:
        """Return the values of one sample before it is stacked with the others."""
        values, draw = self._cached(sample["data"], split, sample["data_id"]), self._draw(sample, quantile is not None)
        values["is_evaluation"] = quantile is not None
        for unit in split.drawn:
            values = run_unit(unit, self, values, draw)
        clean = values.get(self.loss.latents)
        if not isinstance(clean, Tensor) or not clean.is_floating_point():
            kind = "missing" if clean is None else getattr(clean, "dtype", type(clean).__name__)
            raise UserError(
                f"sample {sample['data_id']}: {self.loss.latents!r}, which the loss compares with, is {kind}; provide "
                "a floating-point tensor in the data or from a unit"
            )
        values["noise"] = draw("noise", tuple(clean.shape))
        u = self._stream(sample, "timestep", False).random() if quantile is None else quantile
        values["quantile"] = torch.tensor(open_interval(u), dtype=torch.float64)
        read = dict.fromkeys((*(name for unit in split.gradient for name in unit.reads), *self.loss.reads))
        read |= dict.fromkeys((*self.reads, "noise", "quantile"))
        written_later = {name.rstrip("?") for unit in split.gradient for name in unit.writes}
        for name in read:
            if not name.endswith("?") and name not in values and name not in written_later:
                raise UserError(
                    f"sample {sample['data_id']}: {name!r} is read, but it is neither in the data nor written by a unit"
                )
        return {name.rstrip("?"): values[name.rstrip("?")] for name in read if name.rstrip("?") in values}

    def _draw(self, sample: Sample, evaluation: bool) -> Draw:
        def draw(purpose: str, shape: tuple[int, ...]) -> Tensor:
            generator = self._stream(sample, f"eval-{purpose}" if evaluation else purpose, evaluation)
            return to_device(torch.from_numpy(generator.standard_normal(shape, dtype=np.float32)), self.device)

        return draw

    def _stream(self, sample: Sample, purpose: str, evaluation: bool) -> np.random.Generator:
        epoch, repeat = (0, 0) if evaluation else (sample["epoch"], sample["repeat"])
        return stream(self.seed, purpose, epoch, repeat, sample["data_id"])

    def _to_device(self, value: Any) -> Any:
        return to_device(value, self.device) if isinstance(value, Tensor) else value

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


def stack_samples(samples: Sequence[Values], pads: Sequence[str] = ()) -> dict[str, Any]:
    """Return one batch: tensors are stacked, other values become lists.

    Unequal shapes are an error, except for the length of values in ``pads``, which get a mask ``NAME_mask``.
    """
    names = list(samples[0])
    batch: dict[str, Any] = {}
    for name in names:
        column: list[Any] = [sample.get(name) for sample in samples]
        if any(name not in sample for sample in samples):
            raise UserError(f"some samples of a batch have {name!r} and others do not; give it to all or to none")
        if not isinstance(column[0], Tensor):
            batch[name] = torch.tensor(column) if isinstance(column[0], int | float) else column
            continue
        start = 1 if name in pads else 0
        shapes = sorted({tuple(tensor.shape)[start:] for tensor in column if isinstance(tensor, Tensor)})
        if len(shapes) > 1:
            raise UserError(
                f"samples of one batch have {name!r} of shapes {shapes[0]} and {shapes[1]}; name the samples of "
                "one shape with bucket_of, use batch_size=1, or name texts of unequal length in pads"
            )
        if name in pads:
            batch[name], batch[f"{name}_mask"] = pad_to_longest(column)
        else:
            batch[name] = torch.stack(column)
    return batch


def _with_identity(sample: Sample) -> Sample:
    """Return the sample; a bare item, from a manual call, becomes sample 0."""
    if "data_id" in sample and "data" in sample:
        return sample
    return {"data": sample, "data_id": 0, "epoch": 0, "repeat": 0}
