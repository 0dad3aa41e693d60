"""GPU memory of a training run, with its formula (law 10). Pure arithmetic on a `TrainingSetup`.

Letters in formulas: P parameters, A parameters of an adapter, B micro-batch, D width, L blocks. With pipelines they
describe the stage that needs most.

Some memory is held for the whole run: weights, optimizer state, averages. The rest changes within a step and peaks at
one of these moments: the end of the forward pass (all activations are saved), the start of the backward pass (with
checkpointing, one block is recomputed; released gradients are used) or its end (all other gradients exist), the
optimizer step, or an evaluation of an average. The estimate uses the costliest moment.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from sd3_light.config.base import recomputed_blocks
from sd3_light.config.optimizers import OPTIMIZERS, SLICE_ELEMENTS
from sd3_light.cost.amount import GIB, Amount, format_bytes
from sd3_light.cost.training_setup import TrainingSetup

_GPUS_PER_MACHINE = 8  # replicas of one machine share the writing of checkpoints

CONTEXT_BYTES = 3 * GIB // 4
"""The CUDA context with torch's kernels, and cuBLAS workspaces."""

NCCL_BYTES = GIB // 2
"""Communication buffers. torch does not allocate them, so its counters do not show them."""

SLACK = 0.03
"""Share of a step's memory that the caching allocator loses to fragmentation."""

HOST_INPUTS = 3
"""Inputs of blocks on the GPU where they are in host memory: one in use, one on its way there, one on its way back."""

ZERO_BUCKET_BYTES = 4 * 50_000_000
"""ZeRO's reduce bucket. Tests compare it with `engines/deepspeed/runtime.py`."""

ZERO3_LIVE_BYTES = 4 * ZERO_BUCKET_BYTES
"""Upper bound of the weights that ZeRO-3 gathers at once, in float32. Tests compare it with the same file."""

_ALLREDUCE_BYTES = 4 * 500_000_000  # DeepSpeed's default, without ZeRO


@dataclass(frozen=True)
class GpuMemory:
    """Bytes per GPU of pipeline stage ``stage``: for the run, for the costliest ``moment`` of a step, and for CUDA."""

    state: Amount
    step: Amount
    moment: str
    context: Amount
    stage: int = 0

    @property
    def total(self) -> int:
        """The sum of all three."""
        return self.state.value + self.step.value + self.context.value


def gpu_memory(setup: TrainingSetup) -> GpuMemory:
    """Return the estimated peak memory of a GPU; with pipelines, of the stage that needs most."""
    stages = [_stage_memory(replace(setup, stage=stage)) for stage in range(setup.stages)]
    return max(stages, key=lambda memory: memory.total)


def _stage_memory(setup: TrainingSetup) -> GpuMemory:
    moments = _bytes_by_moment(setup)
    moment = max(moments, key=lambda name: sum(moments[name].values()))
    terms = {name: count for name, count in moments[moment].items() if count}
    terms["next micro-batch"] = next_batch_bytes(setup)
    terms["graphs"] = _graph_bytes(setup, moments) if setup.graphs else 0
    terms["slack"] = round(SLACK * sum(terms.values()))
    formula = " + ".join(f"{name} {format_bytes(count)}" for name, count in terms.items() if count)
    nccl = NCCL_BYTES if setup.world_size > 1 else 0
    return GpuMemory(
        state=state_bytes(setup),
        step=Amount(sum(terms.values()), f"{moment}: {formula}"),
        moment=moment,
        context=Amount(CONTEXT_BYTES + nccl, "allowance for CUDA" + (" and NCCL" if nccl else "")),
        stage=setup.stage,
    )


# --- for the whole run -------------------------------------------------------------------------


def state_bytes(setup: TrainingSetup) -> Amount:
    """Return the bytes per GPU held for the whole run: weights, optimizer state, averages, and a resident cache."""
    terms = _state_terms(setup)
    trained = sum(setup.resident_parameters * term.width / term.shards for term in terms)
    trained += setup.buffered_parameters * (setup.weight_bytes + sum(_optimizer_terms(setup).values()))
    fixed = setup.other_models + setup.cache + (ZERO_BUCKET_BYTES if setup.zero_stage == 3 else 0)
    return Amount(round(setup.frozen_bytes / setup.shards + trained) + fixed, _state_formula(setup, terms))


