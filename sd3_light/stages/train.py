"""The training stage: from a cache to checkpoints and exports."""

import fnmatch
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from sd3_light.checkpoint.state import EMA, WEIGHTS, Progress, gather, of_kind
from sd3_light.checkpoint.store import keep_newest, newest_checkpoint, read_checkpoint, write_checkpoint
from sd3_light.config import DatasetConfig, LoadedConfig, TrainConfig, batch_size_for, resolved_toml
from sd3_light.config.faults import UserError
from sd3_light.data.building.catalogue import sources_of
from sd3_light.data.loader import PipelineDataLoader, PreparesInputs
from sd3_light.data.order import Order
from sd3_light.data.store import open_store
from sd3_light.data.stream import CachedDataset, MicroBatches
from sd3_light.engines import Launch
from sd3_light.engines.protocol import Prepared
from sd3_light.engines.torch import TorchEngine, start_process_group
from sd3_light.metrics.validation import AtQuantiles, EvalPreparer, validate
from sd3_light.model.layers import compile_blocks
from sd3_light.model.start import where_weights_start
from sd3_light.optim.ema import Ema
from sd3_light.optim.schedules import learning_rate
from sd3_light.runlog import RunLog, say
from sd3_light.training.light_sd3 import LightSD3Pipeline
from sd3_light.training.loop import Duty, Run, every, train
from sd3_light.training.module import DiffusionTrainingModule
from sd3_light.training.pictures import draw_samples
from sd3_light.training.saver import Saver


@dataclass(frozen=True)
class Resume:
    """What `--resume_from_checkpoint` and the `--reset_*` flags ask for; ``checkpoint`` None means the newest."""

    checkpoint: Path | None = None
    reset_dataloader: bool = False
    reset_optimizer: bool = False
    reset_optimizer_params: bool = False


def run(loaded: LoadedConfig, launch: Launch | None = None, resume: Resume | None = None) -> Progress:
    """Train to the end of the config's epochs or steps; the cache must be there."""
    launch, config = launch or Launch(), loaded.train
    device = launch.device()
    saved = _find_checkpoint(config.output_dir, resume)
    data = open_cache(loaded.dataset, config, launch, in_memory=not config.sd3_streaming_dataset)
    start_process_group(launch, device, config.dist_timeout_sec)

    order = make_order(data, loaded, launch)
    if saved is None:
        MicroBatches(data, order, launch.rank, launch.world, config.gradient_accumulation_steps).warm(0)
    total = _total_steps(config, order)
    pipeline = LightSD3Pipeline(config.model, config.seed, data.empty_text())
    _freeze(pipeline, config.freeze)
    if config.compile:
        compile_blocks(pipeline.transformer)
    engine = TorchEngine(DiffusionTrainingModule(pipeline.transformer, config), config, launch, device)
    ema = Ema(engine.weights, config.ema.decay, config.ema.update_every) if config.ema.enable else None
    progress = _restore(saved, resume or Resume(), engine, ema, order)

    with RunFolder(loaded, launch.is_main) as folder:
        folder.announce(where_weights_start(config.model).sentence, progress, total, order, launch)
        folder.tell_dropped(data, order)
        stage = _Stage(loaded, launch, order, data, pipeline, engine, ema, folder)
        training = Run(
            engine=engine,
            steps=stage.steps,
            samples_in=order.batch_size,
            learning_rate=lambda step: _rate(config, step, total),
            total_steps=total,
            progress=progress,
            ema=ema,
            duties=stage.duties(total),
            log=folder.log,
            max_nonfinite_steps=config.max_nonfinite_steps,
            logging_steps=config.logging_steps,
            steps_per_print=config.steps_per_print,
        )
        if config.eval_before_first_step and progress.step == 0:
            stage.evaluate(progress)
        return train(training)


