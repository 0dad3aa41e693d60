"""AdamW with moments in 8 bits: one code per value, and one float32 scale, the largest magnitude, per block of 256.

A code is proportional to a root of value / scale, so that small values keep their relative precision: the fourth root
of the first moment, with its sign, and the eighth root of the second. The second moment changes by a thousandth per
step, less than the distance of two codes: rounding to the nearest would keep it where it is, so it is rounded at
random, right on average, and never to 0.

A weight in bfloat16 is updated in float32, too, and rounded at random. On a GPU one kernel does all of this
(`adamw_8bit_kernel.py`); `advance` is its reference.
"""

import importlib.util
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from subprocess import SubprocessError
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from sd3_light.config.optimizers import SLICE_ELEMENTS
from sd3_light.optim.draws import draw_rounding, round_with
from sd3_light.runlog import info

BLOCK = 256
"""Values per scale."""
_FEWEST = 4096
_LEVELS = {torch.int8: 127, torch.uint8: 255}
_ROOTS = {torch.int8: 2, torch.uint8: 3}  # square roots that are taken one after another
_TORCH_SHARE = 8
"""`advance` has this many times the memory of the kernel per element, and gets fewer at a time."""


@dataclass(frozen=True)
class WeightSlice:
    """Flat elements of a weight and all that updates them; the first one begins a block.

    ``draws`` (in [0, 1), one per element of the blocks) round the second moment, ``rounding`` a weight in bfloat16.
    """

    values: Tensor
    gradient: Tensor
    first: Tensor
    first_scale: Tensor
    second: Tensor
    second_scale: Tensor
    draws: Tensor
    rounding: Tensor | None


@dataclass(frozen=True)
class Rates:
    """The numbers of an update. ``corrections`` [2] are Adam's, and nothing changes if ``skip`` is 1.0."""

    lr: float
    weight_decay: float
    betas: tuple[float, float]
    eps: float
    corrections: Tensor
    skip: Tensor


Advance = Callable[[WeightSlice, Rates], None]
"""See `advance`."""


def has_8bit_moments(weight: Tensor) -> bool:
    """Return whether a weight is large enough for 8 bits; the moments of others stay in float32."""
    return weight.numel() >= _FEWEST


class AdamW8bit(torch.optim.Optimizer):
    """AdamW for weights in float32 or bfloat16.

    ``generator_of(purpose, weight)`` rounds its second moment, and the weight in bfloat16, in this step. With
    ``found_inf`` (1.0: skip this step) nothing changes, and the host does not wait for the value.
    """

    found_inf: Tensor | None = None

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        generator_of: Callable[[str, nn.Parameter], torch.Generator],
        lr: float,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps})
        self._generator_of = generator_of
        for device in {weight.device for group in self.param_groups for weight in group["params"] if weight.is_cuda}:
            checked_kernel(device)  # now, since it waits for the device

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all weights that have a gradient."""
        assert closure is None
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            if not weights:
                continue
            steps = [self.state[weight]["step"] for weight in weights]
            skip = torch.zeros_like(steps[0]) if self.found_inf is None else self.found_inf
            torch._foreach_add_(steps, [1 - skip] * len(steps))
            counts = torch.stack(steps).clamp(min=1)  # of a first step that is skipped
            corrections = torch.stack([1 - beta**counts for beta in group["betas"]], dim=1)
            numbers = (group["lr"], group["weight_decay"], group["betas"], group["eps"])
            for weight, own in zip(weights, corrections, strict=True):
                self._update(weight, Rates(*numbers, own, skip))

    def _update(self, weight: nn.Parameter, rates: Rates) -> None:
        state = self.state[weight]
        generator = self._generator_of("second moment", weight)
        rounding = self._generator_of("rounding", weight) if weight.dtype == torch.bfloat16 else None
        function = checked_kernel(weight.device) if weight.is_cuda else None
        most = SLICE_ELEMENTS if function is not None else SLICE_ELEMENTS // _TORCH_SHARE
        values = weight.view(-1)
        gradient = weight.grad.reshape(-1)  # type: ignore[union-attr]
        first = state["exp_avg"].view(-1)
        second = state["exp_avg_sq"].view(-1)
        for start in range(0, len(values), most):
            end = min(start + most, len(values))
            at = slice(start, end)
            rows = slice(start // BLOCK, -(-end // BLOCK))
            piece = WeightSlice(
                values[at],
                gradient[at],
                first[at],
                state["exp_avg_scale"][rows],
                second[at],
                state["exp_avg_sq_scale"][rows],
                torch.rand((rows.stop - rows.start, BLOCK), generator=generator, device=weight.device),
                None if rounding is None else draw_rounding(values[at], rounding),
            )
            (function or advance)(piece, rates)


def advance(piece: WeightSlice, rates: Rates) -> None:
    """Advance the moments of a slice by its gradient, and take AdamW's step."""
    skip = rates.skip.bool()
    gradient = _blocks(piece.gradient.float())
    first = expand(_blocks(piece.first), piece.first_scale)
    second = expand(_blocks(piece.second), piece.second_scale)
    first.lerp_(gradient, 1 - rates.betas[0])
    second.lerp_(gradient.square(), 1 - rates.betas[1])
    moments = (
        (piece.first, piece.first_scale, compress(first, torch.int8)),
        (piece.second, piece.second_scale, compress(second, torch.uint8, piece.draws)),
    )
    for codes, scales, (new_codes, new_scales) in moments:
        codes.copy_(torch.where(skip, codes, new_codes.view(-1)[: len(codes)]))
        scales.copy_(torch.where(skip, scales, new_scales))
    size = second.div_(rates.corrections[1]).sqrt_().add_(rates.eps)
    update = first.div_(rates.corrections[0]).div_(size)
    decayed = piece.values.float() * (1 - rates.lr * rates.weight_decay)
    changed = decayed.add_(update.view(-1)[: len(decayed)], alpha=-rates.lr)
    rounded = changed if piece.rounding is None else round_with(changed, piece.rounding)
    piece.values.copy_(torch.where(skip, piece.values, rounded))


