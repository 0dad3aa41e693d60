"""From cached rows to the batches of a denoiser: times, latents and noise. A family adds its conditioning.

Everything is drawn per sample (law 1), so the same rows give the same batch in any process.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sd3_light.config import ModelConfig
from sd3_light.core.batch import Batch
from sd3_light.core.columns import reference_entry
from sd3_light.core.training import Preparer, ResidentPreparer
from sd3_light.data.resident import ResidentCache
from sd3_light.data.slots import AllocateTensor
from sd3_light.data.stream import CachedBatch
from sd3_light.encoding.vae import LatentScale
from sd3_light.flow.noise import DeviceNoise
from sd3_light.flow.objective import inside_and_outside, interpolate, velocity
from sd3_light.flow.timesteps import drawn_quantiles, times_from_quantiles
from sd3_light.model.base_values import FLUX_LINE, ShiftLine
from sd3_light.randomness import fill_rows, first_words, occurrence_words, uniforms

Occurrences = NDArray[np.int64]
"""The `randomness.occurrence_words` of a batch's samples."""
KEPT = "references.kept"
"""1 for samples that see their references, 0 for those that see zeros instead."""
_OTHERS = "moments."
"""Begins the names of columns with the latents of other images of a sample."""
Draw = Callable[[tuple[int, ...]], Tensor]
"""Shape of a sample -> standard normals of the batch."""


class Conditioning(NamedTuple):
    """What a denoiser gets beside latents and time: values for the device, and counts that stay on the host."""

    values: Mapping[str, Tensor]
    host: Mapping[str, Tensor]


