"""Sana: a VAE with large patches and no distribution, and captions that follow an instruction."""

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from sd3_light.config import ModelConfig
from sd3_light.families.base import StockFamily
from sd3_light.families.stock.texts import masked_embeds, real_rows, text_mask
from sd3_light.model.part_configs import read_json

if TYPE_CHECKING:
    from torch import Tensor, nn

    from sd3_light.core.batch import Batch


class Sana(StockFamily):
    """Captions have their own lengths, and a mask."""

    name = "sana"
    title = "Sana"
    pipeline = "SanaPipeline"
    denoiser = "SanaTransformer2DModel"
    text_parts = MappingProxyType({"gemma": ("text_encoder", "tokenizer")})
    adapter_targets = ("attn1.to_*", "attn2.to_*")  # the feed-forward part is a convolution
    text_length = 300
    text_steps = (32, 64, 128, 256, 512)
    patch = 1
    pads_prompts = True
    text_inputs = MappingProxyType({"text": "caption_channels"})
    usual_guidance = 4.5
    joins_guidance = True
    sets_dynamic_shift = False

    def refusal(self, folder: Path) -> str | None:
        """See `Family.refusal`."""
        config = read_json(folder / "transformer" / "config.json")
        if config.get("guidance_embeds"):
            return "its denoiser is distilled to few steps (Sprint), which is not trained; give the model before it"
        if config.get("patch_size") != self.patch:
            return f"its denoiser has patches of {config.get('patch_size')!r:.80}, a Sana of {self.patch}"
        return None

    def denoise(self, denoiser: "nn.Module", batch: "Batch", guidance: float) -> "Tensor":
        """See `StockFamily.denoise`."""
        stock: Any = denoiser
        config = stock.config
        # that of a vector: matrices that train may be stored in bfloat16
        dtype = next((weight.dtype for weight in denoiser.parameters() if weight.dim() == 1), stock.dtype)
        velocity: Tensor = denoiser(
            batch["noisy"].to(dtype),
            encoder_hidden_states=batch["text"].to(dtype),
            encoder_attention_mask=text_mask(batch),
            timestep=(1000 * batch["t"]).float() * config.timestep_scale,
            return_dict=False,
        )[0].float()
        has_variance = config.out_channels // 2 == config.in_channels
        return velocity.chunk(2, dim=1)[0] if has_variance else velocity

    def encode_captions(self, pipe: Any, texts: Sequence[str], model: ModelConfig) -> "Mapping[str, Sequence[Tensor]]":
        """See `StockFamily.encode_captions`: with the instruction of the pipeline's call."""
        return self._encode(pipe, texts, model, _instruction())

    def encode_negatives(self, pipe: Any, texts: Sequence[str], model: ModelConfig) -> "Mapping[str, Sequence[Tensor]]":
        """See `StockFamily.encode_negatives`: without the instruction."""
        return self._encode(pipe, texts, model, None)

    def _encode(
        self, pipe: Any, texts: Sequence[str], model: ModelConfig, instruction: list[str] | None
    ) -> "Mapping[str, Sequence[Tensor]]":
        options = {"clean_caption": False, "complex_human_instruction": instruction}
        encoded = pipe.encode_prompt(list(texts), False, max_sequence_length=self.max_length(model), **options)
        return {"text": real_rows(encoded[0], encoded[1])}

    def pipeline_arguments(self, texts: "Batch", negative: "Batch | None", guidance: float) -> dict[str, Any]:
        """See `StockFamily.pipeline_arguments`. Both texts get one length."""
        arguments = {"guidance_scale": guidance, "use_resolution_binning": False, "negative_prompt": None}
        return {**arguments, **masked_embeds(texts, negative, "prompt_attention_mask")}


@cache
def _instruction() -> list[str]:
    """Return the instruction of the stock pipeline's call."""
    import inspect

    from diffusers import SanaPipeline

    instruction: list[str] = inspect.signature(SanaPipeline.__call__).parameters["complex_human_instruction"].default
    return instruction