@cache
def checked_kernel(device: torch.device) -> Advance | None:
    """Return the Triton kernel if it computes the same as `advance` on this GPU."""
    if importlib.util.find_spec("triton") is None:
        return None
    from triton.errors import TritonError

    try:
        from sd3_light.optim.adamw_8bit_kernel import advance as kernel

        problem = None if _is_equal(kernel, device) else "it computes something else"
    except torch.OutOfMemoryError:  # of a GPU that others fill: says nothing about the kernel
        raise
    except (TritonError, RuntimeError, OSError, SubprocessError) as error:
        problem = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    if problem is None:
        return kernel
    info(f'optimizer "adamw8bit": its kernel does not work on this GPU, so that steps are slower ({problem})')
    return None


def _is_equal(kernel: Advance, device: torch.device) -> bool:
    """Return whether a kernel advances slices as `advance` does, except for the last bits."""
    corrections = torch.tensor([0.1, 0.01], device=device)
    rates = Rates(1e-2, 0.1, (0.9, 0.99), 1e-8, corrections, torch.zeros((), device=device))
    for dtype in (torch.float32, torch.bfloat16):
        actual = _sample_slice(dtype, device)
        expected = _sample_slice(dtype, device)
        kernel(actual, rates)
        advance(expected, rates)
        distance = 1e-4 if dtype == torch.float32 else 2**-7  # between neighbours
        if not torch.allclose(actual.values.float(), expected.values.float(), rtol=distance, atol=1e-5):
            return False
        for name in ("first", "second"):
            codes = (getattr(actual, name).int() - getattr(expected, name).int()).abs()
            scales = [getattr(piece, f"{name}_scale") for piece in (actual, expected)]
            if codes.max() > 1 or codes.float().mean() > 0.01 or not torch.allclose(scales[0], scales[1], rtol=1e-4):
                return False
    return True


def _sample_slice(dtype: torch.dtype, device: torch.device) -> WeightSlice:
    """Return a slice of several blocks, the last one not full."""
    generator = torch.Generator().manual_seed(0)
    count = 5 * BLOCK + 40
    blocks = -(-count // BLOCK)
    gradient = torch.randn(count, generator=generator) * torch.logspace(-4, 0, count)
    piece = WeightSlice(
        torch.randn(count, generator=generator).to(dtype),
        gradient.to(dtype),
        torch.randint(-127, 128, (count,), generator=generator, dtype=torch.int8),
        torch.rand(blocks, generator=generator),
        torch.randint(0, 256, (count,), generator=generator, dtype=torch.uint8),
        torch.rand(blocks, generator=generator),
        torch.rand(blocks, BLOCK, generator=generator),
        torch.randint(0, 1 << 16, (count,), generator=generator, dtype=torch.int32),
    )
    tensors = {name: value.to(device) for name, value in vars(piece).items()}
    return WeightSlice(**tensors if dtype == torch.bfloat16 else {**tensors, "rounding": None})


def compress(values: Tensor, dtype: torch.dtype, draws: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the codes of rows of values, in int8 with their signs or in uint8 without, and the rows' scales.

    They are rounded to the nearest code, or with ``draws`` in [0, 1) to one of the two at random.
    """
    levels = _LEVELS[dtype]
    codes = values.abs()
    scales = codes.amax(1)
    codes = codes.div_(scales.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(1))
    for _ in range(_ROOTS[dtype]):
        codes.sqrt_()
    codes.mul_(levels)
    if draws is None:
        codes.round_()
    else:
        codes.add_(draws).floor_()
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
