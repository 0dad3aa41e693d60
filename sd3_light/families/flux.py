"""Flux.1: dev, which takes guidance as a number, and schnell."""

import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from sd3_light.config import ModelConfig
from sd3_light.core.columns import CAPTION, Column
from sd3_light.core.sampling import OwnDrawing
from sd3_light.families.base import StockFamily
from sd3_light.families.stock.texts import encoder_width

if TYPE_CHECKING:
    from torch import Tensor, nn

    from sd3_light.core.batch import Batch


class Flux(StockFamily):
    """Text is padded to its full length, which the denoiser attends to."""

    name = "flux"
    title = "Flux"
    pipeline = "FluxPipeline"
    denoiser = "FluxTransformer2DModel"
    text_parts = MappingProxyType({"clip": ("text_encoder", "tokenizer"), "t5": ("text_encoder_2", "tokenizer_2")})
    adapter_targets = ("attn.to_*", "attn.add_*_proj", "ff.net.*", "ff_context.net.*", "proj_mlp", "*single*.proj_out")
    packs_latents = True
    text_inputs = MappingProxyType({"text": "joint_attention_dim", "pooled": "pooled_projection_dim"})
    samplers = ()  # the pipeline passes a shift by resolution
    usual_guidance = 3.5
    cudnn_attention = True  # with `speed_up`
    compiled_share = (0.58, 0.8)
    comfyui = True
    text_tokens = ("padded",)
    guidance = ("negative prompt", "number")

    def text_columns(self, model: ModelConfig, folder: Path) -> tuple[Column, ...]:
        """See `StockFamily.text_columns`: T5's rows, and CLIP's pooled vector."""
        length = self.max_length(model)
        clip = self.text_parts["clip"]
        t5 = self.text_parts["t5"]
        settings = {"text_max_length": length}
        text = (length, encoder_width(folder, t5[0]))
        return (
            Column("text", CAPTION, "bfloat16", text, t5, settings=settings),
            Column("pooled", CAPTION, "bfloat16", (encoder_width(folder, clip[0]),), clip),
        )

    def denoise(self, denoiser: "nn.Module", batch: "Batch", guidance: float) -> "Tensor":
        """See `StockFamily.denoise`."""
        import torch

        from sd3_light.core.batch import references
        from sd3_light.families.stock.packed import packed_images, rounded_times, unpacked_image
        from sd3_light.flow.packing import grid_positions

        noisy = batch["noisy"]
        text = batch["text"]
        config: Any = denoiser.config
        images = [noisy, *references(batch)]
        positions = [grid_positions((1, *(side // 2 for side in image.shape[-2:])), noisy.device) for image in images]
        for place in positions[1:]:
            place[:, 0] = 1  # distinguishes a reference from the image
        number = batch.get("guidance")
        if number is None:
            number = torch.full((batch.size,), guidance, device=noisy.device)
        tokens = denoiser(
            hidden_states=packed_images(batch),
            encoder_hidden_states=text,
            pooled_projections=batch["pooled"],
            timestep=rounded_times(batch),
            guidance=number if config.guidance_embeds else None,
            img_ids=torch.cat(positions).to(noisy.dtype),
            txt_ids=text.new_zeros(text.shape[1], 3),
            return_dict=False,
        )[0]
        return unpacked_image(tokens, batch)

    def speed_up(self, denoiser: "nn.Module") -> None:
        """See `StockFamily.speed_up`: attention of single blocks gets a part of a larger gradient.

        The backward pass of cuDNN's attention is wrong, or ends the process, for other strides than those of the first.
        """
        from sd3_light.families.stock.attention import with_contiguous_gradient

        for block in denoiser.single_transformer_blocks:  # type: ignore[union-attr]
            block.attn.register_forward_hook(with_contiguous_gradient)

    def own_drawing(self, config: Mapping[str, Any]) -> OwnDrawing:
        """See `StockFamily.own_drawing`: schnell is distilled to four steps without guidance."""
        if self.takes_guidance(config):
            return super().own_drawing(config)
        note = "without guidance_embeds it is a schnell; pass --steps and --guidance if it was trained to need more"
        return OwnDrawing(4, self.unguided, note)

    def encode_captions(self, pipe: Any, texts: Sequence[str], model: ModelConfig) -> "Mapping[str, Sequence[Tensor]]":
        """See `StockFamily.encode_captions`."""
        length = self.max_length(model)
        text, pooled, _ = pipe.encode_prompt(prompt=list(texts), prompt_2=None, max_sequence_length=length)
        return {"text": text, "pooled": pooled}

    def encode_columns(
        self, pipe: Any, texts: Sequence[str], model: ModelConfig, columns: Collection[str]
    ) -> "Mapping[str, Sequence[Tensor]]":
        """See `StockFamily.encode_columns`: T5 does not run for CLIP's vector, nor CLIP for T5's rows."""
        values: dict[str, Sequence[Tensor]] = {}
        if "text" in columns:
            values["text"] = pipe._get_t5_prompt_embeds(list(texts), max_sequence_length=self.max_length(model))
        if "pooled" in columns:
            values["pooled"] = pipe._get_clip_prompt_embeds(list(texts))
        return values

    def pipeline_arguments(self, texts: "Batch", negative: "Batch | None", guidance: float) -> dict[str, Any]:
        """See `StockFamily.pipeline_arguments`. With negative texts, guidance has two passes."""
        arguments = {"guidance_scale": guidance, **_embeds("", texts)}
        if negative is None:
            return arguments
        return {**arguments, **_embeds("negative_", negative), "true_cfg_scale": guidance}


class FluxKontext(Flux):
    """Flux that sees an image beside the text: its tokens follow those of the image that is drawn."""

    name = "flux_kontext"
    title = "Flux Kontext"
    pipeline = "FluxKontextPipeline"
    references = 1
    usual_guidance = 2.5

    def reference_arguments(self, images: Any, size: tuple[int, int]) -> dict[str, Any]:
        """See `StockFamily.reference_arguments`: at the size of the image, as in training, not at the reference's."""
        own = {"max_area": math.prod(size), "_auto_resize": False}
        return {**own, "image": images} if len(images) else own


def _embeds(prefix: str, texts: "Batch") -> dict[str, Any]:
    return {f"{prefix}prompt_embeds": texts["text"], f"{prefix}pooled_prompt_embeds": texts["pooled"]}
