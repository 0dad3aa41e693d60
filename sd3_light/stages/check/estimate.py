"""What a run of a config will do, in numbers: samples, steps, tokens, FLOPs, disk, host memory and GPU memory."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sd3_light.budget.amount import Amount
from sd3_light.budget.data_bytes import (
    batch_bytes,
    caption_bytes,
    image_bytes,
    latent_bytes,
    latent_pixels,
    loader_bytes,
    sample_bytes,
)
from sd3_light.budget.flops import Tokens, image_tokens, training_flops
from sd3_light.budget.gpu_memory import GpuMemory, checkpoint_copy_bytes, gpu_memory
from sd3_light.budget.partition import stage_bounds
from sd3_light.budget.training_setup import TrainingSetup
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
)
from sd3_light.data.buckets import Bucket
from sd3_light.data.order import BucketOrder, Segment, open_shards
from sd3_light.model.fast.choice import why_stock_by_config
from sd3_light.model.linears import adapter_layer_parameters
from sd3_light.model.pipeline_folder import stored_weights, text_shape
from sd3_light.model.start import WeightsStart, where_weights_start
from sd3_light.model.text_shape import TextShape
from sd3_light.stages.check.count import Cell, Counts, count


@dataclass(frozen=True)
class BucketEstimate:
    """One bucket at one resolution: what is in it, and what a step of it costs."""

    bucket: Bucket
    resolution: Resolution
    samples: int
    masked: int
    enlarged: int
    cropped: float
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


@dataclass(frozen=True)
class DatasetEstimate:
    """A data set in numbers. ``samples`` are usable pictures; each is in one bucket a resolution."""

    name: str
    path: Path
    cache_dir: CacheLocation
    samples: int
    rejects: Mapping[str, int]
    rows: tuple[BucketEstimate, ...]
    cache: Amount

    @property
    def steps(self) -> int:
        """Steps over all buckets once."""
        return sum(row.steps for row in self.rows)


@dataclass(frozen=True)
class RunEstimate:
    """What a run will do. Memory is that of the costliest bucket.

    ``case`` is how it trains; ``stock`` says why the stock blocks would run on GPUs, None where the fast ones would.
    """

    path: Path
    case: TrainingSetup
    stock: str | None
    accumulation: int
    start: WeightsStart
    parameters: int
    adapter: int | None
    text: TextShape
    data: DatasetEstimate
    evals: tuple[DatasetEstimate, ...]
    total_steps: int
    epoch_flops: Amount
    run_flops: Amount
    host: Amount
    gpu: GpuMemory

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps an epoch."""
        return self.data.steps


def estimate_run(loaded: LoadedConfig, world: int = 1, by_deepspeed: bool = False) -> RunEstimate:
    """Scan the data and add up what a run on ``world`` GPUs costs; the config has no disk faults."""
    train = loaded.train
    assert world % train.pipeline_stages == 0, "only whole pipelines train"
    start = where_weights_start(train.model)
    text = text_shape(train.model.diffusers_path, train.model.t5_max_length, train.model.text_tokens == "real")
    by_deepspeed = by_deepspeed or train.pipeline_stages > 1
    estimator = _Estimator(train, start, text, world, by_deepspeed, train.gradient_accumulation_steps)
    case = estimator.case(Tokens(0, 0), 0)
    repeats = [directory.num_repeats for directory in loaded.dataset.directories]
    data = estimator.dataset("train", loaded.dataset, train.micro_batch_size_per_gpu, repeats)
    evals = tuple(estimator.eval_set(name, dataset) for name, dataset in loaded.eval_datasets.items())
    steps = total_steps(train, data.steps)
    epoch = sum(row.steps * row.step_flops.value for row in data.rows)
    return RunEstimate(
        path=loaded.path,
        case=case,
        stock=estimator.stock,
        accumulation=train.gradient_accumulation_steps,
        start=start,
        parameters=start.size.num_parameters(),
        adapter=None if case.adapter is None else sum(case.adapter),
        text=text,
        data=data,
        evals=evals,
        total_steps=steps,
        epoch_flops=Amount(epoch, "sum over buckets of steps·FLOPs a step"),
        run_flops=Amount(round(epoch * steps / max(1, data.steps)), "FLOPs an epoch·steps / steps an epoch"),
        host=_host(train, data, evals, checkpoint_copy_bytes(case)),
        gpu=max((row.gpu for row in data.rows), key=lambda gpu: gpu.total, default=gpu_memory(case)),
    )


