"""The cache stage: encode images and captions once with the VAE and the three text encoders, into immutable shards.

All processes of a launch, and all other commands on the same folder, divide the units among themselves; none waits in a
collective (law 9). A unit of work is one shard. Its name identifies everything that determines it: existing shards are
reused, and missing ones are encoded by this run or the next.
"""

import gc
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from sd3_light.config import DatasetConfig, LoadedConfig, TrainConfig, batch_size_for
from sd3_light.config.base import CacheLocation
from sd3_light.config.faults import UserError
from sd3_light.data.building.cache_plan import CachePlan, Unit, make_cache_plan
from sd3_light.data.building.catalogue import Catalogue, Listing, make_sources
from sd3_light.data.building.claims import Claims
from sd3_light.data.manifest import (
    CACHE_FORMAT,
    DUPLICATES,
    MANIFEST,
    SHARDS,
    UNMATCHED,
    Manifest,
    ShardEntry,
    damaged_mark,
    read_entry,
)
from sd3_light.data.order import BucketOrder, Segment
from sd3_light.data.preprocess import PREPROCESS_VERSION
from sd3_light.data.shards import Origin, write_shard
from sd3_light.data.store import private_temp_folder
from sd3_light.data.store.build_folder import BuildFolder, open_build_folder, work_name
from sd3_light.data.store.remote import load_remote_manifest
from sd3_light.encoders.fingerprint import parts_fingerprint
from sd3_light.encoders.frozen_parts import FrozenParts
from sd3_light.engines import Launch
from sd3_light.files import sweep_files
from sd3_light.randomness import sample_id
from sd3_light.runlog import info, progress, show
from sd3_light.stages.cache.advice import measure_reconstructions, warn_of_cut_captions, warn_of_extreme_fits
from sd3_light.stages.cache.cached_prompts import add_orphans, cache_prompts, missing_prompts, wait_for_prompts
from sd3_light.stages.cache.freshness import (
    CacheState,
    check_freshness,
    is_readable,
    mark_damaged,
    render_state,
    replaced_files,
)
from sd3_light.stages.cache.manifest_writer import REJECTS, is_manifest_current, write_manifest
from sd3_light.stages.cache.shard_builder import ShardBuilder, empty_content, wait_for_main

_SHORT_KEYS = ("format", "preprocess", "text_tokens", "t5_max_length")  # their values fit in a message

__all__ = ["CacheOptions", "CacheReport", "make_recipe", "run"]


@dataclass(frozen=True)
class CacheOptions:
    """Options of the cache stage beyond the config.

    ``trust``: use a cache that has a manifest without checking it against the sources. ``regenerate``: encode
    everything again. ``verify``: hash every shard and encode damaged ones again. ``prune``: delete unused files.
    ``dry_run``: report the state of the cache and write only the catalogue. ``at_url``: build caches at URLs too, which
    are otherwise used as they are. ``part``: (I, N) builds only every N-th shard from the I-th, and no manifest.
    ``finish``: encode no image; write the manifest of the parts.
    """

    trust: bool = False
    regenerate: bool = False
    verify: bool = False
    prune: bool = False
    dry_run: bool = False
    at_url: bool = False
    part: tuple[int, int] | None = None
    finish: bool = False


@dataclass(frozen=True)
class CacheReport:
    """Results for one dataset: samples that this process encoded, and those of buckets below one global batch."""

    folder: Path
    counts: dict[str, int] = field(default_factory=dict)
    encoded: int = 0
    reused: int = 0
    small_buckets: dict[str, int] = field(default_factory=dict)


def run(loaded: LoadedConfig, launch: Launch | None = None, options: CacheOptions | None = None) -> list[CacheReport]:
    """Build or complete the caches of the dataset and of every evaluation set, then free the encoders."""
    launch, options = launch or Launch(), options or CacheOptions()
    datasets = {"": loaded.dataset, **loaded.eval_datasets}
    if not options.regenerate and (options.trust or not options.at_url):
        datasets = {name: data for name, data in datasets.items() if not _is_remote(data, loaded.train)}
    if options.trust and not options.regenerate:
        datasets = {name: data for name, data in datasets.items() if not _is_trusted(data, loaded.train)}
        if not datasets:
            info("using the cache without checking it against the sources (--trust-cache)")
    with _Stage(loaded.train, launch, options) as stage:
        if "" not in datasets:
            stage.complete_prompts(loaded.dataset)
        return [stage.build(name, dataset) for name, dataset in datasets.items()]


