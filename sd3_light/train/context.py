"""What a run needs before its model is built: processes, data, settings and the weights to start from."""

from dataclasses import dataclass

import torch

from sd3_light import __version__
from sd3_light.check.run_setup import BatchSetup, run_setup
from sd3_light.checkpoint.progress import Progress
from sd3_light.checkpoint.reading import Checkpoint, open_checkpoint
from sd3_light.config import LoadedConfig, TrainConfig, batch_size_for
from sd3_light.config.cross_checks import config_warnings
from sd3_light.core.columns import named_bucket
from sd3_light.core.cost import Cost, Layout, Tokens
from sd3_light.core.registry import family_of
from sd3_light.core.start import WeightsStart
from sd3_light.cost.disk_space import DOES_NOT_FIT, RUN_REMEDY, RunSteps, compare_with_free, run_disk
from sd3_light.cost.residence import Residence
from sd3_light.cost.training_flops import training_flops
from sd3_light.data.manifest import HELD_OUT
from sd3_light.data.order import Order
from sd3_light.data.resident import ResidentCache
from sd3_light.data.shard_table import BucketShards
from sd3_light.data.stream import CachedDataset, MicroBatches
from sd3_light.engines import Launch, deepspeed
from sd3_light.engines.feed import make_order, open_cache
from sd3_light.engines.processes import ProcessGroups, start_process_group
from sd3_light.engines.torch import TorchEngine
from sd3_light.export.model_facts import ModelFacts, bucket_size, commonest_bucket
from sd3_light.formats import plural
from sd3_light.model.base_values import other_shift, unlearnt_steps
from sd3_light.runlog import info
from sd3_light.train.folder import RunFolder
from sd3_light.train.residence import TrainingProcess, place_cache
from sd3_light.train.resume import (
    Resume,
    choose_checkpoint,
    config_in_force,
    keep_position_table,
    progress_in_force,
)


@dataclass(frozen=True)
class RunContext:
    """What the parts of a run share. Some settings of ``config`` may be those of the checkpoint that it resumes from.

    ``start`` names the weights to start from, ``cost`` is that of training them, ``resident`` the cache if it is in
    memory. ``by_segment``: ranks get the samples of different shards, so that each machine reads few of them.
    """

    loaded: LoadedConfig
    config: TrainConfig
    start: WeightsStart
    cost: Cost
    launch: Launch
    device: torch.device
    by_deepspeed: bool
    folder: RunFolder
    groups: ProcessGroups
    data: CachedDataset
    order: Order
    resumed: Checkpoint | None
    resident: ResidentCache | None
    by_segment: bool

    @property
    def stages(self) -> int:
        """The number of processes that hold one model together."""
        return self.config.pipeline_stages

    @property
    def bucket(self) -> BucketShards:
        """The commonest bucket, whose size sample images have."""
        return commonest_bucket(self.data.buckets, self.order)

    @property
    def model_facts(self) -> ModelFacts:
        """What checkpoints store about the model."""
        step = self.start.size.position_step if self.start.source is None else None
        model = self.config.model
        return ModelFacts(
            position_step=step,
            trained_at=bucket_size(self.bucket),
            shift=model.shift,
            flux_shift=model.flux_shift,
            sqrt_shift=model.sqrt_shift,
            uncond_text=model.uncond_text or "zero",
        )

    @property
    def residence(self) -> Residence:
        """Where the cache is."""
        return "stream" if self.resident is None else "device" if self.resident.device.type == "cuda" else "host"

    @property
    def share(self) -> Launch:
        """The rank and world of this process among those that get different data."""
        return self.launch.data_launch(self.stages)

    @property
    def largest_flops(self) -> int:
        """The FLOPs of the largest micro-batch, with padded text."""
        cost = self.cost.unrouted
        sizes = self.config.micro_batch_size_per_gpu
        shapes = {(bucket.resolution, named_bucket(bucket.bucket).frames) for bucket in self.data.buckets}
        flops = []
        for sides, frames in shapes:
            tokens = Tokens(cost.image_tokens(*sides) * cost.latent_frames(frames), cost.longest_text)
            flops.append(batch_size_for(sizes, sides) * training_flops(cost, tokens).value)
        return max(flops)

    def announce(self, trains: str, progress: Progress, total: int) -> None:
        """Open the log; print and log what is about to be trained."""
        order = self.order
        world_size = self.launch.world_size
        padding = sum(bucket.padding for bucket in order.buckets)
        if self.resumed is not None:
            info(f"resumed from {self.resumed.path} (step {progress.step} of {total})")
        if progress.step >= total:
            info(f"already finished: step {progress.step} of {total}; raise max_steps or epochs to train more")
        else:
            repeats = f" (padding repeats {plural(padding, 'sample')} per epoch)" if padding else ""
            info(
                f"train: {trains}; steps {progress.step} to {total}, {order.steps_per_epoch} per epoch in "
                f"{plural(len(order.buckets), 'bucket')}{repeats}, {plural(world_size, 'process')}"
            )
            if (held := self.data.manifest.counts.get(HELD_OUT)) is not None and self.data.side == "train":
                total_images = self.data.manifest.counts["pictures"]
                info(f"validation: {held:,} of {total_images:,} images are held out; they are never trained on")
            for warning in config_warnings(self.config, total, family_of(self.config.model).no_guidance(self.start)):
                info(f"warning: {warning}")
            if self.resumed is None and (other := other_shift(self.config.model)):
                info(f"shift: {other}")
            if sentence := unlearnt_steps(self.config):
                info(f"warning: {sentence}")
            if self.launch.is_main:
                self._warn_of_full_disk(total)
        self.folder.begin(self.config)
        device = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "CPU"
        facts = {"total": total, "steps_per_epoch": order.steps_per_epoch, "world": world_size, "device": device}
        engine_name = deepspeed.engine_name if self.by_deepspeed else TorchEngine.engine_name
        facts |= {"trains": trains, "engine": engine_name(self.config, self.launch), "cache": self.residence}
        facts["version"] = __version__
        checkpoint = {} if self.resumed is None else {"checkpoint": self.resumed.path.name}
        self.folder.log("resume" if checkpoint else "start", **progress.as_dict(), **facts, **checkpoint)
        self._report_dropped()

    def _warn_of_full_disk(self, total: int) -> None:
        """Print that the run's saves do not fit on the disk, with the numbers of `check`."""
        order = self.order
        config = self.config
        batches = BatchSetup(Tokens(0, 0), 0, config.gradient_accumulation_steps)
        setup = run_setup(config, self.cost, Layout(self.stages, self.by_deepspeed), batches)
        samples = max(bucket.batch for bucket in order.buckets)
        needed, text = run_disk(config, setup, RunSteps(total, order.steps_per_epoch, samples))
        verdict = compare_with_free(needed, self.folder.path, text, RUN_REMEDY)
        if verdict.startswith(DOES_NOT_FIT):
            info(f"warning: disk, run: {verdict}")

    def _report_dropped(self) -> None:
        """Print and log the buckets that are left out because they are smaller than a batch."""
        if self.order.dropped:
            dropped = [self.data.buckets[number] for number in self.order.dropped]
            buckets = {bucket.bucket: bucket.size for bucket in dropped}
            names = ", ".join(f"{name} ({size} samples)" for name, size in buckets.items())
            info(f"small_buckets = 'drop' leaves out {sum(buckets.values())} samples in smaller buckets: {names}")
            self.folder.log("dropped", buckets=buckets)


