"""The denoiser of an adapter run: frozen weights are read one by one, in the dtype in which they compute."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from peft.import_utils import is_bnb_available
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from sd3_light.assets import DEMO
from sd3_light.config import TrainConfig
from sd3_light.core.cost import Tokens
from sd3_light.core.registry import family_of
from sd3_light.cost.gpu_memory import state_bytes
from sd3_light.cost.training_setup import TrainingSetup
from sd3_light.engines import Launch
from sd3_light.engines.torch import TorchEngine
from sd3_light.export import trainable
from sd3_light.export.trainable import load_what_trains
from sd3_light.model import quantized
from sd3_light.model.adapter_layers import add_adapter, is_adapter_name
from sd3_light.model.block_swap import BlockSwap, trained_blocks
from tests.cases import combinations
from tests.families import make_denoiser, make_pipeline

CPU = torch.device("cpu")
FolderOf = Callable[[str, torch.dtype], Path]
KINDS: dict[str, dict[str, Any]] = {"lora": {}, "dora": {"use_dora": True}}
KINDS |= {name: {"type": name} for name in ("lokr", "loha")}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> FolderOf:
    """Return a function that writes a family's pipeline once, with its denoiser in a dtype."""

    @cache
    def folder(family: str, dtype: torch.dtype) -> Path:
        path = tmp_path_factory.mktemp("tiny") / family
        if family == "sd3":
            path.mkdir()
            for part in DEMO.iterdir():
                (path / part.name).symlink_to(part)
        else:
            make_pipeline(family).save_pretrained(path)
            denoiser: Any = make_denoiser(family, num_layers=6).to(dtype)
            denoiser.save_pretrained(path / "transformer")
        return path

    return folder


@pytest.fixture
def in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frozen weights have the dtype that they have on a GPU."""
    monkeypatch.setattr(trainable, "frozen_dtype", lambda *_: torch.bfloat16)


def config_of(folder: Path, tmp_path: Path, **adapter: Any) -> TrainConfig:
    model = {"diffusers_path": str(folder), "dtype": "float32"}
    settings = {"output_dir": "out", "dataset": "data.toml", "max_steps": 9, "model": model, "seed": 3}
    targets = ["attn.to_*"] if folder.name != "wan" else ["attn1.to_*"]
    table = {"rank": 2, "target_modules": targets, **adapter}
    return TrainConfig.model_validate({**settings, "adapter": table}, context={"base": tmp_path})


def load_and_cast(config: TrainConfig, dtype: torch.dtype) -> nn.Module:
    """The reference: the adapter on a denoiser in float32, whose frozen weights are then cast."""
    weights = family_of(config.model).weights
    denoiser = weights.load(weights.start(config.model), config.seed)
    assert config.adapter is not None
    add_adapter(denoiser, config.adapter, config.seed)
    cast_frozen(denoiser, dtype)
    return denoiser


def cast_frozen(denoiser: nn.Module, dtype: torch.dtype) -> None:
    """Cast what does not train, except modules that the stock class wants in float32."""
    whole = getattr(denoiser, "_keep_in_fp32_modules", None) or ()
    for name, weight in denoiser.named_parameters():
        if weight.requires_grad or not weight.is_floating_point() or set(name.split(".")) & set(whole):
            continue
        weight.data = weight.data.to(dtype)


def facts(denoiser: nn.Module) -> dict[str, tuple[torch.dtype, bool]]:
    state = denoiser.state_dict(keep_vars=True)
    return {name: (tensor.dtype, tensor.requires_grad) for name, tensor in state.items()}


@pytest.mark.parametrize(
    ("family", "kind", "stored"),
    combinations(
        ("sd3", "flux", "wan"),
        tuple(KINDS),
        (torch.float32, torch.bfloat16),
        fast=[
            *(("flux", kind, torch.float32) for kind in KINDS),
            *((family, "lora", torch.float32) for family in ("sd3", "wan")),
            ("flux", "dora", torch.bfloat16),
        ],
    ),
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_frozen_denoiser_has_the_values_of_one_that_was_cast(
    folder_of: FolderOf, tmp_path: Path, monkeypatch: Any, family: str, kind: str, stored: Any, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(trainable, "frozen_dtype", lambda *_: dtype)  # that of a GPU
    config = config_of(folder_of(family, stored), tmp_path, **KINDS[kind])
    expected = load_and_cast(config, dtype)
    denoiser = load_what_trains(config, family_of(config.model).weights.start(config.model), CPU)
    assert facts(denoiser) == facts(expected)
    states = denoiser.state_dict(), expected.state_dict()
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())
    assert all(not buffer.is_meta for buffer in denoiser.buffers())
    modes = [{name: module.training for name, module in model.named_modules()} for model in (denoiser, expected)]
    assert modes[0] == modes[1]


@pytest.mark.parametrize("family", ["flux", "krea2", "wan"])
@pytest.mark.usefixtures("in_bfloat16")
def test_frozen_weights_have_the_dtypes_of_the_stock_class(folder_of: FolderOf, tmp_path: Path, family: str) -> None:
    """Wan's time embedding and modulation and Krea 2's norms are in float32, whatever dtype is asked for."""
    folder = folder_of(family, torch.float32)
    config = config_of(folder, tmp_path)
    denoiser: Any = load_what_trains(config, family_of(config.model).weights.start(config.model), CPU)
    stock = type(denoiser).from_pretrained(folder / "transformer", torch_dtype=torch.bfloat16)
    expected = {name: weight.dtype for name, weight in stock.named_parameters()}
    named = {name.replace(".base_layer.", "."): weight for name, weight in denoiser.named_parameters()}
    assert {name: weight.dtype for name, weight in named.items() if not is_adapter_name(name)} == expected
    assert set(expected.values()) == ({torch.bfloat16} if family == "flux" else {torch.bfloat16, torch.float32})
    assert config.adapter is not None
    cost = family_of(config.model).cost(family_of(config.model).weights.start(config.model), config.model)
    adapter = cost.adapter_parameters(config.adapter)
    held = sum(weight.nbytes for name, weight in named.items() if not is_adapter_name(name))
    assert TrainingSetup(cost, Tokens(64, 64), 1, adapter=adapter).frozen_bytes == held, "as `check` counts"
    in_float32 = TrainingSetup(cost, Tokens(64, 64), 1, adapter=adapter, compute_dtype="float32")
    assert in_float32.frozen_bytes == 4 * cost.parameters


class Float32Bytes(TorchDispatchMode):
    """Measures the largest number of bytes that float32 tensors held at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        for tensor in tree_iter((args, kwargs, out)):
            if isinstance(tensor, Tensor) and tensor.dtype == torch.float32 and not tensor.is_meta:
                storage = tensor.untyped_storage()
                self._alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._alive = {key: entry for key, entry in self._alive.items() if not entry[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))
        return out


