"""What training a denoiser takes of each GPU's memory, with the formula that gave it (law 10).

Pure arithmetic on a `ModelSize`. Letters in formulas: P parameters, A those of an adapter, B micro-batch, D width, L
blocks.

Some memory lives as long as the run: weights, what the optimizer remembers, averages. The rest comes and goes within a
step, and is highest at one of a few moments: when the forward pass ends (everything is saved for the backward pass),
when the backward pass begins (with checkpointing: one block is computed again) or ends (all gradients are there), in
the optimizer, or while an average is evaluated. The highest of them counts.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from sd3_light.config import ModelSize
from sd3_light.model.cost import Amount, Checkpointing, Tokens, block_weights

GIB = 1 << 30
_GPUS_A_MACHINE = 8  # replicas of one machine share the writing

CONTEXT_BYTES = 3 * GIB // 4
"""CUDA's context with torch's kernels, and the workspaces of cuBLAS."""

NCCL_BYTES = GIB // 2
"""Buffers by which GPUs talk to each other; not torch's to allocate, so its counters do not show them."""

SLACK = 0.03
"""Share of a step's memory that the caching allocator holds in pieces that fit nothing."""

FLASH_BACKWARD = 4
"""Bytes a token and unit of width inside the kernel of attention's backward pass: queries' gradients in float32."""


@dataclass(frozen=True)
class Saved:
    """Bytes that autograd keeps of a block, for each token and unit of width, and what passes by while it runs.

    Counted tensor by tensor, with the residual stream r, in float32 | under CUDA's bf16 autocast, which runs layer
    norms in float32 and casts a float32 input anew for every linear layer that reads it | compiled, where inductor
    computes norms and modulation again:

        norm 1: r, its normalised form                                     4 + 4 | 4 + 4 | 2 (r)
        inputs of q, k, v                            one tensor, shared: 4 | three casts: 6 | 2
        attention: q, k, v, result                                            16 | 8 | 8
        input of the output projection (a slice of the result), its output 4 + 4 | 2 + 2 | 2 + 2
        norm 2: r, its normalised form; input of the feed-forward      4 + 4 + 4 | 4 + 4 + 2 | 2
        feed-forward: before and after GELU (4 D each), its output   16 + 16 + 4 | 8 + 8 + 2 | 8 + 8 + 2
        qk-norm, for q and k each: input (autocast: also in float32), normalised 4 + 4 | 2 + 4 + 4 | 2

    The text of the last block ends at the attention. Dual attention adds q, k, v's inputs, q, k, v, result and output
    to the image. Tests hold each column against what autograd saves.
    """

    block: int
    last_text: int
    dual: int
    norm: int
    norm_dual: int
    output: int
    stream: int
    work: int

    def of(self, size: ModelSize, tokens: Tokens) -> int:
        """Bytes of all blocks for one sample."""
        norm = self.norm if size.qk_norm else 0
        image = size.num_layers * (self.block + norm) + len(size.dual_attention_layers) * self._dual(size)
        text = (size.num_layers - 1) * (self.block + norm) + self.last_text + norm
        return (image * tokens.image + text * tokens.text) * size.width

    def largest(self, size: ModelSize, tokens: Tokens) -> int:
        """Bytes of the block that keeps most, for one sample."""
        dual = self._dual(size) * tokens.image if size.dual_attention_layers else 0
        return (self.a_token(size) * tokens.joint + dual) * size.width

    def a_token(self, size: ModelSize) -> int:
        """Bytes of an ordinary block for each token and unit of width."""
        return self.block + (self.norm if size.qk_norm else 0)

    def _dual(self, size: ModelSize) -> int:
        return self.dual + (self.norm_dual if size.qk_norm else 0)


