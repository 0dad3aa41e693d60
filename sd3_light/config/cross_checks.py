"""Checks over several keys of the train TOML. Pure; a check is skipped if one of its keys is already faulty."""

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

from sd3_light.config.base import Table, walk_tables
from sd3_light.config.faults import Fault
from sd3_light.config.optimizers import OPTIMIZERS
from sd3_light.config.schema_blocks import LayerSyncConfig, RoutingConfig, layer_sync_problem, routing_problem
from sd3_light.config.schema_objective import SPELLINGS, ObjectiveConfig, alignment_problem
from sd3_light.config.schema_reward import RewardConfig
from sd3_light.config.schema_tables import AdapterConfig, ModelConfig
from sd3_light.config.schema_train import TrainConfig
from sd3_light.config.sizes import PRETRAIN_SIZE, SIZES, chosen_size_name

_fault = partial(Fault, "")  # without a file; the caller fills it in


def _num_blocks(model: ModelConfig) -> int | None:
    """Return the number of joint blocks, or None if only the model folder has it."""
    if model.num_layers is not None:
        return model.num_layers
    if model.shape is not None:
        return model.shape.num_layers
    name = chosen_size_name(model)
    return SIZES[name].num_layers if name else None


def length(train: TrainConfig) -> Iterator[Fault]:
    """A run needs an end."""
    if train.epochs is None and train.max_steps is None:
        yield _fault("epochs", "neither epochs nor max_steps is given", hint="give one of them, so that the run ends")


def saving(train: TrainConfig) -> Iterator[Fault]:
    """A run that never saves is a mistake."""
    if not any(getattr(train, key) for key in _SAVING_KEYS):
        problem = "nothing is ever saved: no save_every_n_* and no checkpoint_every_n_*"
        hint = "give one of save_every_n_steps|epochs|examples or checkpoint_every_n_steps|epochs|minutes"
        yield _fault("save_every_n_steps", problem, hint=hint)


def text_recon(train: TrainConfig) -> Iterator[Fault]:
    """The target of the text reconstruction must come before the text stream's last output."""
    num_blocks = _num_blocks(train.model)
    if num_blocks is not None:
        yield from text_recon_faults(train, num_blocks)


def text_recon_faults(train: TrainConfig, num_blocks: int) -> Iterator[Fault]:
    """Yield the fault of the target layer in a denoiser with ``num_blocks`` blocks, if it has one."""
    term = train.terms.text_recon
    if term is not None and term.target_layer > num_blocks - 2:
        key = train.spelled("model.text_recon_target_layer")
        gamma = train.spelled("model.text_recon_gamma").removeprefix("model.").removesuffix(".weight")
        yield _fault(key, **_text_recon_problem(num_blocks, gamma), value=str(term.target_layer))


def _text_recon_problem(num_blocks: int, gamma: str) -> dict[str, str]:
    """Return why a target layer of a model with ``num_blocks`` blocks is invalid, as fields of a `Fault`."""
    if num_blocks == 1:
        problem = "the only block has no text output, so there is nothing to reconstruct"
        return {"problem": problem, "hint": f"remove {gamma}"}
    problem = (
        f"the last of the {num_blocks} blocks has no text output, so the text stream ends after block "
        f"{num_blocks - 1} and its distance to itself is always 0"
    )
    return {"problem": problem, "allowed": f"0 to {num_blocks - 2} (0: after the context embedder, k: after block k)"}


def token_keys(train: TrainConfig) -> Iterator[Fault]:
    """Routing and LayerSync name blocks that exist, in one process; position crops fit in the table."""
    model = train.model
    name = chosen_size_name(train.model) or (PRETRAIN_SIZE if train.model.shape else None)
    positions = None if name is None else SIZES[name].pos_embed_max_size
    for key, fields in token_problems(train, _num_blocks(model), positions).items():
        yield _fault(key, **fields)
    sync = train.spelled("model.layer_sync")
    for key, is_given in (("model.routing", model.routing is not None), (sync, train.terms.layer_sync is not None)):
        if is_given and train.pipeline_stages > 1:
            problem = "pipeline stages do not exchange these tokens"
            hint = "remove it, or write pipeline_stages = 1"
            yield _fault(key, problem, hint=hint)


