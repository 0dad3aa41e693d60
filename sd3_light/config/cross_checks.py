"""Checks over several keys of the train TOML. Pure; a check is skipped if one of its keys is already faulty."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from operator import attrgetter
from typing import Any

from sd3_light.config.base import Table
from sd3_light.config.faults import Fault
from sd3_light.config.optimizers import OPTIMIZERS
from sd3_light.config.schema_blocks import layer_sync_problem, routing_problem
from sd3_light.config.schema_objective import SPELLINGS, ObjectiveConfig, alignment_problem
from sd3_light.config.schema_tables import AdapterConfig, ModelConfig
from sd3_light.config.schema_train import TrainConfig
from sd3_light.config.sizes import PRETRAIN_SIZE, SIZES, chosen_size_name
from sd3_light.config.validation import format_value

_fault = partial(Fault, "")  # without a file; the caller fills it in
_STAGES = "pipeline_stages"
_ONE_STAGE = "write pipeline_stages = 1"
_ONE_OF_BOTH = "remove one of them"
_OBJECTIVE = ("objective.*",)
_TERMS = (*_OBJECTIVE, "reward.*")
_DEPTH = ("model.size", "model.num_layers", "model.shape.num_layers", "model.train_type")
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


# --- rules that need no function ------------------------------------------------------------------


@dataclass(frozen=True)
class _Rule:
    """A fault of ``key`` in configs that break it. ``reads`` are the other keys that decide it."""

    key: str
    reads: tuple[str, ...]
    is_broken: Callable[[TrainConfig], object]
    problem: str
    hint: str | None

    def __call__(self, train: TrainConfig) -> Iterator[Fault]:
        """Yield the fault, if there is one."""
        if self.is_broken(train):
            yield _fault(self.key, self.problem, hint=self.hint)


def _staged(key: str, reads: tuple[str, ...], is_used: Callable[[TrainConfig], object], problem: str) -> _Rule:
    """Return the rule that pipelines do not support what a config uses."""

    def is_broken(train: TrainConfig) -> bool:
        return train.pipeline_stages > 1 and bool(is_used(train))

    return _Rule(key, (_STAGES, *reads), is_broken, problem, f"remove it, or {_ONE_STAGE}")


_SAVING = ("steps", "epochs", "examples")
_CHECKPOINTING = ("steps", "epochs", "minutes")
_SAVING_KEYS = (
    *(f"save_every_n_{unit}" for unit in _SAVING),
    *(f"checkpoint_every_n_{unit}" for unit in _CHECKPOINTING),
)
_RULES = (
    _Rule(
        "epochs",
        ("max_steps",),
        lambda train: train.epochs is None and train.max_steps is None,
        "neither epochs nor max_steps is given",
        "give one of them, so that the run ends",
    ),
    _Rule(
        "save_every_n_steps",
        _SAVING_KEYS,
        lambda train: not any(attrgetter(*_SAVING_KEYS)(train)),
        "nothing is ever saved: no save_every_n_* and no checkpoint_every_n_*",
        "give one of save_every_n_steps|epochs|examples or checkpoint_every_n_steps|epochs|minutes",
    ),
    _Rule(
        "objective",
        _TERMS,
        lambda train: not train.terms.trains_prediction,
        "none of its terms trains the prediction",
        "add [objective.flow], [objective.dpo] or [objective.distill]",
    ),
    _staged(
        "model.routing",
        ("model.routing.*",),
        lambda train: train.model.routing,
        "pipeline stages do not exchange these tokens",
    ),
    _staged(
        "objective.alignment",
        _TERMS,
        lambda train: train.terms.alignment,
        "pipeline stages train no network beside the denoiser",
    ),
    _staged(
        "model.training_adapter",
        (),
        lambda train: train.model.training_adapter,
        "pipeline stages run the model without it",
    ),
    _staged("reward", ("reward.*",), lambda train: train.reward, "pipeline stages do not draw images in a step"),
    _Rule(
        "activation_checkpointing",
        (_STAGES,),
        lambda train: (
            train.pipeline_stages > 1
            and (train.activation_checkpointing == "host" or isinstance(train.activation_checkpointing, float))
        ),
        "the blocks of pipeline stages all keep their inputs, on the GPU",
        f"write true, or {_ONE_STAGE.removeprefix('write ')}",
    ),
    _Rule(
        "objective.alignment.teacher",
        (*_TERMS, "model.routing.*"),
        lambda train: train.terms.alignment and train.terms.alignment.teacher == "average" and train.model.routing,
        "the average would lack the tokens that skip its blocks",
        'write "cache", or remove [model.routing]',
    ),
    _Rule(
        "cache_residence",
        (_STAGES,),
        lambda train: train.cache_residence == "device" and train.pipeline_stages > 1,
        "pipeline stages take their batches from the host",
        'write "host" or "stream"',
    ),
    _Rule(
        "fast",
        ("compile",),
        lambda train: train.compile is True and train.fast is True,
        "compile = true compiles the stock blocks, fast = true replaces them",
        "keep one",
    ),
    _Rule(
        "activation_checkpointing",
        ("compile",),
        lambda train: train.compile is True and train.activation_checkpointing == "selective",
        "does not work with compile = true, which hides the single operations of a block",
        "write true or a share of the blocks, or compile = false",
    ),
    _Rule(
        "optimizer.split_modulation",
        ("optimizer.type",),
        lambda train: train.optimizer.split_modulation and train.optimizer.type != "muon",
        "only muon orthogonalises matrices",
        'remove it, or write type = "muon"',
    ),
    _Rule(
        "gradient_clipping",
        ("gradient_release",),
        lambda train: train.gradient_release and train.gradient_clipping,
        "clipping by the global norm needs all gradients at once, which gradient_release frees one by one",
        "write 0, or gradient_release = false",
    ),
    _Rule(
        "gradient_accumulation_steps",
        ("gradient_release",),
        lambda train: train.gradient_release and train.gradient_accumulation_steps > 1,
        "gradient_release uses the gradients of a micro-batch at once",
        "write 1 and a larger micro_batch_size_per_gpu, or gradient_release = false",
    ),
    _Rule(
        "optimizer.weight_dtype",
        ("model.dtype", "model.transformer_dtype"),
        lambda train: train.optimizer.weight_dtype == "bfloat16" and train.model.transformer_dtype != "bfloat16",
        "weights in bfloat16 do not compute in float32",
        'write model.transformer_dtype = "bfloat16"',
    ),
    _Rule(
        "ema.track",
        ("ema.enable",),
        lambda train: train.ema.track and not train.ema.enable,
        "has no effect with ema.enable = false",
        "write enable = true, or remove the tracks",
    ),
    _Rule(
        "ema.snapshot_every_n_steps",
        ("ema.track",),
        lambda train: train.ema.snapshot_every_n_steps and all(track.power_width is None for track in train.ema.track),
        "there is no power-function track",
        "add a [[ema.track]] with power_width, or remove it",
    ),
    _Rule(
        "sampling.every_n_steps",
        ("sampling.prompts", "sampling.image"),
        lambda train: train.sampling.images and train.sampling.every_n_steps is None,
        "is required with sampling.prompts: no image would be drawn",
        None,
    ),
    _Rule(
        "freeze",
        ("adapter",),
        lambda train: train.adapter and train.freeze,
        "with [adapter] only the adapter trains",
        "remove freeze, or remove [adapter] to train the weights",
    ),
    _Rule(
        "model.init",
        ("adapter",),
        lambda train: train.adapter and train.model.init == "random",
        "an adapter needs trained weights",
        "give the folder or file of a trained model, or remove it",
    ),
    _Rule(
        "adapter.base_bits",
        ("parallel",),
        lambda train: train.adapter and train.adapter.base_bits < 16 and train.parallel == "fsdp2",
        'parallel = "fsdp2" cannot shard quantized weights',
        'write 16, or parallel = "ddp"',
    ),
    _Rule(
        "adapter.base_bits",
        (_STAGES,),
        lambda train: train.adapter and train.adapter.base_bits < 16 and train.pipeline_stages > 1,
        "pipeline stages do not support quantized weights",
        "write 16, or pipeline_stages = 1",
    ),
)


# --- checks of several keys -----------------------------------------------------------------------


def _num_blocks(model: ModelConfig) -> int | None:
    """Return the number of joint blocks, or None if only the model folder has it."""
    if model.num_layers is not None:
        return model.num_layers
    if model.shape is not None:
        return model.shape.num_layers
    name = chosen_size_name(model)
    return SIZES[name].num_layers if name else None


def text_recon(train: TrainConfig) -> Iterator[Fault]:
    """The target of the text reconstruction must come before the text stream's last output."""
    num_blocks = _num_blocks(train.model)
    if num_blocks is not None:
        yield from text_recon_faults(train, num_blocks)


