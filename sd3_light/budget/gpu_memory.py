"""What training a denoiser takes of each GPU's memory, with the formula that gave it (law 10).

Pure arithmetic on a `TrainingSetup`.
Letters in formulas: P parameters, A those of an adapter, B micro-batch, D width, L blocks.
Of a pipeline they are those of one stage, and the stage that takes most counts.

Some memory lives as long as the run: weights, what the optimizer remembers, averages. The rest comes and goes within a
step, and is highest at one of a few moments: when the forward pass ends (everything is saved for the backward pass),
when the backward pass begins (with checkpointing: one block is computed again) or ends (all gradients are there), in
the optimizer, or while an average is evaluated. The highest of them counts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from sd3_light.budget.amount import GIB, Amount, format_bytes
from sd3_light.budget.flops import block_weights
from sd3_light.budget.training_setup import TrainingSetup
from sd3_light.config.optimizers import OPTIMIZERS

__all__ = [
    "GpuMemory",
    "activation_bytes",
    "checkpoint_copy_bytes",
    "gpu_memory",
    "next_batch_bytes",
    "state_bytes",
]

_GPUS_A_MACHINE = 8  # replicas of one machine share the writing

CONTEXT_BYTES = 3 * GIB // 4
"""CUDA's context with torch's kernels, and the workspaces of cuBLAS."""

NCCL_BYTES = GIB // 2
"""Buffers by which GPUs talk to each other; not torch's to allocate, so its counters do not show them."""

SLACK = 0.03
"""Share of a step's memory that the caching allocator holds in pieces that fit nothing."""

FLASH_BACKWARD = 4
"""Bytes a token and unit of width inside the kernel of attention's backward pass: queries' gradients in float32."""

ZERO_BUCKET_BYTES = 4 * 50_000_000
"""What ZeRO reduces at once; see `engines/deepspeed/setup.py`, which a test holds to it."""

ZERO3_LIVE_BYTES = 4 * ZERO_BUCKET_BYTES
"""Weights that ZeRO-3 has gathered at once, at most, in float32; see there."""

_ALLREDUCE_BYTES = 4 * 500_000_000  # DeepSpeed's own, without ZeRO


@dataclass(frozen=True)
class GpuMemory:
    """Bytes on each GPU: for the whole run, for the costliest ``moment`` of a step, and for CUDA itself.

    ``stage`` is the pipeline stage that they are of.
    """

    state: Amount
    step: Amount
    moment: str
    context: Amount
    stage: int = 0

    @property
    def total(self) -> int:
        """All of them together."""
        return self.state.value + self.step.value + self.context.value


def gpu_memory(case: TrainingSetup) -> GpuMemory:
    """The most that a GPU holds at once while the case trains (estimate); of pipelines the stage that takes most."""
    found = [_stage_memory(replace(case, stage=stage)) for stage in range(case.stages)]
    return max(found, key=lambda memory: memory.total)


def _stage_memory(case: TrainingSetup) -> GpuMemory:
    moments = _moments(case)
    moment = max(moments, key=lambda name: sum(moments[name].values()))
    parts = {name: count for name, count in moments[moment].items() if count}
    parts["next micro-batch"] = next_batch_bytes(case)
    parts["slack"] = round(SLACK * sum(parts.values()))
    words = " + ".join(f"{name} {format_bytes(count)}" for name, count in parts.items() if count)
    nccl = NCCL_BYTES if case.world > 1 else 0
    return GpuMemory(
        state=state_bytes(case),
        step=Amount(sum(parts.values()), f"{moment}: {words}"),
        moment=moment,
        context=Amount(CONTEXT_BYTES + nccl, "allowance for CUDA" + (" and NCCL" if nccl else "")),
        stage=case.stage,
    )


# --- for the whole run -------------------------------------------------------------------------


def state_bytes(case: TrainingSetup) -> Amount:
    """Bytes of what lives as long as the run on each GPU: weights, what the optimizer remembers, averages."""
    terms = _state_terms(case)
    trained = sum(case.trained * term.width / term.cut for term in terms)
    fixed = case.beside + (ZERO_BUCKET_BYTES if case.zero_stage == 3 else 0)
    return Amount(round(case.frozen_bytes / case.shards + trained) + fixed, _state_formula(case, terms))


class _Term(NamedTuple):
    """Bytes a parameter, and the number of GPUs over which they are cut."""

    name: str
    width: float
    cut: int


def _state_terms(case: TrainingSetup) -> list[_Term]:
    copies = 4.0 if case.compute == "float32" else 2.0
    terms = [
        _Term("weights", 4.0, case.shards),
        *(_Term(name, width, case.moment_shards) for name, width in _optimizer_terms(case).items()),
        _Term("EMA", 4.0 * case.ema_tracks, case.shards),
        _Term("gradient buckets", 4.0 * case.by_ddp, 1),  # gradients are views of them
        _Term("gradients", 4.0 * (case.zero_stage == 3), case.shards),
        _Term("copies that compute", copies * case.fast, 1),
    ]
    return [term for term in terms if term.width]


