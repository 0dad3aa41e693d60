"""Run the whole denoiser through the fast blocks, with the stock module's weights, inputs and outputs."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from diffusers import SD3Transformer2DModel
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from sd3_light.config import size_from_transformer_config
from sd3_light.families.sd3.between_blocks import BetweenBlocks
from sd3_light.families.sd3.fast import reference
from sd3_light.families.sd3.fast.block import BlockOptions, FastBlock, FinalNorm, modulate
from sd3_light.families.sd3.fast.row_layout import FixedText, RowLayout, Rows, make_layout
from sd3_light.families.sd3.fast.weights import StreamWeights, WeightCopies, WeightViews
from sd3_light.families.sd3.layers import embed_patches

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
    """``denoiser(features, lengths)`` returns the patches [B, N, P] of `families/sd3/layers.py`, up to rounding.

    ``features`` are (noisy_BCHW, timestep_B, prompt_BTE, pooled_BP); ``lengths`` are the number of real text tokens of
    each sample, on the host or as `FixedText`, or None if all are real. The transformer must already be on its device.
    ``dtype`` is the compute dtype; the weights stay float32. If the blocks are ``sharded`` they run as modules, whose
    hooks gather their weights.
    """

    def __init__(
        self,
        transformer: SD3Transformer2DModel,
        dtype: torch.dtype,
        options: BlockOptions | None = None,
        sharded: bool = False,
    ) -> None:
        assert why_stock(transformer) is None, why_stock(transformer)
        self.transformer = transformer
        self.dtype = dtype
        self.options = options or BlockOptions()
        self.heads = int(transformer.config.num_attention_heads)
        self.views = WeightViews(dtype) if sharded else None
        self.weights = self.views or WeightCopies(transformer, dtype, self.options.products == "fp8")
        for number, block in enumerate(transformer.transformer_blocks if sharded else ()):
            block.forward = partial(self._run_sharded, number, block)

    def __call__(self, features: Sequence[Tensor], lengths: Sequence[int] | FixedText | None = None) -> Tensor:
        """Return the predicted patches."""
        return self.with_text(features, lengths, None)[0]

    def with_text(
        self,
        features: Sequence[Tensor],
        lengths: Sequence[int] | FixedText | None,
        target_layer: int | None,
        between: BetweenBlocks | None = None,
    ) -> tuple[Tensor, ...]:
        """Return (patches,), or with a ``target_layer`` k (patches, last text [B, T, D], detached text after block k).

        Text rows after a sample's real tokens are zeros. ``features`` may end with the corners of the position crops.
        ``between`` gets the image tokens between blocks.
        """
        assert target_layer is None or not isinstance(lengths, FixedText), "fillers have no place in a text"
        noisy, timestep, prompt, pooled, *corners = features
        self.weights.refresh()
        with torch.autocast(noisy.device.type, self.dtype, enabled=self.dtype != torch.float32):
            image_BND = embed_patches(self.transformer.pos_embed, noisy, *corners)
            num_image = image_BND.shape[1]
            layouts = _layouts(len(noisy), num_image, prompt.shape[1], lengths, noisy.device, between)
            text, time = self._embed(timestep, prompt, pooled, layouts[num_image])
            image = image_BND.flatten(0, 1).to(self.dtype)
            patches, *texts = self._run(image, text, time, layouts, target_layer, between)
        patches = patches.view(len(noisy), -1, patches.shape[1])
        return (patches, *(_by_sample(rows, layouts[num_image], prompt.shape[1]) for rows in texts))

    def _embed(self, timestep: Tensor, prompt: Tensor, pooled: Tensor, layout: RowLayout) -> tuple[Tensor, Tensor]:
        """Return the text rows, and the activated embedding of time and pooled text, for fillers any."""
        transformer: Any = self.transformer
        rows = prompt.flatten(0, 1)
        if layout.text_index is not None:
            rows = rows[layout.text_index]
        # times up to 1000 need float32, and the embedding takes its dtype from the pooled text
        time = F.silu(transformer.time_text_embed(timestep, pooled.float()))
        if fillers := layout.samples - len(time):
            time = torch.cat([time, time[-1:].expand(fillers, -1)])
        return transformer.context_embedder(rows), time.to(self.dtype)

    def _run(
        self,
        image: Tensor,
        text: Tensor,
        time: Tensor,
        layouts: Mapping[int, RowLayout],
        target_layer: int | None,
        between: BetweenBlocks | None,
    ) -> tuple[Tensor, ...]:
        """Run the blocks; ``layouts`` has one per number of image tokens that a block may get."""
        samples = len(image) // max(layouts)
        transformer: Any = self.transformer
        blocks = transformer.transformer_blocks
        last_norm = transformer.norm_out.linear
        if self.views is not None:
            parts = []
        else:
            modulation = modulate(self.weights.modulation, time, self.options)
            parts = _parts(modulation, image.shape[1], len(blocks))
        streams: list[StreamState] = [(image, None, None, None), (text, None, None, None)]
        texts: list[Tensor] = []
        for number, block in enumerate(blocks):
            layout = layouts[len(streams[0][0]) // samples]
            if between is not None and between.acts_after(number):
                rows = between.after(number, _with_pending(streams[0], layout.image).unflatten(0, (samples, -1)))
                streams[0] = (rows.flatten(0, 1), None, None, None)
                layout = layouts[rows.shape[1]]
            if target_layer == number:
                texts.append(_with_pending(streams[1], layout.text).detach())
            if target_layer is not None and number == len(blocks) - 1:
                texts.insert(0, _with_pending(streams[1], layout.text))
            if self.views is not None:
                streams = block(layout, streams, time)
            else:
                pair = self.weights.blocks[number]
                streams = self._advance(number, layout, pair, streams, parts[4 * number : 4 * number + 4])
        if self.views is not None:
            parts = [modulate(self.views.modulation_of([last_norm]), time, self.options)]
        rows = FinalNorm.apply(layout.image, *streams[0], parts[-1])  # type: ignore[no-untyped-call]
        return transformer.proj_out(rows), *texts

    def _run_sharded(
        self, number: int, block: Any, layout: RowLayout, streams: list[StreamState], time: Tensor
    ) -> list[StreamState]:
        """Run a block whose weights are gathered: it computes its own modulation, and hands copies of biases on."""
        assert self.views is not None
        pair = self.views.of_block(block)
        norms = self.views.modulation_of([block.norm1.linear, block.norm1_context.linear])
        width = streams[0][0].shape[1]
        modulation = modulate(norms, time, self.options)
        text = modulation.shape[1] - 6 * width
        parts = modulation.split([5 * width, width, *([5 * width, width] if text == 6 * width else [text])], dim=1)
        advanced = self._advance(number, layout, pair, streams, parts)
        return [(x, y, bias.to(torch.float32, copy=True), gate) for x, y, bias, gate in advanced if bias is not None]

    def _advance(
        self,
        number: int,
        layout: RowLayout,
        pair: tuple[StreamWeights, StreamWeights],
        streams: list[StreamState],
        parts: Sequence[Tensor],
    ) -> list[StreamState]:
        """Return the streams after a block; ``parts`` are those of its modulation and the gates of both streams."""
        tensors: list[Any] = []
        for stream, values, modulation in zip(pair, streams, parts[::2], strict=True):
            tensors += [*values, modulation, None if stream.out is None else stream.out.modules[0].bias.float()]
        parameters = [parameter for stream in pair for parameter in stream.parameters()]
        options = self.options.of_block(number)
        outputs = FastBlock.apply(layout, pair, self.heads, options, *tensors, *parameters)  # type: ignore[no-untyped-call]
        return [
            (outputs[2 * at], outputs[2 * at + 1], stream.down.modules[0].bias, parts[2 * at + 1])
            for at, stream in enumerate(pair)
            if stream.down is not None
        ]


def _parts(modulation: Tensor, width: int, blocks: int) -> list[Tensor]:
    """Return the modulation per block and stream: five parts, then the gate of the pending update.

    The last text has two parts, the last norm too.
    """
    return list(modulation.split([5 * width, width] * (2 * blocks - 1) + [2 * width, 2 * width], dim=1))


def _layouts(
    samples: int,
    num_image: int,
    num_text: int,
    lengths: Sequence[int] | FixedText | None,
    device: torch.device,
    between: BetweenBlocks | None,
) -> dict[int, RowLayout]:
    """Return the row layouts by number of image tokens: all, and those in routed blocks."""
    counts = {num_image, num_image if between is None or between.num_kept is None else between.num_kept}
    return {count: make_layout(samples, count, num_text, lengths, device) for count in counts}


def _with_pending(stream: StreamState, rows: Rows) -> Tensor:
    """Return the rows of a stream with the pending update added; the backward pass recomputes its intermediates."""
    x, y, bias, gate = stream
    if y is None or bias is None or gate is None:
        return x
    updated: Tensor = checkpoint(
        reference.add_pending, x, (y, bias, gate), rows, use_reentrant=False, preserve_rng_state=False
    )
    return updated


def _by_sample(rows: Tensor, layout: RowLayout, num_text: int) -> Tensor:
    """Reshape text rows to [B, T, D]."""
    if layout.text_index is not None:
        rows = rows.new_zeros(layout.samples * num_text, rows.shape[1]).index_copy(0, layout.text_index, rows)
    return rows.view(layout.samples, num_text, -1)
