"""Checks that look at more than one key of the train TOML. Pure; a check is skipped when a key it reads is faulty."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from sd3_light.config.schema_tables import AdapterConfig
from sd3_light.config.schema_train import TrainConfig
from sd3_light.config.sizes import SIZES, chosen_size_name

UNSHARDED_OPTIMIZERS = ("adamw8bit", "muon")


@dataclass(frozen=True)
class Finding:
    """A fault that does not know its file yet."""

    key: str
    problem: str
    given: str | None = None
    allowed: str | None = None
    hint: str | None = None


def depth_of(train: TrainConfig) -> int | None:
    """Number of joint blocks; None when only the weights' folder can tell."""
    name = chosen_size_name(train.model)
    if train.model.num_layers is not None:
        return train.model.num_layers
    return SIZES[name].num_layers if name else None


def length(train: TrainConfig) -> Iterator[Finding]:
    """A run must know when it ends."""
    if train.epochs is None and train.max_steps is None:
        yield Finding("epochs", "neither epochs nor max_steps is given", hint="give one: the run must end")


def saving(train: TrainConfig) -> Iterator[Finding]:
    """A run that never saves is a mistake."""
    saves = (train.save_every_n_steps, train.save_every_n_epochs, train.save_every_n_examples)
    points = (train.checkpoint_every_n_steps, train.checkpoint_every_n_epochs, train.checkpoint_every_n_minutes)
    if not any((*saves, *points)):
        hint = "give one of save_every_n_steps|epochs|examples or checkpoint_every_n_steps|epochs|minutes"
        yield Finding(
            "save_every_n_steps", "nothing is ever saved: no save_every_n_* and no checkpoint_every_n_*", hint=hint
        )


def text_recon(train: TrainConfig) -> Iterator[Finding]:
    """The text stream can be read after the context embedder and after every block that is not its last."""
    depth, layer = depth_of(train), train.model.text_recon_target_layer
    if train.model.text_recon_gamma > 0 and depth is not None and layer > depth - 2:
        yield Finding("model.text_recon_target_layer", **text_recon_problem(depth), given=str(layer))


def text_recon_problem(depth: int) -> dict[str, str]:
    """Why a layer of a model of ``depth`` blocks cannot be reconstructed, and what can."""
    if depth == 1:
        problem = "the model has 1 layer, whose text is only read: there is nothing to reconstruct"
        return {"problem": problem, "hint": "remove text_recon_gamma"}
    problem = (
        f"of the {depth} layers the last has no text output, so the text after block {depth - 1} is the stream's last "
        "and its distance from itself is always 0"
    )
    return {"problem": problem, "allowed": f"0 to {depth - 2} (0: after the context embedder, k: after block k)"}


def shifts(train: TrainConfig) -> Iterator[Finding]:
    """One time shift at most."""
    if train.model.shift is not None and train.model.flux_shift:
        yield Finding("model.shift", "shift and flux_shift are both given", hint="keep one")


def schedule(train: TrainConfig) -> Iterator[Finding]:
    """`step` needs its two keys, and they mean nothing elsewhere."""
    for key, value in (("lr_step_size", train.lr_step_size), ("lr_step_gamma", train.lr_step_gamma)):
        if train.lr_scheduler == "step" and value is None:
            yield Finding(key, 'is required with lr_scheduler = "step"')
        if train.lr_scheduler != "step" and value is not None:
            yield Finding(key, 'has no meaning without lr_scheduler = "step"', given=str(value), hint="remove it")


def pipeline(train: TrainConfig) -> Iterator[Finding]:
    """Pipelines are DeepSpeed's, with ZeRO-1 only."""
    stages, depth = train.pipeline_stages, depth_of(train)
    if stages == 1:
        return
    if train.zero_stage != 1:
        why = "clips by one stage's gradients" if train.zero_stage == 0 else "does not work with pipelines"
        given, hint = str(train.zero_stage), "or pipeline_stages = 1"
        yield Finding("zero_stage", f"with pipeline_stages = {stages} it {why}", given=given, allowed="1", hint=hint)
    if train.parallel == "fsdp2":
        hint = "remove parallel, or pipeline_stages = 1"
        yield Finding(
            "parallel", "pipelines are the DeepSpeed engine's, fsdp2 is the torch engine's", '"fsdp2"', hint=hint
        )
    if depth is not None and stages > depth + 2:
        problem = f"more stages than the {depth + 2} layers (embedding, {depth} blocks, output)"
        yield Finding("pipeline_stages", problem, given=str(stages), allowed=f"1 to {depth + 2}")