def token_problems(train: TrainConfig, num_blocks: int | None, num_positions: int | None) -> dict[str, dict[str, str]]:
    """Return key -> fields of a `Fault`, for a denoiser with this depth and side of the position table, if known."""
    model = train.model
    sync = train.terms.layer_sync
    problems: dict[str, dict[str, str] | None] = {}
    if model.routing is not None and num_blocks is not None:
        problems["model.routing"] = routing_problem(model.routing, num_blocks)
    if model.routing is not None and model.references:
        problem = "references would skip the routed blocks"
        problems["model.references"] = {"problem": problem, "hint": "remove model.routing or model.references"}
    if sync is not None and num_blocks is not None:
        problems[train.spelled("model.layer_sync")] = layer_sync_problem(sync, num_blocks)
    if train.terms.alignment is not None and num_blocks is not None:
        problems["objective.alignment"] = alignment_problem(train.terms.alignment, num_blocks)
    side = model.position_crop_side
    if side is not None and num_positions is not None and side > num_positions:
        problem = f"the position table has {num_positions} tokens per side"
        problems["model.position_crop_side"] = {"problem": problem, "value": str(side), "hint": "write a lower number"}
    return {key: fields for key, fields in problems.items() if fields is not None}


def spellings(train: TrainConfig) -> Iterator[Fault]:
    """A term of the loss is given once: in [objective], or by the older keys."""
    if train.objective is None:
        return
    model = train.model
    values = {
        "pseudo_huber_c": train.pseudo_huber_c,
        "model.text_recon_gamma": model.text_recon_gamma or None,
        "model.text_recon_target_layer": model.text_recon_target_layer or None,
    }
    given = {key: f"{value:g}" for key, value in values.items() if value is not None}
    if model.layer_sync is not None:
        given["model.layer_sync"] = "a table"
    for key, value in given.items():
        problem = f"[objective] is given too, and lists all terms: there it is {SPELLINGS[key]}"
        yield _fault(key, problem, value, hint="keep one of the two")


def terms(train: TrainConfig) -> Iterator[Fault]:
    """One term trains the velocity, in whole models, and a teacher exists."""
    table = train.terms
    if not table.trains_prediction:
        hint = "add [objective.flow], [objective.dpo] or [objective.distill]"
        yield _fault("objective", "none of its terms trains the prediction", hint=hint)
    if table.teacher == "average" and not train.ema.enable:
        hint = 'write ema.enable = true, or teacher = "start"'
        yield _fault(table.teacher_key, "the run keeps no average", '"average"', hint=hint)
    if table.taught is not None and train.pipeline_stages > 1:
        problem = "pipeline stages run one pass and no teacher"
        yield _fault(f"objective.{table.taught[0]}", problem, hint="write pipeline_stages = 1")
    yield from _distill_faults(table)
    yield from _alignment_faults(train)


def _alignment_faults(train: TrainConfig) -> Iterator[Fault]:
    """An alignment has features to read, a block that exists, and whole models."""
    term = train.terms.alignment
    if term is None:
        return
    if term.teacher == "cache" and train.model.teacher_path is None:
        problem = "no vision model is named whose features the cache stores"
        yield _fault("objective.alignment", problem, hint='write model.teacher_path, or teacher = "average"')
    if term.teacher == "average" and train.model.routing is not None:
        problem = "the average would lack the tokens that skip its blocks"
        yield _fault("objective.alignment.teacher", problem, hint='write "cache", or remove [model.routing]')
    if term.teacher == "average" and train.terms.taught is not None:
        problem = f"[objective.{train.terms.taught[0]}] has a teacher too, and a run has one"
        yield _fault("objective.alignment.teacher", problem, hint='write "cache", or remove one of the two')
    if train.pipeline_stages > 1:
        problem = "pipeline stages train no network beside the denoiser"
        yield _fault("objective.alignment", problem, hint="write pipeline_stages = 1")


def _distill_faults(table: ObjectiveConfig) -> Iterator[Fault]:
    term = table.distill
    if term is None:
        return
    others = [f"[objective.{name}]" for name in table.tables() if name != "distill"]
    if others:
        yield _fault("objective.distill", f"trains at its own times, without {', '.join(others)}", hint="keep one term")
    if term.most_guidance is not None and term.most_guidance <= term.guidance:
        hint = "write a larger number, or leave it out"
        yield _fault("objective.distill.most_guidance", "is not above guidance", f"{term.most_guidance:g}", hint=hint)
    if term.steps is not None and term.steps > term.teacher_steps:
        hint = "write at most teacher_steps"
        yield _fault("objective.distill.steps", "the teacher takes fewer steps", str(term.steps), hint=hint)
    if term.steps is None and not term.is_guided:
        hint = "write steps, or guidance above 1"
        yield _fault("objective.distill", "saves nothing without steps and guidance", hint=hint)


