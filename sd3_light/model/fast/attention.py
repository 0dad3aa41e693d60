"""Attention within each sample, over rows that stand one behind another."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from sd3_light.model.fast.rows import Plan

BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


def attend(query: Tensor, key: Tensor, value: Tensor, plan: Plan, backend: str | None = None) -> Tensor:
    """[rows, H, E] in, the same out. Every row looks at all rows of its sample and at no other.

    Samples of one length are a batch; others go through `varlen_attn` on CUDA in half precision, and elsewhere through
    a mask. ``backend`` names one of `BACKENDS` for batches on CUDA; None leaves the choice to torch.
    """
    if plan.length is not None:
        shaped = [part.unflatten(0, (plan.samples, plan.length)).transpose(1, 2) for part in (query, key, value)]
        with _only(backend if query.is_cuda else None):
            return F.scaled_dot_product_attention(*shaped).transpose(1, 2).flatten(0, 1).contiguous()
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        from torch.nn.attention.varlen import varlen_attn

        return varlen_attn(query, key, value, plan.starts, plan.starts, plan.longest, plan.longest)  # type: ignore[return-value]
    return _masked(query, key, value, plan)


@contextmanager
def _only(backend: str | None) -> Iterator[None]:
    if backend is None:
        yield
        return
    with sdpa_kernel(BACKENDS[backend]):
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
