"""All images of a dataset, decoded once to bytes in memory, with their captions."""

from collections import defaultdict
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sd3_light.config import DatasetConfig
from sd3_light.data.decoded import DecodedSample, decode_dataset
from sd3_light.randomness import stream
from sd3_light.runlog import info

_GPU_SHARE = 0.4  # of the free GPU memory that images may take


@dataclass(frozen=True)
class Pool:
    """Images of one size: uint8 [N, H, W, 3], the sample ids and captions of each. The first ``held_out`` are not
    trained on. ``digest`` identifies the contents."""

    pixels: Tensor
    ids: tuple[int, ...]
    captions: tuple[tuple[str, ...], ...]
    held_out: int
    digest: str

    @property
    def size(self) -> tuple[int, int]:
        """Height and width."""
        return self.pixels.shape[1], self.pixels.shape[2]

    @property
    def trained(self) -> int:
        """Number of images to train on."""
        return len(self.ids) - self.held_out


def load_pools(dataset: DatasetConfig, folder: Path, max_images: int, workers: int) -> list[Pool]:
    """Read at most ``max_images`` images, selected by sample id, at each of the dataset's sizes."""
    decoded: defaultdict[tuple[int, ...], list[DecodedSample]] = defaultdict(list)
    for sample in decode_dataset(dataset, folder, max_images, workers, list_rejects=True):
        decoded[sample.pixels.shape].append(sample)
    return [_pool(decoded[size]) for size in sorted(decoded)]


def _pool(samples: list[DecodedSample]) -> Pool:
    """Return the samples in the order of their ids, which do not depend on names or folders; hold out 2% or 512."""
    samples = sorted(samples, key=lambda sample: sample.member.identity)
    members = [sample.member for sample in samples]
    count = len(samples)
    pixels = torch.from_numpy(np.stack([sample.pixels for sample in samples]))
    ids = tuple(member.identity for member in members)
    captions = tuple(member.captions for member in members)
    digest = blake2b("".join(member.fingerprint for member in members).encode(), digest_size=8).hexdigest()
    return Pool(pixels, ids, captions, min(512, max(count // 50, min(8, count // 4))), digest)


def on_device(pools: list[Pool], device: torch.device) -> list[Pool]:
    """Return the pools with their pixels on the device if they fit beside the model."""
    if device.type != "cuda":
        return pools
    free, _ = torch.cuda.mem_get_info(device)
    if sum(pool.pixels.nbytes for pool in pools) > _GPU_SHARE * free:
        info("the images stay in host memory: they do not fit beside the model on the GPU")
        return [replace(pool, pixels=pool.pixels.pin_memory()) for pool in pools]
    return [replace(pool, pixels=pool.pixels.to(device)) for pool in pools]


def draw_rows(pools: list[Pool], seed: int, purpose: str, step: int, batch: int) -> tuple[Pool, np.ndarray]:
    """Draw the batch of a step: a pool in proportion to its images, and different rows of it in random order."""
    rng = stream(seed, purpose, 0, 0, step)
    counts = np.array([pool.trained for pool in pools])
    pool = pools[int(rng.choice(len(pools), p=counts / counts.sum()))]
    rows = rng.choice(pool.trained, size=min(batch, pool.trained), replace=False)
    return pool, rows + pool.held_out


def take(pixels_NHWC: Tensor, rows: np.ndarray, device: torch.device) -> Tensor:
    """Return rows of images as floats from -1 to 1, [B, 3, H, W] in channels-last memory."""
    index = torch.from_numpy(rows).to(pixels_NHWC.device, non_blocking=True)
    images = pixels_NHWC[index].to(device, non_blocking=True)
    return images.permute(0, 3, 1, 2).float() / 127.5 - 1