# with qk-norm the dual attention's result passes through float32, so under autocast its projection keeps one more cast
FLOAT32 = Saved(block=84, last_text=28, dual=24, norm=16, norm_dual=16, output=12, stream=4, work=20)
BFLOAT16 = Saved(block=54, last_text=22, dual=16, norm=20, norm_dual=22, output=10, stream=2, work=10)
COMPILED = Saved(block=36, last_text=12, dual=14, norm=4, norm_dual=4, output=10, stream=2, work=16)
# in bf16 what products (q, k, v, out, up, down) and attention made, and the block's inputs
SELECTIVE = Saved(block=22, last_text=10, dual=10, norm=0, norm_dual=0, output=10, stream=2, work=10)
# the fast blocks, see `model/fast/block.py`: stream 2 + 2, norms 2 + 2, qkv 6, q, k, v and result 8, the result's rows
# 2, out 2, before and after GELU 8 + 8, down 2. Selective leaves out norms, q, k, v, the result's rows and GELU.
FAST = Saved(block=44, last_text=18, dual=0, norm=0, norm_dual=0, output=4, stream=4, work=16)
FAST_SELECTIVE = Saved(block=24, last_text=10, dual=0, norm=0, norm_dual=0, output=4, stream=4, work=24)


@dataclass(frozen=True)
class Case:
    """How a denoiser trains: all that its memory depends on. ``world`` is the number of GPUs."""

    size: ModelSize
    tokens: Tokens
    batch: int
    ema_tracks: int = 0
    checkpointing: Checkpointing = False
    compiled: bool = False
    fast: bool = False
    compute: str = "bfloat16"
    accumulation: int = 1
    optimizer: str = "adamw"
    world: int = 1
    parallel: str = "ddp"
    evaluates: bool = False
    beside: int = 0  # bytes of other models that stay on the GPU, such as the VAE that decodes samples
    adapter: int | None = None  # weights of the adapter that trains; the denoiser's own are frozen then
    base_bits: int = 16  # of a frozen weight in the matrices of the blocks

    @property
    def shards(self) -> int:
        """GPUs over which weights, gradients, moments and averages are cut."""
        return self.world if self.parallel == "fsdp2" else 1

    @property
    def saved(self) -> Saved:
        """What a block keeps while it is computed."""
        if self.compute == "float32":
            # compiled or fast float32 keeps the same tensors as in bf16, twice as wide
            return FLOAT32 if not (self.compiled or self.fast) else _twice(FAST if self.fast else COMPILED)
        if self.fast:
            return FAST
        return COMPILED if self.compiled else BFLOAT16

    @property
    def kept(self) -> Saved:
        """What a block keeps until the backward pass comes to it, where not only its inputs."""
        if self.checkpointing != "selective":
            return self.saved
        kept = FAST_SELECTIVE if self.fast else SELECTIVE
        return _twice(kept) if self.compute == "float32" else kept

    @property
    def parameters(self) -> int:
        """P, all of them."""
        return self.size.num_parameters()

    @property
    def trained(self) -> int:
        """Parameters that train: P, or those of the adapter."""
        return self.parameters if self.adapter is None else self.adapter

    @property
    def frozen_bytes(self) -> int:
        """Bytes of the weights under an adapter: in the type that they compute in, or in few bits and their scales."""
        if self.adapter is None:
            return 0
        few = sum(vars(block_weights(self.size)).values()) if self.base_bits < 16 else 0
        scales = few / 64 * (1 + 4 / 256) if self.base_bits == 4 else 0  # rows' scales in 8 bits weigh nothing
        wide = 4 if self.compute == "float32" else 2
        return round((self.parameters - few) * wide + few * self.base_bits / 8 + scales)

    @property
    def block_parameters(self) -> int:
        """Parameters of the first block, which is the largest."""
        deep, shallow = (self.size.with_overrides(num_layers=depth) for depth in (2, 1))
        return deep.num_parameters() - shallow.num_parameters()


def _twice(saved: Saved) -> Saved:
    return Saved(**{name: 2 * value for name, value in vars(saved).items()})


@dataclass(frozen=True)
class GpuMemory:
    """Bytes on each GPU: for the whole run, for the costliest ``moment`` of a step, and for CUDA itself."""

    state: Amount
    step: Amount
    moment: str
    context: Amount

    @property
    def total(self) -> int:
        """All of them together."""
        return self.state.value + self.step.value + self.context.value


