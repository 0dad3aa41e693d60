"""The GPU memory formula against what torch allocates, counted per operation as on a GPU under bf16 autocast."""

import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from diffusers import SD3Transformer2DModel
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sd3_light.config import SIZES, AdapterConfig, ModelSize
from sd3_light.config.base import Checkpointing
from sd3_light.config.schema_blocks import BlockPair, TokenRoute
from sd3_light.core.cost import FLASH_BACKWARD, Compute, Tokens
from sd3_light.cost.amount import format_bytes
from sd3_light.cost.gpu_memory import (
    SLACK,
    activation_bytes,
    checkpoint_copy_bytes,
    gpu_memory,
    next_batch_bytes,
    state_bytes,
)
from sd3_light.cost.training_setup import TrainingSetup
from sd3_light.families.sd3.between_blocks import BetweenBlocks, BetweenOptions
from sd3_light.families.sd3.cost import SD3Cost, held_activations, kept_activations
from sd3_light.families.sd3.fast.block import BlockOptions, Keep
from sd3_light.families.sd3.fast.forward import FastDenoiser
from sd3_light.families.sd3.layers import build_layers, run_layers, unpatchify
from sd3_light.flow.objective import alignment_loss, flow_loss
from sd3_light.model.adapter_layers import add_adapter
from sd3_light.optim.groups import WeightKinds
from tests.cases import combinations

LIGHT = TrainingSetup(SD3Cost(SIZES["sd3_light"]), Tokens(256, 333), 64)


def small(qk_norm: bool = True, dual: tuple[int, ...] = (), layers: int = 4) -> ModelSize:
    return ModelSize("small", layers, 2, 64, 128, 64, 32, 32, 0.5, qk_norm, dual)


# --- what torch allocates --------------------------------------------------------------------------


class Allocations(TorchDispatchMode):
    """The bytes of all live tensors that operations created, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.count(leaf)
        self.peak = max(self.peak, self.now)
        return result

    def count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        address, count = storage._cdata, storage.nbytes()
        if address not in self._known:
            self._known.add(address)
            self.now += count
            weakref.finalize(storage, self._release, address, count)

    def _release(self, address: int, count: int) -> None:
        self._known.remove(address)
        self.now -= count


@pytest.fixture
def norms_as_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's autocast runs layer norms in float32, the CPU's does not; for SD3's other operations they agree."""
    stock = functional.layer_norm

    def layer_norm(values: Tensor, *rest: Any, **more: Any) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return stock(values.float(), *rest, **more)

    monkeypatch.setattr(functional, "layer_norm", layer_norm)


def allocated_in_a_step(setup: TrainingSetup, pair: BlockPair | None = None) -> int:
    """The peak over a forward and a backward pass, without weights, with gradients and inputs.

    Fake tensors have the storage sizes of real ones and compute nothing: bf16 is very slow on many CPUs.
    """
    cost: Any = setup.cost
    size = cost.size
    with FakeTensorMode():
        transformer = SD3Transformer2DModel(**size.transformer_config()).train()
        side = 2 * round(setup.tokens.image**0.5)
        noisy, target = torch.randn(2, setup.batch, 16, side, side)
        prompt = torch.randn(setup.batch, setup.tokens.text, size.text_width, dtype=torch.bfloat16)
        features = [noisy, torch.rand(setup.batch), prompt, torch.randn(setup.batch, size.pooled_width)]
        with Allocations() as memory:
            for tensor in (*features, target):
                memory.count(tensor)
            for parameter in transformer.parameters():
                memory._known.add(parameter.untyped_storage()._cdata)
            with torch.autocast("cpu", torch.bfloat16, enabled=setup.compute_dtype != "float32"):
                inputs = [feature.float() for feature in features]
                kept = None
                if cost.route is not None:
                    kept = torch.zeros(setup.batch, cost.route.tokens_in(2, setup.tokens.image)).int()
                between = BetweenBlocks(BetweenOptions(cost.route, pair), kept, alignment_loss)
                patches = run_layers(build_layers(transformer), inputs, setup.checkpointing, between)[0]
            loss = flow_loss(unpatchify(patches, side, side), target).mean()
            (loss if between.compared is None else loss + between.compared.mean()).backward()
        return memory.peak


def require_formula(setup: TrainingSetup, pair: BlockPair | None = None) -> None:
    formula = gpu_memory(setup).step.value / (1 + SLACK) - next_batch_bytes(setup)
    inside_kernels = setup.batch * FLASH_BACKWARD * setup.cost.width * setup.tokens.joint
    assert formula - inside_kernels == pytest.approx(allocated_in_a_step(setup, pair), rel=0.06)


