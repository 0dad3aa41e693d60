"""Bytes of samples: in the cache on disk, as prepared micro-batches, and in the loader's host memory (law 10).

Pure arithmetic; each number comes with its formula. ``pixels`` are latent pixels, see `latent_pixels`.
"""

from sd3_light.budget.amount import MIB, Amount
from sd3_light.config import ModelSize
from sd3_light.model.text_shape import TextShape

CHANNELS = ModelSize.latent_channels
"""Latent channels of SD3's VAE."""

LATENT_STEP = 8
"""Image pixels per latent pixel, in each direction."""

MALLOC_CACHE_BYTES = 64 * MIB
"""Upper bound of the freed memory that the C library keeps in a process that builds batches: twice the 32 MiB above
which an allocation always goes to the kernel."""


def latent_pixels(width: int, height: int) -> int:
    """Return the number of latent pixels of an image of ``width`` x ``height``."""
    return (width // LATENT_STEP) * (height // LATENT_STEP)


def image_bytes(pixels: int, variants: int = 1, mask: bool = False, channels: int = CHANNELS) -> Amount:
    """Return the cache bytes of one image: fp16 mean and log-variance per variant, one mask byte per pixel."""
    value = variants * 2 * channels * pixels * 2 + (pixels if mask else 0)
    formula = f"{variants} variant{'s' if variants > 1 else ''}·2·{channels}·h·w·2 B" + (" + h·w mask" if mask else "")
    return Amount(value, formula)


def caption_bytes(text: TextShape) -> Amount:
    """Return the cache bytes of one caption, tokens and pooled vectors in bf16; the longest one with real tokens."""
    clip = f"{text.clip_tokens}·({text.clip_l_width}+{text.clip_g_width})"
    tokens = f"{text.at_most}({clip} + {text.t5_tokens}·{text.t5_width} + {text.pooled_width} pooled)·2 B"
    return Amount(2 * text.numbers, tokens)


def sample_bytes(
    pixels: int, text: TextShape, captions: int = 1, variants: int = 1, mask: bool = False, channels: int = CHANNELS
) -> Amount:
    """Return the cache bytes of one sample, without its fingerprint in the Arrow file (a few hundred bytes)."""
    image, caption = image_bytes(pixels, variants, mask, channels), caption_bytes(text)
    value = image.value + captions * caption.value
    return Amount(value, f"{image.formula} + {captions} caption{'s' if captions != 1 else ''}·{caption.formula}")


def latent_bytes(pixels: int, batch: int, mask: bool = False, channels: int = CHANNELS) -> int:
    """Return the bytes of a prepared micro-batch's noisy latents, targets and masks."""
    return batch * (2 * channels * pixels * 4 + (4 * pixels if mask else 0))


def batch_bytes(pixels: int, text: TextShape, batch: int, mask: bool = False, channels: int = CHANNELS) -> Amount:
    """Return the bytes of one prepared micro-batch, an upper bound for GPUs, which get moments in fp16 and add noise.

    Noisy latents and targets are fp32, joined text is bf16; samples add their time and, with real tokens, length.
    """
    prompt = 2 * (text.tokens * text.t5_width + text.pooled_width)
    formula = f"{text.at_most}B·(2·{channels}·h·w·4 + " + ("4·h·w mask + " if mask else "")
    formula += f"({text.tokens}·{text.t5_width} + {text.pooled_width})·2)"
    value = latent_bytes(pixels, batch, mask, channels) + batch * (prompt + (4 + 8 if text.real else 4))
    return Amount(value, formula)


def open_shard_bytes(shard_size: int, captions: float = 1.0) -> int:
    """Return the bytes that an open shard holds in memory: ids, and the offsets of captions and tokens."""
    return round(8 * (2 * shard_size + 4 * shard_size * captions))


def resident_index_bytes(samples: int, captions: int) -> int:
    """Return the host memory of the index of a cache that is held in memory: ids, and offsets of images and text."""
    return 8 * (4 * samples + 5 * captions)


def loader_bytes(
    prepared: Amount,
    workers: int,
    prefetch: int,
    shard_size: int,
    open_shards: int,
    *,
    latents: int = 0,
    read: int = 0,
    in_use: int = 1,
    downloads: int = 0,
) -> Amount:
    """Return the host memory of one rank's loader, without interpreters.

    It holds the prefetched micro-batches, those of the step ``in_use`` and one being copied to a device. Each process
    that prepares them adds the ``read`` bytes of a micro-batch's samples, three times its ``latents`` (noise, the
    posterior draw and intermediate values), malloc's cache, the indices of ``open_shards`` shards, and
    the ``downloads`` in progress from a URL.
    """
    preparers, in_copy = max(1, workers), int(workers > 0)
    index = open_shard_bytes(shard_size)
    batches = workers * prefetch + in_use + in_copy
    own = 3 * latents + read + MALLOC_CACHE_BYTES + open_shards * index + downloads
    value = batches * prepared.value + preparers * own
    formula = (
        f"({workers} workers·{prefetch} prefetched + {in_use} in use + {in_copy} in copy)·micro-batch + {preparers}·"
        f"(3·{latents / MIB:.1f} MiB latents + {read / MIB:.1f} MiB read + 64 MiB malloc + "
        f"{open_shards} open shards·{index / 1024:.1f} KiB"
        f"{f' + {downloads / MIB:.0f} MiB downloads' if downloads else ''})"
    )
    return Amount(value, formula)
