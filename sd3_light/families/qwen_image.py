"""Qwen-Image and its models for edits: text of a vision-language model, and guidance that keeps the norm of tokens."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from sd3_light.config import ModelConfig
from sd3_light.core.columns import CAPTION, Bucket, Column, reference_entry
from sd3_light.families.base import StockFamily
from sd3_light.families.stock.texts import real_rows, text_mask
from sd3_light.model.part_configs import read_json

if TYPE_CHECKING:
    from PIL import Image
    from torch import Tensor, nn

    from sd3_light.core.batch import Batch

_LAYERED = ("use_additional_t_cond", "use_layer3d_rope")
_EDITED = "zero_cond_t"
_AREA = 1024 * 1024  # pixels of a reference, as the pipelines scale it
_SMALL_AREA = 384 * 384  # as Plus shows it to the text encoder
_STEP = 32


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
    compiled_share = (0.53, 0.62)
    comfyui = True

    def refusal(self, folder: Path) -> str | None:
        """See `Family.refusal`."""
        config = read_json(folder / "transformer" / "config.json")
        keys = [key for key in _LAYERED if config.get(key)]
        if keys:
            return f"its denoiser has {keys[0]}: it draws layers, which is not trained"
        if config.get(_EDITED) and not self.texts_see_references:
            return f"its denoiser has {_EDITED}: it edits images; give the folder of a QwenImageEditPlusPipeline"
        return None

    def frozen(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        """See `StockFamily.frozen`: the last block has no text output."""
        layers = config.get("num_layers")
        last = layers - 1 if isinstance(layers, int) else "*"
        return (f"transformer_blocks.{last}.attn.to_add_out.*", f"transformer_blocks.{last}.txt_mlp.*")

    def denoise(self, denoiser: "nn.Module", batch: "Batch", guidance: float) -> "Tensor":
        """See `StockFamily.denoise`."""
        from sd3_light.core.batch import references
        from sd3_light.families.stock.packed import packed_images, rounded_times, unpacked_image

        images = [batch["noisy"], *references(batch)]
        shapes = [(1, image.shape[-2] // 2, image.shape[-1] // 2) for image in images]
        mask = text_mask(batch)
        is_rounded = batch.get("text.length") is not None  # the denoiser's use of a mask cannot be recorded
        tokens = denoiser(
            hidden_states=packed_images(batch),
            encoder_hidden_states=batch["text"],
            encoder_hidden_states_mask=None if is_rounded else mask,
            attention_kwargs={"attention_mask": mask} if is_rounded else None,
            timestep=rounded_times(batch),
            img_shapes=[shapes] * batch.size,
            return_dict=False,
        )[0]
        return unpacked_image(tokens, batch)

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

    def pipeline_arguments(self, texts: "Batch", negative: "Batch | None", guidance: float) -> dict[str, Any]:
        """See `StockFamily.pipeline_arguments`."""
        arguments = {"prompt_embeds": texts["text"], "prompt_embeds_mask": text_mask(texts), "true_cfg_scale": guidance}
        if negative is not None:
            arguments["negative_prompt_embeds"] = negative["text"]
            arguments["negative_prompt_embeds_mask"] = text_mask(negative)
        return arguments


class QwenImageEdit(QwenImage):
    """Qwen-Image that sees an image beside the text, and whose text encoder sees it too.

    References are scaled to about a million pixels, whatever the size of the image, as in the stock pipeline. A text is
    the rows of the images, of which there are at most ``seen_rows`` each, and those of the caption.
    """

    name = "qwen_image_edit"
    title = "Qwen-Image-Edit"
    pipeline = "QwenImageEditPipeline"
    text_parts = MappingProxyType({"qwen": ("text_encoder", "tokenizer", "processor")})
    packages = ("torchvision",)  # the processor loads one of videos too
    references = 1
    texts_see_references = True
    single_prompts = True
    seen_rows: ClassVar[int] = 1536  # 1369 of a square: 28 x 28 pixels each

    def recipe(self, folder: Path) -> Mapping[str, Any]:
        """See `Family.recipe`: no text is without references."""
        dropout = ("enable_uncond_text_dropout", "uncond_text_dropout_prob")
        return {**super().recipe(folder), **{f"model.{key}": None for key in dropout}}

    def reference_bucket(self, bucket: Bucket) -> Bucket:
        """See `Family.reference_bucket`: a size that the pipeline leaves as it is; it rounds most to one at once."""
        size = scaled(bucket, _AREA)
        while (rounded := scaled(size, _AREA)) != size:
            size = rounded
        return size

    def text_columns(self, model: ModelConfig, folder: Path) -> tuple[Column, ...]:
        """See `StockFamily.text_columns`."""
        (column,) = super().text_columns(model, folder)
        count = self.reference_count(model)
        reads = "+".join((CAPTION, *map(reference_entry, range(count))))
        return (replace(column, reads=reads, shape=(self._rows(model, count), *column.shape[1:])),)

    def _rows(self, model: ModelConfig, count: int) -> int:
        """Return the rows of the longest text with this number of images."""
        return self.max_length(model) + count * self.seen_rows

    def encode_pairs(
        self, pipe: Any, texts: Sequence[str], images: "Sequence[Sequence[Image.Image]]", model: ModelConfig
    ) -> "Mapping[str, Sequence[Tensor]]":
        """See `StockFamily.encode_pairs`: one by one, as the pipeline draws."""
        values = []
        for text, seen in zip(texts, images, strict=True):
            encoded, mask = pipe.encode_prompt(prompt=[text], image=self.shown(pipe, seen))
            (rows,) = real_rows(encoded, mask)
            values.append(rows[: self._rows(model, len(seen))])
        return {"text": values}

    def shown(self, pipe: Any, images: "Sequence[Image.Image]") -> Any:
        """Return the references of an image as the pipeline shows them to the text encoder."""
        (image,) = images
        return image

    def reference_arguments(self, images: Any, size: tuple[int, int]) -> dict[str, Any]:
        """See `StockFamily.reference_arguments`."""
        (image,) = images
        return {"image": image}


class QwenImageEditPlus(QwenImageEdit):
    """Qwen-Image-Edit with several images: the text encoder sees small ones."""

    name = "qwen_image_edit_plus"
    title = "Qwen-Image-Edit Plus"
    pipeline = "QwenImageEditPlusPipeline"
    references = 0
    sets_references = True
    seen_rows = 272  # 196 of a square, and their numbers

    def shown(self, pipe: Any, images: "Sequence[Image.Image]") -> Any:
        """See `QwenImageEdit.shown`."""
        sizes = (scaled(Bucket(*image.size), _SMALL_AREA) for image in images)
        pairs = zip(images, sizes, strict=True)
        return [pipe.image_processor.resize(image, size.height, size.width) for image, size in pairs]

    def reference_arguments(self, images: Any, size: tuple[int, int]) -> dict[str, Any]:
        """See `StockFamily.reference_arguments`."""
        return {"image": list(images)}


def scaled(size: Bucket, area: int) -> Bucket:
    """Return the size with about this area that the pipelines scale an image to."""
    ratio = size.width / size.height
    width = math.sqrt(area * ratio)
    height = width / ratio
    return Bucket(round(width / _STEP) * _STEP, round(height / _STEP) * _STEP)
