"""Flux.1: dev, which takes guidance as a number, and schnell."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sd3_light.config import ModelConfig
from sd3_light.core.columns import CAPTION, Column
from sd3_light.families.base import StockFamily
from sd3_light.model.part_configs import read_config

if TYPE_CHECKING:
    from torch import Tensor, nn

    from sd3_light.core.batch import Batch

_CLIP = ("text_encoder", "tokenizer")
_T5 = ("text_encoder_2", "tokenizer_2")


class Flux(StockFamily):
    """See `StockFamily`. Padding is attended to, so that texts have one length."""

    name = "flux"
    title = "Flux.1"
    pipeline = "FluxPipeline"
    denoiser = "FluxTransformer2DModel"
    text_parts = {"CLIP": _CLIP, "T5": _T5}
    adapter_targets = (
        "attn.to_*",
        "attn.add_*_proj",
        "ff.net.*",
        "ff_context.net.*",
        "proj_mlp",
        "*single*.proj_out",
    )

    def text_columns(self, model: ModelConfig, folder: Path) -> tuple[Column, ...]:
        """See `StockFamily.text_columns`."""
        length = self.caption_length(model)
        clip, t5 = (read_config(folder / encoder, encoder) for encoder, _ in (_CLIP, _T5))
        settings = {"max_length": length}
        text = Column("text", CAPTION, "bfloat16", (length, int(t5["d_model"])), _T5, settings=settings)
        return text, Column("pooled", CAPTION, "bfloat16", (int(clip["hidden_size"]),), _CLIP)

    def denoise(self, denoiser: "nn.Module", batch: "Batch", guidance: float) -> "Tensor":
        """See `StockFamily.denoise`."""
        import torch

        from sd3_light.flow.packing import pack_latents, unpack_latents

        noisy = batch["noisy"]
        text = batch["text"]
        height, width = noisy.shape[-2:]
        axes = [torch.arange(side, device=noisy.device) for side in (1, height // 2, width // 2)]
        config: Any = denoiser.config
        number = self.guidance_number(batch, guidance) if config.guidance_embeds else None
        tokens = denoiser(
            hidden_states=pack_latents(noisy),
            encoder_hidden_states=text,
            pooled_projections=batch["pooled"],
            timestep=(1000 * batch["t"]).to(noisy.dtype) / 1000,  # rounded as the pipeline does
            guidance=number,
            img_ids=torch.cartesian_prod(*axes).to(noisy.dtype),
            txt_ids=text.new_zeros(text.shape[1], 3),
            return_dict=False,
        )[0]
        return unpack_latents(tokens, height, width)

    def takes_guidance(self, config: Mapping[str, Any]) -> bool:
        """See `StockFamily.takes_guidance`."""
        return bool(config.get("guidance_embeds"))

    #

    comfyui = True

    def encode_captions(self, pipe: Any, texts: Sequence[str], model: ModelConfig) -> "Mapping[str, Sequence[Tensor]]":
        """See `StockFamily.encode_captions`."""
        length = self.caption_length(model)
        text, pooled, _ = pipe.encode_prompt(prompt=list(texts), prompt_2=None, max_sequence_length=length)
        return {"text": text, "pooled": pooled}

    def set_times(self, scheduler: Any, steps: int, tokens: int) -> None:
        """See `StockFamily.set_times`."""
        set_flux_times(scheduler, steps, flux_shift(scheduler.config, tokens))

    def pipeline_arguments(self, texts: "Batch", negative: "Batch | None", guidance: float) -> dict[str, Any]:
        """See `StockFamily.pipeline_arguments`. With negative texts, guidance has two passes."""
        arguments = {"guidance_scale": guidance, **_embeds("", texts)}
        if negative is None:
            return arguments
        return {**arguments, **_embeds("negative_", negative), "true_cfg_scale": guidance}

    def latent_arguments(self, latents: "Tensor") -> dict[str, Any]:
        """See `StockFamily.latent_arguments`."""
        from sd3_light.flow.packing import pack_latents

        return {"latents": pack_latents(latents)}


def flux_shift(config: Any, tokens: int) -> float:
    """Return the logarithm of the shift of a scheduler's config, which grows with the tokens of an image."""
    slope = (config.max_shift - config.base_shift) / (config.max_image_seq_len - config.base_image_seq_len)
    shift: float = tokens * slope + (config.base_shift - slope * config.base_image_seq_len)
    return shift


def set_flux_times(scheduler: Any, steps: int, shift: float) -> None:
    """Set times from 1 to 1 / steps, which the scheduler shifts."""
    import numpy as np

    scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), mu=shift)
    scheduler.set_begin_index(0)


def _embeds(prefix: str, texts: "Batch") -> dict[str, Any]:
    return {f"{prefix}prompt_embeds": texts["text"], f"{prefix}pooled_prompt_embeds": texts["pooled"]}
