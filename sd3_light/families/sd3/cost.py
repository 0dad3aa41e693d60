"""What training SD3 costs, by formulas: FLOPs, and bytes that a block saves for its backward pass.

Pure arithmetic on a `ModelSize`. Letters in formulas: N image tokens, T text tokens, D width, L blocks.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import TYPE_CHECKING

from sd3_light.config import AdapterConfig, ModelConfig, ModelSize, TrainConfig
from sd3_light.config.schema_blocks import TokenRoute
from sd3_light.core.cost import FLASH_BACKWARD, BlockBytes, Compute, Cost, Layout, SampleBytes, TextTokens, Tokens
from sd3_light.families.sd3.fast.choice import why_no_fp8, why_stock_by_config
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
    def table_bytes(self) -> int:
        """See `Cost.table_bytes`: positions in float64, twice while their halves are joined."""
        return 16 * self.size.pos_embed_max_size**2 * self.size.width

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
        terms = "2·weights·tokens of each stream + 4·(N+T)²·D·L"
        if self.size.dual_attention_layers:
            terms += f" + 4·N²·D·{len(self.size.dual_attention_layers)}"
        if self.route is not None:
            terms += f" - {self.route.share:.4g}·N in blocks {self.route.first} to {self.route.last}"
        return terms

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

    def _seen(self, tokens: Tokens) -> Tokens:
        """Return the tokens with those of references."""
        count = 0 if self.model is None else self.model.references
        return Tokens((1 + count) * tokens.image, tokens.text)

    def forward_flops(self, tokens: Tokens) -> int:
        """See `Cost.forward_flops`."""
        return forward_flops(self.size, self._seen(tokens), self.route)

    def input_flops(self, tokens: Tokens) -> int:
        """See `Cost.input_flops`: gradients of images, text, time and pooled text."""
        size = self.size
        tokens = self._seen(tokens)
        weights = _patch(size) * tokens.image + size.text_width * tokens.text + 256 + size.pooled_width
        return 2 * weights * size.width

    def sample_bytes(self, tokens: Tokens, compute: Compute) -> SampleBytes:
        """See `Cost.sample_bytes`: by formulas if all weights train, otherwise counted."""
        tokens = self._seen(tokens)
        if compute.adapter is None:
            return _sample_bytes(self.size, self.route, tokens, compute)
        from sd3_light.families.sd3.adapter_cost import adapter_bytes  # imports torch

        return adapter_bytes(self.size, self.route, tokens, compute)

    def adapter_parameters(self, adapter: AdapterConfig) -> tuple[int, ...]:
        """See `Cost.adapter_parameters`."""
        return adapter_layer_parameters(self.size, adapter)

    def why_stock(self, config: TrainConfig, layout: Layout) -> str | None:
        """See `Cost.why_stock`."""
        return why_stock_by_config(config, self.size, layout.world_size, layout.by_deepspeed)

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


def image_tokens(width: int, height: int) -> int:
    """Return the tokens of an image of ``width`` x ``height`` pixels: the VAE shrinks 8 times, a patch covers 2 x 2."""
    side = 8 * ModelSize.patch_size
    return (width // side) * (height // side)


def forward_flops(size: ModelSize, tokens: Tokens, route: TokenRoute | None = None) -> int:
    """Return the FLOPs of one sample's forward pass: matrix products and attention, without norms and activations."""
    weights = matrix_weights(size)
    products = 2 * (weights.image * tokens.image + weights.text * tokens.text + weights.sample)
    joint = 4 * tokens.joint**2 * size.width * size.num_layers
    dual = 4 * tokens.image**2 * size.width * len(size.dual_attention_layers)
    return products + joint + dual - (0 if route is None else _skipped_flops(size, tokens, route))


def _skipped_flops(size: ModelSize, tokens: Tokens, route: TokenRoute) -> int:
    """Return the FLOPs of the tokens that skip blocks."""
    kept = Tokens(route.tokens_in(route.first, tokens.image), tokens.text)
    blocks = route.last - route.first + 1
    dual = sum(route.first <= layer + 1 <= route.last for layer in size.dual_attention_layers)
    products = 2 * _image_squares(blocks, dual) * size.width**2 * (tokens.image - kept.image)
    pairs = blocks * (tokens.joint**2 - kept.joint**2) + dual * (tokens.image**2 - kept.image**2)
    return products + 4 * pairs * size.width


@dataclass(frozen=True)
class MatrixWeights:
    """Weights in matrix products, by what they multiply: every image token, every text token, or the sample once."""

    image: int
    text: int
    sample: int


def matrix_weights(size: ModelSize) -> MatrixWeights:
    """Return the matrix weights of the whole denoiser."""
    blocks = block_weights(size)
    square = size.width**2
    image = 2 * _patch(size) * size.width + blocks.image
    text = size.text_width * size.width + blocks.text
    # two layers each for time and pooled text; the last norm's modulation has two squares
    embeddings = (256 + size.pooled_width) * size.width + 2 * square
    return MatrixWeights(image, text, embeddings + blocks.sample + 2 * square)