def make_recipe(train: TrainConfig, memo: Path | None = None) -> dict[str, Any]:
    """Return everything that determines a sample's features besides the sample; ``memo`` is a file of known hashes."""
    return {
        "format": CACHE_FORMAT,
        "preprocess": PREPROCESS_VERSION,
        "text_tokens": train.model.text_tokens,
        "t5_max_length": train.model.t5_max_length,
        **parts_fingerprint(train.model.diffusers_path, memo),
    }


def _is_remote(dataset: DatasetConfig, train: TrainConfig) -> bool:
    """Return whether the cache is at a URL. Such a cache must match the config's encoders and is used as it is."""
    url = dataset.cache_dir
    if isinstance(url, Path):
        return False
    memo = (train.stream_cache_dir or private_temp_folder(url)) / "parts.json"
    hint = "correct [model], or build the cache again with `sd3-light cache CONFIG`"
    _require_recipe(url, load_remote_manifest(url), make_recipe(train, memo), hint)
    info(f"using the cache at {url} as it is")
    return True


def _is_trusted(dataset: DatasetConfig, train: TrainConfig) -> bool:
    """Return whether a local cache has a manifest. It must match the config's encoders."""
    folder = dataset.cache_dir
    if not isinstance(folder, Path) or not (folder / MANIFEST).is_file():
        return False
    expected = make_recipe(train, folder / "parts.json")
    _require_recipe(str(folder), Manifest.load(folder), expected, "run without --trust-cache to encode it again")
    return True


def _require_recipe(location: str, manifest: Manifest, expected: Mapping[str, Any], hint: str) -> None:
    """Raise a UserError if a cache was built with settings or encoders other than the config's."""
    for key, value in expected.items():
        built = manifest.recipe.get(key)
        if built != value:
            difference = f"{key} = {built!r}, the config says {value!r}" if key in _SHORT_KEYS else f"another {key}"
            raise UserError(f"{location} was built with {difference}; {hint}")


