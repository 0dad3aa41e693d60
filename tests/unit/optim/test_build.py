"""Optimizers: correct against an independent computation; skipping, saving and loading change nothing."""

import importlib.util
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from sd3_light.config import OptimizerConfig
from sd3_light.config.faults import UserError
from sd3_light.config.optimizers import OPTIMIZERS
from sd3_light.optim import build
from sd3_light.optim.build import MAKERS, Optimizer, make_optimizer

CPU = torch.device("cpu")
MATRIX, BIAS = "transformer_blocks.0.attn.to_q.weight", "transformer_blocks.0.attn.to_q.bias"
NORM, EMBED, OUT = "transformer_blocks.1.attn.norm_q.weight", "context_embedder.weight", "proj_out.weight"
DECAYING = {MATRIX, OUT}
SHAPES = {MATRIX: (72, 60), BIAS: (72,), NORM: (64,), EMBED: (8, 9), OUT: (16, 300)}


def make_model(seed: int = 0) -> nn.Module:
    """Return modules nested as in a denoiser, with random weights of `SHAPES`, and others."""
    rows, columns = SHAPES[MATRIX]
    blocks = nn.ModuleList()
    for _ in range(2):
        layers = {"to_q": nn.Linear(columns, rows), "norm_q": nn.RMSNorm(64), "to_out": nn.Linear(rows, columns)}
        blocks.append(nn.ModuleDict({"attn": nn.ModuleDict(layers)}))
    model = nn.ModuleDict({"context_embedder": nn.Linear(*SHAPES[EMBED][::-1]), "transformer_blocks": blocks})
    model["proj_out"] = nn.Linear(*SHAPES[OUT][::-1])
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        nn.init.normal_(parameter, generator=generator)
    return model


def optional(name: str) -> Any:
    """The optimizer as a test parameter, skipped where its library is missing."""
    package = OPTIMIZERS[name].package
    missing = package is not None and importlib.util.find_spec(package) is None
    return pytest.param(name, marks=pytest.mark.skipif(missing, reason=f"needs {package}"))


STARTS = {"prodigy": ["p0", "d", "d_max"]}
"""State that is not zero at step 0: the initial weights, and the estimate of the step size."""
KINDS = [optional(name) for name in OPTIMIZERS]


class Toy:
    """Some weights of the denoiser, their optimizer, and gradients that depend on the step alone."""

    def __init__(self, kind: str = "adamw", **keys: Any) -> None:
        model = make_model()
        self.named = {name: weight for name, weight in model.named_parameters() if name in SHAPES}
        assert {name: tuple(weight.shape) for name, weight in self.named.items()} == SHAPES
        self.config = OptimizerConfig(**{"type": kind, "lr": 1e-2, "weight_decay": 0.1, **keys})
        self.optimizer: Optimizer = make_optimizer(model, self.named, self.config, CPU)

    def gradients(self, step: int) -> None:
        generator = torch.Generator().manual_seed(100 + step)
        for parameter in self.named.values():
            parameter.grad = torch.randn(parameter.shape, generator=generator)

    def steps(self, first: int, last: int) -> "Toy":
        for step in range(first, last):
            self.gradients(step)
            self.optimizer.set_rate(rate(step))
            self.optimizer.step()
        return self

    def all(self) -> dict[str, Tensor]:
        numbers = {f"param/{name}": parameter.detach().clone() for name, parameter in self.named.items()}
        for name in self.named:
            numbers |= {f"{kind}/{name}": value.clone() for kind, value in self.optimizer.state(name).items()}
        return numbers


def rate(step: int) -> float:
    return 1e-2 / (1 + step)


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if a[name].dtype != b[name].dtype or not torch.equal(a[name], b[name])] == []


def adamw_in_float64(toy: Toy, steps: int) -> dict[str, np.ndarray]:
    """AdamW as in its paper (Loshchilov and Hutter 2019, algorithm 2), in float64 with numpy alone."""
    (b1, b2), eps = toy.config.betas, toy.config.eps
    x = {name: p.detach().double().numpy().copy() for name, p in toy.named.items()}
    m, v = ({name: np.zeros_like(value) for name, value in x.items()} for _ in range(2))
    for step in range(steps):
        toy.gradients(step)
        for name, parameter in toy.named.items():
            assert parameter.grad is not None
            g, lr = parameter.grad.double().numpy(), rate(step)
            m[name] = b1 * m[name] + (1 - b1) * g
            v[name] = b2 * v[name] + (1 - b2) * g**2
            decay = toy.config.weight_decay if name in DECAYING else 0.0
            update = (m[name] / (1 - b1 ** (step + 1))) / (np.sqrt(v[name] / (1 - b2 ** (step + 1))) + eps)
            x[name] = x[name] - lr * decay * x[name] - lr * update
    return x


