"""The model sizes, one per line, and their exact parameter counts."""

from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

from sd3_light.config.faults import UserError

if TYPE_CHECKING:
    from sd3_light.config.schema_tables import ModelConfig

Shape = tuple[int, int]
"""(inputs, outputs) of a linear layer."""
IMAGE_ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
TEXT_ATTENTION = ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")


@dataclass(frozen=True)
class ModelSize:
    """The shape of an SD3 transformer. The last block has no text output.

    ``position_step`` is the distance of neighbouring tokens in the position table of new weights, in radians of its
    fastest component. Trained weights contain their table. ``sample_size`` is the latent side that images have by
    default until the model is trained.
    """

    name: str
    num_layers: int
    num_heads: int
    head_dim: int
    text_width: int
    pooled_width: int
    sample_size: int
    pos_embed_max_size: int
    position_step: float
    qk_norm: bool
    dual_attention_layers: tuple[int, ...] = ()
    latent_channels: int = 16

    patch_size: ClassVar[int] = 2

    @property
    def width(self) -> int:
        """Width of the image and text streams: num_heads * head_dim."""
        return self.num_heads * self.head_dim

    @property
    def stock_position_step(self) -> float:
        """The step of the position table that diffusers builds, which depends on ``sample_size``."""
        return stock_position_step(self.sample_size, self.pos_embed_max_size)

    def with_overrides(
        self, num_layers: int | None = None, qk_norm: bool | None = None, position_step: float | None = None
    ) -> "ModelSize":
        """Return the size with another depth, qk-norm or table. Blocks that remain keep their dual attention."""
        depth = self.num_layers if num_layers is None else num_layers
        norm = self.qk_norm if qk_norm is None else qk_norm
        step = self.position_step if position_step is None else position_step
        dual = tuple(layer for layer in self.dual_attention_layers if layer < depth)
        return replace(self, num_layers=depth, qk_norm=norm, position_step=step, dual_attention_layers=dual)

    def transformer_config(self) -> dict[str, Any]:
        """Return all keyword arguments of diffusers' `SD3Transformer2DModel`."""
        return {
            "sample_size": self.sample_size,
            "patch_size": self.patch_size,
            "in_channels": self.latent_channels,
            "num_layers": self.num_layers,
            "attention_head_dim": self.head_dim,
            "num_attention_heads": self.num_heads,
            "joint_attention_dim": self.text_width,
            "caption_projection_dim": self.width,
            "pooled_projection_dim": self.pooled_width,
            "out_channels": self.latent_channels,
            "pos_embed_max_size": self.pos_embed_max_size,
            "dual_attention_layers": self.dual_attention_layers,
            "qk_norm": "rms_norm" if self.qk_norm else None,
        }

    def num_parameters(self) -> int:
        """Return the exact number of parameters (the position table is a buffer, not a parameter)."""
        return sum(self.layer_parameters())

    def layer_parameters(self) -> tuple[int, ...]:
        """Return the parameter count of each layer that pipelines split: embed, the joint blocks, output."""
        return _layer_parameters(self)

    def linear_layers(self) -> dict[str, Shape]:
        """Return name -> shape of every linear layer."""
        width = self.width
        embed = "time_text_embed."
        layers = {
            f"{embed}timestep_embedder.linear_1": (256, width),
            f"{embed}timestep_embedder.linear_2": (width, width),
            f"{embed}text_embedder.linear_1": (self.pooled_width, width),
            f"{embed}text_embedder.linear_2": (width, width),
            "context_embedder": (self.text_width, width),
        }
        for number in range(self.num_layers):
            layers |= {f"transformer_blocks.{number}.{name}": shape for name, shape in self._block(number).items()}
        patch = self.patch_size**2 * self.latent_channels
        return {**layers, "norm_out.linear": (width, 2 * width), "proj_out": (width, patch)}

    def _block(self, number: int) -> dict[str, Shape]:
        """Return the linear layers of a block; the last one has no text output, so no text feed-forward and gates."""
        width = self.width
        last = number == self.num_layers - 1
        dual = number in self.dual_attention_layers
        square = (width, width)
        layers = {
            "norm1.linear": (width, (9 if dual else 6) * width),
            "norm1_context.linear": (width, (2 if last else 6) * width),
            **{f"attn.{name}": square for name in (*IMAGE_ATTENTION, *TEXT_ATTENTION[: 3 if last else 4])},
        }
        if dual:
            layers |= {f"attn2.{name}": square for name in IMAGE_ATTENTION}
        for stream in ("ff",) if last else ("ff", "ff_context"):
            layers |= {f"{stream}.net.0.proj": (width, 4 * width), f"{stream}.net.2": (4 * width, width)}
        return layers


