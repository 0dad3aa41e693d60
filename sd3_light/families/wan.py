"""Wan 2.1: videos and images from text, with one denoiser."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from sd3_light.config import ModelConfig
from sd3_light.core.columns import Column
from sd3_light.families.base import StockFamily
from sd3_light.families.stock.latents import LatentShape
from sd3_light.model.part_configs import read_json

if TYPE_CHECKING:
    from torch import Tensor, nn

    from sd3_light.core.batch import Batch
    from sd3_light.core.files import AdapterNames

_OTHER_INPUTS = ("image_dim", "added_kv_proj_dim")


class Wan(StockFamily):
    """Captions have their own lengths, and are padded with rows of zeros, which the denoiser attends to."""

    name = "wan"
    title = "Wan"
    pipeline = "WanPipeline"
    denoiser = "WanTransformer3DModel"
    media = "video"
    text_parts = MappingProxyType({"umt5": ("text_encoder", "tokenizer")})
    adapter_targets = ("attn1.to_*", "attn2.to_*", "ffn.net.*")
    text_inputs = MappingProxyType({"text": "text_dim"})
    pads_text = True
    usual_guidance = 5.0
    usual_clip = (81, 16.0)
    trained_side = 624  # the area of 832 x 480
    compiled_share = (0.6, 0.67)
    comfyui = True
    text_tokens = ("padded",)
    sets_dynamic_shift = False

    def refusal(self, folder: Path) -> str | None:
        """See `Family.refusal`."""
        index = read_json(folder / "model_index.json")
        if _names_part(index.get("transformer_2")) or index.get("boundary_ratio") is not None:
            return "it has two denoisers, each for some of the times (Wan 2.2 A14B), and only one can be trained here"
        if index.get("expand_timesteps"):
            return "its denoiser takes a time per token (Wan 2.2 TI2V), and here a clip has one; give a T2V model"
        config = read_json(folder / "transformer" / "config.json")
        channels = LatentShape.of_folder(folder).channels
        if any(config.get(key) for key in _OTHER_INPUTS) or config.get("in_channels") != channels:
            return "its denoiser takes an image beside the noise (I2V), which is not trained; give a T2V model"
        if list(config.get("patch_size", ())) != [1, self.patch, self.patch]:
            return f"its denoiser has patches of {config.get('patch_size')!r:.80}, a Wan of [1, 2, 2]"
        return None

    def text_columns(self, model: ModelConfig, folder: Path) -> tuple[Column, ...]:
        """See `StockFamily.text_columns`: the pipeline repairs texts with ftfy where it is installed."""
        (text,) = super().text_columns(model, folder)
        return (replace(text, settings={**text.settings, "ftfy": find_spec("ftfy") is not None}),)

    def position_table(self, config: Mapping[str, Any]) -> int | None:
        """See `StockFamily.position_table`."""
        length = config.get("rope_max_seq_len")
        return length if isinstance(length, int) else None

    def denoise(self, denoiser: "nn.Module", batch: "Batch", guidance: float) -> "Tensor":
        """See `StockFamily.denoise`."""
        dtype: Any = denoiser.dtype
        velocity: Tensor = denoiser(
            hidden_states=batch["noisy"].to(dtype),
            timestep=(1000 * batch["t"]).float(),
            encoder_hidden_states=batch["text"].to(dtype),
            return_dict=False,
        )[0]
        return velocity

    def encode_captions(self, pipe: Any, texts: Sequence[str], model: ModelConfig) -> "Mapping[str, Sequence[Tensor]]":
        """See `StockFamily.encode_captions`: the pipeline's rows without the zeros after each text."""
        options = {"do_classifier_free_guidance": False, "max_sequence_length": self.max_length(model)}
        text = pipe.encode_prompt(prompt=list(texts), **options)[0]
        lengths = [int(rows.any(dim=-1).nonzero().max()) + 1 for rows in text]
        return {"text": [rows[:length] for rows, length in zip(text, lengths, strict=True)]}

    def adapter_names(self) -> "AdapterNames":
        """See `StockFamily.adapter_names`: those of ComfyUI, which diffusers reads too."""
        from sd3_light.export.wan_names import WanNames

        return WanNames(f"a {self.title} denoiser", self.comfyui, self.name)


def _names_part(entry: Any) -> bool:
    """Return whether an entry of `model_index.json` names a part, and not [null, null]."""
    return isinstance(entry, list) and any(entry)