class _Term(NamedTuple):
    """Bytes per parameter, and the number of GPUs that share them."""

    name: str
    width: float
    shards: int


def _state_terms(setup: TrainingSetup) -> list[_Term]:
    copies = 4.0 if setup.compute_dtype == "float32" else 2.0
    terms = [
        _Term("weights", setup.weight_bytes, setup.shards),
        *(_Term(name, width, setup.moment_shards) for name, width in _optimizer_terms(setup).items()),
        _Term("EMA", 4.0 * setup.ema_tracks, setup.shards),
        _Term("gradient buckets", 4.0 * setup.uses_ddp, 1),  # gradients are views of them
        _Term("gradients", 4.0 * (setup.zero_stage == 3), setup.shards),
        _Term("compute copies", copies * (setup.fast and setup.shards == 1), 1),
    ]
    return [term for term in terms if term.width]


def _state_formula(setup: TrainingSetup, terms: Sequence[_Term]) -> str:
    """Return the formula, with the terms grouped by their number of shards."""
    groups = []
    for shards in dict.fromkeys(term.shards for term in terms):
        joined = " + ".join(f"{term.name} {term.width:.4g}" for term in terms if term.shards == shards)
        groups.append(f"({joined})" + (f" / {shards} GPUs" if shards > 1 else ""))
    formula = ("P·" if setup.adapter is None else "A·") + (groups[0] if len(groups) == 1 else f"({' + '.join(groups)})")
    hosted = f" (with buffers for {format_bytes(setup.host_bytes)} in host memory)" if setup.host_bytes else ""
    if setup.adapter is not None:
        formula = f"{format_bytes(setup.frozen_bytes // setup.shards)} frozen{hosted} + {formula}"
    elif hosted:
        formula = f"{formula}, P without {sum(setup.hosted_parameters):,}{hosted}"
    if setup.stages > 1:
        formula = f"stage {setup.stage} (layers {setup.layers.start} to {setup.layers.stop - 1}): {formula}"
    if setup.zero_stage == 3:
        formula += f" + {format_bytes(ZERO_BUCKET_BYTES)} bucket"
    formula += f" + {format_bytes(setup.cache)} cache" if setup.cache else ""
    return formula + (f" + {format_bytes(setup.other_models)} other models" if setup.other_models else "")


def _optimizer_terms(setup: TrainingSetup) -> dict[str, float]:
    """Return label -> bytes per parameter, averaged over all parameters."""
    share = setup.cost.block_matrices / setup.cost.parameters
    shares = {"all": 1, "block matrices": share, "other": 1 - share}
    return {term.label: term.bytes_per_parameter * shares[term.weights] for term in OPTIMIZERS[setup.optimizer].state}


def checkpoint_copy_bytes(setup: TrainingSetup) -> Amount:
    """Return the host memory of the copies from which a process writes its part of a checkpoint (the largest part)."""
    terms = {"weights": float(setup.weight_bytes), **_optimizer_terms(setup), "EMA": 4.0 * setup.ema_tracks}
    joined = " + ".join(f"{name} {width:.4g}" for name, width in terms.items() if width)
    all_write = setup.shards > 1 or setup.stages > 1 or bool(setup.zero_stage)
    writers = setup.replicas if all_write else min(setup.world_size, _GPUS_PER_MACHINE)
    letter = "P" if setup.adapter is None else "A"
    formula = f"{letter}·({joined})" + (f" / {writers} writers" if writers > 1 else "")
    # what is in host memory is written from there
    trained = max(replace(setup, stage=stage).resident_parameters for stage in range(setup.stages))
    return Amount(round(trained * sum(terms.values()) / writers), formula)


# --- of a micro-batch --------------------------------------------------------------------------


def next_batch_bytes(setup: TrainingSetup) -> int:
    """Return the bytes of the micro-batch that is copied to the GPU while another is computed.

    The copies of both hold moments in fp16, together as much as the noisy latent and target that are made of them.
    """
    return setup.batch * _inputs(setup) if setup.is_first or setup.is_last else 0


def _inputs(setup: TrainingSetup) -> int:
    """Return the bytes of a sample that arrive with its batch."""
    return setup.is_first * setup.sample.features + setup.is_last * setup.sample.target


