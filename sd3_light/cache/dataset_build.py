"""Build one dataset's cache: list and probe its inputs, plan shards, encode what is missing, and finish."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sd3_light.cache.advice import (
    measure_reconstructions,
    warn_of_cut_captions,
    warn_of_cut_prompts,
    warn_of_extreme_fits,
    warn_of_full_disk,
)
from sd3_light.cache.build_folder import BuildFolder, open_build_folder, work_name
from sd3_light.cache.freshness import (
    CacheState,
    check_freshness,
    is_readable,
    last_manifest,
    mark_damaged,
    planned_shards,
    render_state,
    replaced_entries,
)
from sd3_light.cache.identity import decides_shards, make_identity, stored_columns
from sd3_light.cache.leaks import find_leaks
from sd3_light.cache.local_builder import Builder
from sd3_light.cache.manifest_writer import PlannedManifest, is_manifest_current, write_manifest
from sd3_light.cache.report import CacheOptions, CacheReport, describe_values, log_report, small_buckets
from sd3_light.cache.reuse import CopiedColumns, ReuseIndex, Update, open_reuse
from sd3_light.cache.rows import CatalogueRows
from sd3_light.cache.shard_builder import BuildJob, Built, wait_for_main
from sd3_light.cache.shard_in_progress import empty_content
from sd3_light.cache.split import find_split, held_out_samples
from sd3_light.config import DatasetConfig, TrainConfig
from sd3_light.config.base import CacheLocation
from sd3_light.config.faults import UserError
from sd3_light.core.columns import IMAGE, REFERENCE, beside_captions, entries_of
from sd3_light.core.registry import family_of
from sd3_light.data.cache_plan import CachePlan, PlannedShard, make_cache_plan, reuse_files
from sd3_light.data.manifest import MANIFEST, SHARDS, Manifest, ShardEntry, damaged_mark, read_entry
from sd3_light.data.prompt_features import (
    PROMPTS_FOLDER,
    encode_prompts,
    prompt_file,
    read_prompt,
    write_prompt,
)
from sd3_light.data.prompt_lists import prompts_to_encode
from sd3_light.data.shards import Origin, write_shard
from sd3_light.data.sides import HeldOut
from sd3_light.data.store import private_temp_folder
from sd3_light.engines import Launch
from sd3_light.files import sweep_files
from sd3_light.formats import plural
from sd3_light.randomness import sample_id
from sd3_light.runlog import info, progress, show
from sd3_light.sources.catalogue import Catalogue, Listing, make_sources
from sd3_light.sources.claims import Claims

FEW_IMAGES = 500
"""That many images are read faster than worker processes start."""


class DatasetBuild:
    """Builds caches with a config and options; ``builder`` encodes."""

    def __init__(self, train: TrainConfig, launch: Launch, options: CacheOptions, builder: Builder) -> None:
        self._train = train
        self._launch = launch
        self._options = options
        self._builder = builder
        self._training: CatalogueRows | None = None  # of the training set, once it is listed

    def build(self, name: str, dataset: DatasetConfig) -> CacheReport:
        """Build or complete one dataset's cache."""
        with open_build_folder(dataset.cache_dir, self._work_folder(dataset.cache_dir)) as place:
            return self._build(name, dataset, place)

    def _work_folder(self, location: CacheLocation) -> Path:
        """Return the folder in which a cache is built, for a URL that of its local mirror."""
        if isinstance(location, Path):
            return location
        if self._launch.world_size > 1:
            raise UserError(f"cache_dir: {location} is built by one process, or by several with --part I/N each")
        folder = self._train.stream_cache_dir or private_temp_folder(location)
        return folder / work_name(location, self._options.part)

    def _build(self, name: str, dataset: DatasetConfig, place: BuildFolder) -> CacheReport:
        title = f"cache {name}".strip()
        folder = place.folder
        shards = folder / SHARDS
        with Claims(folder / "claims") as claims:
            shards.mkdir(parents=True, exist_ok=True)
            identity = make_identity(self._train.model, folder / "parts.json")
            catalogue = Catalogue(folder, claims, (self._launch.rank, self._launch.world_size))
            listings = self._list_inputs(title, catalogue, dataset)
            rows = CatalogueRows(catalogue, listings)
            if self._options.part is None:
                self._compare(name, rows)
            shard_size = self._train.sd3_shard_size
            plan = make_cache_plan(catalogue, listings, decides_shards(identity), shard_size, progress)
            place.push_catalogue()
            if not plan.shards:
                raise UserError(f"{dataset.path}: {_why_empty(plan)}")
            prompts = () if name else prompts_to_encode(self._train)
            state, reuse = self._check(dataset, place, plan, identity, prompts, claims)
            if self._options.dry_run:
                return CacheReport(folder, reused=state.fresh, missing=len(state.todo))
            split = find_split(rows) if dataset.is_divided and self._options.part is None else None
            if split is not None:
                info(f"{title}: {split.sentence()}")
                place.push_catalogue()  # decisions are stored before they are used
            if self._options.review is not None and not name:
                expected, are_known = planned_shards(folder, plan)
                known = HeldOut() if split is None else held_out_samples(split, plan, shards)
                self._options.review(known.trained(expected), are_known)
            planned = self._in_part(plan.shards if self._options.regenerate else state.todo)
            if self._options.finish and planned:
                remedy = "run the parts (--part I/N) that failed again"
                raise UserError(f"{len(planned):,} shards are missing, such as {planned[0].file}; {remedy}")
            reused = sum(shard.count for shard in self._in_part(plan.shards)) - sum(shard.count for shard in planned)
            beside = beside_captions(stored_columns(self._train.model))
            assert all(entry == IMAGE or entry.startswith(REFERENCE) for entry in beside), f"no source has {beside}"
            job = BuildJob(place, plan, claims, identity["columns"], reuse, self._options.regenerate, beside)
            if planned and self._launch.is_main:
                self._warn(title, job, planned)
            built = self._encode(title, job, planned, reused)
            report = CacheReport(folder, {}, built.samples, reused, values=built.values)
            if self._options.part and self._options.part[0] > 0:
                return self._report_part(title, report)
            empty = self._encode_empty(place, identity)
            self._encode_prompts(title, folder, identity, prompts)
            if self._options.part:
                place.publish()
                return self._report_part(title, report)
            held_out = None if split is None else held_out_samples(split, plan, shards)
            manifest = PlannedManifest(plan, identity, empty, held_out, split)
            counts = self._finish(dataset, place, manifest, rows)
        if self._options.prune and self._launch.is_main:
            _prune(state, place)
        # evaluation fills up its last batches and drops nothing
        small = {} if name else small_buckets(plan.shards, dataset, self._train, self._launch.world_size)
        report = replace(report, counts=counts, small_buckets=small)
        log_report(title, report, self._train.small_buckets, str(dataset.cache_dir))
        return report

    def _in_part(self, planned: Sequence[PlannedShard]) -> list[PlannedShard]:
        """Return the shards that this run builds: all, or those of its part."""
        index, count = self._options.part or (0, 1)
        return [shard for shard in planned if shard.number % count == index]

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
            listings = catalogue.refresh(make_sources(dataset.directories, dataset.compared), bar.advance)
        if num_unprobed := catalogue.count_unprobed(listings):
            with progress(f"{title}: probing new images", num_unprobed, "images") as bar:
                sources = [listing.source for listing in listings]
                # a header does not crash; a thumbnail needs the whole image
                few = num_unprobed <= FEW_IMAGES and not any(source.has_thumbnails for source in sources)
                pool = None if few else self._builder.probe_pool([source.root for source in sources])
                catalogue.probe_images(listings, 0 if few else workers, bar.advance, pool)
        return listings

    def _compare(self, name: str, rows: CatalogueRows) -> None:
        """Print which images of an evaluation set are in the training set too, before anything is encoded."""
        if not name:
            self._training = rows
        elif self._training is not None:
            for leak in find_leaks(name, rows, self._training):
                info(f"warning: {leak.sentence()}")

    def _check(
        self,
        dataset: DatasetConfig,
        place: BuildFolder,
        plan: CachePlan,
        identity: Mapping[str, Any],
        prompts: Sequence[str],
        claims: Claims,
    ) -> tuple[CacheState, ReuseIndex | None]:
        """Return the state of the cache, and what its missing shards copy from those of the last manifest."""
        if self._options.verify:
            _verify(place, self._in_part(plan.shards)[self._launch.rank :: self._launch.world_size])
        last = last_manifest(place.folder)
        if last is not None:
            place.fetch_tables(entry.file for entry in replaced_entries(last[0], plan))
        state = check_freshness(place.folder, plan, identity, None if last is None else last[0])
        add_orphans(state, prompts, identity)
        reuse = None
        if last is not None and state.todo and not (self._options.regenerate or self._options.finish):
            manifest, digest = last
            old = manifest.recipe.get("columns")
            columns = stored_columns(self._train.model)
            copied = CopiedColumns.of(columns, identity["columns"], old if isinstance(old, dict) else {})
            if copied:
                update = Update(plan, state.todo, manifest, digest, copied, place.folder / SHARDS, entries_of(columns))
                reuse = open_reuse(update, claims, place.fetch_tables)
                state.values = reuse.counts
                place.push_catalogue()
        if state.todo or state.orphans or self._options.dry_run or self._options.verify:
            show(render_state(state, dataset.cache_dir))
        if not self._options.dry_run:
            mark_damaged(state)
        return state, reuse

    def _warn(self, title: str, job: BuildJob, planned: Sequence[PlannedShard]) -> None:
        """Print what to know before anything is encoded."""
        plan = job.plan
        model = self._train.model
        warn_of_cut_captions(title, plan, model)
        warn_of_extreme_fits(title, plan)
        if isinstance(job.place.location, Path):
            warn_of_full_disk(title, job.place.location, plan, planned, model)
        if job.reuse is None or job.reuse.counts.images:
            measure_reconstructions(title, plan, self._builder)

    def _encode(self, title: str, job: BuildJob, planned: Sequence[PlannedShard], reused: int) -> Built:
        """Build the shards. Return what this command built."""
        total = reused + sum(shard.count for shard in planned)
        if reused:
            info(f"{title}: {reused:,} of {total:,} images are up to date")
        with progress(title, total, "images", done=reused) as bar:
            built = self._builder.build(job, planned, bar)
        if planned:
            share = " by this process" if self._launch.world_size > 1 else ""
            info(f"{title}: {describe_values(built.values)}{share}")
        return built

    def _encode_empty(self, place: BuildFolder, identity: Mapping[str, Any]) -> ShardEntry:
        """Return the entry of the empty caption's shard, encoded if it is missing or damaged."""
        shards = place.folder / SHARDS
        columns = stored_columns(self._train.model)
        # its image is blank, so only the layout of that decides the bytes
        facts = [identity["columns"][column.name] if column.per_caption else column.layout() for column in columns]
        fingerprint = sample_id(repr([identity["format"], *facts]))
        entry = ShardEntry(f"empty-{fingerprint:016x}.safetensors", "empty", (0, 0), "", 0, 0, "", f"{fingerprint:x}")
        mark = damaged_mark(shards / entry.file)
        existing = read_entry(shards, entry.file)
        if existing is not None and self._options.verify and not place.is_intact(existing):
            mark.touch()
        if existing is not None and not mark.exists():
            return existing
        content = self._builder.call(empty_content, self._train.model)
        written = write_shard(shards, entry, content, [Origin("", "", 0, 0, ("",))])
        place.push_shard(entry.file)
        mark.unlink(missing_ok=True)
        return written

    def complete_prompts(self, dataset: DatasetConfig) -> None:
        """Encode missing prompts into an existing cache, if it is a writable folder."""
        folder = dataset.cache_dir
        if isinstance(folder, Path) and os.access(folder, os.W_OK) and not self._options.dry_run:
            prompts = prompts_to_encode(self._train)
            self._encode_prompts("cache", folder, Manifest.load(folder).recipe, prompts)

    def _encode_prompts(self, title: str, folder: Path, identity: Mapping[str, Any], prompts: Sequence[str]) -> None:
        if not self._launch.is_main:
            wait_for_prompts(folder, prompts, identity, self._train.sd3_manifest_timeout_sec)
            return
        todo = list(dict.fromkeys(prompts)) if self._options.regenerate else missing_prompts(folder, prompts, identity)
        if not todo:
            return
        warn_of_cut_prompts(title, todo, self._train.model)
        tables = "[sampling]" if self._train.reward is None else "[sampling] and [reward]"
        info(f"{title}: encoding {plural(len(todo), 'prompt')} of {tables}")
        names = family_of(self._train.model).encoding.text_encoders
        for prompt, features in zip(todo, self._builder.call(encode_prompts, todo, names), strict=True):
            write_prompt(folder, prompt, identity, features)
        sweep_files(folder / PROMPTS_FOLDER)

    def _finish(
        self,
        dataset: DatasetConfig,
        place: BuildFolder,
        manifest: PlannedManifest,
        rows: CatalogueRows,
    ) -> dict[str, int]:
        """Write the manifest in the main process; wait for it in the others. Return its counts."""
        folder = place.folder
        listings = rows.listings
        if self._launch.is_main:
            paths = {"diffusers_path": str(self._train.model.diffusers_path)}
            paths |= {f"directory:{listing.source.label}": str(listing.source.root) for listing in listings}
            counts = write_manifest(dataset, folder, manifest, paths)
            place.publish()
            for path in reuse_files(manifest.plan.path):
                path.unlink(missing_ok=True)
            rows.catalogue.prune_except(listings)
            place.push_catalogue()
            sweep_files(folder)
            sweep_files(folder / SHARDS)
            return counts
        task = f"write {folder / MANIFEST}"
        wait_for_main(
            lambda: None if is_manifest_current(folder, manifest) else task,
            self._train.sd3_manifest_timeout_sec,
        )
        return Manifest.load(folder).counts