def gpu_memory(case: Case) -> GpuMemory:
    """The most that a GPU holds at once while the case trains (estimate)."""
    moments = _moments(case)
    moment = max(moments, key=lambda name: sum(moments[name].values()))
    parts = {name: count for name, count in moments[moment].items() if count}
    parts["next micro-batch"] = next_bytes(case)
    parts["slack"] = round(SLACK * sum(parts.values()))
    words = " + ".join(f"{name} {_size(count)}" for name, count in parts.items())
    nccl = NCCL_BYTES if case.world > 1 else 0
    return GpuMemory(
        state=state_bytes(case),
        step=Amount(sum(parts.values()), f"{moment}: {words}"),
        moment=moment,
        context=Amount(CONTEXT_BYTES + nccl, "allowance for CUDA" + (" and NCCL" if nccl else "")),
    )


def state_bytes(case: Case) -> Amount:
    """Bytes of what lives as long as the run on each GPU: weights, what the optimizer remembers, averages."""
    terms = {"weights": 4.0, **_optimizer_terms(case), "EMA": 4.0 * case.ema_tracks}
    if case.world > 1 and case.shards == 1:
        terms["gradient buckets"] = 4.0  # DDP's; gradients are views of them
    if case.fast:
        terms["copies that compute"] = _copy_width(case)
    words = " + ".join(f"{name} {count:.4g}" for name, count in terms.items() if count)
    formula = f"P·({words})" if case.adapter is None else f"{_size(case.frozen_bytes)} frozen + A·({words})"
    formula += f" / {case.shards} GPUs" if case.shards > 1 else ""
    if case.beside:
        formula += f" + {_size(case.beside)} of other models"
    trained = case.trained * sum(terms.values())
    return Amount(round((case.frozen_bytes + trained) / case.shards) + case.beside, formula)


def _copy_width(case: Case) -> float:
    return 4.0 if case.compute == "float32" else 2.0


def next_bytes(case: Case) -> int:
    """Bytes of the micro-batch that comes to the GPU while another is computed."""
    return case.batch * _inputs(case)


def _inputs(case: Case) -> int:
    """Bytes of a sample as it comes to the GPU: text in bf16, noisy latent and target in float32."""
    size, tokens = case.size, case.tokens
    return 2 * tokens.text * size.text_width + 8 * tokens.image * size.patch_size**2 * size.latent_channels


def copies_bytes(case: Case) -> Amount:
    """Bytes of host memory for the copies from which a process writes its part of a checkpoint."""
    terms = {"weights": 4.0, **_optimizer_terms(case), "EMA": 4.0 * case.ema_tracks}
    words = " + ".join(f"{name} {count:.4g}" for name, count in terms.items() if count)
    writers = case.shards if case.shards > 1 else min(case.world, _GPUS_A_MACHINE)
    letter = "P" if case.adapter is None else "A"
    formula = f"{letter}·({words})" + (f" / {writers} that write" if writers > 1 else "")
    return Amount(round(case.trained * sum(terms.values()) / writers), formula)


def _optimizer_terms(case: Case) -> dict[str, float]:
    """Bytes a parameter. 8-bit moments have a float32 scale for each 256; Muon has one momentum for block matrices."""
    if case.optimizer == "adamw8bit":
        return {"AdamW in 8 bits": 2 + 2 * 4 / 256}
    if case.optimizer == "muon":
        blocks = block_weights(case.size)
        share = (blocks.image + blocks.text + blocks.sample) / case.parameters
        return {"Muon": 4 * share, "AdamW": 8 * (1 - share)}
    return {"AdamW": 8}


def activation_bytes(case: Case) -> int:
    """Bytes that the forward pass of a micro-batch keeps for the backward pass, besides copies of weights."""
    if case.checkpointing is True:
        kept = case.size.num_layers * case.saved.stream * case.size.width * case.tokens.joint
    else:
        kept = case.kept.of(case.size, case.tokens)
    return case.batch * (kept + _ends(case))