def block_weights(size: ModelSize) -> MatrixWeights:
    """Return the matrix weights of the joint blocks alone."""
    square = size.width**2
    blocks = size.num_layers
    dual = len(size.dual_attention_layers)
    image = _image_squares(blocks, dual)
    # the last block only reads its text: 3 squares
    text = 12 * (blocks - 1) + 3
    # modulation: 6 squares per stream and block, 9 for the image with dual attention, 2 for the last text
    modulation = 6 * blocks + 3 * dual + 6 * (blocks - 1) + 2
    return MatrixWeights(image * square, text * square, modulation * square)


def _image_squares(blocks: int, dual: int) -> int:
    """Return the matrices D x D that multiply an image token: attention has 4, the feed-forward 8."""
    return 12 * blocks + 4 * dual


def _patch(size: ModelSize) -> int:
    return size.patch_size**2 * size.latent_channels


@dataclass(frozen=True)
class ActivationBytes:
    """Bytes that autograd saves of a block, per token and unit of width, and its working memory.

    Counted tensor by tensor, with the residual stream r, in float32 | under CUDA's bf16 autocast, which runs layer
    norms in float32 and casts a float32 input once per linear layer that reads it | compiled, where inductor
    recomputes norms and modulation:

        norm 1: r, its normalised form                                     4 + 4 | 4 + 4 | 2 (r)
        inputs of q, k, v                            one tensor, shared: 4 | three casts: 6 | 2
        attention: q, k, v, result                                            16 | 8 | 8
        input of the output projection (a slice of the result), its output 4 + 4 | 2 + 2 | 2 + 2
        norm 2: r, its normalised form; input of the feed-forward      4 + 4 + 4 | 4 + 4 + 2 | 2
        feed-forward: before and after GELU (4 D each), its output   16 + 16 + 4 | 8 + 8 + 2 | 8 + 8 + 2
        qk-norm, for q and k each: input (autocast: also in float32), normalised 4 + 4 | 2 + 4 + 4 | 2

    The text of the last block ends at the attention. Dual attention adds q, k, v's inputs, q, k, v, result and output
    to the image. Tests compare each column with what autograd saves.
    """

    block: int
    last_text: int
    dual: int
    norm: int
    norm_dual: int
    output: int
    stream: int
    work: int

    def total(self, size: ModelSize, tokens: Tokens, blocks: range | None = None) -> int:
        """Return the bytes of ``blocks`` (None: all) for one sample."""
        blocks = range(size.num_layers) if blocks is None else blocks
        dual = len(set(size.dual_attention_layers) & set(blocks))
        is_last = size.num_layers - 1 in blocks
        image = len(blocks) * self.per_token(size) + dual * self._dual(size)
        text = len(blocks) * self.per_token(size) - is_last * (self.block - self.last_text)
        return (image * tokens.image + text * tokens.text) * size.width

    def largest(self, size: ModelSize, tokens: Tokens) -> int:
        """Return the bytes of the block that saves most, for one sample."""
        dual = self._dual(size) * tokens.image if size.dual_attention_layers else 0
        return (self.per_token(size) * tokens.joint + dual) * size.width

    def doubled(self) -> "ActivationBytes":
        """Return the same tensors, twice as wide."""
        return ActivationBytes(**{name: 2 * value for name, value in vars(self).items()})

    def per_token(self, size: ModelSize) -> int:
        """Return the bytes of an ordinary block per token and unit of width."""
        return self.block + (self.norm if size.qk_norm else 0)

    def _dual(self, size: ModelSize) -> int:
        return self.dual + (self.norm_dual if size.qk_norm else 0)


# with qk-norm the dual attention's result is float32, so under autocast its projection saves one more cast
FLOAT32 = ActivationBytes(block=84, last_text=28, dual=24, norm=16, norm_dual=16, output=12, stream=4, work=20)
BFLOAT16 = ActivationBytes(block=54, last_text=22, dual=16, norm=20, norm_dual=22, output=10, stream=2, work=10)
COMPILED = ActivationBytes(block=36, last_text=12, dual=14, norm=4, norm_dual=4, output=10, stream=2, work=16)
# in bf16: outputs of products (q, k, v, out, up, down) and attention, and the block's inputs
SELECTIVE = ActivationBytes(block=22, last_text=10, dual=10, norm=0, norm_dual=0, output=10, stream=2, work=10)
# the fast blocks of `fast/block.py`: stream 2 + 2, norms 2 + 2, qkv 6, q, k, v and result 8, the result's rows
# 2, out 2, before and after GELU 8 + 8, down 2. Selective leaves out norms, q, k, v, the result's rows and GELU.
FAST = ActivationBytes(block=44, last_text=18, dual=0, norm=0, norm_dual=0, output=4, stream=4, work=16)
FAST_SELECTIVE = ActivationBytes(block=24, last_text=10, dual=0, norm=0, norm_dual=0, output=4, stream=4, work=24)


def held_activations(compute: Compute) -> ActivationBytes:
    """Return what a block holds while it is computed."""
    is_float32 = compute.dtype == "float32"
    if compute.kind == "stock":
        return FLOAT32 if is_float32 else BFLOAT16
    # float32 saves the same tensors as bf16, twice as wide
    held = FAST if compute.kind == "fast" else COMPILED
    return held.doubled() if is_float32 else held


def kept_activations(compute: Compute) -> ActivationBytes:
    """Return what a block saves until its backward pass with selective checkpointing."""
    kept = FAST_SELECTIVE if compute.kind == "fast" else SELECTIVE
    return kept.doubled() if compute.dtype == "float32" else kept
