"""The training setup of a config, from which its GPU memory follows; `check` and training share it."""

from dataclasses import dataclass
from math import prod
from pathlib import Path

from sd3_light.config import TrainConfig
from sd3_light.core.cost import Cost, Layout, Tokens
from sd3_light.core.start import denoiser_folder
from sd3_light.cost.compile_choice import why_uncompiled
from sd3_light.cost.graph_choice import MAX_GRAPHS, REAL_TEXT_GRAPHS, why_no_graphs
from sd3_light.cost.partition import stage_bounds
from sd3_light.cost.training_flops import training_flops
from sd3_light.cost.training_setup import TrainingSetup
from sd3_light.model.folder import JUDGE, stored_weights
from sd3_light.tensor_file import open_tensors

_HEAD_BYTES = 16  # a weight of a head, its gradient and its two moments


@dataclass(frozen=True)
class BatchSetup:
    """Micro-batches of one kind: the tokens and number of their samples, and how many of them make a step.

    ``shapes`` counts the shapes of all micro-batches of the run, ``steps`` its steps, if they are known.
    """

    tokens: Tokens
    samples: int
    accumulation: int
    shapes: int = 1
    steps: int | None = None


def run_setup(train: TrainConfig, cost: Cost, layout: Layout, batches: BatchSetup, cache: int = 0) -> TrainingSetup:
    """Return the setup of a run; ``cache`` are the bytes of the cache in GPU memory."""
    draws_samples = bool(train.sampling.images) or train.metrics is not None or train.reward is not None
    terms = train.terms
    adapter = None if train.adapter is None else cost.adapter_parameters(train.adapter)
    weights = cost.layer_parameters if adapter is None else adapter
    flops = batches.samples * training_flops(cost.unrouted, batches.tokens).value
    vae = stored_weights(train.model.diffusers_path / "vae") if draws_samples else ()
    return TrainingSetup(
        cost,
        batches.tokens,
        batches.samples * terms.passes,
        ema_tracks=1 + len(train.ema.track) if train.ema.enable else 0,
        checkpointing=train.activation_checkpointing,
        compiled=why_uncompiled(train, layout, batches.steps) is None,
        fast=cost.why_stock(train, layout) is None,
        graphs=why_no_graphs(train, cost, flops, layout) is None,
        graph_shapes=min(batches.shapes * (1 if cost.text.is_padded else REAL_TEXT_GRAPHS), MAX_GRAPHS),
        compute_dtype=train.model.transformer_dtype,
        accumulation=batches.accumulation,
        optimizer=train.optimizer.type,
        world_size=layout.world_size,
        parallel=train.parallel,
        evaluates=train.has_evaluations or draws_samples or terms.teacher == "average",
        other_models=4 * sum(count for _, count in vae) + _other_bytes(train, cost),
        cache=cache,
        adapter=adapter,
        adapter_config=train.adapter,
        weight_bytes=2 if train.optimizer.weight_dtype == "bfloat16" else 4,
        release=train.gradient_release,
        deepspeed=layout.by_deepspeed,
        zero=train.zero_stage,
        stages=train.pipeline_stages,
        bounds=stage_bounds(weights, train.pipeline_stages, train.partition_method, train.partition_split),
        base_bits=16 if train.adapter is None else train.adapter.base_bits,
        swapped=train.swap_blocks,
    )


def teacher_bytes(train: TrainConfig, cost: Cost) -> int:
    """Return the bytes of a teacher's own weights on every GPU, in the compute dtype; as many as in the model stay in
    float32."""
    teacher = train.terms.teacher
    width = 4 if train.model.transformer_dtype == "float32" else 2
    kept = (4 - width) * sum(cost.float32_parameters)
    if isinstance(teacher, Path):
        return width * sum(count for _, count in stored_weights(denoiser_folder(teacher))) + kept
    is_copied = train.adapter is None and (teacher == "start" or train.terms.keeps_start)
    return width * sum(cost.layer_parameters) + kept if is_copied else 0


def _other_bytes(train: TrainConfig, cost: Cost) -> int:
    """Return the bytes of what training has beside the denoiser on every GPU."""
    heads = 0 if train.terms.alignment is None else train.terms.alignment.projector_weights(cost.width)
    own = _HEAD_BYTES * heads
    return teacher_bytes(train, cost) + _score_bytes(train) + _training_adapter_bytes(train) + own


def _training_adapter_bytes(train: TrainConfig) -> int:
    """Return the bytes of the training adapter, in the compute dtype."""
    if train.model.training_adapter is None:
        return 0
    from sd3_light.export.lora_file import adapter_file_in  # imports torch

    tensors, _ = open_tensors(adapter_file_in(train.model.training_adapter))
    width = 4 if train.model.transformer_dtype == "float32" else 2
    return width * sum(prod(tensor.shape) for tensor in tensors.values())


def _score_bytes(train: TrainConfig) -> int:
    """Return the bytes of the model that scores images, in float32; those of an installed function are not known."""
    folder = None if train.reward is None else train.reward.score
    if not isinstance(folder, Path):
        return 0
    folder = folder / JUDGE if (folder / JUDGE).is_dir() else folder
    return 4 * sum(count for _, count in stored_weights(folder))