@pytest.mark.parametrize("family", ["sd3", "flux", "wan"])
def test_never_in_float32(folder_of: FolderOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    config = config_of(folder_of(family, torch.float32), tmp_path, rank=1)
    start = family_of(config.model).weights.start(config.model)
    with Float32Bytes() as before:
        load_and_cast(config, torch.bfloat16)
    monkeypatch.setattr(trainable, "frozen_dtype", lambda *_: torch.bfloat16)
    with Float32Bytes() as now:
        denoiser = load_what_trains(config, start, CPU)
    named = dict(denoiser.named_parameters())
    frozen = [weight for name, weight in named.items() if not is_adapter_name(name)]
    adapter = sum(weight.nbytes for name, weight in named.items() if is_adapter_name(name))
    adapter += sum(buffer.nbytes for buffer in denoiser.buffers())
    half = [weight for weight in frozen if weight.dtype == torch.bfloat16]
    assert len(half) > len(frozen) / 2
    adapter += sum(weight.nbytes for weight in frozen if weight.dtype == torch.float32)
    assert before.peak >= 4 * sum(weight.numel() for weight in frozen), "the measurement sees a model in float32"
    largest = 4 * max(weight.numel() for weight in frozen)
    assert now.peak <= adapter + 2 * largest + 4096, "one weight, and a copy of it, beside the adapter"


NEEDS_LIBRARY = pytest.mark.skipif(not is_bnb_available(), reason="needs bitsandbytes")


@pytest.mark.parametrize("bits", [8, pytest.param(4, marks=NEEDS_LIBRARY)])
@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize("family", ["sd3", "flux", "wan"])
@pytest.mark.usefixtures("in_bfloat16")
def test_quantized_weights_come_singly(folder_of: FolderOf, tmp_path: Path, family: str, kind: str, bits: int) -> None:
    config = config_of(folder_of(family, torch.float32), tmp_path, base_bits=bits, **KINDS[kind])
    weights = family_of(config.model).weights
    start = weights.start(config.model)
    expected = weights.load(start, config.seed)
    assert config.adapter is not None
    whole = 4 * sum(weight.numel() for weight in expected.parameters())
    quantized.quantize_base(expected, bits, CPU)
    add_adapter(expected, config.adapter, config.seed)
    cast_frozen(expected, torch.bfloat16)
    with Float32Bytes() as memory:
        denoiser = load_what_trains(config, start, CPU)
    assert facts(denoiser) == facts(expected)
    assert {torch.int8, torch.uint8} & {dtype for dtype, _ in facts(denoiser).values()}
    states = denoiser.state_dict(), expected.state_dict()
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())
    assert memory.peak < 0.6 * whole, "NF4 has a table of 1 KiB per layer"