class _Stage:
    """One run of the stage. The encoders are loaded when something has to be encoded, and freed at the end."""

    def __init__(self, train: TrainConfig, launch: Launch, options: CacheOptions) -> None:
        self._train, self._launch, self._options = train, launch, options
        self._resources = ExitStack()
        self._parts: FrozenParts | None = None

    def __enter__(self) -> "_Stage":
        return self

    def __exit__(self, *_: object) -> None:
        self._resources.close()
        self._parts = None
        gc.collect()

    @property
    def parts(self) -> FrozenParts:
        """The encoders, in the config's dtype on GPUs and in float32 elsewhere."""
        if self._parts is None:
            model, device = self._train.model, self._launch.device(self._train.caching_device)
            self._parts = self._resources.enter_context(
                FrozenParts(
                    model.diffusers_path,
                    device,
                    text_dtype=getattr(torch, model.dtype),
                    t5_max_length=model.t5_max_length,
                    text_tokens=model.text_tokens,
                    batch_size=self._train.caching_batch_size,
                )
            )
        return self._parts

    def build(self, name: str, dataset: DatasetConfig) -> CacheReport:
        """Build or complete one dataset's cache."""
        with open_build_folder(dataset.cache_dir, self._work_folder(dataset.cache_dir)) as place:
            return self._build(name, dataset, place)

    def _work_folder(self, location: CacheLocation) -> Path:
        """Return the folder in which a cache is built, for a URL that of its local mirror."""
        if isinstance(location, Path):
            return location
        if self._launch.world > 1:
            raise UserError(f"cache_dir: {location} is built by one process, or by several with --part I/N each")
        folder = self._train.stream_cache_dir or private_temp_folder(location)
        return folder / work_name(location, self._options.part)

    def _build(self, name: str, dataset: DatasetConfig, place: BuildFolder) -> CacheReport:
        title, folder = f"cache {name}".strip(), place.folder
        shards = folder / SHARDS
        with Claims(folder / "claims") as claims:
            shards.mkdir(parents=True, exist_ok=True)
            recipe = make_recipe(self._train, folder / "parts.json")
            catalogue = Catalogue(folder, claims, (self._launch.rank, self._launch.world))
            listings = self._list_inputs(title, catalogue, dataset)
            plan = make_cache_plan(catalogue, listings, recipe, self._train.sd3_shard_size)
            place.push_catalogue()
            if not plan.units:
                reasons = ", ".join(f"{count} {reason}" for reason, count in plan.counts.rejected.most_common())
                if plan.counts.unmatched:
                    reasons = ", ".join(filter(None, (f"{plan.counts.unmatched:,} do not match where", reasons)))
                raise UserError(f"{dataset.path}: no usable sample found ({reasons or 'the directories are empty'})")
            prompts = () if name else self._train.sampling.texts
            state = self._check(dataset, place, plan, recipe, prompts)
            if self._options.dry_run:
                return CacheReport(folder, reused=state.fresh)
            units = self._in_part(plan.units if self._options.regenerate else state.todo)
            if self._options.finish and units:
                remedy = "run the parts (--part I/N) that failed again"
                raise UserError(f"{len(units):,} shards are missing, such as {units[0].file}; {remedy}")
            reused = sum(unit.count for unit in self._in_part(plan.units)) - sum(unit.count for unit in units)
            if units and self._launch.is_main:
                warn_of_cut_captions(title, plan, self._train.model)
                warn_of_extreme_fits(title, plan)
                measure_reconstructions(title, plan, self.parts)
            encoded = self._encode(title, place, plan, units, reused, claims)
            if self._options.part and self._options.part[0] > 0:
                return self._report_part(title, CacheReport(folder, {}, encoded, reused))
            empty = self._encode_empty(place, recipe)
            self._encode_prompts(title, folder, recipe, prompts)
            if self._options.part:
                place.publish()
                return self._report_part(title, CacheReport(folder, {}, encoded, reused))
            counts = self._finish(dataset, place, plan, recipe, empty, listings, catalogue)
        if self._options.prune and self._launch.is_main:
            _prune(state, place)
        # evaluation fills up its last batches and drops nothing
        small_buckets = {} if name else self._small_buckets(plan.units, dataset)
        report = CacheReport(folder, counts, encoded, reused, small_buckets)
        _log_report(title, report, self._train.small_buckets, f"{dataset.cache_dir}/{REJECTS}")
        return report

    def _in_part(self, units: Sequence[Unit]) -> list[Unit]:
        """Return the units that this run builds: all, or those of its part."""
        index, count = self._options.part or (0, 1)
        return [unit for unit in units if unit.number % count == index]

    def _report_part(self, title: str, report: CacheReport) -> CacheReport:
        index, count = self._options.part or (0, 1)
        info(
            f"{title}: part {index} of {count} is complete, {report.encoded:,} samples encoded; when all parts are, "
            "`--finish` writes the manifest"
        )
        return report

    def _list_inputs(self, title: str, catalogue: Catalogue, dataset: DatasetConfig) -> list[Listing]:
        workers = self._train.map_num_proc or self._train.caching_num_workers
        with progress(f"{title}: listing", None, "inputs") as bar:
            listings = catalogue.refresh(make_sources(dataset.directories), bar.advance)
        if num_unprobed := catalogue.count_unprobed(listings):
            with progress(f"{title}: probing new images", num_unprobed, "images") as bar:
                # a few hundred are read faster than worker processes start
                catalogue.probe_images(listings, workers if num_unprobed > 500 else 0, bar.advance)
        return listings

    def _check(
        self,
        dataset: DatasetConfig,
        place: BuildFolder,
        plan: CachePlan,
        recipe: Mapping[str, Any],
        prompts: Sequence[str],
    ) -> CacheState:
        if self._options.verify:
            _verify(place, self._in_part(plan.units)[self._launch.rank :: self._launch.world])
        place.fetch_tables(replaced_files(place.folder, plan))
        state = check_freshness(place.folder, plan, recipe)
        add_orphans(state, prompts, recipe)
        show(render_state(state, dataset.cache_dir))
        if not self._options.dry_run:
            mark_damaged(state)
        return state

    def _encode(
        self, title: str, place: BuildFolder, plan: CachePlan, units: Sequence[Unit], reused: int, claims: Claims
    ) -> int:
        """Build the units together with other processes. Return the number of samples that this process encoded."""
        total = reused + sum(unit.count for unit in units)
        if reused:
            info(f"{title}: {reused:,} of {total:,} samples are already cached")
        with progress(title, total, "images", done=reused) as bar:
            regenerate = self._options.regenerate
            shards = place.folder / SHARDS
            builder = ShardBuilder(plan, shards, claims, self.parts, bar, self._train, regenerate, place.push_unit)
            builder.build(units, (self._launch.rank, self._launch.world))
        return builder.encoded

    def _encode_empty(self, place: BuildFolder, recipe: Mapping[str, Any]) -> ShardEntry:
        """Return the entry of the empty caption's shard, encoded if it is missing or damaged."""
        shards = place.folder / SHARDS
        fingerprint = sample_id(repr(sorted(recipe.items())))
        entry = ShardEntry(f"empty-{fingerprint:016x}.safetensors", "empty", (0, 0), "", 0, 0, "", f"{fingerprint:x}")
        mark = damaged_mark(shards / entry.file)
        existing = read_entry(shards, entry.file)
        if existing is not None and self._options.verify and not place.is_intact(existing):
            mark.touch()
        if existing is not None and not mark.exists():
            return existing
        written = write_shard(shards, entry, empty_content(self.parts), [Origin("", "", 0, 0, ("",))])
        place.push_unit(entry.file)
        mark.unlink(missing_ok=True)
        return written

    def complete_prompts(self, dataset: DatasetConfig) -> None:
        """Encode missing prompts of [sampling] into an existing cache, if it is a writable folder."""
        folder = dataset.cache_dir
        if isinstance(folder, Path) and os.access(folder, os.W_OK) and not self._options.dry_run:
            self._encode_prompts("cache", folder, Manifest.load(folder).recipe, self._train.sampling.texts)

    def _encode_prompts(self, title: str, folder: Path, recipe: Mapping[str, Any], prompts: Sequence[str]) -> None:
        if not self._launch.is_main:
            wait_for_prompts(folder, prompts, recipe, self._train.sd3_manifest_timeout_sec)
            return
        todo = list(dict.fromkeys(prompts)) if self._options.regenerate else missing_prompts(folder, prompts, recipe)
        cache_prompts(folder, todo, recipe, lambda: self.parts, title)

    def _finish(
        self,
        dataset: DatasetConfig,
        place: BuildFolder,
        plan: CachePlan,
        recipe: dict[str, Any],
        empty: ShardEntry,
        listings: Sequence[Listing],
        catalogue: Catalogue,
    ) -> dict[str, int]:
        """Write the manifest in the main process; wait for it in the others. Return its counts."""
        folder = place.folder
        if self._launch.is_main:
            paths = {"diffusers_path": str(self._train.model.diffusers_path)}
            paths |= {f"directory:{listing.source.label}": str(listing.source.root) for listing in listings}
            counts = write_manifest(dataset, folder, plan, recipe, empty, paths)
            place.publish()
            catalogue.prune_except(listings)
            place.push_catalogue()
            sweep_files(folder)
            sweep_files(folder / SHARDS)
            return counts
        task = f"write {folder / MANIFEST}"
        wait_for_main(
            lambda: None if is_manifest_current(folder, recipe, plan.units) else task,
            self._train.sd3_manifest_timeout_sec,
        )
        return Manifest.load(folder).counts

    def _small_buckets(self, units: Sequence[Unit], dataset: DatasetConfig) -> dict[str, int]:
        """Return the sample counts of buckets with fewer occurrences per epoch than one global batch."""
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


