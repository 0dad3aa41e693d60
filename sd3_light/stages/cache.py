"""The cache stage: pictures and captions through the VAE and three text encoders, once, into immutable shards.

Every process of a launch encodes its share and none waits in a collective (law 9). A unit of work is one shard; its
name says all that made it, so what stands is done and what is missing is encoded, now or by the next run.
"""

import json
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKL

from sd3_light.config import DatasetConfig, LoadedConfig, TrainConfig
from sd3_light.config.faults import UserError
from sd3_light.data.buckets import plan
from sd3_light.data.preprocess import PREPROCESS_VERSION, Reject, decode, decode_mask, fit, fit_mask
from sd3_light.data.shards import (
    FORMAT,
    MANIFEST,
    Features,
    Manifest,
    Origin,
    Sample,
    ShardEntry,
    read_entry,
    write_atomically,
    write_shard,
)
from sd3_light.data.sources import Rejected
from sd3_light.data.units import Member, Plan, Unit, count_reasons, plan_units
from sd3_light.encoders.fingerprint import parts_fingerprint
from sd3_light.encoders.text import PARTS, TextEncoder, load_text_encoder
from sd3_light.encoders.vae import encode_moments, load_vae
from sd3_light.engines import Launch
from sd3_light.randomness import sample_id
from sd3_light.runlog import progress, say


@dataclass(frozen=True)
class CacheReport:
    """What became of a data set."""

    folder: Path
    counts: dict[str, int]
    encoded: int
    already: int


def run(
    loaded: LoadedConfig, launch: Launch | None = None, trust: bool = False, regenerate: bool = False
) -> list[CacheReport]:
    """Build or complete the caches of the data set and of every evaluation set. With ``trust`` a cache that has its
    manifest is taken as it is; with ``regenerate`` everything is encoded anew."""
    launch = launch or Launch()
    datasets = {"": loaded.dataset, **loaded.eval_datasets}
    if trust and not regenerate:
        datasets = {name: data for name, data in datasets.items() if not _is_usable(data, loaded.train)}
        if not datasets:
            say("the cache is trusted as it is")
            return []
    recipe = make_recipe(loaded.train)
    encoders = Encoders(loaded.train, launch.device(loaded.train.caching_device))
    return [build(data, name, loaded.train, recipe, encoders, launch, regenerate) for name, data in datasets.items()]


def make_recipe(train: TrainConfig) -> dict[str, Any]:
    """All that determines a sample's features besides the sample."""
    return {
        "format": FORMAT,
        "preprocess": PREPROCESS_VERSION,
        "text_tokens": train.model.text_tokens,
        "t5_max_length": train.model.t5_max_length,
        **parts_fingerprint(train.model.diffusers_path),
    }


def _is_usable(dataset: DatasetConfig, train: TrainConfig) -> bool:
    if not (dataset.cache_dir / MANIFEST).is_file():
        return False
    recipe = Manifest.load(dataset.cache_dir).recipe
    for key in ("text_tokens", "t5_max_length"):
        if recipe[key] != getattr(train.model, key):
            raise UserError(
                f"{dataset.cache_dir} was built with {key} = {recipe[key]!r}, the config says "
                f"{getattr(train.model, key)!r}; run without --trust_cache to encode anew"
            )
    return True


class Encoders:
    """The frozen parts, loaded when first used and freed together."""

    def __init__(self, train: TrainConfig, device: torch.device) -> None:
        self.train, self.device = train, device
        self._vae: AutoencoderKL | None = None
        self._text: list[TextEncoder] = []

    @property
    def vae(self) -> AutoencoderKL:
        """In float32: latents are made once and trained on for weeks."""
        if self._vae is None:
            self._vae = load_vae(self.train.model.diffusers_path, self.device, torch.float32)
        return self._vae

    @property
    def text(self) -> list[TextEncoder]:
        """All three, in the config's dtype on GPUs and in float32 elsewhere."""
        if not self._text:
            model = self.train.model
            dtype = getattr(torch, model.dtype) if self.device.type == "cuda" else torch.float32
            self._text = [
                load_text_encoder(name, model.diffusers_path, model.t5_max_length, self.device, dtype) for name in PARTS
            ]
        return self._text

    def encode_captions(self, captions: Sequence[str]) -> dict[str, Features]:
        """caption -> features, each distinct caption once, in batches of a fixed make-up."""
        distinct = list(dict.fromkeys(captions))
        found: dict[str, Features] = {caption: {} for caption in distinct}
        for start in range(0, len(distinct), size := self.train.caching_batch_size):
            part = distinct[start : start + size]
            for encoder in self.text:
                for name, values in encoder(part).items():
                    for caption, value in zip(part, values, strict=True):
                        found[caption][name] = value
        return found


