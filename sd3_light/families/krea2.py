"""Krea 2: many layers of one text encoder, joined by the denoiser."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from sd3_light.config import ModelConfig, UserError
from sd3_light.core.columns import CAPTION, Column
from sd3_light.families.base import StockFamily
from sd3_light.families.stock.texts import encoder_width, masked_embeds, real_rows, text_mask
from sd3_light.model.part_configs import read_json

if TYPE_CHECKING:
    from torch import Tensor, nn

    from sd3_light.core.batch import Batch

_MAX_LAYERS = 1000


class Krea2(StockFamily):
    """Captions have their own lengths, and a mask. All text has one position, so that rows of padding can be left out.

    A row has the features of several layers: 60 KiB at the published size.
    """

    name = "krea2"
    title = "Krea 2"
    pipeline = "Krea2Pipeline"
    denoiser = "Krea2Transformer2DModel"
    text_parts = MappingProxyType({"qwen": ("text_encoder", "tokenizer")})
    adapter_targets = ("transformer_blocks.*.attn.to_*", "transformer_blocks.*.ff.*")
    packs_latents = True
    pads_prompts = True
    text_inputs = MappingProxyType({"text": "text_hidden_dim"})
    samplers = ()  # the pipeline passes times
    dynamic_samplers = ()
    usual_guidance = 4.5
    unguided = 0.0
    comfyui = True

    def refusal(self, folder: Path) -> str | None:
        """See `Family.refusal`."""
        if read_json(folder / "model_index.json").get("is_distilled"):
            return "it is distilled to few steps, which training would undo; train Krea 2 Raw, and use its LoRA here"
        return None

    def text_columns(self, model: ModelConfig, folder: Path) -> tuple[Column, ...]:
        """See `StockFamily.text_columns`."""
        parts = self.text_parts["qwen"]
        length = self.max_length(model)
        layers = read_json(folder / "model_index.json").get("text_encoder_select_layers")
        if not isinstance(layers, list) or not 1 <= len(layers) <= _MAX_LAYERS:
            raise UserError(f"{folder}: its model_index.json names no text_encoder_select_layers; download it again")
        shape = (length, len(layers), encoder_width(folder, parts[0]))
        settings = {"text_max_length": length, "layers": layers}
        return (Column("text", CAPTION, "bfloat16", shape, parts, ragged=True, settings=settings),)

    def denoise(self, denoiser: "nn.Module", batch: "Batch", guidance: float) -> "Tensor":
        """See `StockFamily.denoise`."""
        import torch

        from sd3_light.families.stock.packed import packed_images, unpacked_image
        from sd3_light.flow.packing import grid_positions

        noisy = batch["noisy"]
        text = batch["text"]
        height, width = noisy.shape[-2:]
        image = grid_positions((1, height // 2, width // 2), noisy.device).float()
        tokens = denoiser(
            hidden_states=packed_images(batch),
            encoder_hidden_states=text,
            timestep=batch["t"].to(noisy.dtype),
            position_ids=torch.cat([image.new_zeros(text.shape[1], 3), image]),
            encoder_attention_mask=text_mask(batch),
            return_dict=False,
        )[0]
        return unpacked_image(tokens, batch)

    def image_part(self, output: Any, batch: "Batch") -> "Tensor":
        """See `StockFamily.image_part`: the text comes first."""
        tokens: Tensor = output[:, batch["text"].shape[1] :]
        return tokens

    def encode_captions(self, pipe: Any, texts: Sequence[str], model: ModelConfig) -> "Mapping[str, Sequence[Tensor]]":
        """See `StockFamily.encode_captions`: without the padding before the end of the template."""
        text, mask = pipe.encode_prompt(prompt=list(texts), max_sequence_length=self.max_length(model))
        return {"text": real_rows(text, mask)}

    def pipeline_arguments(self, texts: "Batch", negative: "Batch | None", guidance: float) -> dict[str, Any]:
        """See `StockFamily.pipeline_arguments`. Both texts get one length."""
        return {"guidance_scale": guidance, **masked_embeds(texts, negative, "prompt_embeds_mask")}
