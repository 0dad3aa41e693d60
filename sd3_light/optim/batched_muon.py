"""Muon for many matrices at once: those of one shape are orthogonalised together."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

PARTS = "parts"
"""Key of a group whose matrices are several, one above the other, each orthogonalised alone."""
MAX_ELEMENTS = 2**24
"""Elements that are orthogonalised together, except that one matrix may have more; bounds the temporary memory."""


class BatchedMuon(torch.optim.Muon):
    """`torch.optim.Muon` with a few kernels per shape instead of about twenty per matrix.

    With ``found_inf`` (1.0: skip this step) nothing changes, and the host does not wait for the value.
    """

    found_inf: Tensor | None = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all matrices that have a gradient."""
        assert closure is None
        for group in self.param_groups:
            for matrices in _batches(matrix for matrix in group["params"] if matrix.grad is not None):
                self._update(matrices, group)

    def _update(self, matrices: list[Any], group: dict[str, Any]) -> None:
        momenta: Any = [self._momentum(matrix) for matrix in matrices]
        gradients: Any = [matrix.grad for matrix in matrices]
        if self.found_inf is not None:  # the momentum in place of a skipped gradient stays what it is
            skipped = self.found_inf.bool()
            gradients = [torch.where(skipped, *both) for both in zip(momenta, gradients, strict=True)]
        torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
        directions = torch._foreach_lerp(gradients, momenta, group["momentum"]) if group["nesterov"] else momenta
        update = _orthogonalise(torch.stack(list(directions)), group).to(matrices[0].dtype)
        update *= -_adjust_lr(group["lr"], group["adjust_lr_fn"], part_shape(matrices[0].shape, group))
        decay = group["lr"] * group["weight_decay"]
        if self.found_inf is None:
            torch._foreach_mul_(matrices, 1 - decay)
        else:
            update *= 1 - self.found_inf
            torch._foreach_mul_(matrices, 1 - decay * (1 - self.found_inf))
        torch._foreach_add_(matrices, update.unbind())

    def _momentum(self, matrix: nn.Parameter) -> Tensor:
        state = self.state[matrix]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(matrix)
        momentum: Tensor = state["momentum_buffer"]
        return momentum


def _batches(matrices: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Yield matrices of one shape, at most `MAX_ELEMENTS` together."""
    by_shape: dict[tuple[Any, ...], list[nn.Parameter]] = {}
    for matrix in matrices:
        by_shape.setdefault((matrix.shape, matrix.dtype), []).append(matrix)
    for alike in by_shape.values():
        count = max(1, MAX_ELEMENTS // alike[0].numel())
        for first in range(0, len(alike), count):
            yield alike[first : first + count]


def part_shape(shape: torch.Size, group: dict[str, Any]) -> torch.Size:
    """Return the shape of what is orthogonalised alone: a matrix of the group, or one of its parts."""
    return torch.Size((shape[0] // group.get(PARTS, 1), shape[1]))


def _orthogonalise(x_NAB: Tensor, group: dict[str, Any]) -> Tensor:
    keys = {name: group[name] for name in ("ns_coefficients", "ns_steps", "eps")}
    parts = x_NAB.reshape(-1, *part_shape(x_NAB.shape[1:], group))
    if x_NAB.is_cuda:
        return orthogonalise_together(parts, **keys).reshape(x_NAB.shape)
    # batches gain nothing on CPUs
    return torch.stack([_zeropower_via_newtonschulz(part, **keys) for part in parts]).reshape(x_NAB.shape)


def orthogonalise_together(
    x_NAB: Tensor, ns_coefficients: tuple[float, float, float], ns_steps: int, eps: float
) -> Tensor:
    """Return the matrices with singular values near 1: torch's Newton-Schulz iterations, for all at once."""
    a, b, c = ns_coefficients
    is_tall = x_NAB.shape[1] > x_NAB.shape[2]
    x = x_NAB.bfloat16()
    x = x.mT if is_tall else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=eps)
    for _ in range(ns_steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x
