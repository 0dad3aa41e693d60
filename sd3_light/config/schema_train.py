"""The top level of the train TOML."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le
from pydantic import BeforeValidator, Field, Strict

from sd3_light.config.base import (
    Allowed,
    Count,
    CountOrAll,
    CountOrZero,
    DtypeName,
    Flag,
    FlagOrAuto,
    FlagOrLevel,
    Name,
    NotNegative,
    Positive,
    Resolution,
    StepsOrShare,
    Table,
    TomlLocation,
    TomlPath,
    TomlString,
    as_resolution,
    invalid_value,
    is_count,
)
from sd3_light.config.schema_objective import SPELLINGS, FlowTerm, ObjectiveConfig, TextReconTerm
from sd3_light.config.schema_reward import RewardConfig, RewardTerms
from sd3_light.config.schema_tables import (
    AdapterConfig,
    EmaConfig,
    MetricsConfig,
    ModelConfig,
    MonitoringConfig,
    OptimizerConfig,
    SamplingConfig,
)

BatchSize = int | tuple[tuple[Resolution, int], ...]
_BATCH_SIZE_RULE = "an integer >= 1, or [[resolution, size], ...] with a side or [width, height] as resolution"


def parse_batch_size(value: Any) -> BatchSize:
    """Return one size for all resolutions, or ((width, height), size) pairs with unique resolutions."""
    if is_count(value):
        return int(value)
    if not isinstance(value, list | tuple) or not value:
        raise invalid_value("not a batch size")
    pairs: dict[Resolution, int] = {}
    for item in value:
        pair: Sequence[Any] = item if isinstance(item, list | tuple) and len(item) == 2 else (None, None)
        resolution = as_resolution(pair[0])
        if resolution is None or not is_count(pair[1]):
            raise invalid_value("not a list of [resolution, size] pairs")
        if resolution in pairs:
            raise invalid_value(f"contains the resolution {pair[0]} twice")
        pairs[resolution] = int(pair[1])
    return tuple(pairs.items())


def batch_size_for(batch_size: BatchSize, resolution: Resolution) -> int:
    """Return the micro-batch size of a resolution (width, height) of the dataset TOML."""
    return batch_size if isinstance(batch_size, int) else dict(batch_size)[resolution]


def named_entry(value: Any) -> Any:
    """Turn a bare path into an eval dataset entry named after its file; return anything else unchanged."""
    return {"name": Path(value).stem, "config": value} if isinstance(value, str | Path) else value


TomlBatchSize = Annotated[BatchSize, BeforeValidator(parse_batch_size), Allowed(_BATCH_SIZE_RULE)]


class EvalDataset(Table):
    """One entry of `eval_datasets`."""

    name: Name
    """Name of its curves."""
    config: TomlPath
    """Its dataset TOML."""


EvalDatasetRef = Annotated[EvalDataset, BeforeValidator(named_entry), Allowed("a path or {name = ..., config = path}")]


class TrainConfig(Table):
    """The train TOML. Relative paths start at the folder of the file."""

    output_dir: TomlPath
    """Run folder, for the config, log, samples, checkpoints and exports."""
    dataset: TomlPath
    """Path of the dataset TOML."""
    eval_datasets: tuple[EvalDatasetRef, ...] = ()
    """Dataset TOMLs for the validation loss: paths (named after the file), or {name, config} tables."""
    cache_dir: TomlLocation | None = None
    """Folder of the cache, or its URL (`s3://...`, `gs://...`, any fsspec protocol): `sd3-light cache` builds it there,
    training reads it. Eval sets use `<cache_dir>-eval-<name>`. Absent: `<name of the dataset TOML>.cache` next to each
    dataset TOML."""
    seed: Annotated[int, Strict(), Ge(0), Le(2**63 - 1)] = 0
    """Seed of all randomness."""

    epochs: Count | None = None
    """Train for this many epochs. Either this or `max_steps` is required."""
    max_steps: Count | None = None
    """Stop after this many optimizer steps."""
    micro_batch_size_per_gpu: TomlBatchSize = 1
    """Samples per forward pass on one GPU; one number, or one per resolution."""
    gradient_accumulation_steps: Count = 1
    """Micro-batches per optimizer step."""
    eval_micro_batch_size_per_gpu: TomlBatchSize = Field(
        default_factory=lambda data: data["micro_batch_size_per_gpu"],
        json_schema_extra={"default": "`micro_batch_size_per_gpu`"},
    )
    """Samples per forward pass on one GPU in evaluation."""
    eval_gradient_accumulation_steps: Count = 1
    """Micro-batches per evaluation step (pipelines only)."""
    gradient_clipping: NotNegative = 1.0
    """Maximum gradient norm; 0 disables clipping."""
    gradient_release: Flag = False
    """Update weights during the backward pass, as soon as their gradients are known, and free these: all gradients
    never exist at once. Needs `gradient_clipping = 0` (clipping by the global norm needs all of them), one micro-batch
    per step, and one process. After a gradient that is not finite the rest of the step is skipped; layers whose
    gradients were known before keep their update."""
    max_nonfinite_steps: CountOrZero = 10
    """Number of consecutive steps with a non-finite loss or gradient to skip; one more stops the run. 0: the first such
    step stops it."""
    freeze: tuple[TomlString, ...] = ()
    """Shell-style patterns of the denoiser's parameter names that are not trained."""

    warmup_steps: CountOrZero = 0
    """Optimizer steps over which the learning rate rises from 0."""
    lr_scheduler: Literal["constant", "linear", "cosine", "step"] = "constant"
    """Learning rate schedule after warm-up; `linear` and `cosine` end at 0."""
    lr_step_size: Count | None = None
    """`step` only: optimizer steps between decays."""
    lr_step_gamma: Annotated[float, Strict(), Gt(0), Le(1)] | None = None
    """`step` only: factor of each decay."""
    cooldown_steps: StepsOrShare = 0
    """`constant` and `step` only: the last optimizer steps of the run, over which the learning rate decays to 0; 0.2 is
    the last fifth. Taken from the config on resume, so that a short run can branch off any checkpoint."""
    cooldown_shape: Literal["linear", "sqrt"] = "linear"
    """Decay in the cool-down: `linear`, or `sqrt` (1 minus the square root of its share done), which drops faster."""
    force_constant_lr: Positive | None = None
    """Constant learning rate that overrides the schedule (for resumed runs)."""
    pseudo_huber_c: Positive | None = None
    """Pseudo-Huber loss with this c. Absent: mean squared error."""

    parallel: Literal["ddp", "fsdp2"] = "ddp"
    """How the torch engine uses several processes."""
    zero_stage: Annotated[int, Strict(), Ge(0), Le(3)] = 1
    """ZeRO stage of the DeepSpeed engine; must be 1 if `pipeline_stages` is above 1."""
    pipeline_stages: Count = 1
    """Pipeline stages of the DeepSpeed engine."""
    partition_method: Literal["parameters", "uniform", "manual"] = "parameters"
    """How layers are assigned to pipeline stages."""
    partition_split: tuple[Count, ...] = ()
    """`manual` only: index of the first layer of each stage after the first (0 is the embedding)."""
    activation_checkpointing: FlagOrLevel = False
    """Recompute activations in the backward pass to save memory. true: whole blocks, a third more arithmetic. A number
    between 0 and 1: that share of the blocks, the first ones, so that a run uses the memory that there is. selective:
    everything except matrix products and attention, a few percent more time, not for compiled blocks. host: whole
    blocks, whose inputs are in pinned host memory until then; for long videos, whose inputs are a large part of the
    memory."""
    swap_blocks: CountOrAll = 0
    """Blocks of the denoiser whose weights are in host memory, evenly spread: the frozen ones under an adapter, or with
    `gradient_release` those that train, with their optimizer state and averages. Each block is copied to the GPU ahead
    of its use, into one of two buffers; trained ones are updated there and written back. The results do not change.
    From 3 on it saves memory; more than there are means all of them."""
    fast: FlagOrAuto = "auto"
    """Run the joint blocks with hand-written GPU kernels: same weights and mathematics, faster. auto: on a GPU in
    bfloat16, unless `compile`, an adapter, ZeRO-3, pipeline stages or SD3.5's second attention rule them out, or the
    kernels fail their self-check on this GPU; true: report an error where they are not available."""
    fp8: Flag = False
    """The fast blocks multiply activations by weights in FP8 (e4m3, one scale per row), in the forward pass and for
    activation gradients: 1.2 times the speed, for a loss about 2% higher after 2,000 steps. Weight gradients, master
    weights and saved files are unchanged. Needs bfloat16 and a GPU with FP8 support (Ada, Hopper or newer)."""
    compile: FlagOrAuto = "auto"
    """Compile the stock blocks with torch.compile. auto: on a GPU with a compiler, where no hand-written kernels run
    and the run is long enough to pay for it, which code of an earlier run makes cheaper; choice and time are printed.
    true: also where hand-written kernels could run, in short runs and on a CPU. The compiled code is kept for later
    runs."""
    cuda_graphs: FlagOrAuto = "auto"
    """Record forward and backward pass as a CUDA graph per bucket shape and replay it: the same results with one launch
    instead of hundreds of kernels. Lengths of real text are rounded up. For one process, without dropout in an adapter;
    captions of Krea 2 and PRX have too many lengths. auto: if a step is bound by launches; true: at any size."""
    dist_timeout_sec: Positive = 600.0
    """Timeout of collectives, in seconds."""

    save_every_n_steps: Count | None = None
    """Optimizer steps between exports."""
    save_every_n_epochs: Count | None = None
    """Epochs between exports."""
    save_every_n_examples: Count | None = None
    """Samples between exports."""
    save_dtype: DtypeName = "bfloat16"
    """Dtype of exported weights."""
    keep_last_n_exports: CountOrZero = 0
    """Number of exports to keep; older ones are deleted, except the best by validation loss and by `[metrics]`. 0 keeps
    all."""
    checkpoint_every_n_steps: Count | None = None
    """Optimizer steps between checkpoints."""
    checkpoint_every_n_epochs: Count | None = None
    """Epochs between checkpoints."""
    checkpoint_every_n_minutes: Positive | None = None
    """Minutes between checkpoints."""
    keep_last_n_checkpoints: CountOrZero = 3
    """Number of checkpoints to keep; older ones are deleted. 0 keeps all."""
    stop_if_first_save_fails: Flag = True
    """Stop if a save cannot be written and the run has no checkpoint, so that it could not be resumed. false: train on,
    as after later failures; the next save may succeed."""

    eval_every_n_steps: Count | None = None
    """Optimizer steps between evaluations; the last step is evaluated too."""
    eval_every_n_epochs: Count | None = None
    """Epochs between evaluations."""
    eval_every_n_examples: Count | None = None
    """Samples between evaluations."""
    eval_before_first_step: Flag = False
    """Also evaluate before the first step."""
    eval_at_fixed_t: Flag = False
    """Also evaluate at t = 0.1 to 0.9, beside the quantiles of the run's own distribution of t: comparable between runs
    with different distributions and shifts. Doubles the time of an evaluation."""

    logging_steps: Count = 1
    """Optimizer steps between records in log.jsonl and the trackers."""
    steps_per_print: Count = 10
    """Optimizer steps between lines on the console."""
    x_axis_examples: Flag = False
    """Use samples instead of steps as the x axis of the trackers."""

    caching_batch_size: Count = 32
    """Batch size of the encoders while caching."""
    caching_num_workers: CountOrZero = 4
    """Image decoding processes per caching rank; 0 decodes in the rank itself."""
    caching_device: Literal["auto", "cuda", "cpu"] = "auto"
    """Device of the encoders while caching."""
    map_num_proc: Count | None = None
    """Processes per rank that read new source files. Absent: `caching_num_workers`."""
    num_dataloader_workers: CountOrZero = 2
    """Loader processes per rank; 0 loads in the training process."""
    dataloader_prefetch_per_worker: Count = 1
    """Batches that each loader process prefetches. Also spelled `prefetch_batches_per_worker`."""
    cache_residence: Literal["auto", "stream", "host", "device"] = "auto"
    """Where the training cache is during a run. `stream`: in its shards, read as needed. `host`: all of it in host
    memory. `device`: all of it in GPU memory. `host` and `device` hold a copy in every process. `auto`: on GPUs
    `device` if it fits beside training, else `host` if it fits into half of the free memory, else `stream`."""
    sd3_streaming_dataset: Flag = True
    """false: the same as `cache_residence = "host"`."""
    sd3_shard_size: Count = 512
    """Maximum samples per shard; all but the last shards hold at least a quarter of it."""
    shuffle_window: Count = 16
    """Number of shards whose samples are shuffled together; more is more random and less local."""
    small_buckets: Literal["pad", "drop"] = "pad"
    """What happens to a bucket with fewer samples than a global batch. `pad`: its samples repeat to fill one. `drop`:
    they are skipped."""
    stream_cache_dir: TomlPath | None = None
    """Local folder for the shards of a remote `cache_dir`. Absent: a folder in the system's temp folder."""
    stream_cache_gb: Positive = 100.0
    """Maximum size of `stream_cache_dir`, in GB."""
    sd3_manifest_timeout_sec: Positive = 3600.0
    """How long a rank polls for the manifest of the cache, in seconds."""

    model: ModelConfig
    """The denoiser."""
    objective: ObjectiveConfig | None = None
    """The terms of the loss. Absent: flow matching with `pseudo_huber_c`, and the terms that [model] names."""
    reward: RewardConfig | None = None
    """Images that the run draws and scores, in place of the dataset. Absent: train on the dataset."""
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    """The optimizer."""
    ema: EmaConfig = Field(default_factory=EmaConfig)
    """Moving averages of the weights."""
    adapter: AdapterConfig | None = None
    """Train an adapter. Absent: train the weights."""
    sampling: SamplingConfig = Field(default_factory=SamplingConfig)
    """Sample images during training."""
    metrics: MetricsConfig | None = None
    """Measurements against true images. Absent: none."""
    monitoring: MonitoringConfig = Field(default_factory=MonitoringConfig)
    """Trackers."""

    @property
    def terms(self) -> ObjectiveConfig:
        """The terms of the loss, in either spelling."""
        if self.reward is not None:
            return RewardTerms(reward=self.reward)
        if self.objective is not None:
            return self.objective
        gamma = self.model.text_recon_gamma
        recon = TextReconTerm(weight=gamma, target_layer=self.model.text_recon_target_layer) if gamma else None
        flow = FlowTerm(pseudo_huber_c=self.pseudo_huber_c)
        return ObjectiveConfig(flow=flow, text_recon=recon, layer_sync=self.model.layer_sync)

    def spelled(self, key: str) -> str:
        """Return a key of the loss as this config spells it, given its spelling outside of [objective]."""
        return key if self.objective is None else SPELLINGS[key]

    @property
    def residence(self) -> Literal["auto", "stream", "host", "device"]:
        """Where the training cache is during a run, by both keys."""
        if self.cache_residence in ("auto", "stream") and not self.sd3_streaming_dataset:
            return "host"
        return self.cache_residence

    @property
    def has_evaluations(self) -> bool:
        """Whether evaluation sets are named, or an interval at which a part of the dataset is evaluated."""
        intervals = (self.eval_every_n_steps, self.eval_every_n_epochs, self.eval_every_n_examples)
        return bool(self.eval_datasets) or any(intervals)

    def length(self, steps_per_epoch: int) -> int:
        """Return the steps of a whole run: the lower of `max_steps` and those of its epochs."""
        limits = (self.max_steps, None if self.epochs is None else self.epochs * steps_per_epoch)
        return min(limit for limit in limits if limit is not None)


ALIASES = {"prefetch_batches_per_worker": "dataloader_prefetch_per_worker"}
