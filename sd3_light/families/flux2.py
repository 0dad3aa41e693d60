"""Flux.2 klein: several layers of one text encoder, and latents that are normalised by statistics of the VAE."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from sd3_light.config import ModelConfig
from sd3_light.core.columns import CAPTION, Column
from sd3_light.families.base import StockFamily, set_shifted_times
from sd3_light.families.stock.texts import encoder_width
from sd3_light.model.part_configs import read_json

if TYPE_CHECKING:
    from torch import Tensor, nn

    from sd3_light.core.batch import Batch

_LAYERS = (9, 18, 27)  # of the text encoder, as in the pipeline's call
_MANY_TOKENS = 4300
_FRAMES = 10  # between an image and its references


class Flux2(StockFamily):
    """Text is padded to its full length, which the denoiser attends to."""

    name = "flux2"
    title = "Flux.2"
    pipeline = "Flux2KleinPipeline"
    denoiser = "Flux2Transformer2DModel"
    text_parts = MappingProxyType({"qwen": ("text_encoder", "tokenizer")})
    adapter_targets = ("attn.to_*", "attn.add_*_proj", "ff.linear_*", "ff_context.linear_*")
    packs_latents = True
    text_inputs = MappingProxyType({"text": "joint_attention_dim"})
    samplers = ()  # the pipeline passes a shift by resolution
    compiled_share = (0.57, 0.67)
    comfyui = True
    text_tokens = ("padded",)
    sets_references = True

    def refusal(self, folder: Path) -> str | None:
        """See `Family.refusal`."""
        if read_json(folder / "model_index.json").get("is_distilled"):
            return "it is distilled to few steps, which training would undo; give the base model"
        if read_json(folder / "transformer" / "config.json").get("guidance_embeds"):
            return "its denoiser takes guidance as a number, which is another pipeline's; give a klein model"
        return None

    def text_columns(self, model: ModelConfig, folder: Path) -> tuple[Column, ...]:
        """See `StockFamily.text_columns`."""
        parts = self.text_parts["qwen"]
        length = self.max_length(model)
        shape = (length, len(_LAYERS) * encoder_width(folder, parts[0]))
        return (Column("text", CAPTION, "bfloat16", shape, parts, settings={"text_max_length": length}),)

    def denoise(self, denoiser: "nn.Module", batch: "Batch", guidance: float) -> "Tensor":
        """See `StockFamily.denoise`. Positions have a frame, a row, a column and a place in the text."""
        import torch

        from sd3_light.core.batch import references
        from sd3_light.families.stock.packed import packed_images, rounded_times, unpacked_image
        from sd3_light.flow.packing import grid_positions

        noisy = batch["noisy"]
        text = batch["text"]
        height, width = noisy.shape[-2:]
        images = [noisy, *references(batch)]
        positions = [grid_positions((1, height // 2, width // 2, 1), noisy.device) for _ in images]
        for number, place in enumerate(positions):
            place[:, 0] = _FRAMES * number
        tokens = denoiser(
            hidden_states=packed_images(batch),
            encoder_hidden_states=text,
            timestep=rounded_times(batch),
            guidance=None,
            img_ids=torch.cat(positions),
            txt_ids=grid_positions((1, 1, 1, text.shape[1]), noisy.device),
            return_dict=False,
        )[0]
        return unpacked_image(tokens, batch)

    def reference_arguments(self, images: Any, size: tuple[int, int]) -> dict[str, Any]:
        """See `StockFamily.reference_arguments`: the pipeline shows all images to every prompt of a call."""
        return {"image": images}

    def image_part(self, output: Any, batch: "Batch") -> "Tensor":
        """See `StockFamily.image_part`: single blocks return one tensor, the text first."""
        if isinstance(output, tuple):
            return super().image_part(output, batch)
        tokens: Tensor = output[:, batch["text"].shape[1] :]
        return tokens

    def encode_captions(self, pipe: Any, texts: Sequence[str], model: ModelConfig) -> "Mapping[str, Sequence[Tensor]]":
        """See `StockFamily.encode_captions`."""
        length = self.max_length(model)
        encoded = pipe.encode_prompt(prompt=list(texts), max_sequence_length=length, text_encoder_out_layers=_LAYERS)
        return {"text": encoded[0]}

    def set_times(self, scheduler: Any, steps: int, tokens: int) -> None:
        """See `StockFamily.set_times`: the shift depends on the number of steps too."""
        many = 0.00016927 * tokens + 0.45666666  # at 200 steps, the line of Flux.1
        few = 8.73809524e-05 * tokens + 1.89833333  # at 10 steps
        slope = (many - few) / 190.0
        shift = many if tokens > _MANY_TOKENS else slope * steps + (many - 200.0 * slope)
        set_shifted_times(scheduler, steps, shift)
