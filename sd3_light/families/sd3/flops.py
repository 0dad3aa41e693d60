"""FLOPs of SD3's forward pass and of the gradients that its inputs do not need.

Pure arithmetic on a `ModelSize`. Letters in formulas: N image tokens, T text tokens, D width, L blocks.
"""

from dataclasses import dataclass

from sd3_light.config import ModelSize
from sd3_light.config.schema_blocks import TokenRoute
from sd3_light.core.cost import Tokens


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


def flops_formula(size: ModelSize, route: TokenRoute | None = None) -> str:
    """Return the formula of `forward_flops`."""
    terms = "2·weights·tokens of each stream + 4·(N+T)²·D·L"
    if size.dual_attention_layers:
        terms += f" + 4·N²·D·{len(size.dual_attention_layers)}"
    if route is not None:
        terms += f" - {route.share:.4g}·N in blocks {route.first} to {route.last}"
    return terms


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


def input_flops(size: ModelSize, tokens: Tokens) -> int:
    """Return the FLOPs of gradients that are never computed: those of images, text, time and pooled text."""
    weights = _patch(size) * tokens.image + size.text_width * tokens.text + 256 + size.pooled_width
    return 2 * weights * size.width


def _patch(size: ModelSize) -> int:
    return size.patch_size**2 * size.latent_channels
