"""Estimate a run: samples, steps, tokens, FLOPs, disk, host memory and GPU memory."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from sd3_light.check.count import BucketCount, SampleCounts, count_samples
from sd3_light.check.disk import first_clip
from sd3_light.check.run_setup import BatchSetup, run_setup
from sd3_light.config import (
    BatchSize,
    CacheLocation,
    DatasetConfig,
    DirectoryConfig,
    Fault,
    LoadedConfig,
    Resolution,
    TrainConfig,
    batch_size_for,
    load_dataset,
)
from sd3_light.core.caption_lengths import CutCaptions, count_cut_captions
from sd3_light.core.checks import ModelFact
from sd3_light.core.columns import TEACHER, Column, with_pairs
from sd3_light.core.cost import Cost, Layout, Tokens
from sd3_light.core.family import Family
from sd3_light.core.registry import family_of, video_titles
from sd3_light.core.start import WeightsStart
from sd3_light.cost.amount import MIB, Amount, format_bytes
from sd3_light.cost.data_bytes import (
    ReaderMemory,
    batch_bytes,
    caption_bytes,
    image_bytes,
    latent_bytes,
    loader_bytes,
    resident_index_bytes,
    sample_bytes,
)
from sd3_light.cost.drawing_memory import BYTES_PER_PIXEL
from sd3_light.cost.gpu_memory import GpuMemory, checkpoint_copy_bytes, gpu_memory
from sd3_light.cost.training_flops import drawing_flops, training_flops
from sd3_light.cost.training_setup import TrainingSetup
from sd3_light.data.order import BucketOrder, Segment, open_shards
from sd3_light.data.split import expected_split
from sd3_light.data.store.remote import download_bytes
from sd3_light.formats import plural
from sd3_light.model.vision import cached_columns
from sd3_light.sources.buckets import Bucket, ExtremeFits
from sd3_light.sources.catalogue import InputRow
from sd3_light.sources.leaks import EvaluationImages, Leak, open_evaluation_images
from sd3_light.sources.records import Rejects


@dataclass(frozen=True)
class BucketEstimate:
    """One bucket at one resolution: its samples, and the cost of one step."""

    bucket: Bucket
    resolution: Resolution
    samples: int
    micro_batch: int
    global_batch: int
    steps: int
    padding: int
    tokens: Tokens
    step_flops: Amount
    gpu: GpuMemory
    prepared: Amount
    latents: int
    read: int
    enlarged: int = 0
    cropped: float = 0.0


@dataclass(frozen=True)
class DatasetEstimate:
    """The numbers of a dataset. ``samples`` counts usable images; each is in one bucket per resolution.

    ``index`` is the host memory of the cache's index if the cache is held in memory. ``shapes`` counts those of
    micro-batches. About ``held_out`` images are not trained on. ``captions`` are some of all, spread over the samples.
    """

    name: str
    path: Path
    cache_dir: CacheLocation
    samples: int
    rejects: Rejects
    rows: tuple[BucketEstimate, ...]
    cache: Amount
    index: int
    shapes: int
    captions: tuple[str, ...] = ()
    cut: CutCaptions | None = None
    held_out: int = 0
    extremes: ExtremeFits = field(default_factory=ExtremeFits)

    @property
    def steps(self) -> int:
        """Steps per epoch over all buckets."""
        return sum(row.steps for row in self.rows)


@dataclass(frozen=True)
class RunEstimate:
    """The numbers of a run; memory is that of the costliest bucket. ``why_stock``: why GPUs run stock blocks.

    With ``residence`` "auto" memory does not contain the cache, which is in memory only if it fits beside the rest.
    ``facts`` are shown about the weights, ``leaks`` are training images in evaluation sets. ``drawing`` describes the
    images that the run draws for [reward].
    """

    path: Path
    setup: TrainingSetup
    why_stock: str | None
    start: WeightsStart
    facts: tuple[ModelFact, ...]
    data: DatasetEstimate
    evals: tuple[DatasetEstimate, ...]
    total_steps: int
    run_flops: Amount
    host: Amount
    gpu: GpuMemory
    residence: str
    leaks: tuple[Leak, ...] = ()
    drawing: str | None = None


def estimate_run(loaded: LoadedConfig, start: WeightsStart, layout: Layout) -> RunEstimate:
    """Scan the data and estimate a run of a config without disk faults."""
    train = loaded.train
    family = family_of(train.model)
    assert layout.world_size % train.pipeline_stages == 0, "only whole pipelines train"
    layout = layout._replace(by_deepspeed=layout.by_deepspeed or train.pipeline_stages > 1)
    cost = family.cost(start, train.model)
    estimator = Estimator(train, cost, layout, train.gradient_accumulation_steps)
    repeats = [directory.num_repeats for directory in loaded.dataset.directories]
    with open_evaluation_images() as held:
        evals = tuple(estimator.eval_set(name, dataset, held) for name, dataset in loaded.eval_datasets.items())
        for dataset in _metrics_datasets(loaded):
            count_samples(dataset, train.seed, partial(held.add, "the dataset of [metrics]"))
        compare = held.compare if held else None
        data = estimator.dataset("train", loaded.dataset, train.micro_batch_size_per_gpu, repeats, on_used=compare)
        leaks = tuple(held.leaks())
    return replace(estimator.run(loaded.path, start, data, evals), facts=family.checks.facts(start), leaks=leaks)


def _metrics_datasets(loaded: LoadedConfig) -> Iterator[DatasetConfig]:
    """Yield the dataset of [metrics], unless it is an evaluation set too."""
    table = loaded.train.metrics
    if table is not None and all(table.dataset != dataset.path for dataset in loaded.eval_datasets.values()):
        yield replace(load_dataset(table.dataset), compared=True)


def empty_faults(estimate: RunEstimate, loaded: LoadedConfig) -> list[Fault]:
    """Return a fault for each dataset without usable samples."""
    faults = []
    datasets = (loaded.dataset, *loaded.eval_datasets.values())
    for data, dataset in zip((estimate.data, *estimate.evals), datasets, strict=True):
        if data.samples == 0:
            reasons = ", ".join(f"{number} {reason}" for reason, number in sorted(data.rejects.counts.items()))
            problem = f"no usable sample ({reasons or 'no images'})"
            hint = "check the path and the captions"
            if "no_caption" in data.rejects.counts:
                hint += ": write each caption next to its image, as NAME.txt"
                hint += f" ({data.rejects.uncaptioned})" if data.rejects.uncaptioned else ""
            if not reasons and first_clip(dataset.directories):
                hint = _clip_hint(family_of(loaded.train.model))
            faults.append(Fault(str(data.path), "directory", problem, hint=hint))
    if estimate.data.samples and estimate.data.steps == 0:
        problem = "every bucket is smaller than a global batch, so no samples are left"
        faults.append(Fault(str(estimate.path), "small_buckets", problem, hint='write "pad", or lower the batch'))
    return faults


def _clip_hint(family: Family) -> str:
    """Return what to do about a folder of clips whose images are read."""
    if family.media == "video":
        return "the folder has clips: write frames in the dataset TOML"
    return f"the folder has clips, and {family.title} trains on images only; clips need {' or '.join(video_titles())}"


@dataclass(frozen=True)
class Estimator:
    """Estimates datasets for one model."""

    train: TrainConfig
    cost: Cost
    layout: Layout
    accumulation: int
    resident: int = 0
    """Bytes of the cache in GPU memory."""
    shapes: int = 1
    """Shapes of micro-batches."""
    paired: bool = False
    """Whether the dataset has rejected images."""
    steps: int | None = None
    """Steps of the run."""
    kept: float = 1.0
    """Share of the images that is trained on."""

    @property
    def replicas(self) -> int:
        """Data-parallel replicas; the processes of one pipeline count as one."""
        return self.layout.world_size // self.train.pipeline_stages

    def run(
        self, path: Path, start: WeightsStart, data: DatasetEstimate, evals: Sequence[DatasetEstimate] = ()
    ) -> RunEstimate:
        """Return the numbers of a run on a dataset, without facts about its weights."""
        train = self.train
        resident = data.cache.value if train.residence == "device" else 0
        steps = train.length(data.steps)
        setup = replace(self, resident=resident, shapes=data.shapes, steps=steps)._setup(Tokens(0, 0), 0)
        epoch = sum(row.steps * row.step_flops.value for row in data.rows)
        return RunEstimate(
            path=path,
            setup=setup,
            why_stock=self.cost.why_stock(train, self.layout),
            start=start,
            facts=(),
            data=data,
            evals=tuple(evals),
            total_steps=steps,
            run_flops=Amount(round(epoch * steps / max(1, data.steps)), "FLOPs per epoch·steps / steps per epoch"),
            host=_host(train, data, evals, setup),
            gpu=max((row.gpu for row in data.rows), key=lambda gpu: gpu.total, default=gpu_memory(setup)),
            residence=train.residence,
            drawing=self._drawing(data),
        )

    def _drawing(self, data: DatasetEstimate) -> str | None:
        """Describe the images that the run draws for [reward], in the commonest bucket."""
        table = self.train.reward
        row = max(data.rows, key=lambda row: row.samples, default=None)
        if table is None or row is None:
            return None
        share = drawing_flops(self.cost, row.tokens, table).value / row.step_flops.value
        uses = row.global_batch * table.every_n_steps / table.images
        decoding = format_bytes(row.bucket.area * BYTES_PER_PIXEL)
        state = format_bytes(table.images * row.latents // (2 * row.micro_batch))  # which has targets beside latents
        return (
            f"{table.images} images of {row.bucket} every {plural(table.every_n_steps, 'step')} in {table.steps} "
            f"sampler steps, {share:.0%} of the FLOPs; each trains {uses:.2g} times; the VAE decodes one at a time, "
            f"with up to {decoding} on the device between steps; {state} of host memory and of a checkpoint"
        )

    def eval_set(self, name: str, dataset: DatasetConfig, held: EvaluationImages) -> DatasetEstimate:
        """Estimate an evaluation set: each sample once, without accumulation. Its images are added to ``held``."""
        once = replace(self, accumulation=1)
        repeats = [1.0] * len(dataset.directories)
        batch = self.train.eval_micro_batch_size_per_gpu
        add = partial(held.add, name)
        return once.dataset(name, dataset, batch, repeats, streams=True, on_used=add)

    def dataset(
        self,
        name: str,
        dataset: DatasetConfig,
        batch: BatchSize,
        repeats: Sequence[float],
        streams: bool = False,
        on_used: Callable[[InputRow], None] | None = None,
    ) -> DatasetEstimate:
        """Estimate a dataset; an evaluation set always ``streams``. ``on_used`` is called with every sample's row."""
        counts = count_samples(dataset, self.train.seed, on_used)
        estimator = replace(self, paired=any(directory.rejected for directory in dataset.directories))
        cache = estimator.cache(counts, dataset.directories)
        on_device = self.train.residence == "device" and not streams
        shapes = sum(map(_num_shapes, counts.buckets.values()))
        estimator = replace(estimator, resident=cache.value if on_device else 0, shapes=shapes)
        texts = counts.captions.captions()
        images = sum(count.samples for bucket in counts.buckets.values() for count in bucket.values())
        captions = sum(count.captions for bucket in counts.buckets.values() for count in bucket.values())
        held_out = expected_split(counts.samples) if dataset.is_divided else 0
        estimator = replace(estimator, kept=1 - held_out / max(1, counts.samples))
        orders = {
            place: estimator._order(directories, batch_size_for(batch, place[0]), repeats)
            for place, directories in sorted(counts.buckets.items())
        }
        epoch = sum(order.num_batches for order in orders.values())
        estimator = replace(estimator, steps=self.train.length(epoch))
        rows = [
            estimator._row(place, counts.buckets[place], batch_size_for(batch, place[0]), order)
            for place, order in orders.items()
        ]
        return DatasetEstimate(
            name=name,
            path=dataset.path,
            cache_dir=dataset.cache_dir,
            samples=counts.samples,
            rejects=counts.rejects,
            rows=tuple(rows),
            cache=cache,
            index=resident_index_bytes(images, captions),
            shapes=shapes,
            extremes=counts.extremes,
            held_out=held_out,
            captions=tuple(texts),
            cut=count_cut_captions(texts, family_of(self.train.model).encoding.model_limits(self.train.model)),
        )

    def _order(self, directories: Mapping[int, BucketCount], micro_batch: int, repeats: Sequence[float]) -> BucketOrder:
        segments = tuple(
            Segment(max(1, round(self.kept * count.samples)), repeats[index])
            for index, count in sorted(directories.items())
        )
        drop = self.train.small_buckets == "drop"
        return BucketOrder(segments, micro_batch * self.accumulation * self.replicas, self.train.shuffle_window, drop)

    def _row(
        self,
        place: tuple[Resolution, Bucket],
        directories: Mapping[int, BucketCount],
        micro_batch: int,
        order: BucketOrder,
    ) -> BucketEstimate:
        resolution, bucket = place
        counts = directories.values()
        samples = sum(count.samples for count in counts)
        masked = any(count.masked for count in counts)
        columns = self.columns(bucket)
        prepared = family_of(self.train.model).prepared_columns(self.train.model, columns)
        if self.paired and self.train.terms.dpo is not None:
            prepared = with_pairs(prepared)
        if self.train.terms.reads_teacher:
            prepared = (*prepared, *(column for column in columns if column.reads == TEACHER))
        return BucketEstimate(
            bucket=bucket,
            resolution=resolution,
            samples=samples,
            enlarged=sum(count.enlarged for count in counts),
            cropped=sum(count.cropped for count in counts) / samples,
            **self.step(order, self.cost.tokens(bucket), micro_batch),
            prepared=batch_bytes(prepared, micro_batch, masked),
            latents=latent_bytes(prepared, micro_batch, masked),
            read=micro_batch * sample_bytes(columns, masked),
        )

    def step(self, order: BucketOrder, tokens: Tokens, micro_batch: int) -> dict[str, Any]:
        """Return the fields of a `BucketEstimate` that its steps decide."""
        train = self.train
        adapter = train.adapter is not None
        flops = training_flops(self.cost, tokens, train.activation_checkpointing, adapter, train.terms)
        formula = f"{self.cost.text.at_most}samples per step·{flops.formula}"
        drawing = 0
        if train.reward is not None:
            drawn = drawing_flops(self.cost, tokens, train.reward)
            drawing = drawn.value
            formula = f"{formula}; drawing {drawn.formula}"
        return {
            "micro_batch": micro_batch,
            "global_batch": order.batch,
            "steps": order.num_batches,
            "padding": order.padding,
            "tokens": tokens,
            "step_flops": Amount(order.batch * flops.value + drawing, formula),
            "gpu": gpu_memory(self._setup(tokens, micro_batch)),
        }

    def columns(self, bucket: Bucket) -> tuple[Column, ...]:
        """Return the columns of the cache."""
        model = self.train.model
        columns = cached_columns(model, bucket)
        return with_pairs(columns) if self.paired else columns

    def cache(self, counts: SampleCounts, directories: tuple[DirectoryConfig, ...]) -> Amount:
        """Return the bytes of the cache's shards; each resolution has its own copy of the captions' features."""
        total = 0
        formula = "no images"
        for (_, bucket), by_directory in counts.buckets.items():
            columns = self.columns(bucket)
            caption = caption_bytes(columns)
            for index, count in by_directory.items():
                variants = 2 if directories[index].flip else 1
                total += count.samples * image_bytes(columns, variants, count.masked > 0).value
                total += count.captions * caption.value
            image = f"images·{image_bytes(columns).formula} at {bucket} (twice with flip, + masks)"
            formula = f"{image} + captions·{self.cost.text.at_most}{caption.formula}"
        return Amount(total, formula)

    def _setup(self, tokens: Tokens, micro_batch: int) -> TrainingSetup:
        batches = BatchSetup(tokens, micro_batch, self.accumulation, self.shapes, self.steps)
        return run_setup(self.train, self.cost, self.layout, batches, self.resident)