@dataclass(frozen=True)
class FlowPreparer(Preparer, ABC):
    """Turns cached rows into batches. Small: workers get a copy.

    ``patch`` are the latent pixels of a token's side, ``line`` the numbers of `flux_shift`. ``reads`` are the columns
    and draws that an objective reads beside those of the family: see `Objective`. ``references`` are the columns of the
    images that the denoiser sees.
    """

    seed: int
    model: ModelConfig
    scale: LatentScale
    patch: int = field(default=2, kw_only=True)
    line: ShiftLine = field(default=FLUX_LINE, kw_only=True)
    reads: tuple[str, ...] = field(default=(), kw_only=True)
    references: tuple[str, ...] = field(default=(), kw_only=True)

    @abstractmethod
    def condition(
        self, rows: CachedBatch, occurrences: Occurrences, evaluation: bool, allocate: AllocateTensor | None
    ) -> Conditioning:
        """Return the conditioning of a batch, with dropout unless in ``evaluation``.

        The value with most of the bytes is in memory that ``allocate`` returns.
        """

    def image_draws(self, occurrences: Occurrences, shape: torch.Size) -> dict[str, Tensor]:
        """Return what training draws per image, for latents of a shape that ends with height and width."""
        return {}

    @abstractmethod
    def resident(self, cache: ResidentCache, seed: int) -> ResidentPreparer:
        """Return what prepares the same batches from a cache in memory; ``seed`` is that of the order."""

    # --- whole batches ---------------------------------------------------------------------------

    def prepare_inputs(self, batch: CachedBatch, timestep_quantile: float | None = None) -> Batch:
        """Return noisy, t, the conditioning, target and, where there is one, mask.

        In training there are also the `image_draws`. ``timestep_quantile`` makes a validation batch: that quantile of t
        for all samples, noise that depends on the sample alone, the posterior's mean and no dropout.
        """
        return self.prepare_into(batch, None, timestep_quantile)

    def prepare_into(
        self, batch: CachedBatch, allocate: AllocateTensor | None, timestep_quantile: float | None = None
    ) -> Batch:
        """Like `prepare_inputs`, with most of the bytes in memory that ``allocate`` returns."""
        return self.add_noise(self._clean(batch, allocate, timestep_quantile), timestep_quantile is not None)

    def prepare_clean(self, batch: CachedBatch, allocate: AllocateTensor | None = None) -> Batch:
        """Return moments, t, the conditioning, words and so on, to get noise later.

        ``words`` are `randomness.occurrence_words` as int32 [B, 4].
        """
        return self._clean(batch, allocate, None)

    def add_noise(self, clean: Batch, evaluation: bool = False) -> Batch:
        """Return the batch of `prepare_inputs` for one of `prepare_clean`, both on the host."""
        occurrences = clean["words"].view(torch.int64).numpy()
        if evaluation:
            draw = partial(self._normals, "eval-noise", occurrence_words(0, 0, occurrences[:, 1]))
            return self._noisy(clean, draw, None)
        draws = (partial(self._normals, purpose, occurrences) for purpose in ("noise", "posterior"))
        return self._noisy(clean, *draws)

    def noise_adder(self, device: torch.device) -> Callable[[Batch], Batch]:
        """Return a function that turns a batch of `prepare_clean` on the device into one of `prepare_inputs`.

        Noise and posterior draws have the same bits as on the host; latents and targets agree to rounding.
        """
        noise = DeviceNoise(self.seed, device)

        def add(clean: Batch) -> Batch:
            words = clean["words"].view(torch.int64)
            draws = (partial(noise.normals, purpose, words) for purpose in ("noise", "posterior"))
            return self._noisy(clean, *draws)

        return add

    # --- parts of a batch ------------------------------------------------------------------------

    def times(self, occurrences: Occurrences, shape: torch.Size, quantile: float | None = None) -> Tensor:
        """Return t [B] for latents of a shape that ends with height and width."""
        drawn = drawn_quantiles(self.seed, occurrences) if quantile is None else [quantile] * len(occurrences)
        tokens = math.prod(token_grid(shape, self.patch))
        return torch.tensor(times_from_quantiles(drawn, tokens, self.model, self.line), dtype=torch.float32)

    def _clean(self, batch: CachedBatch, allocate: AllocateTensor | None, timestep_quantile: float | None) -> Batch:
        occurrences = occurrence_words(batch["epoch"], batch["repeat"], batch["sample_id"])
        moments = batch["moments"]
        is_evaluation = timestep_quantile is not None
        values = {"moments": moments, "t": self.times(occurrences, moments.shape, timestep_quantile)}
        conditioning = self.condition(batch, occurrences, is_evaluation, allocate)
        values |= conditioning.values
        if not is_evaluation:
            values |= self.image_draws(occurrences, moments.shape)
        values |= self.reference_draws(occurrences, is_evaluation)
        values |= {name: batch[name] for name in self.references}
        values["words"] = torch.from_numpy(occurrences).view(torch.int32)
        # an evaluation set may lack them
        values |= {name: batch[name] for name in self.columns if name in batch or not is_evaluation}
        return Batch(len(moments), values, dict(conditioning.host)).with_values({"mask": batch.get("mask")})

    def _noisy(self, clean: Batch, noise: Draw, posterior: Draw | None) -> Batch:
        moments = clean["moments"]
        mask = clean.get("mask")
        shape = self.scale.latent_shape(moments.shape)
        drawn = noise(shape)
        sample = posterior if self.scale.has_distribution else None
        deviation = None if sample is None else sample(shape)
        latent = self.scale.draw(moments, deviation)
        others = [name for name in self.columns if name.startswith(_OTHERS) and name in clean.values]
        kept = clean.get(KEPT)
        unread = () if "words" in self.reads else ("words",)
        rest = clean.with_values({}, without=("moments", "mask", KEPT, *unread, *others, *self.references))
        values = {"noisy": interpolate(latent, drawn, clean["t"]), **rest.values, "target": velocity(latent, drawn)}
        for name in self.references:
            reference = self.scale.draw(clean[name], None)
            if kept is not None:
                reference = reference * kept.view(-1, *[1] * (reference.dim() - 1))
            values[name.removeprefix(_OTHERS)] = reference
        for name in others:  # with the draws of the sample's own latents
            other = self.scale.draw(clean[name], deviation)
            values[name.replace("moments", "noisy")] = interpolate(other, drawn, clean["t"])
            values[name.replace("moments", "target")] = velocity(other, drawn)
        return replace(clean, values=values).with_values({"mask": None if mask is None else self._mask_weights(mask)})

    def reference_draws(self, occurrences: Occurrences, evaluation: bool = False) -> dict[str, Tensor]:
        """Return which samples keep their references, as 1 or 0 [B]; nothing if all do."""
        probability = self.model.reference_dropout_prob
        if evaluation or not self.references or not probability:
            return {}
        drawn = uniforms(first_words(self.seed, "reference-dropout", occurrences)[0])
        return {KEPT: torch.from_numpy((drawn >= probability).astype(np.float32))}

    def _mask_weights(self, mask: Tensor) -> Tensor:
        """Return the weights 0 to 1 of a mask of bytes, with the same bits on every device.

        A GPU divides by a number of the host as a multiplication by its reciprocal, by a tensor exactly.
        """
        inside = mask.float() / mask.new_full((), 255.0, dtype=torch.float32)
        outside = self.model.outside_mask_weight
        return inside_and_outside(inside, outside) if outside else inside

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns among what the objective reads."""
        return tuple(name for name in self.reads if name != "words")

    def _normals(self, purpose: str, occurrences: Occurrences, shape: tuple[int, ...]) -> Tensor:
        values = np.empty((len(occurrences), *shape), dtype=np.float32)
        fill_rows(self.seed, purpose, occurrences, values)
        return torch.from_numpy(values)


def reference_columns(count: int) -> tuple[str, ...]:
    """Return the names of the columns with the latents of references."""
    return tuple(_OTHERS + reference_entry(number) for number in range(count))


def with_columns(preparer: Preparer, reads: tuple[str, ...]) -> Preparer:
    """Return a preparer whose batches have what an objective reads."""
    if not reads:
        return preparer
    assert isinstance(preparer, FlowPreparer), type(preparer)
    return replace(preparer, reads=reads)


def token_grid(shape: torch.Size, patch: int = 2) -> tuple[int, int]:
    """Return the rows and columns of tokens of latents whose shape ends with height and width."""
    return shape[-2] // patch, shape[-1] // patch


# --- who prepares what -------------------------------------------------------------------------


class _WorkerPreparer(ABC):
    """Prepares training batches in workers."""

    def prepare_inputs(self, batch: Any, timestep_quantile: float | None = None) -> Batch:
        """Return the batch in new memory."""
        return self.prepare_into(batch, None)

    @abstractmethod
    def prepare_into(self, batch: Any, empty: AllocateTensor | None, timestep_quantile: float | None = None) -> Batch:
        """Return the batch in memory that ``empty`` returns."""


@dataclass(frozen=True)
class CleanPreparer(_WorkerPreparer):
    """Prepares batches without noise, for a device that adds it."""

    preparer: Preparer

    def prepare_into(self, batch: Any, empty: AllocateTensor | None, timestep_quantile: float | None = None) -> Batch:
        """See `Preparer.prepare_clean`."""
        return self.preparer.prepare_clean(batch, empty)


@dataclass(frozen=True)
class IndexPreparer(_WorkerPreparer):
    """Prepares batches of indices, for a device that holds the cache."""

    inputs: ResidentPreparer

    def prepare_into(self, batch: Any, empty: AllocateTensor | None, timestep_quantile: float | None = None) -> Batch:
        """See `ResidentPreparer.indices`."""
        return self.inputs.indices(batch)


@dataclass(frozen=True)
class GatheringPreparer(_WorkerPreparer):
    """Gathers batches on the host, with noise if no device adds it."""

    inputs: ResidentPreparer
    adds_noise: bool

    def prepare_into(self, batch: Any, empty: AllocateTensor | None, timestep_quantile: float | None = None) -> Batch:
        """Return the gathered batch."""
        clean = self.inputs.gather(self.inputs.indices(batch), empty)
        return self.inputs.preparer.add_noise(clean) if self.adds_noise else clean
