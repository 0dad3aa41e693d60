"""Wan, trained on images: videos of one frame."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from sd3_light.config import ModelConfig
from sd3_light.core.columns import CAPTION, Column
from sd3_light.families.base import StockFamily
from sd3_light.families.stock.columns import encoder_width
from sd3_light.model.folder import components
from sd3_light.model.part_configs import read_json

if TYPE_CHECKING:
    from torch import Tensor, nn

    from sd3_light.core.batch import Batch
    from sd3_light.core.files import AdapterNames


class Wan(StockFamily):
    """Captions have their own lengths in a cache; the denoiser gets zeros after them up to the full length."""

    name = "wan"
    title = "Wan"
    pipeline = "WanPipeline"
    denoiser = "WanTransformer3DModel"
    text_parts = MappingProxyType({"umt5": ("text_encoder", "tokenizer")})
    adapter_targets = ("attn1.to_*", "attn2.to_*", "ffn.net.*")
    pads_text = True
    text_inputs = MappingProxyType({"text": "text_dim"})
    usual_guidance = 5.0
    comfyui = True

    def refusal(self, folder: Path) -> str | None:
        """See `StockFamily.refusal`."""
        if "transformer_2" in components(folder):
            return "it has two denoisers, one for each part of time, which are not trained; give a model with one"
        if read_json(folder / "model_index.json").get("expand_timesteps"):
            return "its denoiser takes a time per token, which is not trained; give a text-to-video model"
        config = read_json(folder / "transformer" / "config.json")
        if config.get("image_dim") or config.get("added_kv_proj_dim"):
            return "its denoiser takes images beside the text, which is not trained; give a text-to-video model"
        return None

    def text_columns(self, model: ModelConfig, folder: Path) -> tuple[Column, ...]:
        """See `StockFamily.text_columns`."""
        parts = self.text_parts["umt5"]
        length = self.max_length(model)
        shape = (length, encoder_width(folder, parts[0]))
        settings = {"text_max_length": length, **_cleaning()}
        return (Column("text", CAPTION, "bfloat16", shape, parts, ragged=True, settings=settings),)

    def text_settings(self, model: ModelConfig) -> dict[str, Any]:
        """See `StockFamily.text_settings`: the pipeline cleans captions with a package that it may lack."""
        return {**super().text_settings(model), **_cleaning()}

    def denoise(self, denoiser: "nn.Module", batch: "Batch", guidance: float) -> "Tensor":
        """See `StockFamily.denoise`."""
        dtype: Any = denoiser.dtype
        frames = batch["noisy"].unsqueeze(2).to(dtype)
        times = (1000 * batch["t"]).float()
        velocity: Tensor = denoiser(frames, times, batch["text"].to(dtype), return_dict=False)[0]
        return velocity.squeeze(2)

    def encode_captions(self, pipe: Any, texts: Sequence[str], model: ModelConfig) -> "Mapping[str, Sequence[Tensor]]":
        """See `StockFamily.encode_captions`: without the zeros after a text."""
        options = {"do_classifier_free_guidance": False, "max_sequence_length": self.max_length(model)}
        text = pipe.encode_prompt(prompt=list(texts), **options)[0]
        return {"text": [rows[: int(rows.any(dim=-1).nonzero().max()) + 1] for rows in text]}

    def set_times(self, scheduler: Any, steps: int, tokens: int) -> None:
        """See `StockFamily.set_times`."""
        scheduler.set_timesteps(steps)
        scheduler.set_begin_index(0)

    def pipeline_arguments(self, texts: "Batch", negative: "Batch | None", guidance: float) -> dict[str, Any]:
        """See `StockFamily.pipeline_arguments`."""
        arguments = {"prompt_embeds": texts["text"], "guidance_scale": guidance, "num_frames": 1}
        return arguments if negative is None else {**arguments, "negative_prompt_embeds": negative["text"]}

    def latent_arguments(self, latents: "Tensor") -> dict[str, Any]:
        """See `StockFamily.latent_arguments`."""
        return {"latents": latents.unsqueeze(2)}

    def adapter_names(self) -> "AdapterNames":
        """See `StockFamily.adapter_names`: those of ComfyUI, which diffusers reads too."""
        from sd3_light.export.wan_names import WanNames

        return WanNames(f"a {self.title} denoiser", self.comfyui, self.name)


def _cleaning() -> dict[str, bool]:
    from importlib.util import find_spec

    return {"fixes_text": find_spec("ftfy") is not None}