def total_steps(train: TrainConfig, steps_per_epoch: int) -> int:
    """Optimizer steps of the run: what `epochs` and `max_steps` allow, whichever ends first."""
    limits = [train.max_steps, None if train.epochs is None else train.epochs * steps_per_epoch]
    return min(limit for limit in limits if limit is not None)


def empty_faults(found: RunEstimate) -> list[Fault]:
    """A fault for each data set without a usable sample."""
    faults = []
    for data in (found.data, *found.evals):
        if data.samples == 0:
            why = ", ".join(f"{number} {reason}" for reason, number in sorted(data.rejects.items()))
            problem = f"no usable sample ({why or 'no picture at all'})"
            faults.append(Fault(str(data.path), "directory", problem, hint="check path and captions"))
    if found.data.samples and found.data.steps == 0:
        problem = "every bucket is smaller than a global batch, so nothing is left to train on"
        faults.append(Fault(str(found.path), "small_buckets", problem, hint='write "pad", or lower the batch'))
    return faults


@dataclass(frozen=True)
class _Estimator:
    """Measures data sets for one model."""

    train: TrainConfig
    start: WeightsStart
    text: TextShape
    world: int
    by_deepspeed: bool
    accumulation: int

    @property
    def replicas(self) -> int:
        """Processes that learn from samples of their own; those of one pipeline count as one."""
        return self.world // self.train.pipeline_stages

    @property
    def stock(self) -> str | None:
        """Why the stock blocks would run on GPUs."""
        return why_stock_by_config(self.train, self.start.size, self.world, self.by_deepspeed)

    def eval_set(self, name: str, dataset: DatasetConfig) -> DatasetEstimate:
        """Evaluation sees each sample once, without accumulation."""
        once = replace(self, accumulation=1)
        return once.dataset(name, dataset, self.train.eval_micro_batch_size_per_gpu, [1.0] * len(dataset.directories))

    def dataset(self, name: str, dataset: DatasetConfig, batch: BatchSize, repeats: Sequence[float]) -> DatasetEstimate:
        counts = count(dataset, self.train.seed)
        rows = [
            self.row(bucket, resolution, cells, batch_size_for(batch, resolution), repeats)
            for (resolution, bucket), cells in sorted(counts.cells.items())
        ]
        return DatasetEstimate(
            name=name,
            path=dataset.path,
            cache_dir=dataset.cache_dir,
            samples=counts.samples,
            rejects=dict(sorted(counts.rejects.items())),
            rows=tuple(rows),
            cache=_cache(counts, dataset.directories, self.text),
        )

    def row(
        self, bucket: Bucket, resolution: Resolution, cells: Mapping[int, Cell], micro: int, repeats: Sequence[float]
    ) -> BucketEstimate:
        segments = tuple(Segment(cell.samples, repeats[at]) for at, cell in sorted(cells.items()))
        drop = self.train.small_buckets == "drop"
        order = BucketOrder(segments, micro * self.accumulation * self.replicas, self.train.shuffle_window, drop)
        pixels = latent_pixels(bucket.width, bucket.height)
        tokens = Tokens(image_tokens(bucket.width, bucket.height), self.text.tokens)
        lean = self.train.adapter is not None
        flops = training_flops(self.start.size, tokens, self.train.activation_checkpointing, lean)
        samples, masked = (sum(getattr(cell, name) for cell in cells.values()) for name in ("samples", "masked"))
        return BucketEstimate(
            bucket=bucket,
            resolution=resolution,
            samples=samples,
            masked=masked,
            enlarged=sum(cell.enlarged for cell in cells.values()),
            cropped=sum(cell.cropped for cell in cells.values()) / samples,
            micro_batch=micro,
            global_batch=order.batch,
            steps=order.num_batches,
            padding=order.padding,
            tokens=tokens,
            step_flops=Amount(order.batch * flops.value, f"{self.text.at_most}samples a step·{flops.formula}"),
            gpu=self.gpu(tokens, micro),
            prepared=batch_bytes(pixels, self.text, micro, masked > 0),
            latents=latent_bytes(pixels, micro, masked > 0),
            read=micro * sample_bytes(pixels, self.text, mask=masked > 0).value,
        )

    def gpu(self, tokens: Tokens, micro: int) -> GpuMemory:
        return gpu_memory(self.case(tokens, micro))

    def case(self, tokens: Tokens, micro: int) -> TrainingSetup:
        train, draws, size = self.train, bool(self.train.sampling.prompts), self.start.size
        adapter = None if train.adapter is None else adapter_layer_parameters(size, train.adapter)
        weights = size.layer_parameters() if adapter is None else adapter
        return TrainingSetup(
            size,
            tokens,
            micro,
            ema_tracks=1 + len(train.ema.track) if train.ema.enable else 0,
            checkpointing=train.activation_checkpointing,
            compiled=train.compile,
            fast=self.stock is None,
            compute_dtype=train.model.transformer_dtype,
            accumulation=self.accumulation,
            optimizer=train.optimizer.type,
            world=self.world,
            parallel=train.parallel,
            evaluates=bool(train.eval_datasets) or draws,
            other_models=_vae_bytes(train) if draws else 0,
            adapter=adapter,
            deepspeed=self.by_deepspeed,
            zero=train.zero_stage,
            stages=train.pipeline_stages,
            bounds=stage_bounds(weights, train.pipeline_stages, train.partition_method, train.partition_split),
            base_bits=16 if train.adapter is None else train.adapter.base_bits,
        )