CHECKPOINTING = (False, True, 0.5, "selective")
DUAL = (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("checkpointing", "dual", "batch"),
    combinations(
        CHECKPOINTING,
        ((), DUAL),
        (2, 12),
        fast=[(False, DUAL, 2), (False, (), 12), (True, (), 2), (0.5, (), 12), ("selective", DUAL, 12)],
    ),
)
def test_a_step_in_bf16_allocates_what_the_formula_says(
    norms_as_on_gpus: None, checkpointing: Checkpointing, dual: tuple[int, ...], batch: int
) -> None:
    require_formula(TrainingSetup(SD3Cost(small(dual=dual)), Tokens(256, 100), batch, checkpointing=checkpointing))


ROUTE, PAIR = TokenRoute(0.5, 2, 5), BlockPair(2, 4)


@pytest.mark.parametrize(
    ("checkpointing", "route", "pair"),
    combinations(
        CHECKPOINTING,
        (None, ROUTE),
        (None, PAIR),
        fast=[(False, ROUTE, PAIR), (True, None, PAIR), ("selective", ROUTE, None)],
    ),
)
def test_routing_and_alignment_allocate_what_the_formula_says(
    norms_as_on_gpus: None, checkpointing: Checkpointing, route: TokenRoute | None, pair: BlockPair | None
) -> None:
    cost = SD3Cost(small(layers=7), route=route)
    require_formula(TrainingSetup(cost, Tokens(256, 40), 12, checkpointing=checkpointing), pair)


# GiB that torch allocated on an H200 in steps of `benchmarks/step.py`: image tokens, mean text tokens, batch
MEASURED_FAST = [
    (52.8, 256, 333, 64),
    (88.7, 256, 333, 128),
    (58.8, 1024, 333, 32),
    (55.1, 256, 51, 128),
    (93.5, 256, 51, 256),
    (83.9, 1024, 51, 64),
]


@pytest.mark.parametrize(("measured", "image", "text", "batch"), MEASURED_FAST)
def test_fast_blocks_need_what_was_measured(measured: float, image: int, text: int, batch: int) -> None:
    memory = gpu_memory(TrainingSetup(SD3Cost(SIZES["sd3_light"]), Tokens(image, text), batch, fast=True))
    allocated = memory.total - memory.context.value
    assert allocated / 2**30 == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize(("keep", "checkpointing"), [("all", False), ("products", "selective"), ("inputs", True)])
def test_fast_blocks_save_what_the_formula_counts(keep: Keep, checkpointing: Checkpointing) -> None:
    """In float32 on a CPU, by the rows that blocks hold between forward and backward."""
    size, tokens, compute = small(), Tokens(64, 40), Compute("fast", "float32")
    transformer = SD3Transformer2DModel(**size.transformer_config())
    pooled = torch.randn(2, size.pooled_width)
    features = (torch.randn(2, 16, 16, 16), torch.rand(2), torch.randn(2, 40, size.text_width), pooled)
    patches = FastDenoiser(transformer, torch.float32, BlockOptions(keep=keep))(features)
    saved = {False: held_activations(compute), "selective": kept_activations(compute)}
    of_inputs = size.num_layers * held_activations(compute).stream * size.width * tokens.joint
    expected = 2 * (of_inputs if checkpointing is True else saved[checkpointing].total(size, tokens))
    # less: the first block has nothing pending, and the output layer holds the last block's result
    few = 2 * 4 * size.width * (tokens.joint + tokens.image)
    assert expected - few <= held_rows(patches) <= expected


def held_rows(patches: Tensor) -> int:
    """The bytes of all rows that blocks hold, each storage once."""
    seen, waiting, sizes = set(), [patches.grad_fn], dict[int, int]()
    while waiting:
        node: Any = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [follower for follower, _ in node.next_functions]
        if type(node).__name__ == "FastBlockBackward":
            tensors: list[Any] = [tensor for stream in node.streams for tensor in stream.inputs[:2]]
            if node.saved is not None:
                (image, text), attention = node.saved
                tensors += [*vars(image).values(), *vars(text).values(), *attention.leaves, attention.joined]
            storages = [tensor.untyped_storage() for tensor in tensors if tensor is not None]
            sizes |= {storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}
    return sum(sizes.values())


