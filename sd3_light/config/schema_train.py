"""The top level of the train TOML."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le
from pydantic import BeforeValidator, Field, Strict

from sd3_light.config.base import (
    Allowed,
    Count,
    CountOrZero,
    Dtype,
    Flag,
    FlagOrAuto,
    FlagOrSelective,
    Name,
    NotNegative,
    Positive,
    Table,
    Text,
    TomlLocation,
    TomlPath,
    bad,
)
from sd3_light.config.schema_tables import (
    AdapterConfig,
    EmaConfig,
    ModelConfig,
    MonitoringConfig,
    OptimizerConfig,
    SamplingConfig,
)

Resolution = tuple[int, int]
BatchSize = int | tuple[tuple[Resolution, int], ...]
_BATCH_WORDS = "a whole number >= 1, or [[resolution, size], ...] with a side or [width, height] as resolution"


def is_count(value: Any) -> bool:
    """Whether a TOML value is a whole number above zero."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def as_resolution(value: Any) -> Resolution | None:
    """(width, height) from a side or from [width, height]; None from anything else."""
    if is_count(value):
        return (value, value)
    if isinstance(value, list | tuple) and len(value) == 2 and all(is_count(side) for side in value):
        return (value[0], value[1])
    return None


def parse_batch_size(value: Any) -> BatchSize:
    """One size for all, or ((width, height), size) pairs with each resolution once."""
    if is_count(value):
        return int(value)
    if not isinstance(value, list | tuple) or not value:
        raise bad("not a batch size")
    pairs: dict[Resolution, int] = {}
    for item in value:
        pair: Sequence[Any] = item if isinstance(item, list | tuple) and len(item) == 2 else (None, None)
        resolution = as_resolution(pair[0])
        if resolution is None or not is_count(pair[1]):
            raise bad("not a list of [resolution, size] pairs")
        if resolution in pairs:
            raise bad(f"names the resolution {pair[0]} twice")
        pairs[resolution] = int(pair[1])
    return tuple(pairs.items())


def batch_size_for(batch_size: BatchSize, resolution: Resolution) -> int:
    """The micro batch of a resolution (width, height), as the dataset TOML names it."""
    return batch_size if isinstance(batch_size, int) else dict(batch_size)[resolution]


def named_entry(value: Any) -> Any:
    """A bare path is an eval dataset named after its file."""
    return {"name": Path(value).stem, "config": value} if isinstance(value, str | Path) else value


def _train_batch(data: dict[str, Any]) -> BatchSize:
    batch_size: BatchSize = data["micro_batch_size_per_gpu"]
    return batch_size


Batch = Annotated[BatchSize, BeforeValidator(parse_batch_size), Allowed(_BATCH_WORDS)]


class EvalDataset(Table):
    """One entry of `eval_datasets`."""

    name: Name = Field(description="Name of its curves.")
    config: TomlPath = Field(description="Its dataset TOML.")


EvalDatasetRef = Annotated[EvalDataset, BeforeValidator(named_entry), Allowed("a path or {name = ..., config = path}")]