def training_adapter(train: TrainConfig) -> Iterator[Fault]:
    """A training adapter is for losses towards images, in whole models."""
    if train.model.training_adapter is None:
        return
    if train.terms.teacher is not None:
        key = train.terms.teacher_key.removesuffix(".teacher")
        hint = "train with [objective.flow], or remove it"
        yield _fault("model.training_adapter", f"has no use with [{key}], which follows a teacher", hint=hint)
    if train.pipeline_stages > 1:
        hint = "write pipeline_stages = 1"
        yield _fault("model.training_adapter", "pipeline stages run the model without it", hint=hint)


def reward(train: TrainConfig) -> Iterator[Fault]:
    """Rewards are the whole loss, on images that the run draws with whole models."""
    table = train.reward
    if table is None:
        return
    model = train.model
    others = {
        "objective": train.objective is not None,
        "pseudo_huber_c": train.pseudo_huber_c is not None,
        "model.text_recon_gamma": model.text_recon_gamma != 0,
        "model.layer_sync": model.layer_sync is not None,
        "model.routing": model.routing is not None,
    }
    for key in (name for name, is_given in others.items() if is_given):
        yield _fault(key, "has no effect with [reward], which is the whole loss", hint="remove one of the two")
    if train.max_steps is None:
        hint = "write it: a run that draws its images has no epochs"
        yield _fault("max_steps", "is required with [reward]", hint=hint)
    if not isinstance(train.micro_batch_size_per_gpu, int):
        hint = "write one number"
        yield _fault("micro_batch_size_per_gpu", "the images of [reward] have one size", hint=hint)
    if train.pipeline_stages > 1:
        yield _fault("reward", "pipeline stages do not draw images in a step", hint="write pipeline_stages = 1")
    if table.kl > 0 and train.adapter is None and train.swap_blocks != 0:
        problem = "compares with the start of weights that are swapped"
        yield _fault("reward.kl", problem, f"{table.kl:g}", hint="write 0, or swap_blocks = 0")


def shape(train: TrainConfig) -> Iterator[Fault]:
    """A shape replaces the size and its depth; attention needs heads of whole groups of 8."""
    table = train.model.shape
    if table is None:
        return
    for key in ("size", "num_layers"):
        if (value := getattr(train.model, key)) is not None:
            yield _fault(f"model.{key}", "[model.shape] is given too", str(value), hint="keep one of them")
    if table.head_dim % 8:
        yield _fault("model.shape.head_dim", "not a multiple of 8", str(table.head_dim), hint="write 64")


def timesteps(train: TrainConfig) -> Iterator[Fault]:
    """At most one time shift, and no shape of the logit-normal distribution with another one."""
    yield from timestep_faults(train.model)


def timestep_faults(model: Any) -> Iterator[Fault]:
    """Yield the faults of `timesteps` in settings that have the keys `TIME_KEYS`."""
    is_set = {"shift": model.shift is not None, "flux_shift": model.flux_shift, "sqrt_shift": model.sqrt_shift}
    names = [name for name, present in is_set.items() if present]
    if len(names) > 1:
        yield _fault(f"model.{names[0]}", f"{' and '.join(names)} are given together", hint="keep one")
    for key in ("logit_mean", "uniform_share"):
        if model.timestep_sample_method == "uniform" and getattr(model, key):
            problem = 'has no effect with timestep_sample_method = "uniform"'
            hint = "remove one of them"
            yield _fault(f"model.{key}", problem, f"{getattr(model, key):g}", hint=hint)


def schedule(train: TrainConfig) -> Iterator[Fault]:
    """`step` needs its two keys; other schedules do not use them."""
    for key, value in (("lr_step_size", train.lr_step_size), ("lr_step_gamma", train.lr_step_gamma)):
        if train.lr_scheduler == "step" and value is None:
            yield _fault(key, 'is required with lr_scheduler = "step"')
        if train.lr_scheduler != "step" and value is not None:
            yield _fault(key, 'has no effect without lr_scheduler = "step"', value=str(value), hint="remove it")


