"""Run the whole denoiser through the fast blocks, with the stock module's weights, inputs and outputs."""

from collections.abc import Sequence
from typing import Any

import torch
from diffusers import SD3Transformer2DModel
from torch import Tensor, nn
from torch.nn import functional as F

from sd3_light.config import size_from_transformer_config
from sd3_light.model.fast import reference
from sd3_light.model.fast.block import BlockOptions, FastBlock, FinalNorm, modulate
from sd3_light.model.fast.row_plan import RowPlan, make_plan
from sd3_light.model.fast.weights import StreamWeights, WeightCopies

StreamState = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]
"""A stream and its pending update: (x, y, bias, gate)."""


def why_stock(transformer: SD3Transformer2DModel) -> str | None:
    """Return why the fast blocks cannot run this transformer, or None if they can."""
    config = transformer.config
    if any(block.attn2 is not None for block in transformer.transformer_blocks):
        return "the denoiser has SD3.5's second attention"
    if config.attention_head_dim & (config.attention_head_dim - 1):
        return f"the head width {config.attention_head_dim} is not a power of two"
    if config.qk_norm not in (None, "rms_norm"):
        return f"its qk-norm is {config.qk_norm!r}"
    linears = size_from_transformer_config(config, "denoiser").linear_layers()
    names = [name for name in linears if name.startswith(("transformer_blocks.", "norm_out."))]
    if any(type(transformer.get_submodule(name)) is not nn.Linear for name in names):
        return "the linear layers of its blocks are wrapped (adapters)"
    return None


class FastDenoiser:
    """``denoiser(features, lengths)`` returns the patches [B, N, P] of `model/layers.py`, up to rounding.

    ``features`` are (noisy_BCHW, timestep_B, prompt_BTE, pooled_BP); ``lengths`` are the number of real text tokens of
    each sample, on the host, or None if all are real. The transformer must already be on its device. ``dtype`` is the
    compute dtype; the weights stay float32.
    """

    def __init__(
        self, transformer: SD3Transformer2DModel, dtype: torch.dtype, options: BlockOptions | None = None
    ) -> None:
        assert why_stock(transformer) is None, why_stock(transformer)
        self.transformer, self.dtype, self.options = transformer, dtype, options or BlockOptions()
        self.heads = int(transformer.config.num_attention_heads)
        self.weights = WeightCopies(transformer, dtype, self.options.products == "fp8")

    def __call__(self, features: Sequence[Tensor], lengths: Sequence[int] | None = None) -> Tensor:
        """Return the predicted patches."""
        return self.with_text(features, lengths, None)[0]

    def with_text(
        self, features: Sequence[Tensor], lengths: Sequence[int] | None, target_layer: int | None
    ) -> tuple[Tensor, ...]:
        """Return (patches,), or with a ``target_layer`` k (patches, last text [B, T, D], detached text after block k).

        Text rows after a sample's real tokens are zeros.
        """
        noisy, timestep, prompt, pooled = features
        self.weights.refresh()
        with torch.autocast(noisy.device.type, self.dtype, enabled=self.dtype != torch.float32):
            image, text, time, plan = self._embed(noisy, timestep, prompt, pooled, lengths)
            patches, *texts = self._run(image, text, time, plan, target_layer)
        patches = patches.view(len(noisy), -1, patches.shape[1])
        return (patches, *(_by_sample(rows, plan, prompt.shape[1]) for rows in texts))

    def _embed(
        self, noisy: Tensor, timestep: Tensor, prompt: Tensor, pooled: Tensor, lengths: Sequence[int] | None
    ) -> tuple[Tensor, Tensor, Tensor, RowPlan]:
        transformer: Any = self.transformer
        image = transformer.pos_embed(noisy).contiguous()
        plan = make_plan(len(noisy), image.shape[1], prompt.shape[1], lengths, noisy.device)
        rows = prompt.flatten(0, 1)
        if plan.text_index is not None:
            rows = rows[plan.text_index]
        # times up to 1000 need float32, and the embedding takes its dtype from the pooled text
        time = F.silu(transformer.time_text_embed(timestep, pooled.float()))
        return image.flatten(0, 1).to(self.dtype), transformer.context_embedder(rows), time.to(self.dtype), plan

    def _run(
        self, image: Tensor, text: Tensor, time: Tensor, plan: RowPlan, target_layer: int | None
    ) -> tuple[Tensor, ...]:
        width = image.shape[1]
        blocks = self.weights.blocks
        # per block and stream: five parts, then the gate of the pending update; the last text has two parts
        sizes = [5 * width, width] * (2 * len(blocks) - 1) + [2 * width, 2 * width]
        parts = list(modulate(self.weights, time, self.options).split(sizes, dim=1))
        streams: list[StreamState] = [(image, None, None, None), (text, None, None, None)]
        texts: list[Tensor] = []
        for number, pair in enumerate(blocks):
            if target_layer == number:
                texts.append(_with_pending(streams[1], plan).detach())
            if target_layer is not None and number == len(blocks) - 1:
                texts.insert(0, _with_pending(streams[1], plan))
            block_parts = parts[4 * number : 4 * number + 4]
            gates = [block_parts[1], block_parts[3] if pair[1].out is not None else None]
            outputs = self._run_block(plan, pair, streams, (block_parts[0], block_parts[2]))
            streams = [
                (x, y, stream.down.modules[0].bias, gate)
                for (x, y), stream, gate in zip(outputs, pair, gates, strict=False)
                if stream.down is not None
            ]
        rows = FinalNorm.apply(plan.image, *streams[0], parts[-1])  # type: ignore[no-untyped-call]
        return self.transformer.proj_out(rows), *texts

    def _run_block(
        self,
        plan: RowPlan,
        pair: tuple[StreamWeights, StreamWeights],
        streams: list[StreamState],
        modulation: tuple[Tensor, Tensor],
    ) -> list[tuple[Tensor, Tensor]]:
        tensors: list[Any] = []
        for stream, values, parts in zip(pair, streams, modulation, strict=True):
            tensors += [*values, parts, None if stream.out is None else stream.out.modules[0].bias]
        parameters = [parameter for stream in pair for parameter in stream.parameters()]
        outputs = FastBlock.apply(plan, pair, self.heads, self.options, *tensors, *parameters)  # type: ignore[no-untyped-call]
        return [(outputs[index], outputs[index + 1]) for index in range(0, len(outputs), 2)]


def _with_pending(stream: StreamState, plan: RowPlan) -> Tensor:
    """Return the text rows with the pending update added."""
    x, y, bias, gate = stream
    return x if y is None or bias is None or gate is None else reference.add_pending(x, (y, bias, gate), plan.text)


def _by_sample(rows: Tensor, plan: RowPlan, num_text: int) -> Tensor:
    """Reshape text rows to [B, T, D]."""
    if plan.text_index is not None:
        rows = rows.new_zeros(plan.samples * num_text, rows.shape[1]).index_copy(0, plan.text_index, rows)
    return rows.view(plan.samples, num_text, -1)