def open_cache(dataset: DatasetConfig, config: TrainConfig, launch: Launch, in_memory: bool = False) -> CachedDataset:
    """A data set's cache, by its manifest alone unless all of it is wanted in memory."""
    limit = int(config.stream_cache_gb * 1e9)
    store = open_store(dataset.cache_dir, config.stream_cache_dir, limit, config.shuffle_window)
    here = min(launch.world, int(os.environ.get("LOCAL_WORLD_SIZE", launch.world)))
    # the first process of a machine answers for all: the others may come when its memory is taken already
    return CachedDataset(store, in_memory, here if launch.local_rank == 0 else 1, launched=launch.world > 1)


def make_order(data: CachedDataset, loaded: LoadedConfig, launch: Launch) -> Order:
    """The order that training follows."""
    config = loaded.train
    return data.order(
        config.seed,
        {source.label: source.directory.num_repeats for source in sources_of(loaded.dataset.directories)},
        lambda resolution: global_batch(config, resolution, launch.world),
        config.shuffle_window,
        config.small_buckets,
    )


def global_batch(config: TrainConfig, resolution: tuple[int, int], world: int) -> int:
    """Samples of one optimizer step at a resolution."""
    return batch_size_for(config.micro_batch_size_per_gpu, resolution) * config.gradient_accumulation_steps * world


def _total_steps(config: TrainConfig, order: Order) -> int:
    by_epochs = config.epochs * order.steps_per_epoch if config.epochs else None
    limits = [limit for limit in (by_epochs, config.max_steps) if limit is not None]
    return min(limits)


def _rate(config: TrainConfig, step: int, total: int) -> float:
    if config.force_constant_lr is not None:
        return config.force_constant_lr
    return learning_rate(
        step,
        peak=config.optimizer.lr,
        schedule=config.lr_scheduler,
        warmup_steps=config.warmup_steps,
        total_steps=total,
        step_size=config.lr_step_size,
        step_gamma=config.lr_step_gamma,
    )


def _freeze(pipeline: LightSD3Pipeline, patterns: Sequence[str]) -> None:
    names = [name for name, _ in pipeline.transformer.named_parameters()]
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise UserError(f"freeze: {pattern!r} matches no parameter; names look like {names[len(names) // 2]!r}")
    for name, parameter in pipeline.transformer.named_parameters():
        parameter.requires_grad_(not any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns))
    if not any(parameter.requires_grad for parameter in pipeline.transformer.parameters()):
        raise UserError(f"freeze: {list(patterns)} leaves nothing to train; name fewer parameters")


def require_start(loaded: LoadedConfig, resume: Resume | None) -> None:
    """Refuse a run folder that holds a run, before hours are spent on its cache."""
    if resume is None:
        _find_checkpoint(loaded.train.output_dir, resume)


def _find_checkpoint(output_dir: Path, resume: Resume | None) -> Path | None:
    newest = newest_checkpoint(output_dir / "checkpoints")
    if resume is None:
        if newest is not None:
            raise UserError(
                f"{output_dir} holds a run ({newest.name}); go on with --resume (train.py: --resume_from_checkpoint) "
                "or choose another output_dir"
            )
        return None
    if resume.checkpoint is not None:
        return resume.checkpoint
    if newest is None:
        say(f"no checkpoint under {output_dir} yet: starting from the beginning")
    return newest


def _restore(saved: Path | None, resume: Resume, engine: TorchEngine, ema: Ema | None, order: Order) -> Progress:
    if saved is None:
        return Progress()
    tensors, facts = read_checkpoint(saved)
    _load(engine.weights, of_kind(tensors, WEIGHTS), saved)
    if ema is not None:
        averaged = of_kind(tensors, EMA)
        _load(ema.shadow, averaged or of_kind(tensors, WEIGHTS), saved)
    if not resume.reset_optimizer:
        engine.load_optimizer_state(tensors)
    progress = Progress(**facts["progress"])
    if resume.reset_dataloader:
        return Progress()
    if facts["order"] != order_facts(order):
        raise UserError(
            f"{saved} was trained on another order of data ({facts['order']}, now {order_facts(order)}); restore "
            "batch size and data, or start the data anew with --reset_dataloader"
        )
    return progress


