"""`DiffusionTrainingModule`: any denoiser, the units before it and the loss behind it, for people's own scripts."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from sd3_light.config import AdapterConfig
from sd3_light.config.arguments import adapter_from_arguments
from sd3_light.config.faults import UserError
from sd3_light.flow.bands import sum_by_band
from sd3_light.flow.losses import FlowMatchSFTLoss
from sd3_light.model.adapter_layers import AdapterDropout
from sd3_light.model.lora_layers import target_layers
from sd3_light.model.quantized import quantize_base
from sd3_light.randomness import stream
from sd3_light.tasks.units import Draw, PipelineUnit, Split, Values, run_unit, split_units
from sd3_light.training.errors import as_user_error
from sd3_light.training.trainable import put_adapter

Sample = Mapping[str, Any]
"""An item of the data set with its identity: ``{"data": item, "data_id": int, "epoch": int, "repeat": int}``."""


class DiffusionTrainingModule(nn.Module):
    """``module(batch)`` is the loss of a batch, a list of samples (or of one sample): ordered units, then the loss.

    A subclass gives ``denoise(noisy, t, inputs)``, which predicts the velocity with ``self.transformer``, and in
    ``reads`` (as an argument here, or of the class) the names of the inputs that it uses. Other parts (a VAE, encoders)
    are attributes; whatever lies outside ``transformer`` does not train. Noise and time are each sample's own (law 1),
    drawn from ``seed``, its index and the epoch, so the loss depends on neither the batch, the process nor the number
    of them.
    """

    reads: tuple[str, ...] = ()

    def __init__(
        self,
        transformer: nn.Module,
        units: Sequence[PipelineUnit] = (),
        loss: FlowMatchSFTLoss | None = None,
        seed: int = 0,
        reads: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(transformer, nn.Module):
            raise UserError(f"the denoiser is a {type(transformer).__name__}; give a torch module, whose weights train")
        if reads is not None:
            self.reads = tuple(reads)
        self.transformer = transformer
        self.units, self.loss, self.seed = tuple(units), loss or FlowMatchSFTLoss(), seed
        self.adapter: AdapterConfig | None = None
        self.dropout: AdapterDropout | None = None
        self.bands: Tensor | None = None  # of the last batch: losses by bands of time, for the log

    def denoise(self, noisy: Tensor, t: Tensor, inputs: Values) -> Tensor:
        """The velocity at ``noisy`` and time t [B] in (0, 1)."""
        raise UserError(
            f"{type(self).__name__} has no denoise(noisy, t, inputs); write one that calls self.transformer"
        )

    # --- what trains -----------------------------------------------------------------------------

    def train_adapter(self, **keys: Any) -> tuple[str, ...]:
        """Train an adapter in place of the denoiser's weights; keys are those of `[adapter]`. The layers with one."""
        adapter = adapter_from_arguments(keys, "train_adapter")
        if self.adapter is not None:
            raise UserError("train_adapter: the denoiser has an adapter already; make the module anew")
        target_layers(self.transformer, adapter.target_modules)  # before anything is changed
        quantize_base(self.transformer, adapter.base_bits)
        names = put_adapter(self.transformer, adapter, self.seed)
        self.adapter = adapter
        return names

    def trainable_modules(self) -> Iterator[nn.Parameter]:
        """The parameters that train, for an optimizer."""
        return (parameter for _, parameter in self.named_trainable())

    def named_trainable(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The same with their names inside ``transformer``, the canonical ones."""
        return ((name, one) for name, one in self.transformer.named_parameters() if one.requires_grad)

    def freeze_the_rest(self) -> None:
        """Take all that lies outside ``transformer`` out of training."""
        for name, parameter in self.named_parameters():
            if not name.startswith("transformer."):
                parameter.requires_grad_(False)

    def split(self) -> Split:
        """Which units training need not run again; see `split_units`."""
        self.freeze_the_rest()
        if not all(hasattr(self.loss, name) for name in ("reads", "latents")):
            raise UserError(
                "a loss says in `reads` and `latents` which values it needs; derive it from FlowMatchSFTLoss"
            )
        return split_units(self, self.units, (*self.loss.reads, *self.reads))

    # --- a batch ---------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """Where the denoiser is."""
        return next(self.transformer.parameters()).device

    def forward(self, batch: Sample | Sequence[Sample]) -> Tensor:
        """The mean loss of the batch, with its gradient."""
        if self.dropout is not None:
            self.dropout.forward(self.device)
        values = self._values(batch, None)
        each = self._judged(values)
        if torch.is_grad_enabled() and not each.requires_grad:
            raise UserError("the loss depends on no weight that trains; does denoise call self.transformer?")
        if hasattr(self.loss, "times"):
            self.bands = sum_by_band(each, self.loss.times(values["quantile"], values[self.loss.latents]))
        return each.mean()

    def each(self, batch: Sample | Sequence[Sample], quantile: float | None = None) -> Tensor:
        """The loss of each sample; with ``quantile`` as validation has it: that time, noise of the sample alone."""
        return self._judged(self._values(batch, quantile))

    def _judged(self, values: Values) -> Tensor:
        with as_user_error(f"the loss {type(self.loss).__name__}"):
            each: Any = self.loss(self._denoised, values, self._reference)
        count = len(values["quantile"])
        if not isinstance(each, Tensor) or each.shape != (count,):
            found = tuple(each.shape) if isinstance(each, Tensor) else type(each).__name__
            raise UserError(f"the loss gave {found} for {count} samples; it must give one number for each: shape [B]")
        found_B: Tensor = each
        return found_B

    def _denoised(self, noisy: Tensor, t: Tensor, inputs: Values) -> Tensor:
        with as_user_error(f"denoise of {type(self).__name__}"):
            return self.denoise(noisy, t, inputs)

    def _values(self, batch: Sample | Sequence[Sample], quantile: float | None) -> dict[str, Any]:
        """What the loss is given: all that the units make of the batch, and each sample's noise and quantile."""
        samples = [_named(sample) for sample in ([batch] if isinstance(batch, Mapping) else batch)]
        split = self.split()
        values = stacked([self._alone(sample, split, quantile) for sample in samples])
        for unit in split.gradient:
            values = run_unit(unit, self, values)
        return values

    @torch.no_grad()
    def process(self, data: Values) -> dict[str, Any]:
        """What the cached units give for one item of the data, cut down to what the rest of the work needs."""
        split = self.split()
        values = self._cached(data, split)
        needed = [name for name in split.kept if name in values]
        return {name: values[name] for name in needed}

    def _cached(self, data: Values, split: Split) -> dict[str, Any]:
        values = {name: self._moved(value) for name, value in data.items()}
        for unit in split.cached:
            if not all(name.rstrip("?") in values for name in unit.writes):  # a second stage has them already
                values = run_unit(unit, self, values)
        return values

    @torch.no_grad()
    def _alone(self, sample: Sample, split: Split, quantile: float | None) -> dict[str, Any]:
        """All that happens to a sample before it meets the others."""
        values, draw = self._cached(sample["data"], split), self._draw(sample, quantile is not None)
        for unit in split.drawn:
            values = run_unit(unit, self, values, draw)
        clean = values.get(self.loss.latents)
        if not isinstance(clean, Tensor) or not clean.is_floating_point():
            found = "nothing" if clean is None else getattr(clean, "dtype", type(clean).__name__)
            raise UserError(
                f"sample {sample['data_id']}: {self.loss.latents!r}, which the loss compares with, is {found}; let the "
                "data or a unit give a tensor of floating-point numbers"
            )
        values["noise"] = draw("noise", tuple(clean.shape))
        u = self._stream(sample, "timestep", False).random() if quantile is None else quantile
        values["quantile"] = torch.tensor(min(max(u, 1e-12), 1 - 1e-12), dtype=torch.float64)
        wanted = dict.fromkeys((*(unit_name for unit in split.gradient for unit_name in unit.reads), *self.loss.reads))
        wanted |= dict.fromkeys((*self.reads, "noise", "quantile"))
        later = {name.rstrip("?") for unit in split.gradient for name in unit.writes}
        for name in wanted:
            if not name.endswith("?") and name not in values and name not in later:
                raise UserError(
                    f"sample {sample['data_id']}: neither the data nor a unit gives {name!r}, which is read"
                )
        return {name.rstrip("?"): values[name.rstrip("?")] for name in wanted if name.rstrip("?") in values}

    def _draw(self, sample: Sample, evaluation: bool) -> Draw:
        def draw(purpose: str, shape: tuple[int, ...]) -> Tensor:
            generator = self._stream(sample, f"eval-{purpose}" if evaluation else purpose, evaluation)
            return torch.from_numpy(generator.standard_normal(shape, dtype=np.float32)).to(self.device)

        return draw

    def _stream(self, sample: Sample, purpose: str, evaluation: bool) -> np.random.Generator:
        epoch, repeat = (0, 0) if evaluation else (sample["epoch"], sample["repeat"])
        return stream(self.seed, purpose, epoch, repeat, sample["data_id"])

    def _moved(self, value: Any) -> Any:
        return value.to(self.device, non_blocking=True) if isinstance(value, Tensor) else value

    # --- before training -------------------------------------------------------------------------

    def _reference(self, noisy: Tensor, t: Tensor, inputs: Values) -> Tensor:
        """The velocity of the model under its adapter, as it was before training."""
        if self.adapter is None:
            raise UserError("this loss compares with the model before training: train an adapter (train_adapter)")
        with without_adapter(self.transformer), torch.no_grad():
            return self._denoised(noisy, t, inputs)


@contextmanager
def without_adapter(transformer: nn.Module) -> Iterator[None]:
    """The model computes without its adapter inside the block."""
    layers = [module for module in transformer.modules() if isinstance(module, BaseTunerLayer)]
    assert layers, "no adapter"
    for layer in layers:
        layer._disable_adapters = True  # `enable_adapters` would change what requires gradients
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def stacked(samples: Sequence[Values]) -> dict[str, Any]:
    """One batch of several samples: tensors are stacked, other values become lists. Unequal shapes are a fault."""
    names = list(samples[0])
    found: dict[str, Any] = {}
    for name in names:
        column: list[Any] = [sample.get(name) for sample in samples]
        if any(name not in sample for sample in samples):
            raise UserError(f"some samples of a batch have {name!r} and others do not; give it to all or to none")
        if not isinstance(column[0], Tensor):
            found[name] = torch.tensor(column) if isinstance(column[0], int | float) else column
            continue
        shapes = sorted({tuple(tensor.shape) for tensor in column if isinstance(tensor, Tensor)})
        if len(shapes) > 1:
            raise UserError(
                f"samples of one batch have {name!r} of shapes {shapes[0]} and {shapes[1]}; tell launch_training_task "
                "by bucket_of which samples have one shape, or use batch_size=1"
            )
        found[name] = torch.stack(column)
    return found


def _named(sample: Sample) -> Sample:
    """A bare item stands for sample 0: people call a module by hand too."""
    if "data_id" in sample and "data" in sample:
        return sample
    return {"data": sample, "data_id": 0, "epoch": 0, "repeat": 0}