def partition(train: TrainConfig) -> Iterator[Finding]:
    """`partition_split` cuts the list of layers into `pipeline_stages` parts that are not empty."""
    split, stages, depth = train.partition_split, train.pipeline_stages, depth_of(train)
    given = str(list(split))
    if train.partition_method != "manual":
        if split:
            hint = 'write partition_method = "manual", or remove it'
            yield Finding("partition_split", 'has no meaning without partition_method = "manual"', given, hint=hint)
        return
    if len(split) != stages - 1:
        allowed = f"{stages - 1} numbers, one less than pipeline_stages"
        yield Finding("partition_split", f"cuts the layers into {len(split) + 1} parts, not {stages}", given, allowed)
    if any(a >= b for a, b in pairwise(split)):
        yield Finding("partition_split", "must increase", given)
    if depth is not None and any(index >= depth + 2 for index in split):
        yield Finding("partition_split", f"beyond the last of {depth + 2} layers", given, f"1 to {depth + 1}")


def blocks(train: TrainConfig) -> Iterator[Finding]:
    """Blocks are run by hand-written kernels or compiled, and what is compiled cannot be kept by operation."""
    hint = "keep one"
    if train.compile and train.fast is True:
        yield Finding("fast", "compile = true compiles the stock blocks, fast = true replaces them", "true", hint=hint)
    if train.compile and train.activation_checkpointing == "selective":
        problem = "does not work with compile = true: inside a compiled block operations cannot be told apart"
        yield Finding("activation_checkpointing", problem, '"selective"', hint="write true, or compile = false")


def fp8(train: TrainConfig) -> Iterator[Finding]:
    """Products in 8 bits are the fast blocks' own, and stand beside bfloat16."""
    in_the_way = {
        "fast = false": train.fast is False,
        "compile = true": train.compile,
        "an adapter": train.adapter is not None,
        f"pipeline_stages = {train.pipeline_stages}": train.pipeline_stages > 1,
        'transformer_dtype = "float32"': train.model.transformer_dtype != "bfloat16",
    }
    for name, is_there in in_the_way.items():
        if train.fp8 and is_there:
            problem = f"is for the fast blocks in bfloat16, not for {name}"
            yield Finding("fp8", problem, "true", hint="write fp8 = false")


def optimizer(train: TrainConfig) -> Iterator[Finding]:
    """Muon needs whole matrices, and 8-bit state is not sharded."""
    kind = train.optimizer.type
    if kind not in UNSHARDED_OPTIMIZERS:
        return
    problem, hint = "runs on the torch engine without sharding only", 'write type = "adamw"'
    if train.parallel == "fsdp2":
        yield Finding(
            "optimizer.type", problem, f'"{kind}" with parallel = "fsdp2"', hint=f'{hint} or parallel = "ddp"'
        )
    if train.pipeline_stages > 1:
        given = f'"{kind}" with pipeline_stages = {train.pipeline_stages}'
        yield Finding("optimizer.type", problem, given, hint=f"{hint} or pipeline_stages = 1")


def ema(train: TrainConfig) -> Iterator[Finding]:
    """A track has a name of its own, and snapshots are of power-function tracks."""
    if train.ema.track and not train.ema.enable:
        yield Finding(
            "ema.track", "has no meaning with ema.enable = false", hint="write enable = true, or remove the tracks"
        )
    names = Counter(track.name for track in train.ema.track)
    for index, track in enumerate(train.ema.track):
        key, given = f"ema.track[{index}].name", f'"{track.name}"'
        if names[track.name] > 1 or track.name == "ema":
            yield Finding(key, "names a track twice (`ema` is the main one's)", given)
        if track.name == "raw":
            yield Finding(key, "`raw` is the name of the weights that are not averaged", given, hint="choose another")
    every = train.ema.snapshot_every_n_steps
    if every is not None and not any(track.power_width is not None for track in train.ema.track):
        hint = "add a [[ema.track]] with power_width, or remove it"
        yield Finding("ema.snapshot_every_n_steps", "there is no power-function track", str(every), hint=hint)


def sampling(train: TrainConfig) -> Iterator[Finding]:
    """Prompts and interval go together."""
    table = train.sampling
    if table.prompts and table.every_n_steps is None:
        yield Finding("sampling.every_n_steps", "is required with sampling.prompts: no image would be drawn")
    if table.every_n_steps is not None and not table.prompts:
        yield Finding("sampling.prompts", "is required with sampling.every_n_steps: there is nothing to draw")


def eval_names(train: TrainConfig) -> Iterator[Finding]:
    """Two evaluation sets of one name would share a curve."""
    names = Counter(entry.name for entry in train.eval_datasets)
    for index, entry in enumerate(train.eval_datasets):
        if names[entry.name] > 1:
            hint = "give {name = ..., config = ...}"
            yield Finding(f"eval_datasets[{index}]", "two eval datasets have one name", f'"{entry.name}"', hint=hint)


def adapter(train: TrainConfig) -> Iterator[Finding]:
    """What an adapter of this type has no use for."""
    table = train.adapter
    if table is None:
        return
    if train.freeze:
        hint = "remove freeze, or [adapter] to train the weights"
        yield Finding(
            "freeze", "with [adapter] nothing but the adapter trains", given=str(list(train.freeze)), hint=hint
        )
    yield from adapter_findings(table)
    if train.model.init == "random":
        hint = "give the folder or file of a trained model, or remove it"
        yield Finding("model.init", "an adapter belongs on trained weights", given='"random"', hint=hint)


