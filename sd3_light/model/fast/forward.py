"""The whole denoiser through the fast blocks: the stock module's weights, inputs and outputs."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from diffusers import SD3Transformer2DModel
from torch import Tensor, nn
from torch.nn import functional as F

from sd3_light.model.fast import reference
from sd3_light.model.fast.block import Block, BlockOptions, Norm, modulate
from sd3_light.model.fast.row_plan import Plan, make_plan
from sd3_light.model.fast.sample_attention import attend
from sd3_light.model.fast.weights import Stream, Weights

Pending = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]
Streams = list[Pending]
"""Image and text, each with what is pending: (x, y, bias, gate)."""


def why_stock(transformer: SD3Transformer2DModel) -> str | None:
    """Why the fast blocks cannot stand for a transformer's own, in words; None where they can."""
    config = transformer.config
    if any(block.attn2 is not None for block in transformer.transformer_blocks):
        return "the denoiser has SD3.5's second attention"
    if config.attention_head_dim & (config.attention_head_dim - 1):
        return f"the width of its heads, {config.attention_head_dim}, is no power of two"
    if config.qk_norm not in (None, "rms_norm"):
        return f"its qk-norm is {config.qk_norm!r}"
    if any(type(module) is not nn.Linear for module in _linears(transformer)):
        return "the linear layers of its blocks are not its own (adapters)"
    return None


def _linears(transformer: SD3Transformer2DModel) -> Iterator[nn.Module]:
    for block in transformer.transformer_blocks:
        for name in ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj"):
            yield getattr(block.attn, name)
        yield block.attn.to_out[0]
        yield from (block.norm1.linear, block.norm1_context.linear)
        for feed in (block.ff, block.ff_context):
            if feed is not None:
                yield from (feed.net[0].proj, feed.net[2])
        if not block.context_pre_only:
            yield block.attn.to_add_out
    yield transformer.norm_out.linear


class FastDenoiser:
    """``denoiser(features, lengths)`` gives the patches [B, N, P] that `model/layers.py` would give, up to rounding.

    ``features`` are (noisy_BCHW, timestep_B, prompt_BTE, pooled_BP); ``lengths`` are the real text tokens of each
    sample, on the host, or None where all of them count. The transformer must be on its device already. ``dtype`` is
    what computes; the weights stay float32.
    """

    def __init__(self, transformer: SD3Transformer2DModel, dtype: torch.dtype, how: BlockOptions | None = None) -> None:
        assert why_stock(transformer) is None, why_stock(transformer)
        self.transformer, self.dtype, self.how = transformer, dtype, how or BlockOptions()
        self.heads = int(transformer.config.num_attention_heads)
        self.weights = Weights(transformer, dtype, self.how.products == "fp8")
        self.run_block: Callable[..., Any] = self._by_hand

    def __call__(self, features: Sequence[Tensor], lengths: Sequence[int] | None = None) -> Tensor:
        """The predicted patches."""
        return self.with_text(features, lengths, None)[0]

    def with_text(
        self, features: Sequence[Tensor], lengths: Sequence[int] | None, target_layer: int | None
    ) -> tuple[Tensor, ...]:
        """(patches,), or with a ``target_layer`` k (patches, the last text [B, T, D], the text after block k, without
        gradient); behind a sample's own tokens stand zeros."""
        noisy, timestep, prompt, pooled = features
        device = noisy.device
        self.weights.refresh()
        with torch.autocast(device.type, self.dtype, enabled=self.dtype != torch.float32):
            image, text, time, plan = self._embed(noisy, timestep, prompt, pooled, lengths)
            patches, *texts = self._run(image, text, time, plan, target_layer)
        found = [patches.view(len(noisy), -1, patches.shape[1])]
        return (*found, *(_by_sample(rows, plan, prompt.shape[1]) for rows in texts))

    def _embed(
        self, noisy: Tensor, timestep: Tensor, prompt: Tensor, pooled: Tensor, lengths: Sequence[int] | None
    ) -> tuple[Tensor, Tensor, Tensor, Plan]:
        transformer: Any = self.transformer
        image = transformer.pos_embed(noisy).contiguous()
        plan = make_plan(len(noisy), image.shape[1], prompt.shape[1], lengths, noisy.device)
        rows = prompt.flatten(0, 1)
        if plan.text_index is not None:
            rows = rows[plan.text_index]
        # times up to 1000 need float32, and the embedding takes its type from the pooled text
        time = F.silu(transformer.time_text_embed(timestep, pooled.float()))
        return image.flatten(0, 1).to(self.dtype), transformer.context_embedder(rows), time.to(self.dtype), plan

    def _run(
        self, image: Tensor, text: Tensor, time: Tensor, plan: Plan, target_layer: int | None
    ) -> tuple[Tensor, ...]:
        width = image.shape[1]
        blocks = self.weights.blocks
        # of each stream of a block five parts, then the gate of what it leaves pending; the last text has two
        sizes = [5 * width, width] * (2 * len(blocks) - 1) + [2 * width, 2 * width]
        parts = list(modulate(self.weights, time, self.how).split(sizes, dim=1))
        streams: Streams = [(image, None, None, None), (text, None, None, None)]
        texts: list[Tensor] = []
        for number, pair in enumerate(blocks):
            if target_layer == number:
                texts.append(_whole(streams[1], plan).detach())
            if target_layer is not None and number == len(blocks) - 1:
                texts.insert(0, _whole(streams[1], plan))
            mine = parts[4 * number : 4 * number + 4]
            gates = [mine[1], mine[3] if pair[1].out is not None else None]
            outputs = self.run_block(plan, pair, streams, (mine[0], mine[2]))
            streams = [
                (x, y, stream.down.modules[0].bias, gate)
                for (x, y), stream, gate in zip(outputs, pair, gates, strict=False)
                if stream.down is not None
            ]
        rows = Norm.apply(plan.image, *streams[0], parts[-1])  # type: ignore[no-untyped-call]
        return self.transformer.proj_out(rows), *texts

    def _by_hand(
        self, plan: Plan, pair: tuple[Stream, Stream], streams: Streams, modulation: tuple[Tensor, Tensor]
    ) -> list[tuple[Tensor, Tensor]]:
        tensors: list[Any] = []
        for stream, values, parts in zip(pair, streams, modulation, strict=True):
            tensors += [*values, parts, None if stream.out is None else stream.out.modules[0].bias]
        learned = [parameter for stream in pair for parameter in stream.parameters()]
        outputs = Block.apply(plan, pair, self.heads, self.how, *tensors, *learned)  # type: ignore[no-untyped-call]
        return [(outputs[at], outputs[at + 1]) for at in range(0, len(outputs), 2)]

    def compile(self, **options: Any) -> None:
        """Let the compiler write the blocks, forward and backward, instead of the hand-written kernels."""
        assert self.how.products == "plain", "compiled blocks multiply in the type that computes"
        compiled = torch.compile(_plain_block, **options)

        def run(
            plan: Plan, pair: tuple[Stream, Stream], streams: Streams, modulation: tuple[Tensor, Tensor]
        ) -> list[tuple[Tensor, Tensor]]:
            weights = [_plain_weights(stream) for stream in pair]
            found: list[tuple[Tensor, Tensor]] = compiled(
                plan, weights, streams, modulation, self.heads, self.how.attention, self.dtype
            )
            return found

        self.run_block = run


