"""Running averages of the weights in float32 (law 4): any number of tracks, with a decay or a power function."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from sd3_light.config import EmaConfig
from sd3_light.optim.chunks import Tensors
from sd3_light.optim.power_function import decay_at, gamma_from_sigma_rel, ramped_decay

MAIN_TRACK = "ema"
"""Name of the track that [ema] itself describes; [[ema.track]] entries have their own names."""


@dataclass(frozen=True)
class Track:
    """One average. Every ``update_every`` steps: shadow = decay x shadow + (1 - decay) x weights.

    The decay ramps up to a constant, so that the start loses its weight early in training, or it depends on the step so
    that the average has a power-function profile (``gamma``). The number of updates follows from the step: a
    checkpoint needs no counter.
    """

    shadow: dict[str, Tensor]
    update_every: int
    decay: float | None = None
    gamma: float | None = None

    def decay_at(self, step: int) -> float:
        """Return the decay of an update at ``step``."""
        if self.gamma is not None:
            return decay_at(step, self.update_every, self.gamma)
        assert self.decay is not None
        return ramped_decay(step, self.update_every, self.decay)


class Averages:
    """All averages of a run by name; none if ``[ema] enable`` is false.

    They start as copies of ``weights``, which are plain tensors: whole weights, or the local rows of sharded ones, some
    of which may be empty. Updates depend on the step number alone, without reading from the device whether the step was
    skipped: a skipped step leaves the weights unchanged.
    """

    def __init__(self, weights: Tensors, config: EmaConfig) -> None:
        self.config = config
        self._names = list(weights)
        self.tracks = _tracks(weights, config) if config.enable else {}
        # the kernels take lists; loading a checkpoint copies into these same tensors
        self._shadows = {name: [track.shadow[key] for key in self._names] for name, track in self.tracks.items()}

    @torch.no_grad()
    def update(self, weights: Tensors, step: int) -> None:
        """Update the tracks that are due with the weights after optimizer step ``step`` (the first is 1)."""
        due = [name for name, track in self.tracks.items() if step % track.update_every == 0]
        if not due:
            return
        for name in due:
            self._advance(name, weights, 1 - self.tracks[name].decay_at(step))

    def _advance(self, track: str, weights: Tensors, share: float) -> None:
        """Move a track towards the weights; those in bfloat16 one by one, so that they are not all copied at once."""
        shadows = self._shadows[track]
        current = [weights[name].detach() for name in self._names]
        wide = [number for number, weight in enumerate(current) if weight.dtype == torch.float32]
        if wide:
            torch._foreach_lerp_([shadows[number] for number in wide], [current[number] for number in wide], share)
        for number in sorted(set(range(len(current))) - set(wide)):
            shadows[number].lerp_(current[number].float(), share)

    def decays(self, step: int) -> dict[str, float]:
        """Return the decay of each track's update at ``step``, for the log."""
        return {name: track.decay_at(step) for name, track in self.tracks.items()}

    @contextmanager
    def in_place_of(self, track: str, weights: Tensors) -> Iterator[None]:
        """Replace ``weights`` by a track inside the context, and restore them bit for bit afterwards."""
        targets = [weights[name].detach() for name in self._names]
        live = [tensor.clone() for tensor in targets]
        try:
            with torch.no_grad():
                torch._foreach_copy_(targets, self._shadows[track])
            yield
        finally:
            with torch.no_grad():
                # looked up again: weights in host memory may be on their way to the device
                torch._foreach_copy_([weights[name].detach() for name in self._names], live)


def _tracks(weights: Tensors, config: EmaConfig) -> dict[str, Track]:
    tracks = {MAIN_TRACK: Track(_copies(weights), config.update_every, decay=config.decay)}
    for table in config.track:
        gamma = None if table.power_width is None else gamma_from_sigma_rel(table.power_width)
        tracks[table.name] = Track(_copies(weights), table.update_every or config.update_every, table.decay, gamma)
    return tracks


def _copies(weights: Tensors) -> dict[str, Tensor]:
    return {name: weight.detach().to(torch.float32, copy=True) for name, weight in weights.items()}