def _log_report(title: str, report: CacheReport, policy: str, rejects: str) -> None:
    """Log how many inputs were used, rejected and dropped."""
    counts = report.counts
    rejected = {name.removeprefix("rejected: "): counts[name] for name in counts if name.startswith("rejected: ")}
    info(
        f"{title}: {counts['used']:,} samples of {counts['pictures']:,} images are in the cache "
        f"({counts['cropped']:,} cropped, {counts['enlarged']:,} enlarged)"
    )
    for key, result in (("keep", '`duplicates = "drop"` leaves them out'), ("drop", "they are left out")):
        if count := counts.get(DUPLICATES[key]):
            info(f"{title}: {count:,} images have the same bytes as an earlier one: {result}")
    if counts.get(UNMATCHED):
        info(f"{title}: {counts[UNMATCHED]:,} samples do not match `where` and are left out")
    if rejected:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in rejected.items())
        info(f"{title}: {sum(rejected.values()):,} inputs were rejected: {reasons}; see {rejects}")
    for bucket, count in report.small_buckets.items():
        result = "dropped" if policy == "drop" else "repeated to fill one"
        info(f"{title}: bucket {bucket} has {count:,} samples, fewer than one global batch: they are {result}")


def _verify(place: BuildFolder, units: Sequence[Unit]) -> None:
    """Hash every existing shard and mark the damaged ones."""
    shards = place.folder / SHARDS
    with progress("hashing shards", len(units), "shards") as bar:
        for unit in units:
            entry = read_entry(shards, unit.file)
            path = shards / unit.file
            if entry is not None and not (place.is_intact(entry) and is_readable(path.with_suffix(".arrow"))):
                damaged_mark(path).touch()
            bar.advance()


def _prune(state: CacheState, place: BuildFolder) -> None:
    # shards first: the files beside a shard are useless without it, and pruning may be killed
    place.delete(sorted(state.orphans, key=lambda path: path.suffix != ".safetensors"))
    if state.orphans:
        info(f"deleted {len(state.orphans):,} orphaned files, {state.orphan_bytes / 1e9:,.3f} GB")