def open_context(
    loaded: LoadedConfig,
    start: WeightsStart,
    launch: Launch,
    folder: RunFolder,
    resume: Resume | None,
    by_deepspeed: bool,
) -> RunContext:
    """Open the cache, join the process group, and decide which checkpoint the run resumes from."""
    train = loaded.train
    device = launch.device()
    reads_data = launch.reads_data(train.pipeline_stages)
    data = open_cache(loaded.dataset, train, launch, "train" if loaded.dataset.is_divided else "all")
    all_write = deepspeed.all_write(train) if by_deepspeed else train.parallel == "fsdp2"
    groups = start_process_group(launch, device, train.dist_timeout_sec, all_write)
    path = groups.decide_on_rank_0(lambda: choose_checkpoint(folder.path, resume))
    resumed = None if path is None else open_checkpoint(path)
    start = keep_position_table(start, resumed)
    config = config_in_force(train, start, resumed, resume)
    share = launch.data_launch(config.pipeline_stages)
    order = make_order(data, loaded, share)
    by_segment: bool = groups.decide_on_rank_0(lambda: launch.spans_machines)
    cost = family_of(config.model).cost(start, config.model)
    process = TrainingProcess(launch, device, groups, by_deepspeed)
    is_drawn = config.reward is not None  # the run reads no image of its dataset
    resident = None if is_drawn else place_cache(data, order, config, cost, process)
    if reads_data and resident is None and not is_drawn:
        micro = config.gradient_accumulation_steps
        position = progress_in_force(resumed, resume).position
        MicroBatches(data, order, share.rank, share.world_size, micro, by_segment).prefetch_step(position)
    return RunContext(
        loaded=loaded,
        config=config,
        start=start,
        cost=cost,
        launch=launch,
        device=device,
        by_deepspeed=by_deepspeed,
        folder=folder,
        groups=groups,
        data=data,
        order=order,
        resumed=resumed,
        resident=resident,
        by_segment=by_segment,
    )
