"""AdamW with moments in 8 bits: one code per value, and one float32 scale, the largest magnitude, per block of 256.

A code is proportional to a root of value / scale, so that small values keep their relative precision: the fourth root
of the first moment, with its sign, and the eighth root of the second. The second moment changes by a thousandth per
step, less than the distance of two codes: rounding to the nearest would keep it where it is, so it is rounded at
random, right on average, and never to 0.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from sd3_light.config.optimizers import PART_ELEMENTS

BLOCK = 256
"""Values per scale."""
FEWEST = 4096
"""Weights with fewer elements are not worth 8 bits: their moments stay in float32."""
_LEVELS = {torch.int8: 127, torch.uint8: 255}
_ROOTS = {torch.int8: 2, torch.uint8: 3}  # square roots that are taken one after another


class AdamW8bit(torch.optim.Optimizer):
    """AdamW for float32 weights. ``generator_of(weight)`` rounds its second moment in this step.

    With ``found_inf`` (1.0: skip this step) nothing changes, and the host does not wait for the value.
    """

    found_inf: Tensor | None = None

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        generator_of: Callable[[nn.Parameter], torch.Generator],
        lr: float,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps})
        self._generator_of = generator_of

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all weights that have a gradient."""
        assert closure is None
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._update(weight, group)

    def _update(self, weight: nn.Parameter, group: dict[str, Any]) -> None:
        state = self.state[weight]
        skip = torch.zeros_like(state["step"]) if self.found_inf is None else self.found_inf
        state["step"] += 1 - skip
        generator = self._generator_of(weight)
        count = state["step"].clamp(min=1)  # of a first step that is skipped
        corrections = [1 - beta**count for beta in group["betas"]]
        values = weight.view(-1)
        gradient = weight.grad.reshape(-1)  # type: ignore[union-attr]
        for start in range(0, len(values), PART_ELEMENTS):
            part = slice(start, min(start + PART_ELEMENTS, len(values)))
            moments = [_Moment(state, kind, part) for kind in ("exp_avg", "exp_avg_sq")]
            update = _advance(moments, _blocks(gradient[part].float()), group, corrections, generator)
            for moment in moments:
                moment.store(skip)
            decayed = values[part] * (1 - group["lr"] * group["weight_decay"])
            changed = decayed.add_(update.view(-1)[: len(decayed)], alpha=-group["lr"])
            values[part] = torch.where(skip.bool(), values[part], changed)


def _advance(
    moments: list["_Moment"],
    gradient: Tensor,
    group: dict[str, Any],
    corrections: list[Tensor],
    generator: torch.Generator,
) -> Tensor:
    """Replace the moments by those after the gradient and return AdamW's step."""
    first, second = (moment.load() for moment in moments)
    first.lerp_(gradient, 1 - group["betas"][0])
    second.lerp_(gradient.square(), 1 - group["betas"][1])
    moments[0].replace(first)
    moments[1].replace(second, generator)
    size = second.div_(corrections[1]).sqrt_().add_(group["eps"])
    return first.div_(corrections[0]).div_(size)


class _Moment:
    """One moment of a part of a weight, whose first element begins a block."""

    def __init__(self, state: dict[str, Tensor], kind: str, part: slice) -> None:
        self._codes = state[kind].view(-1)[part]
        self._scales = state[f"{kind}_scale"][part.start // BLOCK : -(-part.stop // BLOCK)]
        self._new: tuple[Tensor, Tensor] | None = None

    def load(self) -> Tensor:
        """Return the values in float32, in rows of `BLOCK`."""
        return expand(_blocks(self._codes), self._scales)

    def replace(self, values: Tensor, generator: torch.Generator | None = None) -> None:
        """Keep other values for `store`; with a generator they are rounded at random."""
        self._new = compress(values, self._codes.dtype, generator)

    def store(self, skip: Tensor) -> None:
        """Store the values of `replace` unless ``skip`` is 1."""
        assert self._new is not None
        codes, scales = self._new
        self._codes.copy_(torch.where(skip.bool(), self._codes, codes.view(-1)[: len(self._codes)]))
        self._scales.copy_(torch.where(skip.bool(), self._scales, scales))


def compress(values: Tensor, dtype: torch.dtype, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    """Return the codes of rows of values, in int8 with their signs or in uint8 without, and the rows' scales.

    They are rounded to the nearest code, or with ``generator`` to one of the two at random.
    """
    levels = _LEVELS[dtype]
    codes = values.abs()
    scales = codes.amax(1)
    codes = codes.div_(scales.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(1))
    for _ in range(_ROOTS[dtype]):
        codes.sqrt_()
    codes.mul_(levels)
    if generator is None:
        codes.round_()
    else:
        codes.add_(torch.rand(codes.shape, generator=generator, device=codes.device)).floor_()
        codes.clamp_(min=1, max=levels).masked_fill_(values == 0, 0)
    if dtype == torch.int8:
        codes.copysign_(values)
    return codes.to(dtype), scales


def expand(codes: Tensor, scales: Tensor) -> Tensor:
    """Return the values of codes in float32."""
    values = codes.float().div_(_LEVELS[codes.dtype])
    signs = values.sign() if codes.dtype == torch.int8 else None
    for _ in range(_ROOTS[codes.dtype]):
        values.square_()
    if signs is not None:
        values.mul_(signs)
    return values.mul_(scales.unsqueeze(1))


def _blocks(flat: Tensor) -> Tensor:
    """Return a flat tensor in rows of `BLOCK`, the last one filled with zeros."""
    missing = -len(flat) % BLOCK
    return (pad(flat, (0, missing)) if missing else flat).view(-1, BLOCK)


@torch.no_grad()
def create_8bit_state(optimizer: Any, weight: nn.Parameter) -> None:
    """Create the state of step 0 for a weight."""
    blocks = -(-weight.numel() // BLOCK)
    state: dict[str, Tensor] = {"step": torch.zeros((), device=weight.device)}
    for kind, dtype in (("exp_avg", torch.int8), ("exp_avg_sq", torch.uint8)):
        state[kind] = torch.zeros(weight.shape, dtype=dtype, device=weight.device)
        state[f"{kind}_scale"] = torch.zeros(blocks, device=weight.device)
    optimizer.state[weight] = state
