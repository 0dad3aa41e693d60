"""Attention within each sample, over rows of samples packed one after another."""

from contextlib import nullcontext

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from sd3_light.families.sd3.fast.row_layout import RowLayout

BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
_PRIORITY = [
    SDPBackend.CUDNN_ATTENTION,  # 1.5 times as fast as flash on an H200, forward and backward
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


def attend(query: Tensor, key: Tensor, value: Tensor, layout: RowLayout, backend: str | None = None) -> Tensor:
    """Attend from every row to all rows of its sample: [rows, H, E] -> [rows, H, E].

    Rows after the last sample are undefined. Padded text runs as one batch. Real text runs through `varlen_attn` on
    CUDA in half precision, even if all lengths are equal, because a backend that plans per shape would plan once per
    length. Elsewhere real text of different lengths is masked. ``backend`` is a key of `BACKENDS`, for padded text on
    CUDA; None selects the fastest one available.
    """
    is_half = query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)
    if layout.text_index is None or (layout.length is not None and not query.is_cuda):
        assert layout.length is not None
        batched = [part.unflatten(0, (layout.samples, layout.length)).transpose(1, 2) for part in (query, key, value)]
        backends = _PRIORITY if backend is None else BACKENDS[backend]
        with sdpa_kernel(backends, set_priority=backend is None) if query.is_cuda else nullcontext():
            return F.scaled_dot_product_attention(*batched).transpose(1, 2).flatten(0, 1).contiguous()
    if is_half:
        from torch.nn.attention.varlen import varlen_attn

        return varlen_attn(query, key, value, layout.starts, layout.starts, layout.longest, layout.longest)  # type: ignore[return-value]
    return attend_masked(query, key, value, layout)


def attend_masked(query: Tensor, key: Tensor, value: Tensor, layout: RowLayout) -> Tensor:
    """Compute `attend` on samples padded to the longest, in any dtype and on any device."""
    starts = layout.starts.long()
    lengths = starts.diff()
    sample = torch.arange(layout.samples, device=query.device).repeat_interleave(lengths)
    total = len(query)
    count = layout.image.count + layout.text.count
    slot = sample * layout.longest + torch.arange(count, device=query.device) - starts[sample]
    is_real = torch.arange(layout.longest, device=query.device) < lengths[:, None]
    query, key, value = (_padded(part[:count], slot, layout) for part in (query, key, value))
    output = F.scaled_dot_product_attention(query, key, value, attn_mask=is_real[:, None, None])
    return F.pad(output.transpose(1, 2).flatten(0, 1)[slot], (0, 0, 0, 0, 0, total - count))


def _padded(rows: Tensor, slot: Tensor, layout: RowLayout) -> Tensor:
    """Reshape [rows, H, E] to [B, H, longest, E], padding short samples with zeros."""
    padded: Tensor = rows.new_zeros(layout.samples * layout.longest, *rows.shape[1:]).index_copy(0, slot, rows)
    return padded.view(layout.samples, layout.longest, *rows.shape[1:]).transpose(1, 2)