def build(
    dataset: DatasetConfig,
    name: str,
    train: TrainConfig,
    recipe: dict[str, Any],
    encoders: Encoders,
    launch: Launch,
    regenerate: bool,
) -> CacheReport:
    """One data set's cache: plan, encode this process's share, and let the main process write the manifest."""
    title = f"cache {name}".strip()
    say(f"{title}: scanning {len(dataset.directories)} directories for {dataset.cache_dir}")
    todo = plan_units(dataset, recipe, train.seed, train.sd3_shard_size)
    if not todo.units:
        reasons = ", ".join(f"{count} {reason}" for reason, count in count_reasons(todo.rejected).items())
        raise UserError(f"{dataset.path}: no usable sample found ({reasons or 'the directories are empty'})")
    shards = dataset.cache_dir / "shards"
    shards.mkdir(parents=True, exist_ok=True)
    own = todo.units[launch.rank :: launch.world]
    missing = [unit for unit in own if regenerate or not _is_done(shards, unit)]
    _encode_units(title, shards, missing, own, encoders)
    empty = _encode_empty(shards, recipe, encoders)
    counts = _finish(dataset, todo, recipe, empty, train.sd3_manifest_timeout_sec, launch)
    return CacheReport(dataset.cache_dir, counts, len(missing), len(own) - len(missing))


def _is_done(shards: Path, unit: Unit) -> bool:
    path = shards / unit.entry.file
    return path.is_file() or path.with_suffix(".none").is_file()


def _encode_units(title: str, shards: Path, units: list[Unit], own: list[Unit], encoders: Encoders) -> None:
    total = sum(len(unit.members) for unit in own)
    already = total - sum(len(unit.members) for unit in units)
    if already:
        say(f"{title}: {already} of {total} samples are there already")
    with progress(title, total, "images", done=already) as bar, ThreadPoolExecutor(1) as writer:
        waiting = None
        for unit in units:
            done = _encode_unit(unit, encoders)
            # the disk writes one shard while the device encodes the next; never more than one waits
            if waiting is not None:
                waiting.result()
            waiting = writer.submit(_write_unit, shards, unit, *done)
            bar.advance(len(unit.members))
        if waiting is not None:
            waiting.result()


def _encode_unit(unit: Unit, encoders: Encoders) -> tuple[list[Sample], list[Origin], list[Rejected]]:
    good, pixels, masks, rejected = [], [], [], []
    with ThreadPoolExecutor(max(1, encoders.train.caching_num_workers)) as decoders:
        for member, loaded in zip(unit.members, decoders.map(lambda m: _load(m, unit), unit.members), strict=True):
            if isinstance(loaded, Rejected):
                rejected.append(loaded)
                continue
            good.append(member)
            pixels.append(loaded[0])
            masks.append(loaded[1])
    if not good:
        return [], [], rejected
    moments = list(_encode_pictures(np.stack(pixels), unit.flip, encoders))
    text = encoders.encode_captions([caption for member in good for caption in member.captions])
    samples = [
        Sample(sample_id(member.record.key), latent, [text[caption] for caption in member.captions], mask)
        for member, latent, mask in zip(good, moments, masks, strict=True)
    ]
    origins = [
        Origin(member.record.key, member.fingerprint, member.width, member.height, member.captions) for member in good
    ]
    return samples, origins, rejected


def _load(member: Member, unit: Unit) -> tuple[np.ndarray[Any, Any], torch.Tensor | None] | Rejected:
    fitting = plan(member.width, member.height, unit.bucket)
    try:
        picture = fit(decode(member.record.read()), fitting)
        if member.record.mask is None:
            return picture, None
        return picture, torch.from_numpy(fit_mask(decode_mask(member.record.mask.read()), fitting))
    except Reject as reject:
        return Rejected(member.record.key, reject.reason, reject.detail)