def text_recon_faults(train: TrainConfig, num_blocks: int) -> Iterator[Fault]:
    """Yield the fault of the target layer in a denoiser with ``num_blocks`` blocks, if it has one."""
    term = train.terms.text_recon
    if term is None or term.target_layer <= num_blocks - 2:
        return
    fault = partial(_fault, train.spelled("model.text_recon_target_layer"), value=str(term.target_layer))
    if num_blocks == 1:
        gamma = train.spelled("model.text_recon_gamma").removeprefix("model.").removesuffix(".weight")
        problem = "the only block has no text output, so there is nothing to reconstruct"
        yield fault(problem, hint=f"remove {gamma}")
    else:
        problem = (
            f"the last of the {num_blocks} blocks has no text output, so the text stream ends after block "
            f"{num_blocks - 1} and its distance to itself is always 0"
        )
        yield fault(problem, allowed=f"0 to {num_blocks - 2} (0: after the context embedder, k: after block k)")


def token_keys(train: TrainConfig) -> Iterator[Fault]:
    """Routing and LayerSync name blocks that exist, in one process; position crops fit in the table."""
    model = train.model
    name = chosen_size_name(model) or (PRETRAIN_SIZE if model.shape else None)
    positions = None if name is None else SIZES[name].pos_embed_max_size
    for key, fields in token_problems(train, _num_blocks(model), positions).items():
        yield _fault(key, **fields)
    if train.terms.layer_sync is not None and train.pipeline_stages > 1:
        key = train.spelled("model.layer_sync")
        yield _fault(key, "pipeline stages do not exchange these tokens", hint=f"remove it, or {_ONE_STAGE}")


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
    for key in SPELLINGS if train.objective is not None else ():
        if attrgetter(key)(train):
            problem = f"[objective] is given too, and lists all terms: there it is {SPELLINGS[key]}"
            yield _fault(key, problem, hint="keep one of the two")