class TrainConfig(Table):
    """The train TOML. Relative paths are taken from the folder of the file."""

    output_dir: TomlPath = Field(description="The run's folder: config, log, samples, checkpoints and exports.")
    dataset: TomlPath = Field(description="The dataset TOML.")
    eval_datasets: tuple[EvalDatasetRef, ...] = Field(
        default=(),
        description="Dataset TOMLs of the validation loss: paths (named by their stem), or {name, config} tables.",
    )
    cache_dir: TomlLocation | None = Field(
        default=None,
        description="Folder of the cache, or the URL of a finished one (`s3://...`, `https://...`, whatever fsspec "
        "knows; it is read, not built); eval sets get `<cache_dir>-eval-<name>`. Absent: `<dataset TOML's stem>.cache` "
        "beside each dataset TOML.",
    )
    seed: Annotated[int, Strict(), Ge(0), Le(2**63 - 1)] = Field(default=0, description="Seed of everything random.")

    epochs: Count | None = Field(default=None, description="Train for this many epochs; this or `max_steps` is needed.")
    max_steps: Count | None = Field(default=None, description="Stop after this many optimizer steps.")
    micro_batch_size_per_gpu: Batch = Field(default=1, description="Samples of one forward pass on one GPU.")
    gradient_accumulation_steps: Count = Field(default=1, description="Micro-batches an optimizer step.")
    eval_micro_batch_size_per_gpu: Batch = Field(
        default_factory=_train_batch,
        description="The same in evaluation.",
        json_schema_extra={"default": "`micro_batch_size_per_gpu`"},
    )
    eval_gradient_accumulation_steps: Count = Field(
        default=1, description="Micro-batches an evaluation step (pipelines)."
    )
    gradient_clipping: NotNegative = Field(default=1.0, description="Largest gradient norm; 0 turns clipping off.")
    max_nonfinite_steps: CountOrZero = Field(
        default=10,
        description="Most steps in a row whose loss or gradient may be not finite; they are skipped, and one more "
        "stops the run (0: the first one does).",
    )
    freeze: tuple[Text, ...] = Field(
        default=(), description="Patterns (shell style, on the denoiser's parameter names) of what does not train."
    )

    warmup_steps: CountOrZero = Field(default=0, description="Steps over which the learning rate rises from 0.")
    lr_scheduler: Literal["constant", "linear", "cosine", "step"] = Field(
        default="constant",
        description="Course of the learning rate after warm-up; `linear` and `cosine` end at 0.",
    )
    lr_step_size: Count | None = Field(default=None, description="`step` only: steps between two falls.")
    lr_step_gamma: Annotated[float, Strict(), Gt(0), Le(1)] | None = Field(
        default=None, description="`step` only: factor of each fall."
    )
    force_constant_lr: Positive | None = Field(
        default=None,
        description="A learning rate that holds from here on, whatever the schedule says (for resumed runs).",
    )
    pseudo_huber_c: Positive | None = Field(
        default=None, description="Pseudo-Huber loss with this c. Absent: mean squared error."
    )

    parallel: Literal["ddp", "fsdp2"] = Field(default="ddp", description="How the torch engine uses many processes.")
    zero_stage: Annotated[int, Strict(), Ge(0), Le(3)] = Field(
        default=1, description="ZeRO stage of the DeepSpeed engine; with `pipeline_stages` above 1 it must be 1."
    )
    pipeline_stages: Count = Field(default=1, description="Pipeline stages of the DeepSpeed engine.")
    partition_method: Literal["parameters", "uniform", "manual"] = Field(
        default="parameters", description="How layers are dealt to stages."
    )
    partition_split: tuple[Count, ...] = Field(
        default=(),
        description="`manual` only: index of the first layer of each stage after the first (0 is the embedding).",
    )
    activation_checkpointing: FlagOrSelective = Field(
        default=False,
        description="Compute activations again in the backward pass: less memory. true: whole blocks, a third more "
        "arithmetic; selective: all but what matrix products and attention made, a few percent more time.",
    )
    fast: FlagOrAuto = Field(
        default="auto",
        description="Run the joint blocks with hand-written GPU kernels: same weights and mathematics, faster. auto: "
        "on a GPU in bfloat16, unless `compile`, an adapter, sharded weights, pipeline stages or SD3.5's second "
        "attention rule them out; true: report an error where they are not available.",
    )
    fp8: Flag = Field(
        default=False,
        description="Experimental: the fast blocks multiply rows with weights in 8 bits (e4m3, a scale a row), forward "
        "and for gradients of rows: faster, rounded more coarsely. Gradients of weights, master weights and what is "
        "saved stay as they are. Needs bfloat16 and a GPU that knows fp8 (Ada, Hopper, or newer).",
    )
    compile: Flag = Field(default=False, description="Compile the stock blocks with torch.compile.")
    dist_timeout_sec: Positive = Field(
        default=600.0, description="Seconds a rank waits for the others in a collective."
    )

    save_every_n_steps: Count | None = Field(default=None, description="Optimizer steps between two exports.")
    save_every_n_epochs: Count | None = Field(default=None, description="Epochs between two exports.")
    save_every_n_examples: Count | None = Field(default=None, description="Samples seen between two exports.")
    save_dtype: Dtype = Field(default="bfloat16", description="Type of exported weights.")
    keep_last_n_exports: CountOrZero = Field(default=0, description="Older exports are deleted; 0 keeps all.")
    checkpoint_every_n_steps: Count | None = Field(default=None, description="Optimizer steps between two checkpoints.")
    checkpoint_every_n_epochs: Count | None = Field(default=None, description="Epochs between two checkpoints.")
    checkpoint_every_n_minutes: Positive | None = Field(default=None, description="Minutes between two checkpoints.")
    keep_last_n_checkpoints: CountOrZero = Field(default=3, description="Older checkpoints are deleted; 0 keeps all.")

    eval_every_n_steps: Count | None = Field(default=None, description="Optimizer steps between two evaluations.")
    eval_every_n_epochs: Count | None = Field(default=None, description="Epochs between two evaluations.")
    eval_every_n_examples: Count | None = Field(default=None, description="Samples seen between two evaluations.")
    eval_before_first_step: Flag = Field(default=False, description="Evaluate before training too.")

    logging_steps: Count = Field(
        default=1, description="Optimizer steps between two records of log.jsonl and the trackers."
    )
    steps_per_print: Count = Field(default=10, description="Optimizer steps between two lines on the console.")
    x_axis_examples: Flag = Field(default=False, description="Trackers count samples seen, not steps.")

    caching_batch_size: Count = Field(default=32, description="Samples the encoders take at once while caching.")
    caching_num_workers: CountOrZero = Field(
        default=4, description="Processes that decode images for one caching rank; 0 decodes in the rank itself."
    )
    caching_device: Literal["auto", "cuda", "cpu"] = Field(
        default="auto", description="Where the encoders run while caching."
    )
    map_num_proc: Count | None = Field(
        default=None, description="Processes of a rank that read new source files. Absent: `caching_num_workers`."
    )
    num_dataloader_workers: CountOrZero = Field(
        default=2, description="Loader processes a rank; 0 loads in the trainer itself."
    )
    dataloader_prefetch_per_worker: Count = Field(
        default=1, description="Batches each worker prepares ahead. Other spelling: `prefetch_batches_per_worker`."
    )
    sd3_streaming_dataset: Flag = Field(
        default=True, description="Read samples from shards as needed; false: all in host memory."
    )
    sd3_shard_size: Count = Field(
        default=512, description="Most samples of a shard; shards hold a quarter of it or more, but for the last ones."
    )
    shuffle_window: Count = Field(
        default=16, description="Shards whose samples are mixed with each other; more is more random and less local."
    )
    small_buckets: Literal["pad", "drop"] = Field(
        default="pad",
        description="A bucket with fewer samples than a global batch: its samples repeat to fill one, or are left out.",
    )
    stream_cache_dir: TomlPath | None = Field(
        default=None,
        description="Local folder for shards of a remote `cache_dir`. Absent: one in the system's temp folder.",
    )
    stream_cache_gb: Positive = Field(
        default=100.0, description="Most disk space that `stream_cache_dir` takes, in GB."
    )
    sd3_manifest_timeout_sec: Positive = Field(
        default=3600.0, description="Seconds a rank polls for the cache's manifest."
    )

    model: ModelConfig = Field(description="The denoiser.")
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig, description="The optimizer.")
    ema: EmaConfig = Field(default_factory=EmaConfig, description="Running averages of the weights.")
    adapter: AdapterConfig | None = Field(default=None, description="Train a LoRA. Absent: train the weights.")
    sampling: SamplingConfig = Field(default_factory=SamplingConfig, description="Images drawn while training.")
    monitoring: MonitoringConfig = Field(default_factory=MonitoringConfig, description="Trackers.")


ALIASES = {"prefetch_batches_per_worker": "dataloader_prefetch_per_worker"}
