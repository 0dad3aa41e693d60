"""The cache stage: pictures and captions through the VAE and three text encoders, once, into immutable shards.

Every process of a launch, and every other command on the same folder, encodes what no other does; none waits in a
collective (law 9). A unit of work is one shard; its name says all that made it, so what stands is done and what is
missing is encoded, now or by the next run.
"""

import gc
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from sd3_light.config import DatasetConfig, LoadedConfig, TrainConfig, batch_size_for
from sd3_light.config.faults import UserError
from sd3_light.data.building.cache_plan import CachePlan, Unit, make_cache_plan
from sd3_light.data.building.catalogue import Catalogue, Listing, make_sources
from sd3_light.data.building.claims import Claims
from sd3_light.data.manifest import CACHE_FORMAT, MANIFEST, SHARDS, Manifest, ShardEntry, damaged_mark, read_entry
from sd3_light.data.order import BucketOrder, Segment
from sd3_light.data.preprocess import PREPROCESS_VERSION
from sd3_light.data.shards import Origin, write_shard
from sd3_light.data.store import private_temp_folder
from sd3_light.data.store.remote import load_remote_manifest
from sd3_light.data.verify import is_whole
from sd3_light.encoders.fingerprint import parts_fingerprint
from sd3_light.encoders.frozen_parts import FrozenParts
from sd3_light.engines import Launch
from sd3_light.files import sweep_files
from sd3_light.randomness import sample_id
from sd3_light.runlog import info, progress, show
from sd3_light.stages.cache.cached_prompts import (
    await_prompts,
    cache_prompts,
    may_write,
    missing_prompts,
    name_orphans,
)
from sd3_light.stages.cache.freshness import CacheState, compare, is_readable, mark_damaged, render
from sd3_light.stages.cache.manifest_writer import REJECTS, has_manifest, write_manifest
from sd3_light.stages.cache.shard_builder import ShardBuilder, empty_content

_SHORT = ("format", "preprocess", "text_tokens", "t5_max_length")

__all__ = ["CacheReport", "Wishes", "make_recipe", "run"]


@dataclass(frozen=True)
class CacheOptions:
    """What is asked of the stage besides the config.

    ``trust``: a cache that has its manifest is taken as it is. ``regenerate``: everything is encoded anew. ``verify``:
    every shard is hashed and damaged ones are encoded again. ``prune``: files that nothing uses are deleted.
    ``dry_run``: look and tell, change nothing but the catalogue.
    """

    trust: bool = False
    regenerate: bool = False
    verify: bool = False
    prune: bool = False
    dry_run: bool = False


@dataclass(frozen=True)
class CacheReport:
    """What became of a data set. ``encoded`` counts this process's own work; ``small`` are samples by bucket in
    buckets with fewer of them than one global batch."""

    folder: Path
    counts: dict[str, int] = field(default_factory=dict)
    encoded: int = 0
    already: int = 0
    small: dict[str, int] = field(default_factory=dict)


def run(loaded: LoadedConfig, launch: Launch | None = None, options: CacheOptions | None = None) -> list[CacheReport]:
    """Build or complete the caches of the data set and of every evaluation set; the encoders are freed at the end."""
    launch, options = launch or Launch(), options or CacheOptions()
    datasets = {"": loaded.dataset, **loaded.eval_datasets}
    if not options.regenerate:
        datasets = {name: data for name, data in datasets.items() if not _is_remote(data, loaded.train)}
    if options.trust and not options.regenerate:
        datasets = {name: data for name, data in datasets.items() if not _is_usable(data, loaded.train)}
        if not datasets:
            info("the cache is trusted as it is")
    with _Stage(loaded.train, launch, options) as stage:
        if "" not in datasets:
            stage.complete_prompts(loaded.dataset)
        return [stage.build(name, dataset) for name, dataset in datasets.items()]


