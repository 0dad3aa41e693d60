"""What training SD3 costs, by formulas: `families/sd3/flops.py` and `families/sd3/activations.py`."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import TYPE_CHECKING

from sd3_light.config import AdapterConfig, ModelConfig, ModelSize, TrainConfig
from sd3_light.config.schema_blocks import TokenRoute
from sd3_light.core.cost import FLASH_BACKWARD, BlockBytes, Compute, Cost, Layout, SampleBytes, TextTokens, Tokens
from sd3_light.families.sd3.activations import held_activations, kept_activations
from sd3_light.families.sd3.fast.choice import why_no_fp8, why_stock_by_config
from sd3_light.families.sd3.flops import block_weights, flops_formula, forward_flops, image_tokens, input_flops
from sd3_light.model.folder import CLIP_TOKENS, text_shape
from sd3_light.model.linears import adapter_layer_parameters

if TYPE_CHECKING:
    from sd3_light.core.batch import Batch

_LATENT_STEP = 8  # image pixels per latent pixel


@dataclass(frozen=True)
class SD3Cost(Cost):
    """See `Cost`. Without a ``model`` the number of text tokens is unknown; ``route`` names blocks that tokens skip."""

    size: ModelSize
    model: ModelConfig | None = None
    route: TokenRoute | None = None

    @property
    def description(self) -> str:
        """See `Cost.description`."""
        return f"{self.size.name}: {self.size.num_layers} layers, {self.size.num_heads} heads·{self.size.head_dim}"

    @property
    def layer_parameters(self) -> tuple[int, ...]:
        """See `Cost.layer_parameters`."""
        return self.size.layer_parameters()

    @property
    def block_matrices(self) -> int:
        """See `Cost.block_matrices`."""
        return sum(vars(block_weights(self.size)).values())

    @property
    def width(self) -> int:
        """See `Cost.width`."""
        return self.size.width

    @cached_property
    def text(self) -> TextTokens:
        """See `Cost.text`."""
        model = self._model
        shape = text_shape(model.diffusers_path, model.t5_max_length, model.text_tokens == "real")
        formula = f"{shape.at_most}CLIP {shape.clip_tokens} + T5 {shape.t5_tokens}"
        padding = "; real tokens: memory, cache and FLOPs below are for the longest captions"
        return TextTokens(shape.tokens, not shape.real, formula + (padding if shape.real else ", padded"))

    @property
    def longest_text(self) -> int:
        """See `Cost.longest_text`."""
        return CLIP_TOKENS + self._model.t5_max_length

    @property
    def flops_formula(self) -> str:
        """See `Cost.flops_formula`."""
        return flops_formula(self.size, self.route)

    @property
    def unrouted(self) -> "SD3Cost":
        """See `Cost.unrouted`."""
        return replace(self, route=None)

    @property
    def _model(self) -> ModelConfig:
        assert self.model is not None, "only a [model] table has a text length"
        return self.model

    def image_tokens(self, width: int, height: int) -> int:
        """See `Cost.image_tokens`."""
        return image_tokens(width, height)

    def batch_tokens(self, batch: "Batch") -> Mapping[Tokens, int]:
        """See `Cost.batch_tokens`."""
        height, width = batch["noisy"].shape[-2:]
        image = image_tokens(_LATENT_STEP * width, _LATENT_STEP * height)
        lengths = batch.lengths("prompt")
        counts = {batch["prompt"].shape[1]: batch.size} if lengths is None else Counter(lengths.tolist())
        return {Tokens(image, text): count for text, count in counts.items()}

    def forward_flops(self, tokens: Tokens) -> int:
        """See `Cost.forward_flops`."""
        return forward_flops(self.size, tokens, self.route)

    def input_flops(self, tokens: Tokens) -> int:
        """See `Cost.input_flops`."""
        return input_flops(self.size, tokens)

    def sample_bytes(self, tokens: Tokens, compute: Compute) -> SampleBytes:
        """See `Cost.sample_bytes`."""
        return _sample_bytes(self.size, self.route, tokens, compute)

    def adapter_parameters(self, adapter: AdapterConfig) -> tuple[int, ...]:
        """See `Cost.adapter_parameters`."""
        return adapter_layer_parameters(self.size, adapter)

    def why_stock(self, config: TrainConfig, layout: Layout) -> str | None:
        """See `Cost.why_stock`."""
        return why_stock_by_config(config, self.size, layout.world, layout.by_deepspeed)

    def why_no_fp8(self, capability: tuple[int, int] | None) -> str | None:
        """See `Cost.why_no_fp8`."""
        return why_no_fp8(self.size, capability)


@cache  # `new` asks for it with many sizes of micro-batches
def _sample_bytes(size: ModelSize, route: TokenRoute | None, tokens: Tokens, compute: Compute) -> SampleBytes:
    held = held_activations(compute)
    kept = kept_activations(compute)
    latent = 4 * tokens.image * size.patch_size**2 * size.latent_channels  # noisy latent or target, in float32
    # text arrives in bf16, is cast to float32, and again by autocast's linear layer; fast blocks gather its real rows
    casts = 2 if compute.kind == "fast" else 4 + (2 if compute.dtype != "float32" else 0)
    blocks = []
    for block in range(size.num_layers):
        inside = tokens if route is None else Tokens(route.tokens_in(block + 1, tokens.image), tokens.text)
        own = range(block, block + 1)
        inputs = held.stream * size.width * inside.joint
        blocks.append(BlockBytes(inputs, held.total(size, inside, own), kept.total(size, inside, own)))
    stream = held.stream * size.width * tokens.joint
    return SampleBytes(
        features=2 * tokens.text * size.text_width + latent,
        target=latent,
        before=tokens.text * size.text_width * casts,
        blocks=tuple(blocks),
        after=2 * latent + held.output * size.width * tokens.image,  # the prediction and its error
        stream=stream,
        largest=BlockBytes(stream, held.largest(size, tokens), kept.largest(size, tokens)),
        work=(held.work + FLASH_BACKWARD) * size.width * tokens.joint,
    )