def order_facts(order: Order) -> dict[str, Any]:
    """What must be equal for a position in the order to mean the same."""
    buckets = []
    for bucket in order.buckets:
        shards = blake2b(digest_size=8)
        shards.update(repr([(shard.size, shard.repeats) for shard in bucket.segments]).encode())
        buckets.append([bucket.batch, bucket.window, bucket.length, bucket.num_batches, shards.hexdigest()])
    return {"seed": order.seed, "buckets": buckets}


@torch.no_grad()
def _load(target: Any, source: dict[str, Tensor], saved: Path) -> None:
    if set(target) != set(source):
        differing = sorted(set(target) ^ set(source))[:3]
        raise UserError(f"{saved} is of another model (differs in {differing}); check [model] and freeze")
    for name, tensor in target.items():
        tensor.copy_(source[name])


class RunFolder:
    """<output_dir>: resolved config, log, samples, checkpoints, exports. Only the main process writes."""

    def __init__(self, loaded: LoadedConfig, is_main: bool) -> None:
        self.path, self.is_main = loaded.train.output_dir, is_main
        self._log: RunLog | None = None
        if is_main:
            self.path.mkdir(parents=True, exist_ok=True)
            (self.path / "config.toml").write_text(resolved_toml(loaded), encoding="utf-8")
            key = loaded.train.monitoring.wandb_api_key
            secrets = () if key is None else (key.get_secret_value(),)
            axis = "samples" if loaded.train.x_axis_examples else "step"
            self._log = RunLog(self.path, secrets=secrets, x_axis=axis)

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, *_: object) -> None:
        if self._log is not None:
            self._log.close()

    def log(self, event: str, **fields: Any) -> None:
        """One line of log.jsonl."""
        if self._log is not None:
            self._log.event(event, **fields)

    def announce(self, start: str, progress: Progress, total: int, order: Order, launch: Launch) -> None:
        """Say and log what is about to happen."""
        padding = sum(bucket.padding for bucket in order.buckets)
        say(
            f"train: {start}; steps {progress.step} to {total}, {order.steps_per_epoch} an epoch in "
            f"{len(order.buckets)} buckets (padding repeats {padding} samples an epoch), {launch.world} process(es)"
        )
        event = "resume" if progress.step else "start"
        self.log(event, **progress.as_dict(), total=total, steps_per_epoch=order.steps_per_epoch, world=launch.world)

    def tell_dropped(self, data: CachedDataset, order: Order) -> None:
        """Name the buckets that are left out because they are smaller than a batch."""
        if order.dropped:
            buckets = {data.buckets[number].bucket: data.buckets[number].size for number in order.dropped}
            named = ", ".join(f"{name} ({size} samples)" for name, size in buckets.items())
            say(f"small_buckets = 'drop' leaves out {sum(buckets.values())} samples in smaller buckets: {named}")
            self.log("dropped", buckets=buckets)