@pytest.mark.parametrize("base_bits", [16, 8])
@pytest.mark.parametrize("swapped", [3, "all"])
@pytest.mark.parametrize("family", ["sd3", "flux", "wan"])
@pytest.mark.usefixtures("in_bfloat16")
def test_swapped_blocks_have_the_bytes_that_check_counts(
    folder_of: FolderOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, swapped: Any, base_bits: int
) -> None:
    config = config_of(folder_of(family, torch.float32), tmp_path, base_bits=base_bits)
    config = config.model_copy(update={"swap_blocks": swapped})
    assert config.adapter is not None
    swaps: list[BlockSwap] = []
    start_swap = BlockSwap.start

    def record(swap: BlockSwap) -> None:
        start_swap(swap)
        swaps.append(swap)

    monkeypatch.setattr(BlockSwap, "start", record)
    start = family_of(config.model).weights.start(config.model)
    denoiser = load_what_trains(config, start, CPU)
    cost = family_of(config.model).cost(start, config.model)
    adapter = cost.adapter_parameters(config.adapter)
    setup = TrainingSetup(cost, Tokens(64, 64), 1, adapter=adapter, base_bits=base_bits, swapped=config.swap_blocks)
    (swap,) = swaps
    weights = [*denoiser.parameters(), *(buffer for name, buffer in denoiser.named_buffers() if "scale" in name)]
    alignment = 512 * len(weights)  # it counts in tiny models only
    assert setup.host_bytes == pytest.approx(swap.host_bytes, abs=alignment, rel=0.1)
    storages = {weight.untyped_storage().data_ptr(): weight.untyped_storage().nbytes() for weight in weights}
    held = sum(storages.values()) - 4 * sum(adapter)
    assert setup.frozen_bytes == pytest.approx(held, abs=alignment, rel=0.1)
    whole = TrainingSetup(cost, Tokens(64, 64), 1, adapter=adapter, base_bits=base_bits)
    assert whole.host_bytes == 0
    assert setup.frozen_bytes + setup.host_bytes > whole.frozen_bytes, "and the buffers"


@pytest.mark.parametrize("swapped", [0, 3, "all"])
@pytest.mark.parametrize(("family", "kind"), [("sd3", "adamw8bit"), ("wan", "adamw"), ("flux", "adafactor")])
def test_trained_block_bytes(folder_of: FolderOf, tmp_path: Path, family: str, kind: str, swapped: int | str) -> None:
    model = {"diffusers_path": str(folder_of(family, torch.float32)), "dtype": "float32"}
    settings = {"output_dir": "out", "dataset": "data.toml", "max_steps": 9, "model": model, "swap_blocks": swapped}
    settings |= {"gradient_release": True, "gradient_clipping": 0.0, "optimizer": {"type": kind}}
    config = TrainConfig.model_validate(settings, context={"base": tmp_path})
    start = family_of(config.model).weights.start(config.model)
    denoiser = load_what_trains(config, start, CPU)
    cost = family_of(config.model).cost(start, config.model)
    engine = TorchEngine(family_of(config.model).training.model(denoiser, config, False), config, Launch(), CPU)
    setup = TrainingSetup(cost, Tokens(64, 64), 1, optimizer=kind, release=True, swapped=config.swap_blocks)
    engine.optimizer.prepare_state()
    optimizers = [each.optimizer for chunk in engine.optimizer.chunks for each in chunk.optimizers]
    states = [state for optimizer in optimizers for state in optimizer.state.values()]
    values = [*denoiser.parameters(), *(value for state in states for value in state.values())]
    held = {value.untyped_storage().data_ptr(): value.untyped_storage().nbytes() for value in values}
    alignment = 512 * len(values)  # it counts in tiny models only, as do the moments of vectors
    assert state_bytes(setup).value == pytest.approx(sum(held.values()), abs=alignment, rel=0.15)
    swap = trained_blocks(denoiser)
    assert (swap is None) == (swapped == 0)
    if swap is not None:
        state_ring = swap[0]._state
        assert state_ring is not None
        assert setup.host_bytes == pytest.approx(swap[0].host_bytes + state_ring.host_bytes, abs=alignment, rel=0.15)
    stored = dict(family_of(config.model).weights.load(start, 0).named_parameters())
    assert all(torch.equal(tensor, stored[name]) for name, tensor in engine.weights.items())