def make_recipe(train: TrainConfig, memory: Path | None = None) -> dict[str, Any]:
    """All that determines a sample's features besides the sample."""
    return {
        "format": CACHE_FORMAT,
        "preprocess": PREPROCESS_VERSION,
        "text_tokens": train.model.text_tokens,
        "t5_max_length": train.model.t5_max_length,
        **parts_fingerprint(train.model.diffusers_path, memory),
    }


def _is_remote(dataset: DatasetConfig, train: TrainConfig) -> bool:
    """Whether a cache lies at a URL: it is taken as it is if the config's encoders made it, and never built there."""
    url = dataset.cache_dir
    if isinstance(url, Path):
        return False
    memory = (train.stream_cache_dir or private_temp_folder(url)) / "parts.json"
    remedy = "correct [model], or build the cache anew with a local cache_dir and copy the folder there"
    _require_recipe(url, load_remote_manifest(url), make_recipe(train, memory), remedy)
    info(f"the cache at {url} is taken as it is")
    return True


def _is_usable(dataset: DatasetConfig, train: TrainConfig) -> bool:
    if not (dataset.local_cache_dir / MANIFEST).is_file():
        return False
    folder = dataset.local_cache_dir
    wanted = make_recipe(train, folder / "parts.json")
    _require_recipe(str(folder), Manifest.load(folder), wanted, "run without --trust_cache to encode anew")
    return True


def _require_recipe(place: str, manifest: Manifest, wanted: Mapping[str, Any], remedy: str) -> None:
    """A cache that is taken as it is was made the way the config says."""
    for key, value in wanted.items():
        made = manifest.recipe.get(key)
        if made != value:
            shown = f"{key} = {made!r}, the config says {value!r}" if key in _SHORT else f"another {key}"
            raise UserError(f"{place} was built with {shown}; {remedy}")