@dataclass
class _Stage:
    """The duties of a run, over the parts they need."""

    loaded: LoadedConfig
    launch: Launch
    order: Order
    data: CachedDataset
    pipeline: LightSD3Pipeline
    engine: TorchEngine
    ema: Ema | None
    folder: RunFolder
    eval_sets: dict[str, CachedDataset] = field(default_factory=dict)

    @property
    def config(self) -> TrainConfig:
        return self.loaded.train

    def steps(self, first: int) -> Iterator[Sequence[Prepared]]:
        micro = self.config.gradient_accumulation_steps
        dataset = MicroBatches(self.data, self.order, self.launch.rank, self.launch.world, micro)
        return self._loader(dataset, micro, self.pipeline.preparer, range(first * micro, 2**62)).steps()

    def _loader(
        self, dataset: Dataset[Any], micro_batches: int, preparer: PreparesInputs, items: range | None = None
    ) -> PipelineDataLoader:
        return PipelineDataLoader(
            dataset,
            self.engine,
            micro_batches,
            preparer,
            num_dataloader_workers=self.config.num_dataloader_workers,
            prefetch_batches_per_worker=self.config.dataloader_prefetch_per_worker,
            items=items,
        )

    def duties(self, total: int) -> list[Duty]:
        c, per_epoch = self.config, self.order.steps_per_epoch
        last = every(steps=total)
        save = every(c.save_every_n_steps, c.save_every_n_epochs, c.save_every_n_examples, steps_per_epoch=per_epoch)
        check = every(
            c.checkpoint_every_n_steps,
            c.checkpoint_every_n_epochs,
            minutes=c.checkpoint_every_n_minutes,
            steps_per_epoch=per_epoch,
        )
        judge = every(c.eval_every_n_steps, c.eval_every_n_epochs, c.eval_every_n_examples, steps_per_epoch=per_epoch)
        draw = every(c.sampling.every_n_steps)
        return [
            Duty("evaluate", lambda a, b: bool(self.loaded.eval_datasets) and judge(a, b), self.evaluate),
            Duty("sample", lambda a, b: bool(c.sampling.prompts) and draw(a, b), self.sample),
            Duty("checkpoint", lambda a, b: check(a, b) | last(a, b), self.checkpoint),
            Duty("export", lambda a, b: save(a, b) | last(a, b), self.export),
        ]

    def evaluate(self, progress: Progress) -> None:
        """The validation loss of every evaluation set, with the averaged weights where there are any."""
        for name, dataset in self.loaded.eval_datasets.items():
            if name not in self.eval_sets:
                self.eval_sets[name] = open_cache(dataset, self.config, self.launch)
            loader = self._eval_loader(self.eval_sets[name])
            losses = self._with_average(lambda loader=loader: validate(loader, self.engine.evaluate))
            say(f"eval {name} at step {progress.step}: flow loss {losses['flow']:.4f}")
            self.folder.log("eval", **progress.as_dict(), set=name, **losses)

    def _eval_loader(self, data: CachedDataset) -> PipelineDataLoader:
        """Each sample once, whatever its directory's repeats."""
        once = {shard.directory: 1.0 for shard in data.manifest.shards}
        order = data.order(0, once, self._eval_batch, self.config.shuffle_window)
        batches = MicroBatches(data, order, self.launch.rank, self.launch.world, 1)
        return self._loader(AtQuantiles(batches, order.steps_per_epoch), 1, EvalPreparer(self.pipeline.preparer))

    def _eval_batch(self, resolution: tuple[int, int]) -> int:
        return batch_size_for(self.config.eval_micro_batch_size_per_gpu, resolution) * self.launch.world

    def _with_average(self, work: Any) -> Any:
        if self.ema is None:
            return work()
        with self.ema.in_place_of(self.engine.weights):
            return work()

    def sample(self, progress: Progress) -> None:
        """A grid of the config's prompts."""
        if self.launch.is_main:
            path = self.folder.path / "samples" / f"step-{progress.step:08d}.png"
            size = next(iter(sorted(bucket.resolution for bucket in self.data.buckets)))
            self._with_average(lambda: draw_samples(self.config, self.pipeline.transformer, path, size))
            self.folder.log("sample", **progress.as_dict(), file=str(path.relative_to(self.folder.path)))

    def checkpoint(self, progress: Progress) -> None:
        """All that the run needs to go on."""
        if self.launch.is_main:
            folder = self.folder.path / "checkpoints"
            shadow = None if self.ema is None else self.ema.shadow
            tensors = gather(self.engine.weights, self.engine.optimizer_state(), shadow)
            facts = {"progress": progress.as_dict(), "order": order_facts(self.order)}
            path = write_checkpoint(folder, progress.step, tensors, facts)
            keep_newest(folder, self.config.keep_last_n_checkpoints)
            self.folder.log("checkpoint", **progress.as_dict(), file=path.name)

    def export(self, progress: Progress) -> None:
        """A proven diffusers folder, of the averaged weights where there are any."""
        if self.launch.is_main:
            saver = Saver(self.config, self.pipeline.transformer, self.folder.path / "exports")
            trained, weights = (self.engine.weights, "raw") if self.ema is None else (self.ema.shadow, "ema")
            path = saver.save_model(trained, weights, progress)
            say(f"export at step {progress.step}, proven with stock diffusers: {path}")
            self.folder.log("export", **progress.as_dict(), file=path.name, weights=weights)
