"""Texts of stock pipelines: their width by the config of an encoder, and texts of different lengths."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from sd3_light.config import UserError
from sd3_light.model.part_configs import read_json

if TYPE_CHECKING:
    from torch import Tensor

    from sd3_light.core.batch import Batch

_LARGEST = 1 << 16
_LENGTHS = "text.length"


def encoder_width(folder: Path, part: str) -> int:
    """Return the width of the features of a text encoder. Raises UserError if its config does not say it."""
    path = folder / part / "config.json"
    config = read_json(path)
    tables = (config, config.get("text_config"), config.get("encoder"))
    for table in (table for table in tables if isinstance(table, dict)):
        for width in (table.get("hidden_size"), table.get("d_model")):
            if type(width) is int and 1 <= width <= _LARGEST:
                return width
    raise UserError(f"{path} has no width of 1 to {_LARGEST}; download the folder again")


def rounded_text(batch: "Batch", step: int) -> "Batch":
    """Return the batch with its text padded to a multiple of ``step`` rows, its lengths among the values on the device.

    A batch whose host has no lengths stays as it is.
    """
    from sd3_light.model.device_copy import to_device

    lengths = batch.lengths("text")
    if lengths is None:
        return batch
    padded = batch.padded_to("text", -(-int(lengths.max()) // step) * step)
    host = {name: value for name, value in batch.host.items() if name != _LENGTHS}
    return replace(padded, host=host).with_values({_LENGTHS: to_device(lengths, batch["noisy"].device)})


def real_rows(text: "Tensor", mask: "Tensor | None") -> "Sequence[Tensor]":
    """Return the rows of each text that its mask keeps; without a mask all."""
    if mask is None:
        return list(text)
    return [rows[real.bool()] for rows, real in zip(text, mask, strict=True)]


def text_mask(batch: "Batch", always: bool = False) -> "Tensor | None":
    """Return which rows of the batch's text are a sample's own [B, T]; None where no row is padded, unless ``always``.

    Without a mask attention is faster. Lengths on the device are not read: there is a mask in any case.
    """
    import torch

    text = batch["text"]
    on_device = batch.get(_LENGTHS)
    lengths = batch.lengths("text") if on_device is None else on_device
    rows = text.shape[1]
    if lengths is None or (on_device is None and int(lengths.min()) == rows):
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