def adapter_findings(table: AdapterConfig) -> Iterator[Finding]:
    """What keys of an adapter say against each other, in a config or in a call."""
    if table.type == "lora":
        return
    for key in ("use_rslora", "use_dora"):
        if getattr(table, key):
            hint = 'remove it, or write type = "lora"'
            yield Finding(f"adapter.{key}", f'has no meaning with type = "{table.type}"', given="true", hint=hint)
    if table.base_bits < 16:
        problem, hint = f'type = "{table.type}" cannot be put on such weights', 'write 16, or type = "lora"'
        yield Finding("adapter.base_bits", problem, str(table.base_bits), hint=hint)


def base_bits(train: TrainConfig) -> Iterator[Finding]:
    """Weights in few bits stay whole and are not compiled."""
    if train.adapter is None or train.adapter.base_bits == 16:
        return
    key, given, hint = "adapter.base_bits", str(train.adapter.base_bits), "write 16, or "
    if train.parallel == "fsdp2":
        yield Finding(key, 'parallel = "fsdp2" cannot cut such weights', given, hint=f'{hint}parallel = "ddp"')
    if train.pipeline_stages > 1:
        yield Finding(key, "pipelines do not carry such weights", given, hint=f"{hint}pipeline_stages = 1")
    if train.compile:
        yield Finding(key, "compile = true does not know such layers", given, hint=f"{hint}compile = false")


@dataclass(frozen=True)
class Check:
    """A check and the keys it reads."""

    run: Callable[[TrainConfig], Iterator[Finding]]
    keys: tuple[str, ...]


_SAVE_KEYS = tuple(f"save_every_n_{unit}" for unit in ("steps", "epochs", "examples"))
_CHECKPOINT_KEYS = tuple(f"checkpoint_every_n_{unit}" for unit in ("steps", "epochs", "minutes"))
_ADAPTER_KEYS = ("adapter.type", "adapter.use_rslora", "adapter.use_dora", "adapter.base_bits")
_DEPTH_KEYS = ("model", "model.size", "model.num_layers", "model.train_type")
CHECKS = (
    Check(length, ("epochs", "max_steps")),
    Check(saving, (*_SAVE_KEYS, *_CHECKPOINT_KEYS)),
    Check(text_recon, (*_DEPTH_KEYS, "model.text_recon_gamma", "model.text_recon_target_layer")),
    Check(shifts, ("model", "model.shift", "model.flux_shift")),
    Check(schedule, ("lr_scheduler", "lr_step_size", "lr_step_gamma")),
    Check(pipeline, (*_DEPTH_KEYS, "pipeline_stages", "zero_stage", "parallel")),
    Check(partition, (*_DEPTH_KEYS, "pipeline_stages", "partition_method", "partition_split")),
    Check(blocks, ("fast", "compile", "activation_checkpointing")),
    Check(
        fp8, ("fp8", "fast", "compile", "adapter", "pipeline_stages", "model", "model.dtype", "model.transformer_dtype")
    ),
    Check(optimizer, ("optimizer", "optimizer.type", "parallel", "pipeline_stages")),
    Check(ema, ("ema", "ema.enable", "ema.track", "ema.snapshot_every_n_steps")),
    Check(sampling, ("sampling", "sampling.prompts", "sampling.every_n_steps")),
    Check(eval_names, ("eval_datasets",)),
    Check(base_bits, ("adapter", "adapter.base_bits", "parallel", "pipeline_stages", "compile")),
    Check(adapter, ("adapter", *_ADAPTER_KEYS, "freeze", "model.init")),
)


def run_cross_checks(train: TrainConfig, bad: frozenset[str]) -> Iterator[Finding]:
    """All findings of the checks whose keys are sound."""
    for check in CHECKS:
        if not bad.intersection(check.keys):
            yield from check.run(train)


def deepspeed_problem(config: TrainConfig, world: int) -> str | None:
    """Why ``world`` processes of the DeepSpeed engine cannot train so, with the remedy; None where they can."""
    stages = config.pipeline_stages
    if config.optimizer.type != "adamw":
        return f"--deepspeed trains with AdamW only; optimizer.type is {config.optimizer.type!r}: write 'adamw'"
    if config.adapter is not None and config.adapter.base_bits < 16 and config.zero_stage != 2:
        return "adapter.base_bits under 16 needs whole weights; write zero_stage = 2, or base_bits = 16"
    if config.parallel != "ddp":
        hint = "start without --deepspeed, or write zero_stage = 3 in its place"
        return f"parallel = {config.parallel!r} is for torch's own engine; {hint}"
    if world % stages:
        return f"{world} processes cannot form pipelines of {stages} stages; start a multiple of pipeline_stages"
    return None