def _encode_pictures(pixels: np.ndarray[Any, Any], flip: bool, encoders: Encoders) -> Iterator[torch.Tensor]:
    size = encoders.train.caching_batch_size
    for start in range(0, len(pixels), size):
        part = pixels[start : start + size]
        variants = [encode_moments(encoders.vae, part)]
        if flip:
            variants.append(encode_moments(encoders.vae, np.ascontiguousarray(part[:, :, ::-1])))
        yield from torch.stack(variants, dim=1)


def _write_unit(
    shards: Path, unit: Unit, samples: list[Sample], origins: list[Origin], rejected: list[Rejected]
) -> None:
    path = shards / unit.entry.file
    if rejected:
        lines = "".join(json.dumps(asdict(reject), ensure_ascii=False) + "\n" for reject in rejected)
        write_atomically(path.with_suffix(".rejects.jsonl"), lines.encode())
    if samples:
        write_shard(shards, unit.entry, samples, origins)
    else:
        write_atomically(path.with_suffix(".none"), b"")


def _encode_empty(shards: Path, recipe: dict[str, Any], encoders: Encoders) -> ShardEntry:
    """The empty caption's features, kept like a sample whose picture is one blank latent pixel."""
    fingerprint = sample_id(repr(sorted(recipe.items())))
    entry = ShardEntry(f"empty-{fingerprint:016x}.safetensors", "empty", (0, 0), -1, 0, 0, "", f"{fingerprint:x}")
    found = read_entry(shards, entry.file)
    if found is not None:
        return found
    features = encoders.encode_captions([""])[""]
    sample = Sample(0, torch.zeros(1, 2 * encoders.vae.config.latent_channels, 1, 1), [features])
    return write_shard(shards, entry, [sample], [Origin("", "", 0, 0, ("",))])


def _finish(
    dataset: DatasetConfig, todo: Plan, recipe: dict[str, Any], empty: ShardEntry, timeout: float, launch: Launch
) -> dict[str, int]:
    """The main process waits for all units and writes the manifest; the others wait for a manifest of this plan."""
    folder, shards = dataset.cache_dir, dataset.cache_dir / "shards"
    deadline = time.monotonic() + timeout
    if not launch.is_main:
        while not _has_manifest(folder, recipe, todo.units):
            _wait(deadline, f"the main process to write {folder / MANIFEST}")
        return Manifest.load(folder).counts
    while missing := [unit for unit in todo.units if not _is_done(shards, unit)]:
        _wait(deadline, f"{len(missing)} shards of other processes, such as {missing[0].entry.file}")
    entries = [entry for unit in todo.units if (entry := read_entry(shards, unit.entry.file)) is not None]
    rejected = [*todo.rejected, *_unit_rejects(shards, todo.units)]
    lines = "".join(json.dumps(asdict(reject), ensure_ascii=False) + "\n" for reject in rejected)
    write_atomically(folder / "rejects.jsonl", lines.encode())
    if not entries:
        raise UserError(f"{dataset.path}: every sample was rejected; see the reasons in {folder / 'rejects.jsonl'}")
    counts = {
        "used": sum(entry.count for entry in entries),
        "cropped": todo.cropped,
        "enlarged": todo.enlarged,
        **{f"rejected: {reason}": count for reason, count in sorted(count_reasons(rejected).items())},
    }
    Manifest(recipe, tuple(entries), empty, counts).save(folder)
    return counts


def _has_manifest(folder: Path, recipe: dict[str, Any], units: Sequence[Unit]) -> bool:
    """Whether the manifest is of this plan: of every unit, but those whose samples were all rejected."""
    shards = folder / "shards"
    if not (folder / MANIFEST).is_file() or not all(_is_done(shards, unit) for unit in units):
        return False
    manifest = Manifest.load(folder)
    standing = {unit.entry.file for unit in units if (shards / unit.entry.file).is_file()}
    return manifest.recipe == recipe and {shard.file for shard in manifest.shards} == standing


def _wait(deadline: float, what: str) -> None:
    if time.monotonic() > deadline:
        raise UserError(
            f"gave up waiting for {what}; see the other processes' output, or raise sd3_manifest_timeout_sec"
        )
    time.sleep(0.2)


def _unit_rejects(shards: Path, units: Sequence[Unit]) -> Iterator[Rejected]:
    for unit in units:
        path = (shards / unit.entry.file).with_suffix(".rejects.jsonl")
        if path.is_file():
            yield from (Rejected(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines())