def cooldown(train: TrainConfig) -> Iterator[Fault]:
    """A cool-down ends a rate that stays up, and is not longer than the run."""
    steps = train.cooldown_steps
    key = "cooldown_steps"
    if not steps:
        return
    if train.lr_scheduler in ("linear", "cosine"):
        problem = f'lr_scheduler = "{train.lr_scheduler}" decays to 0 by itself'
        hint = 'write "constant" there'
        yield _fault(key, problem, str(steps), hint=f"{hint}, or remove the cool-down")
    if train.force_constant_lr is not None:
        yield _fault(key, "has no effect with force_constant_lr", str(steps), hint="remove one of them")
    if train.max_steps is not None and steps > train.max_steps:
        yield _fault(key, "is longer than the run", str(steps), f"at most max_steps, {train.max_steps}")


def pipeline(train: TrainConfig) -> Iterator[Fault]:
    """Pipeline stages need the DeepSpeed engine with ZeRO-1."""
    stages = train.pipeline_stages
    num_blocks = _num_blocks(train.model)
    if stages == 1:
        return
    if train.zero_stage != 1:
        reason = "clips by one stage's gradients only" if train.zero_stage == 0 else "does not support pipelines"
        problem = f"with pipeline_stages = {stages} this ZeRO stage {reason}"
        hint = "or pipeline_stages = 1"
        yield _fault("zero_stage", problem, value=str(train.zero_stage), allowed="1", hint=hint)
    if train.parallel == "fsdp2":
        problem = "pipeline stages need the DeepSpeed engine, fsdp2 needs the torch engine"
        yield _fault("parallel", problem, '"fsdp2"', hint="remove parallel, or pipeline_stages = 1")
    if num_blocks is not None and stages > num_blocks + 2:
        problem = f"more stages than the {num_blocks + 2} layers (embedding, {num_blocks} blocks, output)"
        yield _fault("pipeline_stages", problem, value=str(stages), allowed=f"1 to {num_blocks + 2}")


def partition(train: TrainConfig) -> Iterator[Fault]:
    """`partition_split` cuts the list of layers into `pipeline_stages` non-empty parts."""
    split = train.partition_split
    stages = train.pipeline_stages
    num_blocks = _num_blocks(train.model)
    value = str(list(split))
    if train.partition_method != "manual":
        if split:
            hint = 'write partition_method = "manual", or remove it'
            yield _fault("partition_split", 'has no effect without partition_method = "manual"', value, hint=hint)
        return
    if len(split) != stages - 1:
        allowed = f"{stages - 1} numbers, one less than pipeline_stages"
        yield _fault("partition_split", f"cuts the layers into {len(split) + 1} parts, not {stages}", value, allowed)
    if any(a >= b for a, b in pairwise(split)):
        yield _fault("partition_split", "must increase", value)
    if num_blocks is not None and any(index >= num_blocks + 2 for index in split):
        yield _fault("partition_split", f"beyond the last of {num_blocks + 2} layers", value, f"1 to {num_blocks + 1}")


def residence(train: TrainConfig) -> Iterator[Fault]:
    """Pipeline stages take batches from the host."""
    if train.cache_residence == "device" and train.pipeline_stages > 1:
        problem = "pipeline stages take their batches from the host"
        yield _fault("cache_residence", problem, value="device", hint='write "host" or "stream"')


def blocks(train: TrainConfig) -> Iterator[Fault]:
    """Blocks run either through hand-written kernels or compiled; compiled blocks hide their operations."""
    if train.compile is True and train.fast is True:
        problem = "compile = true compiles the stock blocks, fast = true replaces them"
        yield _fault("fast", problem, "true", hint="keep one")
    if train.compile is True and train.activation_checkpointing == "selective":
        problem = "does not work with compile = true, which hides the single operations of a block"
        hint = "write true or a share of the blocks, or compile = false"
        yield _fault("activation_checkpointing", problem, '"selective"', hint=hint)
    level = train.activation_checkpointing
    if train.pipeline_stages > 1 and (level == "host" or isinstance(level, float)):
        problem = "the blocks of pipeline stages all keep their inputs, on the GPU"
        value = '"host"' if level == "host" else str(level)
        yield _fault("activation_checkpointing", problem, value, hint="write true, or pipeline_stages = 1")