def activation_bytes(setup: TrainingSetup) -> int:
    """Return the bytes that a micro-batch's forward pass saves for the backward pass, without copies of weights."""
    blocks = [setup.sample.blocks[block] for block in setup.blocks]
    if setup.checkpointing == "host":
        saved = HOST_INPUTS * max((block.inputs for block in blocks), default=0)
    elif setup.checkpointing == "selective":
        saved = sum(block.selective for block in blocks)
    else:
        recomputed = recomputed_blocks(setup.checkpointing, len(blocks))
        saved = sum(block.inputs for block in blocks[:recomputed]) + sum(block.saved for block in blocks[recomputed:])
    outputs = 0 if setup.is_last else setup.sample.stream  # they wait for their gradients
    fixed = 0 if setup.recomputes_all else sum(block.fixed for block in blocks)
    return fixed + setup.batch * (saved + outputs + _ends(setup))


def _ends(setup: TrainingSetup) -> int:
    """Return the bytes per sample outside the blocks: inputs, final norm, prediction and loss."""
    return setup.is_first * setup.sample.before + setup.is_last * setup.sample.after + _inputs(setup)


# --- the moments of a step ---------------------------------------------------------------------


def _bytes_by_moment(setup: TrainingSetup) -> dict[str, Mapping[str, int]]:
    """Return moment -> term -> bytes, for everything a step holds in addition to the state."""
    sample = setup.sample
    batch = setup.batch
    saved = setup.in_flight * activation_bytes(setup)
    work = batch * sample.work
    one_block = batch * sample.largest.saved + work if setup.blocks else work
    # recomputed for one block when the backward pass starts
    recomputed = one_block if setup.recomputes_all else work
    if setup.checkpointing == "selective":
        recomputed -= batch * sample.largest.selective
    gradients = _gradients(setup)
    # activations of one neighbouring stage, gradients of the other
    exchanged = batch * ((not setup.is_first) + (not setup.is_last)) * sample.stream
    # before the last micro-batch; graphs add to zeros
    accumulated = _all_gradients(setup) if setup.accumulation > 1 or setup.graphs else 0
    all_copies, block_copies = _weight_copies(setup)
    name = "block inputs" if setup.recomputes_all else "activations"
    name = "products" if setup.checkpointing == "selective" else name
    name += f" of {setup.in_flight} micro-batches" if setup.in_flight > 1 else ""
    return {
        "end of forward": {
            name: saved,
            "work": work,
            "copies of weights": all_copies,
            "accumulated gradients": accumulated,
            "sent and received": exchanged,
        },
        "start of backward": {
            name: saved,
            "one block": recomputed,
            "released gradients": setup.weight_bytes * setup.block_parameters if setup.release else 0,
            "optimizer work": _update_work(setup) if setup.release else 0,
            "copies of weights": block_copies if setup.recomputes_all else all_copies,
            "accumulated gradients": accumulated,
            "sent and received": exchanged,
        },
        "end of backward": {
            "gradients": gradients,
            "one block": one_block,
            "inputs and outputs": batch * _ends(setup),
            "copies of weights": block_copies,
            "sent and received": exchanged,
        },
        "optimizer": _optimizer_step(setup),
        "evaluation": _evaluation(setup, one_block, all_copies),
    }


def _graph_bytes(setup: TrainingSetup, moments: Mapping[str, Mapping[str, int]]) -> int:
    """Return the bytes that only CUDA graphs use: inputs, and a step's memory beside that of a step not yet recorded.

    Graphs share the latter, so that the largest one counts. Each has inputs, here those of the largest for all.
    """
    passes = (moments[name] for name in ("end of forward", "start of backward"))
    largest = max(sum(terms.values()) - terms["accumulated gradients"] for terms in passes)
    return largest + setup.graph_shapes * next_batch_bytes(setup)


def _evaluation(setup: TrainingSetup, one_block: int, copies: int) -> dict[str, int]:
    """Return the terms while an average replaces the weights; torch's last gradients still exist then."""
    if not setup.evaluates:
        return {}
    backup = setup.weight_bytes * setup.resident_parameters // setup.shards if setup.ema_tracks else 0
    gradients = _all_gradients(setup) if setup.zero_stage is None else 0
    return {"gradients": gradients, "backup of weights": backup, "one block": one_block, "copies of weights": copies}