class _Stage:
    """One run of the stage: the encoders are loaded when something has to be encoded, and freed with it."""

    def __init__(self, train: TrainConfig, launch: Launch, options: CacheOptions) -> None:
        self._train, self._launch, self._options = train, launch, options
        self._held = ExitStack()
        self._parts: FrozenParts | None = None

    def __enter__(self) -> "_Stage":
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()
        self._parts = None
        gc.collect()

    @property
    def parts(self) -> FrozenParts:
        """The frozen parts, in the config's dtype on GPUs and in float32 elsewhere."""
        if self._parts is None:
            model, device = self._train.model, self._launch.device(self._train.caching_device)
            self._parts = self._held.enter_context(
                FrozenParts(
                    model.diffusers_path,
                    device,
                    text_dtype=getattr(torch, model.dtype) if device.type == "cuda" else torch.float32,
                    t5_max_length=model.t5_max_length,
                    text_tokens=model.text_tokens,
                    batch_size=self._train.caching_batch_size,
                )
            )
        return self._parts

    def build(self, name: str, dataset: DatasetConfig) -> CacheReport:
        """One data set's cache."""
        title, folder = f"cache {name}".strip(), dataset.local_cache_dir
        shards = folder / SHARDS
        with Claims(folder / "claims") as claims:
            shards.mkdir(parents=True, exist_ok=True)
            recipe = make_recipe(self._train, folder / "parts.json")
            catalogue = Catalogue(folder, claims, (self._launch.rank, self._launch.world))
            listings = self._look(title, catalogue, dataset)
            plan = make_cache_plan(catalogue, listings, recipe, self._train.sd3_shard_size)
            _require_samples(dataset, plan)
            prompts = () if name else self._train.sampling.prompts
            state = self._compare(folder, plan, recipe, prompts)
            if self._options.dry_run:
                return CacheReport(folder, already=state.fresh)
            units = plan.units if self._options.regenerate else state.todo
            already = sum(unit.count for unit in plan.units) - sum(unit.count for unit in units)
            encoded = self._encode(title, folder, plan, units, already, claims)
            empty = self._encode_empty(shards, recipe)
            self._encode_prompts(title, folder, recipe, prompts)
            counts = self._finish(dataset, plan, recipe, empty, listings, catalogue)
        if self._options.prune and self._launch.is_main:
            _prune(state)
        # evaluation fills up its last batches and drops nothing
        small = {} if name else self._small_buckets(plan.units, dataset)
        report = CacheReport(folder, counts, encoded, already, small)
        _tell(title, report, self._train.small_buckets)
        return report

    def _look(self, title: str, catalogue: Catalogue, dataset: DatasetConfig) -> list[Listing]:
        workers = self._train.map_num_proc or self._train.caching_num_workers
        with progress(f"{title}: listing", None, "inputs") as bar:
            listings = catalogue.refresh(make_sources(dataset.directories), bar.advance)
        if num_unprobed := catalogue.count_unprobed(listings):
            with progress(f"{title}: probing new images", num_unprobed, "images") as bar:
                # a few hundred are read before worker processes have started
                catalogue.probe_images(listings, workers if num_unprobed > 500 else 0, bar.advance)
        return listings

    def _compare(self, folder: Path, plan: CachePlan, recipe: Mapping[str, Any], prompts: Sequence[str]) -> CacheState:
        if self._options.verify:
            _verify(folder / SHARDS, plan.units[self._launch.rank :: self._launch.world])
        state = compare(folder, plan, recipe)
        name_orphans(state, prompts, recipe)
        show(render(state))
        if not self._options.dry_run:
            mark_damaged(state)
        return state

    def _encode(
        self, title: str, folder: Path, plan: CachePlan, units: Sequence[Unit], already: int, claims: Claims
    ) -> int:
        """Have the units stand; how many samples this process encoded."""
        total = already + sum(unit.count for unit in units)
        train = self._train
        if already:
            info(f"{title}: {already:,} of {total:,} samples are there already")
        with progress(title, total, "images", done=already) as bar:
            builder = ShardBuilder(
                plan,
                folder / SHARDS,
                claims,
                self.parts,
                bar,
                train.caching_batch_size,
                train.caching_num_workers,
                train.sd3_manifest_timeout_sec,
                self._options.regenerate,
            )
            builder.build(units, (self._launch.rank, self._launch.world))
        return builder.encoded

    def _encode_empty(self, shards: Path, recipe: Mapping[str, Any]) -> ShardEntry:
        fingerprint = sample_id(repr(sorted(recipe.items())))
        entry = ShardEntry(f"empty-{fingerprint:016x}.safetensors", "empty", (0, 0), "", 0, 0, "", f"{fingerprint:x}")
        mark = damaged_mark(shards / entry.file)
        found = read_entry(shards, entry.file)
        if found is not None and self._options.verify and not is_whole(shards / entry.file, found):
            mark.touch()
        if found is not None and not mark.exists():
            return found
        found = write_shard(shards, entry, empty_content(self.parts), [Origin("", "", 0, 0, ("",))])
        mark.unlink(missing_ok=True)
        return found

    def complete_prompts(self, dataset: DatasetConfig) -> None:
        """Have the prompts of [sampling] in a cache that is taken as it is, if it is a folder that may be written."""
        folder = dataset.cache_dir
        if isinstance(folder, Path) and may_write(folder) and not self._options.dry_run:
            self._encode_prompts("cache", folder, Manifest.load(folder).recipe, self._train.sampling.prompts)

    def _encode_prompts(self, title: str, folder: Path, recipe: Mapping[str, Any], prompts: Sequence[str]) -> None:
        if not self._launch.is_main:
            await_prompts(folder, prompts, recipe, self._train.sd3_manifest_timeout_sec)
            return
        wanted = list(dict.fromkeys(prompts)) if self._options.regenerate else missing_prompts(folder, prompts, recipe)
        cache_prompts(folder, wanted, recipe, lambda: self.parts, title)

    def _finish(
        self,
        dataset: DatasetConfig,
        plan: CachePlan,
        recipe: dict[str, Any],
        empty: ShardEntry,
        listings: Sequence[Listing],
        catalogue: Catalogue,
    ) -> dict[str, int]:
        """The main process writes the manifest when all units stand; the others wait for a manifest of this plan."""
        folder = dataset.local_cache_dir
        if self._launch.is_main:
            places = {"diffusers_path": str(self._train.model.diffusers_path)}
            places |= {f"directory:{listing.source.label}": str(listing.source.root) for listing in listings}
            counts = write_manifest(dataset, plan, recipe, empty, places)
            catalogue.prune_except(listings)
            sweep_files(folder)
            sweep_files(folder / SHARDS)
            return counts
        deadline = time.monotonic() + self._train.sd3_manifest_timeout_sec
        while not has_manifest(folder, recipe, plan.units):
            if time.monotonic() > deadline:
                raise UserError(
                    f"gave up waiting for the main process to write {folder / MANIFEST}; see its output, or raise "
                    "sd3_manifest_timeout_sec"
                )
            time.sleep(0.2)
        return Manifest.load(folder).counts

    def _small_buckets(self, units: Sequence[Unit], dataset: DatasetConfig) -> dict[str, int]:
        """Samples by bucket in buckets that have fewer occurrences in an epoch than a global batch has samples."""
        repeats = {source.label: source.directory.num_repeats for source in make_sources(dataset.directories)}
        buckets: dict[tuple[tuple[int, int], str], list[Segment]] = {}
        for unit in units:
            segments = buckets.setdefault((unit.resolution, str(unit.bucket)), [])
            segments.append(Segment(unit.count, repeats[unit.label]))
        step = self._train.gradient_accumulation_steps * self._launch.world
        small = {}
        for (size, bucket), segments in buckets.items():
            batch = batch_size_for(self._train.micro_batch_size_per_gpu, size) * step
            if BucketOrder(tuple(segments), batch).length < batch:
                small[f"{bucket} of {size[0]}x{size[1]}"] = sum(segment.size for segment in segments)
        return small


