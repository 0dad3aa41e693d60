"""Attention within each sample, over rows that stand one behind another."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from sd3_light.model.fast.rows import Plan

BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
_FIRST_TO_LAST = [
    SDPBackend.CUDNN_ATTENTION,  # a half faster than flash on an H200, both ways
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


def attend(query: Tensor, key: Tensor, value: Tensor, plan: Plan, backend: str | None = None) -> Tensor:
    """[rows, H, E] in, the same out. Every row looks at all rows of its sample and at no other.

    Padded text makes a batch; real text goes through `varlen_attn` on CUDA in half precision, whatever its lengths, as
    a backend that makes a plan for each shape would make one for each length; elsewhere through a mask where lengths
    differ. ``backend`` names one of `BACKENDS` for batches on CUDA; None takes the fastest that can.
    """
    is_half = query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)
    if plan.length is not None and (plan.text_index is None or not is_half):
        shaped = [part.unflatten(0, (plan.samples, plan.length)).transpose(1, 2) for part in (query, key, value)]
        with _backends(backend, query.is_cuda):
            return F.scaled_dot_product_attention(*shaped).transpose(1, 2).flatten(0, 1).contiguous()
    if is_half:
        from torch.nn.attention.varlen import varlen_attn

        return varlen_attn(query, key, value, plan.starts, plan.starts, plan.longest, plan.longest)  # type: ignore[return-value]
    return _masked(query, key, value, plan)


@contextmanager
def _backends(name: str | None, is_cuda: bool) -> Iterator[None]:
    if not is_cuda:
        yield
        return
    with sdpa_kernel(_FIRST_TO_LAST if name is None else BACKENDS[name], set_priority=name is None):
        yield


def _masked(query: Tensor, key: Tensor, value: Tensor, plan: Plan) -> Tensor:
    starts = plan.starts.long()
    lengths = starts.diff()
    owner = torch.arange(plan.samples, device=query.device).repeat_interleave(lengths)
    slot = owner * plan.longest + torch.arange(len(query), device=query.device) - starts[owner]
    is_real = torch.arange(plan.longest, device=query.device) < lengths[:, None]
    query, key, value = (_padded(part, slot, plan) for part in (query, key, value))
    found = F.scaled_dot_product_attention(query, key, value, attn_mask=is_real[:, None, None])
    return found.transpose(1, 2).flatten(0, 1)[slot]


def _padded(rows: Tensor, slot: Tensor, plan: Plan) -> Tensor:
    """[rows, H, E] -> [B, H, longest, E] with zeros where a sample has ended."""
    padded: Tensor = rows.new_zeros(plan.samples * plan.longest, *rows.shape[1:]).index_copy(0, slot, rows)
    return padded.view(plan.samples, plan.longest, *rows.shape[1:]).transpose(1, 2)
