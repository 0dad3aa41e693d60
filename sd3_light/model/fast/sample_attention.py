"""Attention within each sample, over rows that stand one behind another."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from sd3_light.model.fast.row_plan import Plan

BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
_FIRST_TO_LAST = [
    SDPBackend.CUDNN_ATTENTION,  # a half faster than flash on an H200, both ways
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


def attend(query: Tensor, key: Tensor, value: Tensor, plan: Plan, backend: str | None = None) -> Tensor:
    """[rows, H, E] in, the same out. Every row looks at all rows of its sample and at no other; rows behind the last
    sample mean nothing.

    Padded text makes a batch; real text goes through `varlen_attn` on CUDA in half precision, whatever its lengths, as
    a backend that makes a plan for each shape would make one for each length; elsewhere through a mask where lengths
    differ. ``backend`` names one of `BACKENDS` for padded text on CUDA; None takes the fastest that can.
    """
    is_half = query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)
    if plan.text_index is None or (plan.length is not None and not query.is_cuda):
        assert plan.length is not None
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
    total = len(query)
    count = plan.image.count + plan.text.count
    slot = owner * plan.longest + torch.arange(count, device=query.device) - starts[owner]
    is_real = torch.arange(plan.longest, device=query.device) < lengths[:, None]
    shaped = [_padded(part[:count], slot, plan) for part in (query, key, value)]
    query, key, value = shaped
    found = F.scaled_dot_product_attention(query, key, value, attn_mask=is_real[:, None, None])
    return F.pad(found.transpose(1, 2).flatten(0, 1)[slot], (0, 0, 0, 0, 0, total - count))


def _padded(rows: Tensor, slot: Tensor, plan: Plan) -> Tensor:
    """[rows, H, E] -> [B, H, longest, E] with zeros where a sample has ended."""
    padded: Tensor = rows.new_zeros(plan.samples * plan.longest, *rows.shape[1:]).index_copy(0, slot, rows)
    return padded.view(plan.samples, plan.longest, *rows.shape[1:]).transpose(1, 2)