@pytest.mark.parametrize("keys", [{}, {"betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.0}])
def test_adamw_matches_the_paper_over_20_steps(keys: dict[str, Any]) -> None:
    expected = adamw_in_float64(Toy(**keys), 20)
    toy = Toy(**keys).steps(0, 20)
    for name, parameter in toy.named.items():
        np.testing.assert_allclose(parameter.detach().numpy(), expected[name], rtol=2e-6, atol=2e-6, err_msg=name)
        assert toy.optimizer.state(name)["step"].item() == 20


def test_muon_steps_are_orthogonal_and_of_adamws_size() -> None:
    """For a gradient U S V' the first step is about U V', scaled to a root mean square of 0.2 lr."""
    toy = Toy("muon", weight_decay=0.0)
    before = toy.named[MATRIX].detach().clone()
    toy.gradients(0)
    gradient = toy.named[MATRIX].grad
    assert gradient is not None
    toy.optimizer.set_rate(1e-2)
    toy.optimizer.step()
    moved = before - toy.named[MATRIX].detach()
    u, _, vh = torch.linalg.svd(gradient, full_matrices=False)
    inner = torch.nn.functional.cosine_similarity((u @ vh).flatten(), moved.flatten(), dim=0)
    assert inner > 0.95
    assert moved.square().mean().sqrt().item() == pytest.approx(0.2 * 1e-2, rel=0.25)


def test_muon_updates_and_decays_matrices_of_blocks_and_adamw_the_rest() -> None:
    muon, adamw = Toy("muon").steps(0, 3), Toy("adamw").steps(0, 3)
    for name in SHAPES:
        same = torch.equal(muon.named[name], adamw.named[name])
        assert same == (name != MATRIX), name
    assert {name for name in SHAPES if "momentum_buffer" in muon.optimizer.state(name)} == {MATRIX}
    free, decaying = Toy("muon", weight_decay=0.0).steps(0, 1), Toy("muon", weight_decay=0.5).steps(0, 1)
    expected = free.named[MATRIX].detach() - 1e-2 * 0.5 * Toy().named[MATRIX].detach()
    torch.testing.assert_close(decaying.named[MATRIX].detach(), expected, rtol=1e-5, atol=1e-6)


def test_muon_splits_the_modulation_only_on_request() -> None:
    block = nn.ModuleDict({"norm1": nn.ModuleDict({"linear": nn.Linear(8, 24)}), "to_q": nn.Linear(8, 24)})
    model = nn.ModuleDict({"transformer_blocks": nn.ModuleList([block])})
    named = dict(model.named_parameters())
    parts = {}
    for split in (False, True):
        config = OptimizerConfig(type="muon", split_modulation=split)
        _, muon = make_optimizer(model, named, config, CPU)._optimizers
        names = {id(weight): name for name, weight in named.items()}
        groups = muon.optimizer.param_groups
        parts[split] = {names[id(weight)]: group["parts"] for group in groups for weight in group["params"]}
    modulation, query = "transformer_blocks.0.norm1.linear.weight", "transformer_blocks.0.to_q.weight"
    assert parts == {False: {modulation: 1, query: 1}, True: {modulation: 3, query: 1}}


def test_muon_with_only_one_kind_of_weight(capsys: pytest.CaptureFixture[str]) -> None:
    """For example when all other weights are frozen."""
    for names in ([MATRIX], [BIAS, EMBED]):
        model = make_model()
        named = {name: weight for name, weight in model.named_parameters() if name in names}
        optimizer = make_optimizer(model, named, OptimizerConfig(type="muon"), CPU)
        optimizer.prepare_state()
        assert all(optimizer.state(name) for name in names)
    assert capsys.readouterr().err.count("no matrix of a block trains, so AdamW updates all weights") == 1


def adafactor_in_float64(toy: Toy, steps: int) -> dict[str, np.ndarray]:
    """Adafactor (Shazeer and Stern 2018, algorithms 4 and 5, without first moment), decay as in AdamW, with numpy."""
    x = {name: p.detach().double().numpy().copy() for name, p in toy.named.items()}
    rows, columns = (dict.fromkeys(x, 0.0) for _ in range(2))
    for step in range(steps):
        toy.gradients(step)
        for name, parameter in toy.named.items():
            assert parameter.grad is not None
            g, lr, new = parameter.grad.double().numpy(), rate(step), (step + 1) ** -0.8
            alpha = max(1e-3, np.sqrt((x[name] ** 2).mean())) * min(lr, (step + 1) ** -0.5)
            squares = g**2 if g.ndim == 1 else (g**2).mean(-1, keepdims=True)
            estimate = rows[name] = (1 - new) * rows[name] + new * squares
            if g.ndim > 1:
                columns[name] = (1 - new) * columns[name] + new * (g**2).mean(-2, keepdims=True)
                estimate = rows[name] @ columns[name] / rows[name].mean(-2, keepdims=True)
            update = g / np.sqrt(estimate)
            update = update / max(1.0, np.sqrt((update**2).mean()))
            decay = toy.config.weight_decay if name in DECAYING else 0.0
            x[name] = x[name] - lr * decay * x[name] - alpha * update
    return x


def test_adafactor_matches_the_paper_over_20_steps() -> None:
    expected, toy = adafactor_in_float64(Toy("adafactor"), 20), Toy("adafactor").steps(0, 20)
    for name, parameter in toy.named.items():
        np.testing.assert_allclose(parameter.detach().numpy(), expected[name], rtol=2e-5, atol=2e-5, err_msg=name)


def test_prodigy_is_the_librarys() -> None:
    """Its step size grows from 1e-6, and keeping it in the state changes no bit."""
    prodigyopt = pytest.importorskip("prodigyopt")
    toy, stock = Toy("prodigy", lr=1.0), Toy()
    decaying = [stock.named[name] for name in SHAPES if name in DECAYING]
    free = [stock.named[name] for name in SHAPES if name not in DECAYING]
    groups = [{"params": decaying, "weight_decay": 0.1}, {"params": free, "weight_decay": 0.0}]
    library = prodigyopt.Prodigy(groups, lr=1.0, use_bias_correction=True, safeguard_warmup=True)
    for _ in range(60):
        toy.gradients(0)
        toy.optimizer.set_rate(1.0)
        toy.optimizer.step()
        stock.gradients(0)
        library.step()
    assert all(torch.equal(toy.named[name], stock.named[name]) for name in SHAPES)
    state = toy.optimizer.state(MATRIX)
    assert state["d"].item() == library.param_groups[0]["d"] > 1e-4
    assert (state["k"].item(), state["step"].item()) == (60, 60)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("at", [0, 3])
def test_a_skipped_step_changes_nothing(kind: str, at: int) -> None:
    """Not even the first step; non-finite gradients never reach weights or state."""
    toy, untroubled = Toy(kind).steps(0, at), Toy(kind).steps(0, 5)
    toy.optimizer.prepare_state()
    before = toy.all()
    for bad in (float("nan"), float("inf")):
        for parameter in toy.named.values():
            parameter.grad = torch.full_like(parameter, bad)
        toy.optimizer.set_rate(0.5)
        toy.optimizer.step(skip=torch.ones(()))
        assert_same(toy.all(), before)
    assert_same(toy.steps(at, 5).all(), untroubled.all())
    for each, skip in ((toy, torch.zeros(())), (untroubled, None)):  # a skip of 0 is a plain step
        each.gradients(5)
        each.optimizer.step(skip=skip)
    assert_same(toy.all(), untroubled.all())


def test_adamw_skips_without_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    toy = Toy().steps(0, 1)

    def read_by_host(self: Tensor) -> Any:
        raise AssertionError("the host waits for the device")

    for method in ("__bool__", "item", "__float__", "tolist"):
        monkeypatch.setattr(Tensor, method, read_by_host)
    toy.optimizer.step(skip=torch.ones(()))


@pytest.mark.parametrize("kind", KINDS)
def test_prepare_state_creates_step_0_and_changes_no_weight(kind: str) -> None:
    toy, fresh = Toy(kind), Toy(kind)
    assert all(toy.optimizer.state(name) == {} for name in SHAPES)
    toy.optimizer.prepare_state()
    assert all(torch.equal(toy.named[name], fresh.named[name]) for name in SHAPES)
    for name in SHAPES:
        state = toy.optimizer.state(name)
        assert [kind for kind, value in state.items() if value.any()] == STARTS.get(kind, [])
        assert kind != "prodigy" or torch.equal(state["p0"], toy.named[name].flatten())
    assert_same(toy.steps(0, 4).all(), fresh.steps(0, 4).all())
    prepared = toy.all()
    toy.optimizer.prepare_state()
    assert_same(toy.all(), prepared)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("at", [0, 3])
def test_a_run_resumes_bit_for_bit_from_the_listed_state(kind: str, at: int) -> None:
    """Several steps after loading: the first would not show lost moments."""
    unbroken = Toy(kind).steps(0, at)
    unbroken.optimizer.prepare_state()
    saved, resumed = unbroken.all(), Toy(kind)
    resumed.optimizer.prepare_state()
    with torch.no_grad():
        for name, parameter in resumed.named.items():
            parameter.copy_(saved[f"param/{name}"])
            for state_kind, value in resumed.optimizer.state(name).items():
                value.view(-1).copy_(saved[f"{state_kind}/{name}"].view(-1))
    assert_same(resumed.steps(at, at + 3).all(), unbroken.steps(at, at + 3).all())


def test_8_bit_adamw_stays_close_to_adamw_and_its_state_keeps_its_dtypes() -> None:
    toy = Toy("adamw8bit").steps(0, 2)
    large = {key: (value.dtype, value.numel()) for key, value in toy.optimizer.state(MATRIX).items()}
    blocks = -(-72 * 60 // 256)
    codes = {"exp_avg": (torch.int8, 4320), "exp_avg_sq": (torch.uint8, 4320)}
    scales = {f"{name}_scale": (torch.float32, blocks) for name in codes}
    assert large == {"step": (torch.float32, 1), **codes, **scales}
    small = {key: value.dtype for key, value in toy.optimizer.state(BIAS).items()}
    assert small == {"step": torch.float32, "exp_avg": torch.float32, "exp_avg_sq": torch.float32}
    coarse, exact, start = Toy("adamw8bit").steps(0, 20), Toy("adamw").steps(0, 20), Toy()
    for name in SHAPES:
        distance = (exact.named[name] - start.named[name]).norm()
        assert (coarse.named[name] - exact.named[name]).norm() < 0.05 * distance, name


def test_a_missing_library_is_an_error_with_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="run `pip install 'sd3-light\\[prodigy\\]'`"):
        Toy("prodigy")


@pytest.mark.parametrize("kind", KINDS)
def test_every_record_has_a_maker_its_rate_and_the_bytes_of_its_state(kind: str) -> None:
    assert MAKERS.keys() == OPTIMIZERS.keys()
    assert OptimizerConfig(type=kind).lr == OPTIMIZERS[kind].lr
    assert OptimizerConfig(type=kind, lr=3e-4).lr == 3e-4
    linear = {"to_q": nn.Linear(256, 128), "to_out": nn.Linear(8, 8)}
    model = nn.ModuleDict({"transformer_blocks": nn.ModuleList([nn.ModuleDict({"attn": nn.ModuleDict(linear)})])})
    model["proj_out"] = nn.Linear(128, 64)
    named = {name: weight for name, weight in model.named_parameters() if name in (MATRIX, OUT)}
    optimizer = make_optimizer(model, named, OptimizerConfig(type=kind), CPU)
    optimizer.prepare_state()
    stored = {name: sum(value.nbytes for value in optimizer.state(name).values() if value.dim()) for name in named}
    for name, parameter in named.items():
        weights = ("all", "block matrices" if name == MATRIX else "other")
        terms = [term.bytes_per_parameter for term in OPTIMIZERS[kind].state if term.weights in weights]
        factored = 4 * sum(parameter.shape) if kind == "adafactor" else 0  # not proportional to the weights
        assert stored[name] == sum(terms) * parameter.numel() + factored


@pytest.fixture
def one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_sharded_weights_train_and_skip_like_whole_ones(one_process: None) -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    torch.manual_seed(0)
    whole = nn.Linear(6, 4)
    sharded = nn.Linear(6, 4)
    sharded.load_state_dict(whole.state_dict())
    fully_shard(sharded, mesh=dist.device_mesh.init_device_mesh("cpu", (1,)))
    optimizers = []
    for module in (whole, sharded):
        optimizer = make_optimizer(module, dict(module.named_parameters()), OptimizerConfig(lr=0.1), CPU)
        optimizer.prepare_state()
        for step, skip in enumerate((0.0, 1.0, 0.0)):
            module.zero_grad(set_to_none=True)
            module(torch.full((2, 6), 1.0 + step)).square().sum().backward()
            optimizer.step(skip=torch.tensor(skip))
        optimizers.append(optimizer)
    for name, parameter in sharded.named_parameters():
        assert isinstance(parameter, DTensor)
        assert torch.equal(parameter.to_local(), dict(whole.named_parameters())[name])
        moment, count = optimizers[1].state(name)["exp_avg"], optimizers[1].state(name)["step"]
        assert isinstance(moment, DTensor)
        assert torch.equal(moment.to_local(), optimizers[0].state(name)["exp_avg"])
        assert count.item() == 2


def test_updates_are_counted_when_they_start() -> None:
    """Also those of a library that drives the torch optimizer itself, and one that fails on the way."""
    for kind in ("adamw", "muon"):
        model = make_model()
        weight = model.get_parameter(MATRIX)
        optimizer = make_optimizer(model, {MATRIX: weight}, OptimizerConfig(type=kind, lr=1e-3), CPU)
        weight.grad = torch.ones_like(weight)
        optimizer.torch_optimizer.step()
        assert optimizer.updates_started == 1
        optimizer.torch_optimizer.param_groups[0]["params"] = [object()]
        with pytest.raises(AttributeError):
            optimizer.torch_optimizer.step()
        assert optimizer.updates_started == 2
