"""What samples weigh: in the cache on disk, as prepared micro-batches, and in the loader's host memory (law 10).

Pure arithmetic; each number comes with the formula that gave it.
"""

from sd3_light.config import ModelSize
from sd3_light.data.buckets import Bucket
from sd3_light.data.order import WINDOW, open_shards
from sd3_light.model.cost import Amount
from sd3_light.model.folder import TextShape

LATENT_STEP = 8
"""Pixels a latent pixel covers, each way."""

KEPT_BY_MALLOC = 64 << 20
"""Bytes of freed tensors that the C library keeps for the next ones, at most, in a process that makes batches: twice
the 32 MiB above which it always asks the kernel."""


def latent_pixels(bucket: Bucket) -> int:
    """Pixels of a bucket's latent."""
    return (bucket.width // LATENT_STEP) * (bucket.height // LATENT_STEP)


def picture_bytes(bucket: Bucket, variants: int = 1, mask: bool = False) -> Amount:
    """Cache bytes of one picture: fp16 mean and log-variance a variant, one byte a latent pixel for a mask."""
    pixels, channels = latent_pixels(bucket), ModelSize.latent_channels
    value = variants * 2 * channels * pixels * 2 + (pixels if mask else 0)
    formula = f"{variants} variant{'s' if variants > 1 else ''}·2·{channels}·h·w·2 B" + (" + h·w mask" if mask else "")
    return Amount(value, formula)


def caption_bytes(text: TextShape) -> Amount:
    """Cache bytes of one caption: tokens and pooled vectors in bf16; with real tokens those of the longest."""
    clip = f"{text.clip_tokens}·({text.clip_l_width}+{text.clip_g_width})"
    tokens = f"{text.at_most}({clip} + {text.t5_tokens}·{text.t5_width} + {text.pooled_width} pooled)·2 B"
    return Amount(2 * text.numbers, tokens)


def sample_bytes(bucket: Bucket, text: TextShape, captions: int = 1, variants: int = 1, mask: bool = False) -> Amount:
    """Cache bytes of one sample (its fingerprint in the Arrow file, some hundred bytes, is not counted)."""
    picture, caption = picture_bytes(bucket, variants, mask), caption_bytes(text)
    value = picture.value + captions * caption.value
    return Amount(value, f"{picture.formula} + {captions} caption{'s' if captions != 1 else ''}·{caption.formula}")


def latent_bytes(bucket: Bucket, batch: int, mask: bool = False) -> int:
    """Bytes of the noisy latents and the target of a prepared micro-batch, and of its masks."""
    pixels = latent_pixels(bucket)
    return batch * (2 * ModelSize.latent_channels * pixels * 4 + (4 * pixels if mask else 0))


def batch_bytes(bucket: Bucket, text: TextShape, batch: int, mask: bool = False) -> Amount:
    """Bytes of one prepared micro-batch: noisy latents and target in fp32, joined text in bf16, each sample's time and
    with real tokens its length."""
    prompt = 2 * (text.tokens * text.t5_width + text.pooled_width)
    formula = f"{text.at_most}B·(2·{ModelSize.latent_channels}·h·w·4 + " + ("4·h·w mask + " if mask else "")
    formula += f"({text.tokens}·{text.t5_width} + {text.pooled_width})·2)"
    value = latent_bytes(bucket, batch, mask) + batch * (prompt + (4 + 8 if text.real else 4))
    return Amount(value, formula)


def open_shard_bytes(shard_size: int, captions: float = 1.0) -> int:
    """Bytes that an open shard holds in memory: ids, and where captions and tokens start. The rest stays on disk."""
    return round(8 * (2 * shard_size + 4 * shard_size * captions))


def loader_bytes(
    prepared: Amount,
    workers: int,
    prefetch: int,
    shard_size: int,
    captions: float = 1.0,
    *,
    latents: int = 0,
    read: int = 0,
    in_use: int = 1,
    window: int = WINDOW,
    buckets: int = 1,
) -> Amount:
    """Host memory of a rank's loader, besides interpreters.

    Micro-batches that workers prepare ahead, those of the step ``in_use`` and one that goes to a device, and for each
    process that makes them the ``read`` bytes of a micro-batch's samples, thrice the bytes of its ``latents`` (noise,
    the draw and what lies between), what malloc keeps, and open shards' indices.
    """
    makers, shards = max(1, workers), open_shards(window, buckets)
    index, on_its_way = open_shard_bytes(shard_size, captions), int(workers > 0)
    batches = workers * prefetch + in_use + on_its_way
    value = batches * prepared.value + makers * (3 * latents + read + KEPT_BY_MALLOC + shards * index)
    formula = (
        f"({workers} workers·{prefetch} ahead + {in_use} in use + {on_its_way})·micro-batch + {makers}·"
        f"(3·{latents / (1 << 20):.1f} MiB latents + {read / (1 << 20):.1f} MiB read + 64 MiB malloc + "
        f"{shards} open shards·{index / 1024:.1f} KiB)"
    )
    return Amount(value, formula)