def fp8(train: TrainConfig) -> Iterator[Fault]:
    """FP8 products exist only in the fast blocks with bfloat16."""
    conflicts = {
        "fast = false": train.fast is False,
        "compile = true": train.compile is True,
        "an adapter": train.adapter is not None,
        "a training adapter": train.model.training_adapter is not None,
        f"pipeline_stages = {train.pipeline_stages}": train.pipeline_stages > 1,
        "gradient_release = true": train.gradient_release,
        'optimizer.weight_dtype = "bfloat16"': train.optimizer.weight_dtype == "bfloat16",
        'transformer_dtype = "float32"': train.model.transformer_dtype != "bfloat16",
    }
    for name, is_present in conflicts.items():
        if train.fp8 and is_present:
            yield _fault("fp8", f"needs the fast blocks in bfloat16, not {name}", "true", hint="write fp8 = false")


def optimizer(train: TrainConfig) -> Iterator[Fault]:
    """An optimizer runs only in layouts that can shard its state, and only with keys that it reads."""
    name = train.optimizer.type
    record = OPTIMIZERS[name]
    problem = f"needs {record.layouts}"
    hint = 'write type = "adamw"'
    if train.parallel == "fsdp2" and not record.fsdp2:
        value = f'"{name}" with parallel = "fsdp2"'
        yield _fault("optimizer.type", problem, value, hint=f'{hint} or parallel = "ddp"')
    if train.pipeline_stages > 1 and not record.deepspeed:
        value = f'"{name}" with pipeline_stages = {train.pipeline_stages}'
        yield _fault("optimizer.type", problem, value, hint=f"{hint} or pipeline_stages = 1")
    if train.optimizer.split_modulation and name != "muon":
        problem = "only muon orthogonalises matrices"
        yield _fault("optimizer.split_modulation", problem, "true", hint='remove it, or write type = "muon"')


def release(train: TrainConfig) -> Iterator[Fault]:
    """A gradient that is released is used once, alone."""
    if not train.gradient_release:
        return
    if train.gradient_clipping:
        problem = "clipping by the global norm needs all gradients at once, which gradient_release frees one by one"
        value = f"{train.gradient_clipping:g}"
        yield _fault("gradient_clipping", problem, value, "0", "or write gradient_release = false")
    if train.gradient_accumulation_steps > 1:
        problem = "gradient_release uses the gradients of a micro-batch at once"
        hint = "write a larger micro_batch_size_per_gpu, or gradient_release = false"
        yield _fault("gradient_accumulation_steps", problem, str(train.gradient_accumulation_steps), "1", hint)
    yield from _in_chunks(train, "gradient_release", "true")


def weight_dtype(train: TrainConfig) -> Iterator[Fault]:
    """Weights in bfloat16 compute in it."""
    if train.optimizer.weight_dtype == "float32":
        return
    key = "optimizer.weight_dtype"
    if train.model.transformer_dtype != "bfloat16":
        hint = 'write model.transformer_dtype = "bfloat16"'
        yield _fault(key, "weights in bfloat16 do not compute in float32", '"bfloat16"', hint=hint)
    yield from _in_chunks(train, key, '"bfloat16"')


def _in_chunks(train: TrainConfig, key: str, value: str) -> Iterator[Fault]:
    """Yield why weights cannot be updated one after another, as a key requires."""
    name = train.optimizer.type
    for conflicts, problem in (
        (train.adapter is not None, "an adapter is small: its weights stay float32 and its gradients together"),
        (train.parallel == "fsdp2", 'parallel = "fsdp2" shards weights, and this needs one process'),
        (train.pipeline_stages > 1, "pipeline stages are several processes, and this needs one"),
        (not OPTIMIZERS[name].in_chunks, f'optimizer.type = "{name}" updates all weights together'),
    ):
        if conflicts:
            yield _fault(key, problem, value, hint="remove one of them")


def one_process_problem(config: TrainConfig, world_size: int, by_deepspeed: bool) -> str | None:
    """Return why this launch cannot train a config whose weights are updated one after another, or None if it can."""
    keys = {
        "gradient_release = true": config.gradient_release,
        'optimizer.weight_dtype = "bfloat16"': config.optimizer.weight_dtype == "bfloat16",
    }
    for key, is_set in keys.items():
        if is_set and by_deepspeed:
            return f"{key} needs the torch engine; start without --deepspeed, or remove it"
        if is_set and world_size > 1:
            return f'{key} needs one process, not {world_size}; remove it and write parallel = "fsdp2", or start one'
    return None


