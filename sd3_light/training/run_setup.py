"""The training setup of a config, from which its GPU memory follows; `check` and training share it."""

from sd3_light.budget.flops import Tokens, training_flops
from sd3_light.budget.graph_choice import MAX_GRAPHS, why_no_graphs
from sd3_light.budget.partition import stage_bounds
from sd3_light.budget.training_setup import TrainingSetup
from sd3_light.config import ModelSize, TrainConfig
from sd3_light.model.fast.choice import why_stock_by_config
from sd3_light.model.linears import adapter_layer_parameters
from sd3_light.model.pipeline_folder import stored_weights


def run_setup(
    train: TrainConfig,
    size: ModelSize,
    tokens: Tokens,
    micro_batch: int,
    world: int,
    by_deepspeed: bool,
    *,
    accumulation: int,
    shapes: int = 1,
    cache: int = 0,
) -> TrainingSetup:
    """Return the setup of a run on ``world`` GPUs, for micro-batches of one kind.

    ``shapes`` counts the shapes of its micro-batches, ``cache`` the bytes of the cache in GPU memory.
    """
    draws_samples = bool(train.sampling.images) or train.metrics is not None
    adapter = None if train.adapter is None else adapter_layer_parameters(size, train.adapter)
    weights = size.layer_parameters() if adapter is None else adapter
    flops = micro_batch * training_flops(size, tokens).value
    vae = stored_weights(train.model.diffusers_path / "vae") if draws_samples else ()
    return TrainingSetup(
        size,
        tokens,
        micro_batch,
        ema_tracks=1 + len(train.ema.track) if train.ema.enable else 0,
        checkpointing=train.activation_checkpointing,
        compiled=train.compile,
        fast=why_stock_by_config(train, size, world, by_deepspeed) is None,
        graphs=why_no_graphs(train, size, flops, world, by_deepspeed) is None,
        graph_shapes=min(shapes, MAX_GRAPHS),
        compute_dtype=train.model.transformer_dtype,
        accumulation=accumulation,
        optimizer=train.optimizer.type,
        world=world,
        parallel=train.parallel,
        evaluates=bool(train.eval_datasets) or draws_samples,
        other_models=4 * sum(count for _, count in vae),
        cache=cache,
        adapter=adapter,
        deepspeed=by_deepspeed,
        zero=train.zero_stage,
        stages=train.pipeline_stages,
        bounds=stage_bounds(weights, train.pipeline_stages, train.partition_method, train.partition_split),
        route=train.model.route(size.num_layers),
        base_bits=16 if train.adapter is None else train.adapter.base_bits,
    )