class SavedTensors:
    """Collects the tensors that autograd saves inside the context, without ``module``'s weights."""

    def __init__(self, module: nn.Module) -> None:
        self._weights = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
        self._saved: dict[int, Tensor] = {}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self.add, lambda tensor: tensor)

    def add(self, tensor: Tensor) -> Tensor:
        self._saved[tensor.untyped_storage().data_ptr()] = tensor  # referenced, so that its address is not reused
        return tensor

    @property
    def tensors(self) -> Iterator[Tensor]:
        return (tensor for address, tensor in self._saved.items() if address not in self._weights)

    @property
    def total(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in self.tensors)

    def __enter__(self) -> "SavedTensors":
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)


@pytest.mark.parametrize("dual", [(), (0, 1)])
@pytest.mark.parametrize("qk_norm", [True, False])
def test_activations_in_float32_are_what_autograd_saves(qk_norm: bool, dual: tuple[int, ...]) -> None:
    size = small(qk_norm, dual)
    setup = TrainingSetup(SD3Cost(size), Tokens(256, 40), 2, compute_dtype="float32")
    transformer = SD3Transformer2DModel(**size.transformer_config()).train()
    prompt, pooled = torch.randn(2, 40, size.text_width), torch.randn(2, size.pooled_width)
    with SavedTensors(transformer) as saved:
        transformer(torch.randn(2, 16, 32, 32), prompt, pooled, torch.rand(2), return_dict=False)
    # on top of it the formula counts target, loss and the incoming bf16 text
    assert saved.total == pytest.approx(activation_bytes(setup), rel=0.02)


def saved_by_compiled(block: Any, batch: int, size: ModelSize, tokens: Tokens, trains: bool) -> int:
    """The bytes that a compiled block saves, without copies of weights: they have no tokens in their shapes."""
    image, text = (torch.randn(batch, count, size.width).bfloat16() for count in (tokens.image, tokens.text))
    time = torch.randn(batch, size.width).bfloat16().requires_grad_(trains)
    torch._dynamo.reset()
    block.compile(backend="aot_eager_decomp_partition")  # saves what inductor saves, without its kernels
    with SavedTensors(block) as saved, torch.autocast("cpu", torch.bfloat16):
        block(image.requires_grad_(), text.requires_grad_(), time)
    counts = {batch * count for count in (tokens.image, tokens.text)} | {tokens.image, tokens.text, tokens.joint}
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.tensors if counts & set(tensor.shape))


@pytest.mark.slow  # compiles for seconds; the formulas are tested without it
@pytest.mark.parametrize("dual", [(), (0, 1)])
def test_a_compiled_block_saves_what_the_formula_says(norms_as_on_gpus: None, dual: tuple[int, ...]) -> None:
    size, tokens = small(dual=dual, layers=2), Tokens(48, 40)
    denoiser = SD3Transformer2DModel(**size.transformer_config()).train()
    activations = held_activations(Compute("compiled", "bfloat16"))
    measured = saved_by_compiled(denoiser.transformer_blocks[0], 2, size, tokens, trains=True)
    assert measured == pytest.approx(2 * activations.largest(size, tokens), rel=0.02)
    adapter, tokens = AdapterConfig(rank=4), Tokens(240, 104)
    denoiser = SD3Transformer2DModel(**size.transformer_config()).train().requires_grad_(False)
    add_adapter(denoiser, adapter, seed=0)
    stated = SD3Cost(size).sample_bytes(tokens, Compute("compiled", "bfloat16", adapter)).largest.saved
    measured = saved_by_compiled(denoiser.transformer_blocks[0], 1, size, tokens, trains=False)
    assert measured == pytest.approx(stated, rel=0.05)


# --- properties of the formula --------------------------------------------------------------------------


def test_each_moment_can_be_the_costliest() -> None:
    many, some, few = (replace(LIGHT, checkpointing=True, batch=batch) for batch in (512, 64, 1))
    assert gpu_memory(LIGHT).moment == "end of forward"
    assert gpu_memory(replace(many, accumulation=2)).moment == "start of backward"
    assert gpu_memory(some).moment == "end of backward"
    assert gpu_memory(replace(few, evaluates=True, ema_tracks=1)).moment == "evaluation"
    assert gpu_memory(few).moment == "optimizer"