def _whole(stream: Pending, plan: Plan) -> Tensor:
    """The rows of the text with what is pending."""
    x, y, bias, gate = stream
    return x if y is None or bias is None or gate is None else reference.add(x, (y, bias, gate), plan.text)


def _by_sample(rows: Tensor, plan: Plan, num_text: int) -> Tensor:
    """Rows of text as [B, T, D]."""
    if plan.text_index is not None:
        rows = rows.new_zeros(plan.samples * num_text, rows.shape[1]).index_copy(0, plan.text_index, rows)
    return rows.view(plan.samples, num_text, -1)


def _plain_weights(stream: Stream) -> dict[str, Any]:
    named = {"qkv": stream.qkv, "out": stream.out, "up": stream.up, "down": stream.down}
    found: dict[str, Any] = {
        name: [(module.weight, module.bias) for module in linear.modules]
        for name, linear in named.items()
        if linear is not None
    }
    return {**found, "norms": stream.norms}


def _product(rows: Tensor, linears: list[tuple[Tensor, Tensor]], dtype: torch.dtype, biased: bool = True) -> Tensor:
    weight = torch.cat([weight for weight, _ in linears]).to(dtype)
    bias = torch.cat([bias for _, bias in linears]).to(dtype) if biased else None
    return F.linear(rows, weight, bias)


def _plain_block(
    plan: Plan,
    weights: list[dict[str, Any]],
    streams: Streams,
    modulation: tuple[Tensor, Tensor],
    heads: int,
    backend: str | None,
    dtype: torch.dtype,
) -> list[tuple[Tensor, Tensor]]:
    """A block in operations that autograd knows; the same as `Block`."""
    stays, qkv, rows_of = [], [], (plan.image, plan.text)
    with torch.autocast(streams[0][0].device.type, enabled=False):
        for learned, (x, y, bias, gate), parts, rows in zip(weights, streams, modulation, rows_of, strict=True):
            is_last = "out" not in learned
            scale, shift = parts.chunk(2, dim=1) if is_last else parts.chunk(5, dim=1)[1::-1]
            pending = None if y is None or bias is None or gate is None else (y, bias, gate)
            x, h = reference.residual_norm(x, pending, scale, shift, rows)
            stays.append(x)
            qkv.append(_product(h, learned["qkv"], dtype))
        norms = (weights[0]["norms"], weights[1]["norms"])
        query, key, value = reference.join((qkv[0], qkv[1]), norms, heads, plan)
        joined = attend(query, key, value, plan, backend)
        found = []
        for learned, x, parts, rows in zip(weights, stays, modulation, rows_of, strict=True):
            if "out" not in learned:
                continue
            gate, shift, scale = parts.chunk(5, dim=1)[2:]
            a = _product(reference.take(joined, rows).flatten(1), learned["out"], dtype, biased=False)
            x, h = reference.residual_norm(x, (a, learned["out"][0][1], gate), scale, shift, rows)
            g = reference.gelu(_product(h, learned["up"], dtype))
            found.append((x, _product(g, learned["down"], dtype, biased=False)))
    return found