def _state_formula(case: TrainingSetup, terms: Sequence[_Term]) -> str:
    """Terms that are cut alike stand together."""
    words = []
    for cut in dict.fromkeys(term.cut for term in terms):
        joined = " + ".join(f"{term.name} {term.width:.4g}" for term in terms if term.cut == cut)
        words.append(f"({joined})" + (f" / {cut} GPUs" if cut > 1 else ""))
    formula = ("P·" if case.adapter is None else "A·") + (words[0] if len(words) == 1 else f"({' + '.join(words)})")
    if case.adapter is not None:
        formula = f"{format_bytes(case.frozen_bytes // case.shards)} frozen + {formula}"
    if case.stages > 1:
        formula = f"stage {case.stage} (layers {case.layers.start} to {case.layers.stop - 1}): {formula}"
    if case.zero_stage == 3:
        formula += f" + {format_bytes(ZERO_BUCKET_BYTES)} bucket"
    return formula + (f" + {format_bytes(case.beside)} of other models" if case.beside else "")


def _optimizer_terms(case: TrainingSetup) -> dict[str, float]:
    """Return label -> bytes per parameter, averaged over all parameters."""
    blocks = block_weights(case.size)
    share = (blocks.image + blocks.text + blocks.sample) / case.size.num_parameters()
    shares = {"all": 1, "block matrices": share, "other": 1 - share}
    return {term.label: term.bytes_per_parameter * shares[term.weights] for term in OPTIMIZERS[case.optimizer].state}


def checkpoint_copy_bytes(case: TrainingSetup) -> Amount:
    """Bytes of host memory for the copies from which a process writes its part of a checkpoint; the most of any."""
    terms = {"weights": 4.0, **_optimizer_terms(case), "EMA": 4.0 * case.ema_tracks}
    words = " + ".join(f"{name} {count:.4g}" for name, count in terms.items() if count)
    all_write = case.shards > 1 or case.stages > 1 or bool(case.zero_stage)
    writers = case.replicas if all_write else min(case.world, _GPUS_A_MACHINE)
    letter = "P" if case.adapter is None else "A"
    formula = f"{letter}·({words})" + (f" / {writers} that write" if writers > 1 else "")
    trained = max(replace(case, stage=stage).trained for stage in range(case.stages))
    return Amount(round(trained * sum(terms.values()) / writers), formula)


# --- of a micro-batch --------------------------------------------------------------------------


def next_batch_bytes(case: TrainingSetup) -> int:
    """Bytes of the micro-batch that comes to the GPU while another is computed."""
    return case.batch * _inputs(case) if case.is_first or case.is_last else 0


def _inputs(case: TrainingSetup) -> int:
    """Bytes of a sample as it comes to the GPU: text in bf16, noisy latent and target in float32."""
    size, tokens = case.size, case.tokens
    latent = 4 * tokens.image * size.patch_size**2 * size.latent_channels
    return case.is_first * (2 * tokens.text * size.text_width + latent) + case.is_last * latent


def activation_bytes(case: TrainingSetup) -> int:
    """Bytes that the forward pass of a micro-batch keeps for the backward pass, besides copies of weights."""
    if case.checkpointing is True:
        kept = len(case.blocks) * _stream(case)
    else:
        kept = case.kept.of(case.size, case.tokens, case.blocks)
    outputs = 0 if case.is_last else _stream(case)  # they wait for their gradients
    return case.batch * (kept + outputs + _ends(case))


def _stream(case: TrainingSetup) -> int:
    """Bytes of a sample between two blocks."""
    return case.saved.stream * case.size.width * case.tokens.joint


def _ends(case: TrainingSetup) -> int:
    """Bytes for one sample outside the blocks: inputs, final norm, prediction and loss."""
    size, tokens = case.size, case.tokens
    # text comes in bf16, is made float32, and cast once more by autocast's linear layer; fast, real rows are gathered
    casts = 2 if case.fast else 4 + (2 if case.compute != "float32" else 0)
    prompt = case.is_first * tokens.text * size.text_width * casts
    # besides noisy and target the prediction and its error, all float32
    latents = case.is_last * 2 * 4 * tokens.image * size.patch_size**2 * size.latent_channels + _inputs(case)
    return prompt + latents + case.is_last * case.saved.output * size.width * tokens.image


# --- the moments of a step ---------------------------------------------------------------------