def ema(train: TrainConfig) -> Iterator[Fault]:
    """Track names are unique, and snapshots need a power-function track."""
    if train.ema.track and not train.ema.enable:
        hint = "write enable = true, or remove the tracks"
        yield _fault("ema.track", "has no effect with ema.enable = false", hint=hint)
    names = Counter(track.name for track in train.ema.track)
    for index, track in enumerate(train.ema.track):
        key = f"ema.track[{index}].name"
        value = f'"{track.name}"'
        if names[track.name] > 1 or track.name == "ema":
            yield _fault(key, "the name is already taken (`ema` is the main track)", value, hint="choose another")
        if track.name == "raw":
            yield _fault(key, "`raw` is the name of the weights without averaging", value, hint="choose another")
    interval = train.ema.snapshot_every_n_steps
    if interval is not None and not any(track.power_width is not None for track in train.ema.track):
        hint = "add a [[ema.track]] with power_width, or remove it"
        yield _fault("ema.snapshot_every_n_steps", "there is no power-function track", str(interval), hint=hint)


def sampling(train: TrainConfig) -> Iterator[Fault]:
    """Prompts and interval go together."""
    table = train.sampling
    if table.images and table.every_n_steps is None:
        yield _fault("sampling.every_n_steps", "is required with sampling.prompts: no image would be drawn")
    for key in ("every_n_steps", "at_steps"):
        if getattr(table, key) and not table.images:
            yield _fault("sampling.prompts", f"is required with sampling.{key}: there is nothing to draw")
    default = "empty" if train.model.continues_weights else "zero"
    yield from negative_prompts(train, train.model.uncond_text or default)


def negative_prompts(train: TrainConfig, uncond_text: str) -> Iterator[Fault]:
    """Negative prompts need the text of stock guidance."""
    prompts = train.sampling.negative_prompts
    if prompts and uncond_text == "zero":
        problem = 'has no effect with model.uncond_text = "zero"'
        hint = 'remove it, or write uncond_text = "empty"'
        yield _fault("sampling.negative_prompt", problem, f'"{prompts[0]}"', hint=hint)


def eval_names(train: TrainConfig) -> Iterator[Fault]:
    """Two evaluation sets with the same name would share a curve."""
    names = Counter(entry.name for entry in train.eval_datasets)
    for index, entry in enumerate(train.eval_datasets):
        if names[entry.name] > 1:
            problem = "two eval datasets have the same name"
            hint = "give {name = ..., config = ...}"
            yield _fault(f"eval_datasets[{index}]", problem, f'"{entry.name}"', hint=hint)


def adapter(train: TrainConfig) -> Iterator[Fault]:
    """An adapter trains alone, on top of trained weights."""
    if train.adapter is None:
        return
    if train.freeze:
        hint = "remove freeze, or remove [adapter] to train the weights"
        yield _fault("freeze", "with [adapter] only the adapter trains", value=str(list(train.freeze)), hint=hint)
    yield from adapter_faults(train.adapter)
    if train.model.init == "random":
        hint = "give the folder or file of a trained model, or remove it"
        yield _fault("model.init", "an adapter needs trained weights", value='"random"', hint=hint)


def adapter_faults(table: AdapterConfig) -> Iterator[Fault]:
    """Find contradicting keys of an adapter, from a config or from the arguments of a call."""
    if table.type == "lora":
        return
    for key in ("use_rslora", "use_dora"):
        if getattr(table, key):
            hint = 'remove it, or write type = "lora"'
            yield _fault(f"adapter.{key}", f'has no effect with type = "{table.type}"', value="true", hint=hint)
    if table.base_bits < 16:
        problem = f'type = "{table.type}" does not support quantized weights'
        hint = 'write 16, or type = "lora"'
        yield _fault("adapter.base_bits", problem, str(table.base_bits), hint=hint)


def base_bits(train: TrainConfig) -> Iterator[Fault]:
    """Quantized weights are not sharded."""
    if train.adapter is None or train.adapter.base_bits == 16:
        return
    for conflicts, problem, other in (
        (train.parallel == "fsdp2", 'parallel = "fsdp2" cannot shard quantized weights', 'parallel = "ddp"'),
        (train.pipeline_stages > 1, "pipeline stages do not support quantized weights", "pipeline_stages = 1"),
    ):
        if conflicts:
            value = str(train.adapter.base_bits)
            yield _fault("adapter.base_bits", problem, value, hint=f"write 16, or {other}")


