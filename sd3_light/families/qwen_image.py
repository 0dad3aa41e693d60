"""Qwen-Image: one text stream of a vision-language model, and guidance that keeps the norm of tokens."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from sd3_light.config import ModelConfig
from sd3_light.families.base import StockFamily, resolution_shift, set_shifted_times
from sd3_light.families.stock.texts import real_rows, text_mask
from sd3_light.model.part_configs import read_json

if TYPE_CHECKING:
    from torch import Tensor, nn

    from sd3_light.core.batch import Batch

_OTHER_MODELS = ("zero_cond_t", "use_additional_t_cond", "use_layer3d_rope")


class QwenImage(StockFamily):
    """Captions have their own lengths, and a mask where they differ."""

    name = "qwen_image"
    title = "Qwen-Image"
    pipeline = "QwenImagePipeline"
    denoiser = "QwenImageTransformer2DModel"
    text_parts = MappingProxyType({"qwen": ("text_encoder", "tokenizer")})
    # without layers of the text's own output, which get no gradient in the last block
    adapter_targets = ("attn.to_[qkv]", "attn.to_out.0", "attn.add_*_proj", "img_mlp.net.*")
    text_steps = (32, 64, 128, 256, 512)
    packs_latents = True
    text_inputs = MappingProxyType({"text": "joint_attention_dim"})
    samplers = ()  # the pipeline passes times
    dynamic_samplers = ()
    comfyui = True

    def refusal(self, folder: Path) -> str | None:
        """See `Family.refusal`."""
        config = read_json(folder / "transformer" / "config.json")
        keys = [key for key in _OTHER_MODELS if config.get(key)]
        return f"its denoiser has {keys[0]}: it edits images or draws layers, which is not trained" if keys else None

    def frozen(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        """See `StockFamily.frozen`: the last block has no text output."""
        layers = config.get("num_layers")
        last = layers - 1 if isinstance(layers, int) else "*"
        return (f"transformer_blocks.{last}.attn.to_add_out.*", f"transformer_blocks.{last}.txt_mlp.*")

    def denoise(self, denoiser: "nn.Module", batch: "Batch", guidance: float) -> "Tensor":
        """See `StockFamily.denoise`."""
        from sd3_light.flow.packing import pack_latents, unpack_latents

        noisy = batch["noisy"]
        height, width = noisy.shape[-2:]
        mask = text_mask(batch)
        is_rounded = batch.get("text.length") is not None  # the denoiser's use of a mask cannot be recorded
        tokens = denoiser(
            hidden_states=pack_latents(noisy),
            encoder_hidden_states=batch["text"],
            encoder_hidden_states_mask=None if is_rounded else mask,
            attention_kwargs={"attention_mask": mask} if is_rounded else None,
            timestep=(1000 * batch["t"]).to(noisy.dtype) / 1000,  # as the pipeline rounds it
            img_shapes=[[(1, height // 2, width // 2)]] * len(noisy),
            return_dict=False,
        )[0]
        return unpack_latents(tokens, height, width)

    def speed_up(self, denoiser: "nn.Module") -> None:
        """See `StockFamily.speed_up`."""
        from sd3_light.families.stock.attention import QwenAttention, use_attention

        use_attention(denoiser, QwenAttention())

    def guide(self, negative: "Tensor", positive: "Tensor", guidance: float) -> "Tensor":
        """See `StockFamily.guide`: every token keeps its norm."""
        import torch

        from sd3_light.flow.packing import pack_latents, unpack_latents

        own = pack_latents(positive)
        other = pack_latents(negative)
        mixed = other + guidance * (own - other)
        norm = torch.norm(own, dim=-1, keepdim=True)
        new = torch.norm(mixed, dim=-1, keepdim=True)
        return unpack_latents(mixed * (norm / new), *positive.shape[-2:])

    def encode_captions(self, pipe: Any, texts: Sequence[str], model: ModelConfig) -> "Mapping[str, Sequence[Tensor]]":
        """See `StockFamily.encode_captions`."""
        text, mask = pipe.encode_prompt(prompt=list(texts), max_sequence_length=self.max_length(model))
        return {"text": real_rows(text, mask)}

    def set_times(self, scheduler: Any, steps: int, tokens: int) -> None:
        """See `StockFamily.set_times`."""
        set_shifted_times(scheduler, steps, resolution_shift(scheduler.config, tokens))

    def pipeline_arguments(self, texts: "Batch", negative: "Batch | None", guidance: float) -> dict[str, Any]:
        """See `StockFamily.pipeline_arguments`."""
        arguments = {"prompt_embeds": texts["text"], "prompt_embeds_mask": text_mask(texts), "true_cfg_scale": guidance}
        if negative is not None:
            arguments["negative_prompt_embeds"] = negative["text"]
            arguments["negative_prompt_embeds_mask"] = text_mask(negative)
        return arguments