def _tell(title: str, report: CacheReport, small_buckets: str) -> None:
    """The end report: everything that went in is counted and named."""
    counts = dict(report.counts)
    rejected = {name.removeprefix("rejected: "): counts[name] for name in counts if name.startswith("rejected: ")}
    info(
        f"{title}: {counts['used']:,} samples of {counts['pictures']:,} pictures are in the cache "
        f"({counts['cropped']:,} cropped, {counts['enlarged']:,} enlarged)"
    )
    if rejected:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in rejected.items())
        info(f"{title}: {sum(rejected.values()):,} inputs were rejected: {reasons}; see {report.folder / REJECTS}")
    for bucket, count in report.small.items():
        fate = "dropped" if small_buckets == "drop" else "repeated to fill one"
        info(f"{title}: bucket {bucket} has {count:,} samples, fewer than a global batch: they are {fate}")


def _require_samples(dataset: DatasetConfig, plan: CachePlan) -> None:
    if not plan.units:
        reasons = ", ".join(f"{count} {reason}" for reason, count in plan.counts.rejected.most_common())
        raise UserError(f"{dataset.path}: no usable sample found ({reasons or 'the directories are empty'})")


def _verify(shards: Path, units: Sequence[Unit]) -> None:
    """Hash every shard that stands and mark the damaged ones."""
    with progress("hashing shards", len(units), "shards") as bar:
        for unit in units:
            entry = read_entry(shards, unit.file)
            whole = entry is not None and is_whole(shards / unit.file, entry)
            if entry is not None and not (whole and is_readable((shards / unit.file).with_suffix(".arrow"))):
                damaged_mark(shards / unit.file).touch()
            bar.advance()


def _prune(state: CacheState) -> None:
    # shards first: what lies beside one is nothing without it, and a prune may be killed
    for path in sorted(state.orphans, key=lambda path: path.suffix != ".safetensors"):
        path.unlink(missing_ok=True)
    if state.orphans:
        info(f"deleted {len(state.orphans):,} orphaned files, {state.orphan_bytes / 1e9:,.3f} GB")