def terms(train: TrainConfig) -> Iterator[Fault]:
    """One term has a teacher, which exists, in whole models; a distillation is complete."""
    table = train.terms
    if table.teacher == "average" and not train.ema.enable:
        hint = 'write ema.enable = true, or teacher = "start"'
        yield _fault(table.teacher_key, "the run keeps no average", hint=hint)
    if table.taught is not None and train.pipeline_stages > 1:
        key = f"objective.{table.taught[0]}"
        yield _fault(key, "pipeline stages run one pass and no teacher", hint=_ONE_STAGE)
    yield from _distill_faults(table)


def _distill_faults(table: ObjectiveConfig) -> Iterator[Fault]:
    term = table.distill
    if term is None:
        return
    others = [f"[objective.{name}]" for name in table.tables() if name != "distill"]
    if others:
        yield _fault("objective.distill", f"trains at its own times, without {', '.join(others)}", hint="keep one term")
    if term.most_guidance is not None and term.most_guidance <= term.guidance:
        hint = "write a larger number, or leave it out"
        yield _fault("objective.distill.most_guidance", "is not above guidance", hint=hint)
    if term.steps is not None and term.steps > term.teacher_steps:
        yield _fault("objective.distill.steps", "the teacher takes fewer steps", hint="write at most teacher_steps")
    if term.steps is None and not term.is_guided:
        hint = "write steps, or guidance above 1"
        yield _fault("objective.distill", "saves nothing without steps and guidance", hint=hint)


def alignment(train: TrainConfig) -> Iterator[Fault]:
    """An alignment has features to read."""
    term = train.terms.alignment
    if term is None:
        return
    if term.teacher == "cache" and train.model.teacher_path is None:
        problem = "no vision model is named whose features the cache stores"
        yield _fault("objective.alignment", problem, hint='write model.teacher_path, or teacher = "average"')
    if term.teacher == "average" and train.terms.taught is not None:
        problem = f"[objective.{train.terms.taught[0]}] has a teacher too, and a run has one"
        yield _fault("objective.alignment.teacher", problem, hint='write "cache", or remove one of the two')


def training_adapter(train: TrainConfig) -> Iterator[Fault]:
    """A training adapter is for losses towards images."""
    if train.model.training_adapter is not None and train.terms.teacher is not None:
        key = train.terms.teacher_key.removesuffix(".teacher")
        hint = "train with [objective.flow], or remove it"
        yield _fault("model.training_adapter", f"has no use with [{key}], which follows a teacher", hint=hint)