def _num_shapes(directories: Mapping[int, BucketCount]) -> int:
    """Return the shapes of a bucket's micro-batches: two if only some have masks."""
    masked, samples = (sum(getattr(count, name) for count in directories.values()) for name in ("masked", "samples"))
    return 2 if 0 < masked < samples else 1


def _host(train: TrainConfig, data: DatasetEstimate, evals: Sequence[DatasetEstimate], setup: TrainingSetup) -> Amount:
    """Return the host memory of the loaders, of the copies for checkpoints, and of swapped blocks."""
    copies = checkpoint_copy_bytes(setup)
    loader, micro_batch = _loader(train, data, train.gradient_accumulation_steps)
    evaluation = max((_loader(train, dataset, 1)[0].value for dataset in evals), default=0)
    inputs = (replace(setup, tokens=row.tokens, batch=row.micro_batch).host_input_bytes for row in data.rows)
    resident = {"host": data.cache.value + data.index, "device": data.index}.get(train.residence, 0)
    others = {
        "by the same formula while evaluating": evaluation,
        f"copies for checkpoints = {copies.formula}": copies.value,
        "pinned for blocks in host memory": setup.host_bytes,
        "for their averages": 4 * setup.ema_tracks * sum(setup.hosted_parameters),
        "pinned for inputs of blocks": max(inputs, default=0),
        f"for the cache in memory ({train.residence})": resident,
    }
    formula = f"{loader.formula}; micro-batch {micro_batch.value / MIB:.1f} MiB = {micro_batch.formula}"
    for use, value in others.items():
        formula += f"; + {value / MIB:.0f} MiB {use}" if value else ""
    return Amount(loader.value + sum(others.values()), formula)


def _loader(train: TrainConfig, data: DatasetEstimate, in_use: int) -> tuple[Amount, Amount]:
    """Return the memory of a dataset's loader, and of the largest prepared micro-batch."""
    prepared = max((row.prepared for row in data.rows), key=lambda amount: amount.value, default=Amount(0, "no sample"))
    reader = ReaderMemory(
        train.sd3_shard_size,
        open_shards(train.shuffle_window, max(1, len(data.rows))),
        latents=max((row.latents for row in data.rows), default=0),
        read=max((row.read for row in data.rows), default=0),
        downloads=0 if isinstance(data.cache_dir, Path) else _downloads(train, data),
    )
    workers = train.num_dataloader_workers
    prefetch = train.dataloader_prefetch_per_worker
    return loader_bytes(prepared, workers, prefetch, reader, in_use), prepared


def _downloads(train: TrainConfig, data: DatasetEstimate) -> int:
    """Return the memory of a process's downloads."""
    shards = (
        max(1, train.sd3_shard_size // row.bucket.frames) * row.read / max(1, row.micro_batch) for row in data.rows
    )
    return download_bytes(round(max(shards, default=0)))
