"""The columns of SD3's cache: moments of the VAE, masks, and the features of three text encoders. Imports no torch."""

from collections.abc import Sequence
from pathlib import Path

from sd3_light.config import ModelConfig
from sd3_light.core.columns import CAPTION, Bucket, Column, mask_column, with_prepared_references, with_references
from sd3_light.core.columns import prepared_columns as image_columns
from sd3_light.model.folder import TEXT_ENCODER_FOLDERS, TOKENIZER_FOLDERS, text_shape, vae_shape
from sd3_light.model.part_configs import read_config

_CLIP_L, _CLIP_G, _T5 = zip(TEXT_ENCODER_FOLDERS, TOKENIZER_FOLDERS, strict=True)
_PARTS = {
    "clip_l": _CLIP_L,
    "clip_g": (*_CLIP_G, _CLIP_L[1]),  # both CLIPs use the length of the first tokenizer
    "t5": _T5,
}


def sd3_columns(model: ModelConfig, folder: Path, bucket: Bucket) -> tuple[Column, ...]:
    """Return the columns of a bucket; see `Family.columns`."""
    images = with_references(_image_columns(model, folder, bucket), model.references)
    return (*images, *_text_columns(model, folder))


def _image_columns(model: ModelConfig, folder: Path, bucket: Bucket) -> tuple[Column, Column]:
    channels, step = vae_shape(folder)
    latent = (-(-bucket.height // step), -(-bucket.width // step))
    # the precisions that "auto" chooses differ by less than the latents' own noise; scale and shift are applied on read
    settings = {} if model.vae_dtype == "auto" else {"vae_dtype": model.vae_dtype}
    moments = Column("moments", "image", "float16", (2 * channels, *latent), ("vae",), settings=settings)
    return moments, mask_column(latent, step)


def _text_columns(model: ModelConfig, folder: Path) -> list[Column]:
    text = text_shape(folder, model.t5_max_length)
    shapes = {
        "clip_l": (text.clip_tokens, text.clip_l_width),
        "clip_g": (text.clip_tokens, text.clip_g_width),
        "t5": (text.t5_tokens, text.t5_width),
    }
    columns = []
    for name, shape in shapes.items():
        settings = {"text_tokens": model.text_tokens, "max_length": shape[0]}
        columns.append(Column(name, CAPTION, "bfloat16", shape, _PARTS[name], ragged=True, settings=settings))
    for name, (encoder, _) in (("clip_l", _CLIP_L), ("clip_g", _CLIP_G)):
        width = int(read_config(folder / encoder, encoder).get("projection_dim", 512))
        settings = {"text_tokens": model.text_tokens, "max_length": text.clip_tokens}
        columns.append(Column(f"{name}.pooled", CAPTION, "bfloat16", (width,), _PARTS[name], settings=settings))
    return columns


def prepared_columns(model: ModelConfig, columns: Sequence[Column]) -> tuple[Column, ...]:
    """Return noisy latents and targets, masks, and the joined text: CLIP's rows, then T5's, in T5's width."""
    shapes = {column.name: column.shape for column in columns}
    rows = max(shapes["clip_l"][0], shapes["clip_g"][0]) + shapes["t5"][0]
    pooled = shapes["clip_l.pooled"][0] + shapes["clip_g.pooled"][0]
    moments = next(column for column in columns if column.name == "moments")
    return (
        *with_prepared_references(image_columns(moments, moments.shape[0] // 2), model.references),
        Column("prompt", CAPTION, "bfloat16", (rows, shapes["t5"][1]), (), ragged=model.text_tokens == "real"),
        Column("pooled", CAPTION, "bfloat16", (pooled,), ()),
    )
