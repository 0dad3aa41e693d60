"""What training a denoiser costs: FLOPs, weights and the memory of one sample.

A family counts it (`Family.cost`); `cost/` sums it up over batches, processes and the moments of a step.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from sd3_light.config import AdapterConfig, TrainConfig
from sd3_light.core.columns import Bucket

if TYPE_CHECKING:
    from sd3_light.core.batch import Batch

FLASH_BACKWARD = 4
"""Bytes per token and unit of width inside the backward kernel of attention: the queries' gradients in float32."""

BlockKind = Literal["fast", "compiled", "stock"]
"""The family's own kernels, or diffusers' blocks, compiled or not."""


@dataclass(frozen=True)
class Tokens:
    """Tokens of one sample per stream."""

    image: int
    text: int

    @property
    def joint(self) -> int:
        """Tokens that attend to each other."""
        return self.image + self.text


@dataclass(frozen=True)
class TextTokens:
    """Text tokens of a caption: their number, ``most`` of them if captions are not padded, and where they come from.

    Captions that are not padded can be padded to multiples of ``steps``, smallest first, without another result.
    """

    most: int
    is_padded: bool
    formula: str
    steps: tuple[int, ...] = ()

    @property
    def at_most(self) -> str:
        """The prefix of formulas that hold for the longest caption."""
        return "" if self.is_padded else "at most "


class Layout(NamedTuple):
    """The processes of a run: their number, and whether DeepSpeed trains."""

    world_size: int = 1
    by_deepspeed: bool = False


class Compute(NamedTuple):
    """What the activations depend on: what computes the blocks, in which dtype, and the adapter if only it is trained.

    A frozen layer saves less: its weight needs no gradient, so that its input is not kept for one.
    """

    kind: BlockKind
    dtype: str
    adapter: AdapterConfig | None = None


@dataclass(frozen=True)
class BlockBytes:
    """Bytes of one sample in a block: its inputs, and what autograd saves, in full or with selective checkpointing.

    ``fixed`` is saved once for all samples of a micro-batch: updates of weights as matrices.
    """

    inputs: int
    saved: int
    selective: int
    fixed: int = 0


@dataclass(frozen=True)
class SampleBytes:
    """GPU memory of one sample in training.

    ``features`` and ``target`` arrive with the batch. In addition autograd saves what is ``before``, inside and
    ``after`` the blocks. ``stream`` goes from one block to the next. While the block that saves most, ``largest``, is
    computed, it needs ``work``.
    """

    features: int
    target: int
    before: int
    blocks: tuple[BlockBytes, ...]
    after: int
    stream: int
    largest: BlockBytes
    work: int


class Cost(ABC):
    """The cost of training one denoiser with one [model] table. Nothing here loads a weight.

    Layers are what pipelines split: everything before the blocks, the blocks, and everything after them.
    """

    @property
    @abstractmethod
    def description(self) -> str:
        """The denoiser in a few words, such as its number of blocks and heads."""

    @property
    @abstractmethod
    def layer_parameters(self) -> tuple[int, ...]:
        """The parameters of each layer."""

    @property
    def float32_parameters(self) -> tuple[int, ...]:
        """The parameters of each layer that stay in float32 below an adapter, as in the stock class."""
        return (0,) * len(self.layer_parameters)

    @property
    def table_bytes(self) -> int:
        """What stock diffusers holds while it computes the denoiser's own tables, before it reads the weights."""
        return 0

    @property
    @abstractmethod
    def block_matrices(self) -> int:
        """The weights in the matrices of all blocks."""

    @property
    @abstractmethod
    def width(self) -> int:
        """The width of a token between blocks."""

    @property
    @abstractmethod
    def text(self) -> TextTokens:
        """The text tokens of a caption, as the text encoders of the model folder return them."""

    @property
    @abstractmethod
    def longest_text(self) -> int:
        """The text tokens of a caption by the config alone; those of the folder may be fewer."""

    @property
    @abstractmethod
    def flops_formula(self) -> str:
        """The formula behind `forward_flops`; N are image tokens, T text tokens, D is the width, L counts blocks."""

    @property
    def num_blocks(self) -> int:
        """The number of blocks."""
        return len(self.layer_parameters) - 2

    @property
    def parameters(self) -> int:
        """All parameters of the denoiser."""
        return sum(self.layer_parameters)

    @property
    def unrouted(self) -> "Cost":
        """The cost if every token runs through every block; threads and graphs are chosen by it."""
        return self

    @property
    def token_side(self) -> int:
        """The pixels of an image token's side."""
        return 16

    @property
    def why_no_graphs(self) -> str | None:
        """Why the denoiser is not recorded as a CUDA graph; None if it can be."""
        return None

    @abstractmethod
    def image_tokens(self, width: int, height: int) -> int:
        """Return the tokens of an image of ``width`` x ``height`` pixels."""

    def latent_frames(self, frames: int) -> int:
        """Return the frames of a clip's latents, of which each has the tokens of an image."""
        assert frames == 1, "a family of images"
        return 1

    def tokens(self, bucket: Bucket) -> Tokens:
        """Return the tokens of a sample of a bucket with the longest caption."""
        image = self.image_tokens(bucket.width, bucket.height)
        return Tokens(image * self.latent_frames(bucket.frames), self.text.most)

    @abstractmethod
    def batch_tokens(self, batch: "Batch") -> Mapping[Tokens, int]:
        """Return the real tokens of the samples in a prepared batch -> how many samples have them."""

    @abstractmethod
    def forward_flops(self, tokens: Tokens) -> int:
        """Return the FLOPs of one sample's forward pass: matrix products and attention."""

    @abstractmethod
    def input_flops(self, tokens: Tokens) -> int:
        """Return the FLOPs of gradients that a backward pass never computes, because inputs need none."""

    @abstractmethod
    def sample_bytes(self, tokens: Tokens, compute: Compute) -> SampleBytes:
        """Return the GPU memory of one sample."""

    @abstractmethod
    def adapter_parameters(self, adapter: AdapterConfig) -> tuple[int, ...]:
        """Return the parameters that an adapter adds to each layer. Raises UserError for a target without a match."""

    @abstractmethod
    def why_stock(self, config: TrainConfig, layout: Layout) -> str | None:
        """Return why a config runs diffusers' blocks, or None if it allows the family's own kernels."""

    @abstractmethod
    def why_no_fp8(self, capability: tuple[int, int] | None) -> str | None:
        """Return why the kernels cannot multiply in fp8, or None; ``capability`` is the GPU's, None if unknown."""
