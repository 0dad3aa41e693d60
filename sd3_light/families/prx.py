"""PRX, with a VAE."""

from collections.abc import Mapping, Sequence
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


class PRX(StockFamily):
    """Captions have their own lengths, and a mask. The pipeline cleans them: lower case, no brackets, no Chinese."""

    name = "prx"
    title = "PRX"
    pipeline = "PRXPipeline"
    denoiser = "PRXTransformer2DModel"
    text_parts = MappingProxyType({"t5gemma": ("text_encoder", "tokenizer")})
    adapter_targets = (
        "attention.img_qkv_proj",
        "attention.txt_kv_proj",
        "attention.to_out.0",
        "gate_proj",
        "up_proj",
        "down_proj",
    )
    text_length = 256
    pads_prompts = True
    text_inputs = MappingProxyType({"text": "context_in_dim"})
    joins_guidance = True
    single_prompts = True  # the pipeline fails with guidance for several
    loads_adapters = False  # the pipeline's loader is that of a UNet, and the denoiser has none of peft's methods
    packages = ("ftfy",)  # cleans captions
    sets_dynamic_shift = False

    def refusal(self, folder: Path) -> str | None:
        """See `Family.refusal`."""
        patch = read_json(folder / "transformer" / "config.json").get("patch_size")
        if patch == self.patch:
            return None
        return f"its denoiser has patches of {patch!r:.80}, and only {self.patch} is known"

    def denoise(self, denoiser: "nn.Module", batch: "Batch", guidance: float) -> "Tensor":
        """See `StockFamily.denoise`."""
        noisy = batch["noisy"]
        text = batch["text"].to(noisy.dtype)
        velocity: Tensor = denoiser(
            noisy, batch["t"].float(), text, attention_mask=text_mask(batch), return_dict=False
        )[0]
        return velocity

    def encode_captions(self, pipe: Any, texts: Sequence[str], model: ModelConfig) -> "Mapping[str, Sequence[Tensor]]":
        """See `StockFamily.encode_captions`."""
        options = {"do_classifier_free_guidance": False, "skip_text_cleaning": False}
        encoded = pipe.encode_prompt(list(texts), tokenizer_max_length=self.max_length(model), **options)
        return {"text": real_rows(encoded[0], encoded[1])}

    def pipeline_arguments(self, texts: "Batch", negative: "Batch | None", guidance: float) -> dict[str, Any]:
        """See `StockFamily.pipeline_arguments`. Both texts get one length."""
        scale = 1.0 if negative is None else guidance  # the pipeline refuses less
        arguments = {"guidance_scale": scale, "use_resolution_binning": False}
        return {**arguments, **masked_embeds(texts, negative, "prompt_attention_mask")}
