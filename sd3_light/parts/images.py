"""All images of a dataset, decoded once to bytes in memory, with their captions."""

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sd3_light.config import DatasetConfig
from sd3_light.config.faults import UserError
from sd3_light.data.building.cache_plan import CachePlan, Member, Unit, decode_task, make_cache_plan
from sd3_light.data.building.catalogue import Catalogue, make_sources
from sd3_light.data.building.claims import Claims
from sd3_light.data.building.decode import CRASHED_DECODE, decode_images
from sd3_light.data.building.workers import WorkerPool
from sd3_light.data.preprocess import PREPROCESS_VERSION, Pixels
from sd3_light.randomness import stream
from sd3_light.runlog import info, progress

_SHARD, _BATCH = 1024, 32
_ID_BITS = 63
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
    """Read at most ``max_images`` images, selected by sample id, at each of the dataset's sizes.

    ``folder`` holds the catalogue of the sources, so that a second run need not probe the images again.
    """
    with Claims(folder / "claims") as claims:
        catalogue = Catalogue(folder, claims)
        with progress("listing", None, "inputs") as bar:
            listings = catalogue.refresh(make_sources(dataset.directories), bar.advance)
        if num_unprobed := catalogue.count_unprobed(listings):
            with progress("probing new images", num_unprobed, "images") as bar:
                catalogue.probe_images(listings, workers if num_unprobed > 500 else 0, bar.advance)
        plan = make_cache_plan(catalogue, listings, {"parts": PREPROCESS_VERSION}, _SHARD)
        total = sum(unit.count for unit in plan.units)
        limit = (1 << _ID_BITS) * min(max_images, total) // max(total, 1)
        decoded = _decode(plan, limit, workers)
    if not decoded:
        raise UserError(f"{dataset.path}: no usable image found; check the paths in it")
    return [_pool(decoded[size]) for size in sorted(decoded)]


def _decode(plan: CachePlan, limit: int, workers: int) -> dict[tuple[int, int], list[tuple[Member, Pixels]]]:
    """Return the samples with an id below the limit by image size."""
    decoded: defaultdict[tuple[int, int], list[tuple[Member, Pixels]]] = defaultdict(list)
    rejected = Counter(plan.counts.rejected)
    samples = [(unit, member) for unit in plan.units for member in plan.members(unit) if member.identity < limit]
    with (
        WorkerPool(workers if len(samples) > 500 else 0, decode_images, CRASHED_DECODE) as pool,
        progress("decoding", len(samples), "images") as bar,
    ):
        results = pool.map([decode_task(member, plan.source(unit).root, unit) for unit, member in batch]
                           for batch in _batches(samples))  # fmt: skip
        for batch, images in zip(_batches(samples), results, strict=True):
            for (unit, member), image in zip(batch, images, strict=True):
                if image.pixels is None:
                    rejected[image.reason] += 1
                else:
                    decoded[unit.bucket.height, unit.bucket.width].append((member, image.pixels))
            bar.advance(len(batch))
    if rejected:
        info("rejected: " + ", ".join(f"{count:,} {reason}" for reason, count in rejected.most_common()))
    return decoded


def _batches(samples: list[tuple[Unit, Member]]) -> Iterator[list[tuple[Unit, Member]]]:
    return (samples[start : start + _BATCH] for start in range(0, len(samples), _BATCH))


def _pool(samples: list[tuple[Member, Pixels]]) -> Pool:
    """Return the samples in the order of their ids, which do not depend on names or folders; hold out 2% or 512."""
    samples = sorted(samples, key=lambda sample: sample[0].identity)
    count = len(samples)
    pixels = torch.from_numpy(np.stack([image for _, image in samples]))
    ids = tuple(member.identity for member, _ in samples)
    captions = tuple(member.captions for member, _ in samples)
    digest = blake2b("".join(member.fingerprint for member, _ in samples).encode(), digest_size=8).hexdigest()
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