def _all_gradients(setup: TrainingSetup) -> int:
    """Return the bytes of this process's gradients once all exist; 0 if they are part of the state."""
    if setup.uses_ddp or setup.zero_stage == 3 or setup.release:
        return 0
    # FSDP2 shards them when processes communicate, after the last micro-batch
    unsharded = setup.zero_stage is None and setup.accumulation > 1
    shards = setup.replicas if setup.zero_stage == 2 else 1 if unsharded else setup.shards
    return setup.weight_bytes * setup.trained_parameters // shards


def _gradients(setup: TrainingSetup) -> int:
    """Return the bytes of gradients at the end of the backward pass."""
    if setup.zero_stage == 2:  # a bucket and its copy being reduced, then this process's part
        buckets = ZERO_BUCKET_BYTES + min(ZERO_BUCKET_BYTES, 4 * setup.trained_parameters)
        return buckets + (2 if setup.accumulation > 1 else 1) * _all_gradients(setup)
    gradients = _all_gradients(setup)
    if setup.adapter or not gradients:
        return gradients
    # gradients of the first block appear while its activations are freed
    return max(0, gradients - setup.weight_bytes * setup.block_parameters // setup.shards)


def _weight_copies(setup: TrainingSetup) -> tuple[int, int]:
    """Return the bytes of copies of weights at the end of the forward pass, and while one block is computed.

    Autocast casts each weight once and keeps the copy until the forward pass ends, or until a block from host memory
    ends; without checkpointing the backward pass needs it too. Pipelines leave autocast after each layer, and each of
    their micro-batches has its own copies. FSDP2 gathers weights in bf16, one block ahead, and sends a block's
    gradients in float32; ZeRO-3 gathers in float32.
    """
    block = setup.block_parameters
    if setup.zero_stage is None and setup.shards > 1:
        gathered = 2 * block * (4 if setup.compute_dtype == "float32" else 2)
        return gathered, gathered + 4 * block
    gathered = min(ZERO3_LIVE_BYTES, 4 * setup.parameters) if setup.zero_stage == 3 else 0
    if setup.compute_dtype == "float32" or setup.weight_bytes == 2 or setup.fast:  # fast blocks: part of the state
        return gathered, gathered
    if setup.adapter is not None:  # frozen weights are bf16 already
        return gathered + 2 * setup.trained_parameters, gathered + 2 * setup.trained_parameters
    if setup.stages > 1:
        return 2 * (block if setup.checkpointing else setup.in_flight * setup.parameters), 2 * block
    if setup.recomputes_all and setup.compiled:  # a compiled block casts for itself
        return gathered + 2 * block, gathered + 2 * block
    if setup.recomputes_all and setup.hosted_parameters:  # those since the last block from host memory
        return 2 * block * -(-setup.cost.num_blocks // len(setup.hosted_parameters)), 2 * block
    return gathered + 2 * setup.parameters, gathered + 2 * block


def _optimizer_step(setup: TrainingSetup) -> dict[str, int]:
    """Return the terms of the optimizer step: gradients and working memory. Fused AdamW works in place."""
    gradients = _all_gradients(setup)
    work = _update_work(setup)
    if setup.uses_ddp:
        work = 4 * setup.trained_parameters  # after its first step DDP allocates new buckets beside the old ones
    elif setup.zero_stage == 0:  # flattened for the all-reduce
        work = min(_ALLREDUCE_BYTES, gradients) if setup.replicas > 1 else 0
    elif setup.zero_stage == 1:  # reduced bucket by bucket; then this process's part is flattened, the others freed
        flat = max(0, 2 * gradients // setup.replicas - gradients)
        work = max(min(ZERO_BUCKET_BYTES, gradients), flat)
    elif setup.zero_stage == 2:
        work = gradients
    elif setup.zero_stage == 3:
        work = 4 * setup.trained_parameters // setup.world_size
    return {"gradients": gradients, "optimizer work": work}


def _update_work(setup: TrainingSetup) -> int:
    """Return the working memory of an update in one process.

    Weights in bfloat16 and their gradients become float32, unless the optimizer updates them part by part.
    """
    record = OPTIMIZERS[setup.optimizer]
    work = record.step_bytes * setup.cost.width**2
    if record.slice_bytes:
        return work + record.slice_bytes * min(SLICE_ELEMENTS, setup.trained_parameters)
    return work + (8 * setup.chunk_parameters if setup.weight_bytes == 2 else 0)
