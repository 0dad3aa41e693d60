"""Texts of different lengths, as stock pipelines return and take them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from sd3_light.core.batch import Batch


def real_rows(text: "Tensor", mask: "Tensor | None") -> "Sequence[Tensor]":
    """Return the rows of each text that its mask keeps; without a mask all."""
    if mask is None:
        return list(text)
    return [rows[real.bool()] for rows, real in zip(text, mask, strict=True)]


def text_mask(batch: "Batch", always: bool = False) -> "Tensor | None":
    """Return which rows of the batch's text are a sample's own [B, T]; None where no row is padded, unless ``always``.

    Without a mask attention is faster.
    """
    import torch

    text = batch["text"]
    lengths = batch.lengths("text")
    rows = text.shape[1]
    if lengths is None or int(lengths.min()) == rows:
        return torch.ones(text.shape[:2], dtype=torch.bool, device=text.device) if always else None
    return torch.arange(rows, device=text.device) < lengths.to(text.device, non_blocking=True)[:, None]


def masked_embeds(texts: "Batch", negative: "Batch | None", mask_name: str) -> "dict[str, Tensor]":
    """Return the arguments of a pipeline that takes texts with masks named ``mask_name``, all of one length."""
    from torch.nn.functional import pad

    both = {"": texts} if negative is None else {"": texts, "negative_": negative}
    rows = max(batch["text"].shape[1] for batch in both.values())
    arguments = {}
    for prefix, batch in both.items():
        mask = text_mask(batch, always=True)
        assert mask is not None
        arguments[f"{prefix}prompt_embeds"] = batch.padded_to("text", rows)["text"]
        arguments[f"{prefix}{mask_name}"] = pad(mask, (0, rows - mask.shape[1]))
    return arguments