def _vae_bytes(train: TrainConfig) -> int:
    """The VAE that decodes samples, in float32."""
    return 4 * sum(count for _, count in stored_weights(train.model.diffusers_path / "vae"))


def _cache(counts: Counts, directories: tuple[DirectoryConfig, ...], text: TextShape) -> Amount:
    """Bytes of the cache's shards; each resolution keeps its own copy of the captions' features."""
    caption = caption_bytes(text)
    total = 0
    for (_, bucket), cells in counts.cells.items():
        for at, cell in cells.items():
            variants = 2 if directories[at].flip else 1
            total += (
                cell.samples * image_bytes(latent_pixels(bucket.width, bucket.height), variants, cell.masked > 0).value
            )
            total += cell.captions * caption.value
    return Amount(total, f"pictures·2·16·h·w·2 B (twice with flip, + h·w masked) + captions·{caption.formula}")


def _host(train: TrainConfig, data: DatasetEstimate, evals: Sequence[DatasetEstimate], copies: Amount) -> Amount:
    """The training loader, beside it that of an evaluation while one runs, and what checkpoints are written from."""
    loader, micro_batch = _loader(train, data, train.gradient_accumulation_steps)
    beside = max((_loader(train, one, 1)[0].value for one in evals), default=0)
    formula = f"{loader.formula}; micro-batch {micro_batch.value / (1 << 20):.1f} MiB = {micro_batch.formula}"
    if beside:
        formula += f"; + {beside / (1 << 20):.0f} MiB by the same formula while evaluating"
    formula += f"; + {copies.value / (1 << 20):.0f} MiB copies for checkpoints = {copies.formula}"
    return Amount(loader.value + beside + copies.value, formula)


def _loader(train: TrainConfig, data: DatasetEstimate, in_use: int) -> tuple[Amount, Amount]:
    """The memory of a data set's loader, and of the largest prepared micro-batch."""
    prepared = max((row.prepared for row in data.rows), key=lambda amount: amount.value, default=Amount(0, "no sample"))
    loader = loader_bytes(
        prepared,
        train.num_dataloader_workers,
        train.dataloader_prefetch_per_worker,
        train.sd3_shard_size,
        open_shards(train.shuffle_window, max(1, len(data.rows))),
        latents=max((row.latents for row in data.rows), default=0),
        read=max((row.read for row in data.rows), default=0),
        in_use=in_use,
    )
    return loader, prepared