def swapped_blocks(train: TrainConfig) -> Iterator[Fault]:
    """Only whole weights are in host memory; they are frozen, or updated block by block."""
    if train.swap_blocks == 0:
        return
    value = f'"{train.swap_blocks}"' if train.swap_blocks == "all" else str(train.swap_blocks)
    is_full = train.adapter is None
    teacher = train.terms.teacher if is_full else None
    for conflicts, problem, other in (
        (
            is_full and not train.gradient_release,
            "weights that train are swapped only where they are updated block by block",
            "write gradient_release = true, or add [adapter]",
        ),
        (
            teacher in ("start", "average"),
            f"the objective's teacher is the {teacher} of all weights, which are not on the GPU together",
            "give the folder of a model as the teacher",
        ),
        (train.parallel == "fsdp2", 'parallel = "fsdp2" shards the blocks', 'write parallel = "ddp"'),
        (train.pipeline_stages > 1, "pipeline stages hold their own blocks", "write pipeline_stages = 1"),
    ):
        if conflicts:
            yield _fault("swap_blocks", problem, value, hint=f"write 0, or {other}")


def _all_keys(table: type[Table], name: str) -> tuple[str, ...]:
    """Return the name of a table, and those of all its keys and tables."""
    return tuple(
        key
        for inner, own in walk_tables(table, name)
        for key in (inner, *(f"{inner}.{key}" for key in own.model_fields))
    )


_SAVING_KEYS = (
    *(f"save_every_n_{unit}" for unit in ("steps", "epochs", "examples")),
    *(f"checkpoint_every_n_{unit}" for unit in ("steps", "epochs", "minutes")),
)
_ADAPTER_KEYS = ("adapter.type", "adapter.use_rslora", "adapter.use_dora", "adapter.base_bits")
TIME_KEYS = (
    "timestep_sample_method",
    "sigmoid_scale",
    "logit_mean",
    "uniform_share",
    "shift",
    "flux_shift",
    "sqrt_shift",
)
"""The keys of [model] that decide the distribution of times; losses of scripts have them too."""
_SAMPLING_KEYS = ("sampling", *(f"sampling.{key}" for key in ("prompts", "image", "every_n_steps", "negative_prompt")))
_DEPTH_KEYS = ("model", "model.size", "model.num_layers", "model.shape", "model.shape.num_layers", "model.train_type")
_TOKEN_KEYS = (
    "model.position_crop_side",
    *_all_keys(RoutingConfig, "model.routing"),
    *_all_keys(LayerSyncConfig, "model.layer_sync"),
)
_TERM_KEYS = _all_keys(ObjectiveConfig, "objective")
_REWARD_KEYS = _all_keys(RewardConfig, "reward")
_RECON_KEYS = ("model.text_recon_gamma", "model.text_recon_target_layer")
CHECKS: dict[Callable[[TrainConfig], Iterator[Fault]], tuple[str, ...]] = {
    length: ("epochs", "max_steps"),
    saving: _SAVING_KEYS,
    text_recon: (*_DEPTH_KEYS, *_RECON_KEYS, *_TERM_KEYS),
    token_keys: (*_DEPTH_KEYS, *_TOKEN_KEYS, *_TERM_KEYS, "pipeline_stages"),
    spellings: ("model", *SPELLINGS, *_TERM_KEYS),
    terms: (*_TERM_KEYS, *_REWARD_KEYS, "ema", "ema.enable", "pipeline_stages", "model.teacher_path"),
    training_adapter: ("model", "model.training_adapter", *_TERM_KEYS, *_REWARD_KEYS, "pipeline_stages"),
    reward: (
        *(*_TERM_KEYS, *_REWARD_KEYS, *_TOKEN_KEYS, *_RECON_KEYS, "model", "max_steps", "micro_batch_size_per_gpu"),
        *("pipeline_stages", "adapter", "swap_blocks", "pseudo_huber_c"),
    ),
    shape: ("model", "model.shape", "model.shape.head_dim", "model.size", "model.num_layers"),
    timesteps: ("model", *(f"model.{key}" for key in TIME_KEYS)),
    schedule: ("lr_scheduler", "lr_step_size", "lr_step_gamma"),
    cooldown: ("cooldown_steps", "lr_scheduler", "force_constant_lr", "max_steps"),
    pipeline: (*_DEPTH_KEYS, "pipeline_stages", "zero_stage", "parallel"),
    partition: (*_DEPTH_KEYS, "pipeline_stages", "partition_method", "partition_split"),
    residence: ("cache_residence", "pipeline_stages"),
    blocks: ("fast", "compile", "activation_checkpointing", "pipeline_stages"),
    fp8: (
        *("fp8", "fast", "compile", "adapter", "pipeline_stages", "model", "model.dtype", "model.transformer_dtype"),
        "model.training_adapter",
        *("gradient_release", "optimizer", "optimizer.weight_dtype"),
    ),
    optimizer: ("optimizer", "optimizer.type", "optimizer.split_modulation", "parallel", "pipeline_stages"),
    release: (
        *("gradient_release", "gradient_clipping", "gradient_accumulation_steps", "adapter", "parallel"),
        *("pipeline_stages", "optimizer", "optimizer.type"),
    ),
    weight_dtype: (
        *("optimizer", "optimizer.type", "optimizer.weight_dtype", "model", "model.dtype", "model.transformer_dtype"),
        *("adapter", "parallel", "pipeline_stages"),
    ),
    ema: ("ema", "ema.enable", "ema.track", "ema.snapshot_every_n_steps"),
    sampling: (*_SAMPLING_KEYS, "model", "model.uncond_text", "model.train_type", "model.init"),
    eval_names: ("eval_datasets",),
    base_bits: ("adapter", "adapter.base_bits", "parallel", "pipeline_stages"),
    swapped_blocks: (
        "swap_blocks",
        "adapter",
        "parallel",
        "pipeline_stages",
        "gradient_release",
        *_TERM_KEYS,
        *_REWARD_KEYS,
    ),
    adapter: ("adapter", *_ADAPTER_KEYS, "freeze", "model.init"),
}
"""Each check and the keys that it reads."""