def reward(train: TrainConfig) -> Iterator[Fault]:
    """Rewards are the whole loss, on images that the run draws with whole models."""
    if train.reward is None:
        return
    for key in ("objective", "pseudo_huber_c", "model.text_recon_gamma", "model.layer_sync", "model.routing"):
        if attrgetter(key)(train):
            yield _fault(key, "has no effect with [reward], which is the whole loss", hint="remove one of the two")
    if train.max_steps is None:
        hint = "write it: a run that draws its images has no epochs"
        yield _fault("max_steps", "is required with [reward]", hint=hint)
    if not isinstance(train.micro_batch_size_per_gpu, int):
        yield _fault("micro_batch_size_per_gpu", "the images of [reward] have one size", hint="write one number")
    if train.reward.kl > 0 and train.adapter is None and train.swap_blocks != 0:
        problem = "compares with the start of weights that are swapped"
        yield _fault("reward.kl", problem, hint="write 0, or swap_blocks = 0")


def shape(train: TrainConfig) -> Iterator[Fault]:
    """A shape replaces the size and its depth; attention needs heads of whole groups of 8."""
    table = train.model.shape
    if table is None:
        return
    for key in ("size", "num_layers"):
        if getattr(train.model, key) is not None:
            yield _fault(f"model.{key}", "[model.shape] is given too", hint="keep one of them")
    if table.head_dim % 8:
        yield _fault("model.shape.head_dim", "not a multiple of 8", hint="write 64")


def timesteps(train: TrainConfig) -> Iterator[Fault]:
    """At most one time shift, and no shape of the logit-normal distribution with another one."""
    yield from timestep_faults(train.model)


def timestep_faults(model: Any) -> Iterator[Fault]:
    """Yield the faults of `timesteps` in settings that have the keys `TIME_KEYS`."""
    names = [name for name in ("shift", "flux_shift", "sqrt_shift") if getattr(model, name)]
    if len(names) > 1:
        yield _fault(f"model.{names[0]}", f"{' and '.join(names)} are given together", hint="keep one")
    for key in ("logit_mean", "uniform_share"):
        if model.timestep_sample_method == "uniform" and (value := getattr(model, key)):
            problem = 'has no effect with timestep_sample_method = "uniform"'
            yield _fault(f"model.{key}", problem, f"{value:g}", hint=_ONE_OF_BOTH)


def schedule(train: TrainConfig) -> Iterator[Fault]:
    """`step` needs its two keys; other schedules do not use them."""
    needs = train.lr_scheduler == "step"
    for key in ("lr_step_size", "lr_step_gamma"):
        value = getattr(train, key)
        if needs and value is None:
            yield _fault(key, 'is required with lr_scheduler = "step"')
        if not needs and value is not None:
            yield _fault(key, 'has no effect without lr_scheduler = "step"', hint="remove it")


def cooldown(train: TrainConfig) -> Iterator[Fault]:
    """A cool-down ends a rate that stays up, and is not longer than the run."""
    steps = train.cooldown_steps
    if not steps:
        return
    if train.lr_scheduler in ("linear", "cosine"):
        problem = f'lr_scheduler = "{train.lr_scheduler}" decays to 0 by itself'
        yield _fault("cooldown_steps", problem, hint='write "constant" there, or remove the cool-down')
    if train.force_constant_lr is not None:
        yield _fault("cooldown_steps", "has no effect with force_constant_lr", hint=_ONE_OF_BOTH)
    if train.max_steps is not None and steps > train.max_steps:
        yield _fault("cooldown_steps", "is longer than the run", allowed=f"at most max_steps, {train.max_steps}")


def pipeline(train: TrainConfig) -> Iterator[Fault]:
    """Pipeline stages need the DeepSpeed engine with ZeRO-1."""
    stages = train.pipeline_stages
    num_blocks = _num_blocks(train.model)
    if stages == 1:
        return
    if train.zero_stage != 1:
        reason = "clips by one stage's gradients only" if train.zero_stage == 0 else "does not support pipelines"
        problem = f"with pipeline_stages = {stages} this ZeRO stage {reason}"
        yield _fault("zero_stage", problem, allowed="1", hint="or pipeline_stages = 1")
    if train.parallel == "fsdp2":
        problem = "pipeline stages need the DeepSpeed engine, fsdp2 needs the torch engine"
        yield _fault("parallel", problem, hint="remove parallel, or pipeline_stages = 1")
    if num_blocks is not None and stages > num_blocks + 2:
        problem = f"more stages than the {num_blocks + 2} layers (embedding, {num_blocks} blocks, output)"
        yield _fault(_STAGES, problem, allowed=f"1 to {num_blocks + 2}")


