"""The model sizes, one per line, and their exact parameter counts."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

from sd3_light.config.faults import UserError


@dataclass(frozen=True)
class ModelSize:
    """The shape of an SD3 transformer. The last block has no text output."""

    name: str
    num_layers: int
    num_heads: int
    head_dim: int
    text_width: int
    pooled_width: int
    sample_size: int
    pos_embed_max_size: int
    qk_norm: bool
    dual_attention_layers: tuple[int, ...] = ()

    patch_size: ClassVar[int] = 2
    latent_channels: ClassVar[int] = 16

    @property
    def width(self) -> int:
        """Width of the image and text streams: num_heads * head_dim."""
        return self.num_heads * self.head_dim

    def with_overrides(self, num_layers: int | None = None, qk_norm: bool | None = None) -> "ModelSize":
        """Return the size with another depth or qk-norm. Blocks that remain keep their dual attention."""
        depth = self.num_layers if num_layers is None else num_layers
        norm = self.qk_norm if qk_norm is None else qk_norm
        dual = tuple(layer for layer in self.dual_attention_layers if layer < depth)
        return replace(self, num_layers=depth, qk_norm=norm, dual_attention_layers=dual)

    def transformer_config(self, num_layers: int | None = None, qk_norm: bool | None = None) -> dict[str, Any]:
        """Return all keyword arguments of diffusers' `SD3Transformer2DModel`."""
        size = self.with_overrides(num_layers, qk_norm)
        return {
            "sample_size": size.sample_size,
            "patch_size": size.patch_size,
            "in_channels": size.latent_channels,
            "num_layers": size.num_layers,
            "attention_head_dim": size.head_dim,
            "num_attention_heads": size.num_heads,
            "joint_attention_dim": size.text_width,
            "caption_projection_dim": size.width,
            "pooled_projection_dim": size.pooled_width,
            "out_channels": size.latent_channels,
            "pos_embed_max_size": size.pos_embed_max_size,
            "dual_attention_layers": size.dual_attention_layers,
            "qk_norm": "rms_norm" if size.qk_norm else None,
        }

    def num_parameters(self, num_layers: int | None = None, qk_norm: bool | None = None) -> int:
        """Return the exact number of parameters (the position table is a buffer, not a parameter)."""
        return sum(self.with_overrides(num_layers, qk_norm).layer_parameters())

    def layer_parameters(self) -> tuple[int, ...]:
        """Return the parameter count of each layer that pipelines split: embed, the joint blocks, output."""
        width, patch = self.width, self.patch_size**2 * self.latent_channels
        timestep = _linear(256, width) + _linear(width, width)
        pooled = _linear(self.pooled_width, width) + _linear(width, width)
        start = _linear(patch, width) + _linear(self.text_width, width)
        end = _linear(width, 2 * width) + _linear(width, patch)
        return (timestep + pooled + start, *map(self._block_parameters, range(self.num_layers)), end)

    def _block_parameters(self, layer: int) -> int:
        width, square = self.width, _linear(self.width, self.width)
        feed_forward = _linear(width, 4 * width) + _linear(4 * width, width)
        norms = 2 * self.head_dim if self.qk_norm else 0
        image = _linear(width, 6 * width) + 4 * square + norms + feed_forward
        if layer in self.dual_attention_layers:
            image += _linear(width, 3 * width) + 4 * square + norms
        if layer == self.num_layers - 1:  # no text output, so no text feed-forward and no gates
            return image + _linear(width, 2 * width) + 3 * square + norms
        return image + _linear(width, 6 * width) + 4 * square + norms + feed_forward


def _linear(inputs: int, outputs: int) -> int:
    return inputs * outputs + outputs


_DUAL = tuple(range(13))
# fmt: off
_ALL_SIZES = (
    #         name                layers heads head  text  pooled sample  pos  qk_norm dual
    ModelSize("sd3_light",            15,   24,  64, 4096,  2048,    32, 192,  True),
    ModelSize("sd3_light_square",     15,   15,  64, 4096,  2048,    32, 192,  True),
    ModelSize("sd3_medium",           24,   24,  64, 4096,  2048,   128, 192,  False),
    ModelSize("sd3.5_medium",         24,   24,  64, 4096,  2048,   128, 384,  True,  _DUAL),
    ModelSize("tiny2",                 2,    2,  64,  256,   224,     8,  16,  True),
    ModelSize("tiny3",                 3,    3,  64,  256,   224,     8,  16,  True),
    ModelSize("demo",                  4,    4,  64,  256,   224,     8,  16,  True),
)
# fmt: on
SIZES: dict[str, ModelSize] = {size.name: size for size in _ALL_SIZES}
PRETRAIN_SIZE = "sd3_light"


class _ChoosesSize(Protocol):
    @property
    def train_type(self) -> str | None: ...
    @property
    def size(self) -> str | None: ...
    @property
    def num_layers(self) -> int | None: ...
    @property
    def qk_norm(self) -> bool | None: ...


def chosen_size_name(model: _ChoosesSize) -> str | None:
    """Return the name of the size that a [model] table chooses, or None if only the model folder has it."""
    return model.size or (PRETRAIN_SIZE if model.train_type else None)


def resolve_size(model: _ChoosesSize) -> ModelSize:
    """Return the size that a [model] table chooses, with its `num_layers` and `qk_norm` applied."""
    name = chosen_size_name(model)
    if name is None:
        raise UserError(
            "model.size: is missing; without train_type only the model folder has the size: give model.size"
        )
    return SIZES[name].with_overrides(model.num_layers, model.qk_norm)


def size_from_transformer_config(config: dict[str, Any], name: str = "folder") -> ModelSize:
    """Return the size that a transformer's `config.json` describes."""
    return ModelSize(
        name=name,
        num_layers=config["num_layers"],
        num_heads=config["num_attention_heads"],
        head_dim=config["attention_head_dim"],
        text_width=config["joint_attention_dim"],
        pooled_width=config["pooled_projection_dim"],
        sample_size=config["sample_size"],
        pos_embed_max_size=config["pos_embed_max_size"],
        qk_norm=config.get("qk_norm") is not None,
        dual_attention_layers=tuple(config.get("dual_attention_layers") or ()),
    )