def _ends(case: Case) -> int:
    """Bytes for one sample outside the blocks: inputs, final norm, prediction and loss."""
    size, tokens = case.size, case.tokens
    # text comes in bf16, is made float32, and cast once more by autocast's linear layer; fast, real rows are gathered
    casts = 2 if case.fast else 4 + (2 if case.compute != "float32" else 0)
    prompt = tokens.text * size.text_width * casts
    # besides noisy and target the prediction and its error, all float32
    latents = 2 * 4 * tokens.image * size.patch_size**2 * size.latent_channels + _inputs(case)
    return prompt + latents + case.saved.output * size.width * tokens.image


def _moments(case: Case) -> dict[str, Mapping[str, int]]:
    """What each moment of a step holds besides the state, part by part."""
    size, saved, batch = case.size, case.saved, case.batch
    kept = activation_bytes(case)
    work = batch * (saved.work + FLASH_BACKWARD) * size.width * case.tokens.joint
    one_block = batch * saved.largest(size, case.tokens) + work
    # what is made again of a block when the backward pass begins
    again = one_block if case.checkpointing else work
    if case.checkpointing == "selective":
        again -= batch * case.kept.largest(size, case.tokens)
    gradients, before = _gradients(case), _gradients_before(case)
    whole, block = _copies(case)
    name = {False: "activations", True: "block inputs", "selective": "products"}[case.checkpointing]
    return {
        "end of forward": {name: kept, "work": work, "bf16 weights": whole, "gradients so far": before},
        "start of backward": {
            name: kept,
            "one block": again,
            "bf16 weights": block if case.checkpointing else whole,
            "gradients so far": before,
        },
        "end of backward": {
            # those of the first block come while what it keeps goes
            "gradients": gradients if case.adapter else max(0, gradients - 4 * case.block_parameters // case.shards),
            "one block": one_block,
            "ends": batch * _ends(case),
            "bf16 weights": block,
        },
        "optimizer": {"gradients": gradients, "its work": _optimizer_work(case)},
        "evaluation": _evaluation(case, gradients, one_block, whole),
    }


def _evaluation(case: Case, gradients: int, one_block: int, copies: int) -> dict[str, int]:
    """An average stands in the weights' place, they stand aside, and the last step's gradients are still there."""
    if not case.evaluates:
        return {}
    aside = 4 * case.trained // case.shards if case.ema_tracks else 0
    return {"gradients": gradients, "weights set aside": aside, "one block": one_block, "bf16 weights": copies}


def _gradients(case: Case) -> int:
    """Gradients when the backward pass ends; DDP's lie in buckets that count as state."""
    if case.world > 1 and case.shards == 1:
        return 0
    uncut = case.shards > 1 and case.accumulation > 1  # FSDP2 cuts them when processes talk, after the last micro-batch
    return 4 * case.trained // (1 if uncut else case.shards)


def _gradients_before(case: Case) -> int:
    """Gradients that are there already when the last micro-batch begins."""
    return _gradients(case) if case.accumulation > 1 else 0


def _copies(case: Case) -> tuple[int, int]:
    """bf16 copies of weights when the forward pass ends, and while one block is computed.

    Autocast casts each weight once and keeps it until the forward pass ends; without checkpointing the backward pass
    needs it too. FSDP2 gathers weights in bf16, one block ahead, and sends a block's gradients in float32.
    """
    block = case.block_parameters
    if case.shards > 1:
        gathered = 2 * block * (4 if case.compute == "float32" else 2)
        return gathered, gathered + 4 * block
    if case.compute == "float32" or case.fast:  # the fast blocks' copies live as long as the run
        return 0, 0
    if case.adapter is not None:  # frozen weights are bf16 already
        return 2 * case.adapter, 2 * case.adapter
    freed = case.compiled and case.checkpointing  # a compiled block casts for itself
    return 2 * (block if freed else case.parameters), 2 * block


def _optimizer_work(case: Case) -> int:
    """Fused AdamW and clipping work in place. Muon orthogonalises one matrix at a time, 6 D x D at most, in bf16."""
    if case.world > 1 and case.shards == 1:
        return 4 * case.trained  # after its first step DDP lays its buckets anew beside the old ones
    return 16 * 6 * case.size.width**2 if case.optimizer == "muon" else 0


def _size(count: int) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / (1 << 20):.1f} MiB"