def _why_empty(plan: CachePlan) -> str:
    """Return why a plan has no samples."""
    reasons = ", ".join(f"{count} {reason}" for reason, count in plan.counts.rejected.most_common())
    if plan.counts.unmatched:
        reasons = ", ".join(filter(None, (f"{plan.counts.unmatched:,} do not match where", reasons)))
    if plan.counts.excluded:
        reasons = ", ".join(filter(None, (f"{plan.counts.excluded:,} are listed in exclude", reasons)))
    details = (row.detail for row in plan.rejected() if row.reason == "no_caption")
    first = next((f"; the first has {detail}" for detail in details), "")
    return f"no usable sample found ({reasons or 'the directories are empty'}){first}"


def _verify(place: BuildFolder, planned: Sequence[PlannedShard]) -> None:
    """Hash every existing shard and mark the damaged ones."""
    shards = place.folder / SHARDS
    with progress("hashing shards", len(planned), "shards") as bar:
        for shard in planned:
            entry = read_entry(shards, shard.file)
            path = shards / shard.file
            if entry is not None and not (place.is_intact(entry) and is_readable(path.with_suffix(".arrow"))):
                damaged_mark(path).touch()
            bar.advance()


def _prune(state: CacheState, place: BuildFolder) -> None:
    # shards first: the files beside a shard are useless without it, and pruning may be killed
    place.delete(sorted(state.orphans, key=lambda path: path.suffix != ".safetensors"))
    if state.orphans:
        info(f"deleted {len(state.orphans):,} orphaned files, {state.orphan_bytes / 1e9:,.3f} GB")


def missing_prompts(cache: Path, prompts: Sequence[str], identity: Mapping[str, Any]) -> list[str]:
    """Return the distinct prompts that are missing or damaged in the cache."""
    return [prompt for prompt in dict.fromkeys(prompts) if read_prompt(cache, prompt, identity) is None]


def add_orphans(state: CacheState, prompts: Sequence[str], identity: Mapping[str, Any]) -> None:
    """Add the files of prompts that this config does not use, or encodes differently, to the orphans."""
    used = {prompt_file(prompt, identity) for prompt in prompts}
    for path in sorted((state.folder / PROMPTS_FOLDER).glob("*.safetensors")):
        if path.name not in used:
            state.orphans.append(path)
            state.orphan_bytes += path.stat().st_size


def wait_for_prompts(cache: Path, prompts: Sequence[str], identity: Mapping[str, Any], timeout: float) -> None:
    """Wait until the main process has encoded all prompts."""

    def task() -> str | None:
        missing = missing_prompts(cache, prompts, identity)
        return f"encode the prompt {missing[0]!r}" if missing else None

    wait_for_main(task, timeout)
