"""What a denoiser costs: FLOPs of a training sample and bytes on the GPU, each number with the formula that gave it.

Pure arithmetic on a `ModelSize`. Letters in formulas: P parameters, B micro-batch, N image tokens, T text tokens,
D width, L blocks.
"""

from dataclasses import dataclass

from sd3_light.config import ModelSize

GIB = 1 << 30
CONTEXT_BYTES = 1 * GIB
"""Allowance for the CUDA context, cuBLAS workspaces and the allocator's slack; an estimate."""


@dataclass(frozen=True)
class Amount:
    """A number and the formula that it comes from, for people to check."""

    value: int
    formula: str


@dataclass(frozen=True)
class Tokens:
    """Tokens of one sample in each stream."""

    image: int
    text: int

    @property
    def joint(self) -> int:
        """Tokens that attend to each other."""
        return self.image + self.text


def image_tokens(width: int, height: int) -> int:
    """Tokens of a picture of ``width`` x ``height`` pixels: the VAE shrinks 8 times, a patch covers 2 x 2."""
    side = 8 * ModelSize.patch_size
    return (width // side) * (height // side)


# --- FLOPs ------------------------------------------------------------------------------------


def forward_flops(size: ModelSize, tokens: Tokens) -> int:
    """FLOPs of one sample's forward pass: matrix products and attention, norms and activations left out."""
    weights = _matrix_weights(size)
    products = 2 * (weights["image"] * tokens.image + weights["text"] * tokens.text + weights["sample"])
    joint = 4 * tokens.joint**2 * size.width * size.num_layers
    dual = 4 * tokens.image**2 * size.width * len(size.dual_attention_layers)
    return products + joint + dual


def training_flops(size: ModelSize, tokens: Tokens, checkpointing: bool = False) -> Amount:
    """FLOPs of one training sample: the backward pass costs two forwards, checkpointing one more."""
    passes = 4 if checkpointing else 3
    terms = "2·weights·tokens of each stream + 4·(N+T)²·D·L"
    if size.dual_attention_layers:
        terms += f" + 4·N²·D·{len(size.dual_attention_layers)}"
    return Amount(passes * forward_flops(size, tokens), f"{passes}·({terms})")


def _matrix_weights(size: ModelSize) -> dict[str, int]:
    """Weights in matrix products by what they act on: each image token, each text token, the sample once."""
    square, patch = size.width**2, size.patch_size**2 * size.latent_channels
    blocks, dual = size.num_layers, len(size.dual_attention_layers)
    # attention has 4 squares and the feed-forward 8; the last block only reads its text: 3 squares
    image = 2 * patch * size.width + (12 * blocks + 4 * dual) * square
    text = size.text_width * size.width + (12 * (blocks - 1) + 3) * square
    embeddings = (256 + size.pooled_width) * size.width + 2 * square
    # modulation: 6 squares a stream and block, 9 for the image with dual attention, 2 for the last text; 2 at the end
    modulation = (6 * blocks + 3 * dual + 6 * (blocks - 1) + 2 + 2) * square
    return {"image": image, "text": text, "sample": embeddings + modulation}


# --- bytes on the GPU -------------------------------------------------------------------------


@dataclass(frozen=True)
class _Saved:
    """Bytes that autograd keeps of a block, for each token and unit of width.

    Counted tensor by tensor, with the residual stream r, in float32 | under CUDA's bf16 autocast, which runs layer
    norms in float32 and casts a float32 input anew for every linear layer that reads it:

        norm 1: r, its normalised form                                     4 + 4 | 4 + 4
        inputs of q, k, v                            one tensor, shared: 4 | three casts: 6
        attention: q, k, v, result                                            16 | 8
        input of the output projection (a slice of the result), its output 4 + 4 | 2 + 2
        norm 2: r, its normalised form; input of the feed-forward      4 + 4 + 4 | 4 + 4 + 2
        feed-forward: before and after GELU (4 D each), its output   16 + 16 + 4 | 8 + 8 + 2
        qk-norm, for q and k each: input (autocast: also in float32), normalised 4 + 4 | 2 + 4 + 4

    The text of the last block ends at the attention. Dual attention adds q, k, v's inputs, q, k, v, result and output
    to the image. The float32 column is held by a test that counts what autograd saves.
    """

    block: int
    last_text: int
    dual: int
    norm: int
    norm_dual: int
    output: int
    stream: int

    def of(self, size: ModelSize, tokens: Tokens) -> int:
        """Bytes of all blocks for one sample."""
        norm = self.norm if size.qk_norm else 0
        image = size.num_layers * (self.block + norm)
        image += len(size.dual_attention_layers) * (self.dual + (self.norm_dual if size.qk_norm else 0))
        text = (size.num_layers - 1) * (self.block + norm) + self.last_text + norm
        return (image * tokens.image + text * tokens.text) * size.width


_FLOAT32 = _Saved(block=84, last_text=28, dual=24, norm=16, norm_dual=16, output=12, stream=4)
# with qk-norm the dual attention's result passes through float32, so its projection keeps one more cast
_BFLOAT16 = _Saved(block=54, last_text=22, dual=16, norm=20, norm_dual=22, output=10, stream=2)


def activation_bytes(
    size: ModelSize, tokens: Tokens, batch: int, checkpointing: bool = False, compute: str = "bfloat16"
) -> Amount:
    """Bytes that the forward pass of a micro-batch keeps for the backward pass (estimate; see `_Saved`)."""
    saved = _FLOAT32 if compute == "float32" else _BFLOAT16
    all_blocks = saved.of(size, tokens)
    rest = _edges(size, tokens, saved)
    if not checkpointing:
        text = f"B·(blocks {_mib(all_blocks)} + ends {_mib(rest)}); a block: {_per_token(saved, size)}·D bytes a token"
        return Amount(batch * (all_blocks + rest), text)
    one_block = -(-all_blocks // size.num_layers)
    kept = size.num_layers * saved.stream * size.width * tokens.joint
    text = f"B·(block inputs {_mib(kept)} + one block {_mib(one_block)} + ends {_mib(rest)})"
    return Amount(batch * (kept + one_block + rest), text)


def _edges(size: ModelSize, tokens: Tokens, saved: _Saved) -> int:
    """Bytes for one sample outside the blocks: inputs, final norm, prediction and loss."""
    # text comes in bf16, is made float32, and cast once more by autocast's linear layer
    prompt = tokens.text * size.text_width * (2 + 4 + (2 if saved is _BFLOAT16 else 0))
    # noisy, target, prediction and its error, all float32
    latents = 4 * 4 * tokens.image * size.patch_size**2 * size.latent_channels
    return prompt + latents + saved.output * size.width * tokens.image


@dataclass(frozen=True)
class GpuMemory:
    """Bytes on each GPU, by what they are for."""

    state: Amount
    activations: Amount
    context: Amount

    @property
    def total(self) -> int:
        """All of them together."""
        return self.state.value + self.activations.value + self.context.value


def parameter_bytes(size: ModelSize, bytes_each: int = 4) -> int:
    """Bytes of the denoiser's weights."""
    return bytes_each * size.num_parameters()


def state_bytes(size: ModelSize, ema_tracks: int = 0, compute: str = "bfloat16") -> Amount:
    """Bytes of what lives as long as the run, all on every GPU: weights, gradients, AdamW's moments, EMA."""
    terms = {"weights": 4, "gradients": 4, "AdamW": 8}
    if ema_tracks:
        terms["EMA"] = 4 * ema_tracks
    if compute != "float32":
        terms["bf16 copies"] = 2  # autocast keeps a cast of every weight until the forward pass ends
    words = " + ".join(f"{name} {count}" for name, count in terms.items())
    return Amount(parameter_bytes(size, sum(terms.values())), f"P·({words})")


def gpu_memory(
    size: ModelSize,
    tokens: Tokens,
    batch: int,
    *,
    ema_tracks: int = 0,
    checkpointing: bool = False,
    compute: str = "bfloat16",
) -> GpuMemory:
    """Bytes on each GPU while a micro-batch of ``batch`` samples trains (estimate)."""
    return GpuMemory(
        state=state_bytes(size, ema_tracks, compute),
        activations=activation_bytes(size, tokens, batch, checkpointing, compute),
        context=Amount(CONTEXT_BYTES, "allowance for CUDA itself"),
    )


def _per_token(saved: _Saved, size: ModelSize) -> int:
    return saved.block + (saved.norm if size.qk_norm else 0)


def _mib(count: int) -> str:
    return f"{count / (1 << 20):.1f} MiB"