@cache  # the memory formulas ask for it thousands of times
def _layer_parameters(size: ModelSize) -> tuple[int, ...]:
    patch = size.patch_size**2 * size.latent_channels
    norms = 2 * size.head_dim if size.qk_norm else 0
    streams = [3 if number in size.dual_attention_layers else 2 for number in range(size.num_layers)]
    counts = [(patch + 1) * size.width, *(norms * count for count in streams), 0]
    for name, (inputs, outputs) in size.linear_layers().items():
        counts[layer_index(name)] += (inputs + 1) * outputs
    return tuple(counts)


def stock_position_step(sample_size: int, positions: int) -> float:
    """Return the step in radians that diffusers gives a position table."""
    return sample_size // ModelSize.patch_size / positions


def layer_index(name: str) -> int:
    """Return the index of a linear layer among embed (0), the joint blocks and output (-1)."""
    first, _, rest = name.partition(".")
    if first == "transformer_blocks":
        return int(rest.partition(".")[0]) + 1
    return -1 if first in ("norm_out", "proj_out") else 0


_DUAL = tuple(range(13))
# fmt: off
_ALL_SIZES = (
    #         name                layers heads head  text  pooled sample  pos  step  qk_norm dual
    ModelSize("sd3_light",            15,   24,  64, 4096,  2048,    32, 192,  1.0,  True),
    ModelSize("sd3_light_square",     15,   15,  64, 4096,  2048,    32, 192,  1.0,  True),
    ModelSize("sd3_medium",           24,   24,  64, 4096,  2048,   128, 192,  1/3,  False),
    ModelSize("sd3.5_medium",         24,   24,  64, 4096,  2048,   128, 384,  1/6,  True,  _DUAL),
    ModelSize("tiny2",                 2,    2,  64,  256,   224,     8,  16,  1.0,  True),
    ModelSize("tiny3",                 3,    3,  64,  256,   224,     8,  16,  1.0,  True),
    ModelSize("demo",                  4,    4,  64,  256,   224,     8,  16,  1.0,  True),
)
# fmt: on
SIZES: dict[str, ModelSize] = {size.name: size for size in _ALL_SIZES}
PRETRAIN_SIZE = "sd3_light"
CUSTOM_SIZE = "custom"
"""Name of a size that is not in the table."""
MAX_POSITION_STEP = 3.0
"""Radians; from pi on, a step would be the same as a smaller one backwards."""


def chosen_size_name(model: "ModelConfig") -> str | None:
    """Return the name of the size that a [model] table chooses, or None for a shape or the size of a model folder."""
    if model.shape is not None:
        return None
    return model.size or (PRETRAIN_SIZE if model.train_type else None)


def resolve_size(model: "ModelConfig") -> ModelSize:
    """Return the size that a [model] table chooses, with its `num_layers`, `qk_norm` and `position_step` applied."""
    name = chosen_size_name(model)
    if name is None:
        raise UserError(
            "model.size: is missing; without train_type only the model folder has the size: give model.size"
        )
    return SIZES[name].with_overrides(model.num_layers, model.qk_norm, model.position_step)


def size_from_transformer_config(config: dict[str, Any], name: str) -> ModelSize:
    """Return the size that a transformer's `config.json` describes, with diffusers' position table."""
    return ModelSize(
        name=name,
        num_layers=config["num_layers"],
        num_heads=config["num_attention_heads"],
        head_dim=config["attention_head_dim"],
        text_width=config["joint_attention_dim"],
        pooled_width=config["pooled_projection_dim"],
        sample_size=config["sample_size"],
        pos_embed_max_size=config["pos_embed_max_size"],
        position_step=stock_position_step(config["sample_size"], config["pos_embed_max_size"]),
        qk_norm=config.get("qk_norm") is not None,
        dual_attention_layers=tuple(config.get("dual_attention_layers") or ()),
        latent_channels=config.get("in_channels", ModelSize.latent_channels),
    )
