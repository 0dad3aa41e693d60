"""Bytes that a denoiser block saves for its backward pass, and its working memory, per token and unit of width.

Pure arithmetic on a `ModelSize`; `cost/gpu_memory.py` sums it up.
"""

from dataclasses import dataclass

from sd3_light.config import ModelSize
from sd3_light.core.cost import Compute, Tokens


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