def test_state_counts_every_copy_of_the_weights() -> None:
    count = LIGHT.parameters
    assert state_bytes(LIGHT).value == 12 * count
    amount = state_bytes(replace(LIGHT, ema_tracks=2, world_size=4))
    assert amount.value == (12 + 8 + 4) * count
    assert amount.formula == "P·(weights 4 + AdamW 8 + EMA 8 + gradient buckets 4)"
    assert state_bytes(replace(LIGHT, ema_tracks=1, world_size=4, parallel="fsdp2")).value == 16 * count // 4
    # it depends on the optimizer
    count, denoiser = LIGHT.parameters, SD3Transformer2DModel(**small().transformer_config())
    assert state_bytes(replace(LIGHT, optimizer="adamw8bit")).value == pytest.approx(6.03 * count, rel=0.001)
    assert state_bytes(replace(LIGHT, optimizer="adafactor")).value == 4 * count
    assert state_bytes(replace(LIGHT, optimizer="prodigy")).value == 20 * count
    kinds = WeightKinds(denoiser)
    matrices = sum(weight.numel() for weight in denoiser.parameters() if kinds.is_block_matrix(weight))
    muon = state_bytes(replace(LIGHT, cost=SD3Cost(small()), optimizer="muon")).value
    assert muon == 4 * matrices + 12 * small().num_parameters() - 4 * matrices - 4 * matrices


def test_evaluations_keep_the_weights_beside_an_average() -> None:
    few = replace(LIGHT, checkpointing=True, batch=1, evaluates=True)
    with_average = gpu_memory(replace(few, ema_tracks=1))
    assert with_average.moment == "evaluation"
    assert f"backup of weights {format_bytes(4 * LIGHT.parameters)}" in with_average.step.formula
    assert "backup" not in gpu_memory(few).step.formula
    sharded = gpu_memory(replace(few, ema_tracks=1, world_size=4, parallel="fsdp2", batch=64))
    assert "backup" not in sharded.step.formula or format_bytes(LIGHT.parameters) in sharded.step.formula


def test_sharding_divides_the_state_and_gathers_blocks() -> None:
    alone, sharded = gpu_memory(LIGHT), gpu_memory(replace(LIGHT, world_size=8, parallel="fsdp2"))
    assert sharded.state.value == pytest.approx(alone.state.value / 8, rel=0.001)
    assert sharded.step.value < alone.step.value
    assert "/ 8 GPUs" in sharded.state.formula
    assert gpu_memory(replace(LIGHT, other_models=123)).total == alone.total + 123
    assert "NCCL" in sharded.context.formula


def test_checkpoint_copies_are_divided_among_writers() -> None:
    one = replace(LIGHT, ema_tracks=2)
    assert checkpoint_copy_bytes(one).value == one.parameters * (4 + 8 + 8)
    assert checkpoint_copy_bytes(replace(one, world_size=4)).value == one.parameters * 20 // 4
    assert checkpoint_copy_bytes(replace(one, world_size=16)).value == one.parameters * 20 // 8, (
        "only one machine writes replicas"
    )
    assert checkpoint_copy_bytes(replace(one, world_size=16, parallel="fsdp2")).value == one.parameters * 20 // 16


def test_trained_blocks_in_host_memory_leave_the_gpu() -> None:
    resident = replace(LIGHT, fast=False, batch=1, checkpointing=True, release=True, ema_tracks=1, evaluates=True)
    totals = [gpu_memory(replace(resident, swapped=count)).total for count in range(2, LIGHT.cost.num_blocks + 1)]
    assert totals == sorted(totals, reverse=True), "from the second on each block saves memory"
    hosted = replace(resident, swapped="all")
    blocks = LIGHT.cost.layer_parameters[1:-1]
    assert hosted.host_bytes == 12 * sum(blocks)
    outside = LIGHT.parameters - sum(blocks)
    assert state_bytes(hosted).value == 16 * outside + 2 * 12 * max(blocks)
    assert "host memory" in state_bytes(hosted).formula
    assert checkpoint_copy_bytes(hosted).value == 16 * outside, "the rest is written from where it is"


def test_weights_in_bfloat16_and_released_gradients_take_less() -> None:
    count = LIGHT.parameters
    stock = replace(LIGHT, fast=False, batch=1, optimizer="adamw8bit", checkpointing=True)
    narrow = replace(stock, weight_bytes=2)
    released = replace(narrow, release=True)
    assert state_bytes(narrow).value == pytest.approx(4.03 * count, rel=0.001)
    assert state_bytes(narrow).formula == "P·(weights 2 + AdamW in 8 bits 2.031)"
    assert "copies of weights" not in gpu_memory(narrow).step.formula
    terms = gpu_memory(released).step.formula
    assert "released gradients" in terms
    assert " gradients " not in terms.replace("released gradients", "")
    totals = [gpu_memory(setup).total for setup in (stock, narrow, released)]
    assert totals == sorted(totals, reverse=True)
    assert gpu_memory(replace(stock, release=True)).total < gpu_memory(stock).total
    assert checkpoint_copy_bytes(narrow).value == state_bytes(narrow).value