def _moments(case: TrainingSetup) -> dict[str, Mapping[str, int]]:
    """What each moment of a step holds besides the state, part by part."""
    size, saved, batch = case.size, case.saved, case.batch
    kept = case.in_flight * activation_bytes(case)
    work = batch * (saved.work + FLASH_BACKWARD) * size.width * case.tokens.joint
    one_block = batch * saved.largest(size, case.tokens) + work if case.blocks else work
    # what is made again of a block when the backward pass begins
    again = one_block if case.checkpointing else work
    if case.checkpointing == "selective":
        again -= batch * case.kept.largest(size, case.tokens)
    gradients, before, sent = _gradients(case), _gradients_before(case), _sent(case)
    whole, block = _copies(case)
    name = {False: "activations", True: "block inputs", "selective": "products"}[case.checkpointing]
    name += f" of {case.in_flight} micro-batches" if case.in_flight > 1 else ""
    return {
        "end of forward": {
            name: kept,
            "work": work,
            "copies of weights": whole,
            "gradients so far": before,
            "sent and received": sent,
        },
        "start of backward": {
            name: kept,
            "one block": again,
            "copies of weights": block if case.checkpointing else whole,
            "gradients so far": before,
            "sent and received": sent,
        },
        "end of backward": {
            "gradients": gradients,
            "one block": one_block,
            "ends": batch * _ends(case),
            "copies of weights": block,
            "sent and received": sent,
        },
        "optimizer": _optimizer(case),
        "evaluation": _evaluation(case, one_block, whole),
    }


def _evaluation(case: TrainingSetup, one_block: int, copies: int) -> dict[str, int]:
    """An average stands in the weights' place, they stand aside, and torch's last gradients are still there."""
    if not case.evaluates:
        return {}
    aside = 4 * case.trained // case.shards if case.ema_tracks else 0
    left = _all_gradients(case) if case.zero_stage is None else 0
    return {"gradients": left, "weights set aside": aside, "one block": one_block, "copies of weights": copies}


def _sent(case: TrainingSetup) -> int:
    """What comes from the stages on both sides: activations of one, gradients of the other."""
    ends = (not case.is_first) + (not case.is_last)
    return case.batch * ends * _stream(case)


def _all_gradients(case: TrainingSetup) -> int:
    """Gradients of all weights of this process, when they are there, but not where they are part of the state."""
    if case.by_ddp or case.zero_stage == 3:
        return 0
    # FSDP2 cuts them when processes talk, after the last micro-batch
    uncut = case.zero_stage is None and case.accumulation > 1
    return 4 * case.trained // (case.replicas if case.zero_stage == 2 else 1 if uncut else case.shards)


def _gradients(case: TrainingSetup) -> int:
    """Gradients when the backward pass ends."""
    if case.zero_stage == 2:  # in a bucket and a copy of it on their way, then in this process's part
        buckets = ZERO_BUCKET_BYTES + min(ZERO_BUCKET_BYTES, 4 * case.trained)
        return buckets + (2 if case.accumulation > 1 else 1) * _all_gradients(case)
    found = _all_gradients(case)
    if case.adapter or not found:
        return found
    # those of the first block come while what it keeps goes
    return max(0, found - 4 * case.block_parameters // case.shards)


def _gradients_before(case: TrainingSetup) -> int:
    """Gradients that are there already when the last micro-batch begins."""
    return _all_gradients(case) if case.accumulation > 1 else 0


def _copies(case: TrainingSetup) -> tuple[int, int]:
    """Copies of weights when the forward pass ends, and while one block is computed.

    Autocast casts each weight once and keeps it until the forward pass ends; without checkpointing the backward pass
    needs it too. Pipelines leave autocast after each layer, and each of their micro-batches has casts of its own. FSDP2
    gathers weights in bf16, one block ahead, and sends a block's gradients in float32; ZeRO-3 gathers in float32.
    """
    block = case.block_parameters
    if case.zero_stage is None and case.shards > 1:
        gathered = 2 * block * (4 if case.compute == "float32" else 2)
        return gathered, gathered + 4 * block
    gathered = min(ZERO3_LIVE_BYTES, 4 * case.parameters) if case.zero_stage == 3 else 0
    if case.compute == "float32" or case.fast:  # the fast blocks' copies live as long as the run
        return gathered, gathered
    if case.adapter is not None:  # frozen weights are bf16 already
        return gathered + 2 * case.trained, gathered + 2 * case.trained
    if case.stages > 1:
        return 2 * (block if case.checkpointing else case.in_flight * case.parameters), 2 * block
    freed = case.compiled and case.checkpointing  # a compiled block casts for itself
    return gathered + 2 * (block if freed else case.parameters), gathered + 2 * block


def _optimizer(case: TrainingSetup) -> dict[str, int]:
    """The gradients, and what comes beside them before and in the optimizer's step.

    Fused AdamW and clipping work in place. Muon orthogonalises one matrix at a time, 6 D x D at most, in bf16.
    """
    gradients = _all_gradients(case)
    work = OPTIMIZERS[case.optimizer].step_bytes * case.size.width**2
    if case.by_ddp:
        work = 4 * case.trained  # after its first step DDP lays its buckets anew beside the old ones
    elif case.zero_stage == 0:  # flat, to be averaged
        work = min(_ALLREDUCE_BYTES, gradients) if case.replicas > 1 else 0
    elif case.zero_stage == 1:  # averaged bucket by bucket; then this process's part is made flat, the others' go
        flat = max(0, 2 * gradients // case.replicas - gradients)
        work = max(min(ZERO_BUCKET_BYTES, gradients), flat)
    elif case.zero_stage == 2:
        work = gradients
    elif case.zero_stage == 3:
        work = 4 * case.trained // case.world
    return {"gradients": gradients, "its work": work}