def run_cross_checks(train: TrainConfig, faulty_keys: frozenset[str]) -> Iterator[Fault]:
    """Run every check whose keys are all valid. The faults carry no file yet."""
    for check, keys in CHECKS.items():
        if not faulty_keys.intersection(keys):
            yield from check(train)


def config_warnings(train: TrainConfig, total_steps: int, unguided: float | None = 1.0) -> Iterator[str]:
    """Yield what is allowed and probably not intended. An adapter inherits text dropout from the model under it.

    ``unguided`` is the largest guidance that is none; None: the denoiser takes it as a number, and no other text.
    """
    drops_text = train.model.enable_uncond_text_dropout and train.model.uncond_text_dropout_prob > 0
    guided = bool(train.sampling.images) and unguided is not None and train.sampling.guidance > unguided
    if guided and not drops_text and train.adapter is None:
        yield (
            f"sampling.guidance = {train.sampling.guidance:g} compares with a prediction without text, which this run "
            f"does not train; write model.enable_uncond_text_dropout = true, or sampling.guidance = {unguided:g}"
        )
    if train.warmup_steps >= total_steps and train.force_constant_lr is None:
        yield (
            f"warmup_steps = {train.warmup_steps} is not shorter than the run of {total_steps} steps, so the learning "
            f"rate never reaches optimizer.lr; write warmup_steps = {total_steps // 10}, or train longer"
        )


def deepspeed_problem(config: TrainConfig, world_size: int) -> str | None:
    """Return why ``world`` processes of the DeepSpeed engine cannot train this config, or None if they can."""
    stages = config.pipeline_stages
    if not OPTIMIZERS[config.optimizer.type].deepspeed:
        return f"--deepspeed cannot shard the state of optimizer.type = {config.optimizer.type!r}; write 'adamw'"
    if config.adapter is not None and config.adapter.base_bits < 16 and config.zero_stage != 2:
        return "adapter.base_bits under 16 needs whole weights; write zero_stage = 2, or base_bits = 16"
    if config.swap_blocks != 0:
        return "swap_blocks needs the torch engine; start without --deepspeed, or write swap_blocks = 0"
    if config.terms.taught is not None and config.zero_stage == 0:
        name = config.terms.taught[0]
        return f"objective.{name} takes several passes, which ZeRO 0 does not run; write zero_stage = 1"
    if config.reward is not None and config.zero_stage == 0:
        return "[reward] draws images in a step, which ZeRO 0 does not do; write zero_stage = 1"
    if config.parallel != "ddp":
        hint = "start without --deepspeed, or write zero_stage = 3 instead"
        return f"parallel = {config.parallel!r} needs the torch engine; {hint}"
    if world_size % stages:
        return f"{world_size} processes cannot form pipelines of {stages} stages; start a multiple of pipeline_stages"
    return None