def partition(train: TrainConfig) -> Iterator[Fault]:
    """`partition_split` cuts the list of layers into `pipeline_stages` non-empty parts."""
    split = train.partition_split
    stages = train.pipeline_stages
    num_blocks = _num_blocks(train.model)
    fault = partial(_fault, "partition_split")
    if train.partition_method != "manual":
        if split:
            hint = 'write partition_method = "manual", or remove it'
            yield fault('has no effect without partition_method = "manual"', hint=hint)
        return
    if len(split) != stages - 1:
        allowed = f"{stages - 1} numbers, one less than pipeline_stages"
        yield fault(f"cuts the layers into {len(split) + 1} parts, not {stages}", allowed=allowed)
    if any(a >= b for a, b in pairwise(split)):
        yield fault("must increase")
    if num_blocks is not None and any(index >= num_blocks + 2 for index in split):
        yield fault(f"beyond the last of {num_blocks + 2} layers", allowed=f"1 to {num_blocks + 1}")


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
            yield _fault("fp8", f"needs the fast blocks in bfloat16, not {name}", hint="write fp8 = false")


def optimizer(train: TrainConfig) -> Iterator[Fault]:
    """An optimizer runs only in layouts that can shard its state."""
    record = OPTIMIZERS[train.optimizer.type]
    fault = partial(_fault, "optimizer.type", f"needs {record.layouts}")
    if train.parallel == "fsdp2" and not record.fsdp2:
        yield fault(hint='write type = "adamw" or parallel = "ddp"')
    if train.pipeline_stages > 1 and not record.deepspeed:
        yield fault(hint='write type = "adamw" or pipeline_stages = 1')


_ONE_BY_ONE = {"gradient_release": True, "optimizer.weight_dtype": "bfloat16"}
"""Keys, and the values with which weights are updated one after another."""


def one_by_one(key: str, train: TrainConfig) -> Iterator[Fault]:
    """Weights are updated one after another in one process, if all of them train independently."""
    if attrgetter(key)(train) != _ONE_BY_ONE[key]:
        return
    name = train.optimizer.type
    for conflicts, problem in (
        (train.adapter, "an adapter is small: its weights stay float32 and its gradients together"),
        (train.parallel == "fsdp2", 'parallel = "fsdp2" shards weights, and this needs one process'),
        (train.pipeline_stages > 1, "pipeline stages are several processes, and this needs one"),
        (not OPTIMIZERS[name].in_chunks, f'optimizer.type = "{name}" updates all weights together'),
    ):
        if conflicts:
            yield _fault(key, problem, hint=_ONE_OF_BOTH)


def one_process_problem(config: TrainConfig, world_size: int, by_deepspeed: bool) -> str | None:
    """Return why this launch cannot train a config whose weights are updated one after another, or None if it can."""
    for key, value in _ONE_BY_ONE.items():
        is_set = attrgetter(key)(config) == value
        if is_set and by_deepspeed:
            return f"{key} = {format_value(value)} needs the torch engine; start without --deepspeed, or remove it"
        if is_set and world_size > 1:
            hint = 'remove it and write parallel = "fsdp2", or start one'
            return f"{key} = {format_value(value)} needs one process, not {world_size}; {hint}"
    return None


def track_names(train: TrainConfig) -> Iterator[Fault]:
    """Averages have names of their own."""
    names = Counter(track.name for track in train.ema.track)
    for index, track in enumerate(train.ema.track):
        fault = partial(_fault, f"ema.track[{index}].name", value=f'"{track.name}"', hint="choose another")
        if names[track.name] > 1 or track.name == "ema":
            yield fault("the name is already taken (`ema` is the main track)")
        if track.name == "raw":
            yield fault("`raw` is the name of the weights without averaging")


def sampling(train: TrainConfig) -> Iterator[Fault]:
    """An interval needs prompts, and negative prompts the text of stock guidance."""
    table = train.sampling
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
    """An adapter's keys belong to its type."""
    if train.adapter is not None:
        yield from adapter_faults(train.adapter)


def adapter_faults(table: AdapterConfig) -> Iterator[Fault]:
    """Find contradicting keys of an adapter, from a config or from the arguments of a call."""
    if table.type == "lora":
        return
    for key in ("use_rslora", "use_dora"):
        if getattr(table, key):
            hint = 'remove it, or write type = "lora"'
            yield _fault(f"adapter.{key}", f'has no effect with type = "{table.type}"', "true", hint=hint)
    if table.base_bits < 16:
        problem = f'type = "{table.type}" does not support quantized weights'
        yield _fault("adapter.base_bits", problem, str(table.base_bits), hint='write 16, or type = "lora"')


def swapped_blocks(train: TrainConfig) -> Iterator[Fault]:
    """Only whole weights are in host memory; they are frozen, or updated block by block."""
    if train.swap_blocks == 0:
        return
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
        (train.pipeline_stages > 1, "pipeline stages hold their own blocks", _ONE_STAGE),
    ):
        if conflicts:
            yield _fault("swap_blocks", problem, hint=f"write 0, or {other}")


_TOKENS = ("model.position_crop_side", "model.routing.*", "model.layer_sync.*")
_RECON = ("model.text_recon_gamma", "model.text_recon_target_layer")
_CHECKS: dict[Callable[[TrainConfig], Iterator[Fault]], tuple[str, ...]] = {
    **{rule: (rule.key, *rule.reads) for rule in _RULES},
    text_recon: (*_DEPTH, *_RECON, *_OBJECTIVE),
    token_keys: (*_DEPTH, *_TOKENS, *_OBJECTIVE, _STAGES),
    spellings: (*SPELLINGS, *_OBJECTIVE),
    terms: (*_TERMS, "ema.enable", _STAGES),
    alignment: (*_TERMS, "model.teacher_path"),
    training_adapter: ("model.training_adapter", *_TERMS),
    reward: (*_TERMS, *_TOKENS, *_RECON, "max_steps", "micro_batch_size_per_gpu", "adapter", "swap_blocks"),
    shape: ("model.shape.head_dim", "model.size", "model.num_layers"),
    timesteps: tuple(f"model.{key}" for key in TIME_KEYS),
    schedule: ("lr_scheduler", "lr_step_size", "lr_step_gamma"),
    cooldown: ("cooldown_steps", "lr_scheduler", "force_constant_lr", "max_steps"),
    pipeline: (*_DEPTH, _STAGES, "zero_stage", "parallel"),
    partition: (*_DEPTH, _STAGES, "partition_method", "partition_split"),
    fp8: (
        *("fp8", "fast", "compile", "adapter", _STAGES, "model.dtype", "model.transformer_dtype"),
        *("model.training_adapter", "gradient_release", "optimizer.weight_dtype"),
    ),
    optimizer: ("optimizer.type", "parallel", _STAGES),
    **{partial(one_by_one, key): (key, "adapter", "parallel", _STAGES, "optimizer.type") for key in _ONE_BY_ONE},
    track_names: ("ema.track",),
    sampling: (
        *("sampling.prompts", "sampling.image", "sampling.every_n_steps", "sampling.negative_prompt"),
        *("model.uncond_text", "model.train_type", "model.init"),
    ),
    eval_names: ("eval_datasets",),
    swapped_blocks: ("swap_blocks", "adapter", "parallel", _STAGES, "gradient_release", *_TERMS),
    adapter: ("adapter.type", "adapter.use_rslora", "adapter.use_dora", "adapter.base_bits"),
}
"""Each check and the keys that it reads; `table.*` is a table with all its keys."""


def run_cross_checks(train: TrainConfig, faulty_keys: Collection[str]) -> Iterator[Fault]:
    """Run every check whose keys, and the tables that they are in, are all valid. The faults carry no file yet."""
    for check, keys in _CHECKS.items():
        if any(_concerns(key, faulty) for key in keys for faulty in faulty_keys):
            continue
        for fault in check(train):
            yield fault if fault.value is not None else replace(fault, value=_shown_value(train, fault.key))


def _concerns(key: str, faulty: str) -> bool:
    """Return whether a faulty key is one that a check reads, its table, or in the table `key.*`."""
    return f"{key}.".startswith(f"{faulty}.") or (key.endswith(".*") and faulty.startswith(key[:-1]))


def _shown_value(train: TrainConfig, key: str) -> str | None:
    """Return the value of a key as a fault shows it; None for absent keys, tables and empty lists."""
    value = attrgetter(key)(train)
    is_list = isinstance(value, list | tuple)
    if value is None or isinstance(value, Table) or (is_list and all(isinstance(each, Table) for each in value)):
        return None
    return format_value(value)


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
    """Return why ``world_size`` processes of the DeepSpeed engine cannot train this config, or None if they can."""
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
