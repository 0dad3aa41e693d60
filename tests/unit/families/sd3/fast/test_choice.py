"""Which blocks a run uses: the fast ones, or the stock ones with a reason."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sd3_light.config import SIZES, TrainConfig
from sd3_light.config.cross_checks import run_cross_checks
from sd3_light.config.faults import UserError
from sd3_light.core.cost import Layout
from sd3_light.engines import Launch
from sd3_light.engines import blocks as chosen
from sd3_light.engines.blocks import Blocks, choose_blocks, require_blocks
from sd3_light.engines.processes import ProcessGroups
from sd3_light.families import sd3
from sd3_light.families.sd3.cost import SD3Cost
from sd3_light.families.sd3.fast import self_check
from sd3_light.families.sd3.fast.choice import why_no_fp8, why_stock_by_config, why_stock_on_device
from sd3_light.families.sd3.random_weights import new_transformer

SIZE = SIZES["tiny2"]
COST = SD3Cost(SIZE)


def train_config(**keys: Any) -> TrainConfig:
    model = {"train_type": "sd3_light_pretrain", "diffusers_path": "model", "size": "tiny2", **keys.pop("model", {})}
    settings = {"output_dir": "run", "dataset": "data.toml", "max_steps": 1, "model": model, **keys}
    return TrainConfig.model_validate(settings, context={"base": Path.cwd()})


def test_the_config_and_the_device_decide_about_fast_blocks() -> None:
    assert why_stock_by_config(train_config(), SIZE) is None
    assert why_stock_by_config(train_config(parallel="fsdp2", fp8=True), SIZE) is None, "one process shards nothing"
    assert why_stock_by_config(train_config(parallel="fsdp2"), SIZE, world_size=2) is None
    assert why_stock_by_config(train_config(), SIZE, by_deepspeed=True) is None, "one stage runs the whole module"
    assert why_stock_by_config(train_config(zero_stage=3), SIZE) is None, "the torch engine has no ZeRO"
    reasons = [
        why_stock_by_config(train_config(fast=False), SIZE),
        why_stock_by_config(train_config(compile=True), SIZE),
        why_stock_by_config(train_config(adapter={"type": "lora", "rank": 4}), SIZE),
        why_stock_by_config(train_config(zero_stage=3), SIZE, by_deepspeed=True),
        why_stock_by_config(train_config(pipeline_stages=2), SIZE),
        why_stock_by_config(train_config(parallel="fsdp2", fp8=True), SIZE, world_size=2),
        why_stock_by_config(train_config(), SIZES["sd3.5_medium"]),
        why_stock_by_config(train_config(), replace(SIZE, head_dim=48)),
        why_stock_by_config(train_config(model={"transformer_dtype": "float32"}), SIZE),
    ]
    words = ["fast", "compile", "adapter", "ZeRO-3", "pipeline", "fsdp2", "second attention", "head width"]
    words.append("transformer_dtype")
    assert [word in str(reason) for word, reason in zip(words, reasons, strict=True)] == [True] * len(words)
    assert why_stock_on_device(train_config(), "cpu") == "there is no GPU"
    assert why_stock_on_device(train_config(fast=True, model={"text_tokens": "real"}), "cpu") is None


CPU, CUDA = torch.device("cpu"), torch.device("cuda")
FAST = Blocks("fast")


@pytest.fixture(scope="module")
def transformer() -> Any:
    return new_transformer(SIZE.transformer_config(), 0)


def choose(
    config: TrainConfig,
    transformer: Any,
    device: torch.device = CPU,
    by_deepspeed: bool = False,
    steps: int | None = 1000,
) -> Blocks:
    return choose_blocks(config, COST, transformer, Layout(by_deepspeed=by_deepspeed), device, ProcessGroups(), steps)


def test_unavailable_fast_blocks_are_an_error(transformer: Any) -> None:
    assert choose(train_config(fast=True), transformer) == FAST
    assert choose(train_config(), transformer) == ("stock", "there is no GPU", "there is no GPU")
    assert choose(train_config(fast=False), transformer) == ("stock", "fast = false", "there is no GPU")
    assert choose(train_config(), transformer, steps=1).why_uncompiled == "there is no GPU", "not that the run is short"
    assert choose(train_config(compile=True), transformer) == ("compiled", "compile = true", None)
    with pytest.raises(UserError, match=r'fast = true is not available: ZeRO-3.*write fast = "auto"'):
        choose(train_config(fast=True, zero_stage=3), transformer, by_deepspeed=True)
    require_blocks(train_config(fast=True), COST, Launch(), CPU, by_deepspeed=True)
    for keys in ({"fast": True}, {"fp8": True}):
        with pytest.raises(UserError, match="ZeRO-3"):
            require_blocks(train_config(zero_stage=3, **keys), COST, Launch(), CPU, by_deepspeed=True)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, str | None]:
    """A GPU as the decision sees it: the problems of its kernels, plain and in fp8, and of torch.compile."""
    problems: dict[str, str | None] = {"plain": None, "fp8": None, "compile": None}
    monkeypatch.setattr(sd3, "why_stock_on_device", lambda config, device: None)
    monkeypatch.setattr(self_check, "kernel_problem", lambda shape, device: problems["fp8" if shape.fp8 else "plain"])
    monkeypatch.setattr(chosen, "why_not_compiled", lambda device: problems["compile"])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    return problems


PRICE = "; the first steps take longer, while they compile"
BROKEN = "the kernel join differs from its reference by 0.4, more than 0.02"


def test_a_broken_kernel_means_compiled_stock_blocks(
    gpu: dict[str, str | None], transformer: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    assert choose(train_config(), transformer, CUDA) == FAST
    assert capfd.readouterr().err == "blocks: fast kernels\n"
    gpu["plain"] = BROKEN
    assert choose(train_config(), transformer, CUDA) == ("compiled", BROKEN, None)
    assert capfd.readouterr().err == f"blocks: stock, compiled ({BROKEN}){PRICE}\n"
    selective = train_config(activation_checkpointing="selective")
    assert choose(selective, transformer, CUDA)[:2] == ("stock", BROKEN), "compiled blocks hide their operations"
    gpu["compile"] = "torch.compile does not work here (InductorError)"
    assert choose(train_config(), transformer, CUDA) == ("stock", BROKEN, gpu["compile"])
    capfd.readouterr()
    assert choose(train_config(fast=False), transformer, CUDA) == ("stock", "fast = false", gpu["compile"])
    assert capfd.readouterr().err == f"blocks: stock (fast = false; {gpu['compile']})\n"


@pytest.mark.parametrize(
    ("keys", "why_stock"),
    [
        ({"adapter": {"type": "lora", "rank": 4}}, "an adapter is trained"),
        ({"fast": False}, "fast = false"),
        ({"model": {"transformer_dtype": "float32"}}, 'transformer_dtype = "float32"'),
    ],
)
def test_other_stock_blocks_are_compiled_on_a_gpu(
    gpu: dict[str, str | None],
    transformer: Any,
    keys: dict[str, Any],
    why_stock: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    config = train_config(**keys)
    assert choose(config, transformer, CUDA).kind == "compiled"
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("blocks: stock, compiled (")
    assert why_stock in line
    assert line.endswith(PRICE)
    assert choose(config, transformer, CUDA, by_deepspeed=True).why_uncompiled == "DeepSpeed wraps the layers"
    assert choose(config, transformer, CUDA, steps=None).kind == "compiled", "of a run of unknown length"
    assert choose(config, transformer, CUDA, steps=12).kind == "stock"
    line = capfd.readouterr().err.splitlines()[-1]
    assert line.endswith("; compiling pays from about 400 micro-batches on, and this run has 12)")


def test_a_broken_kernel_is_an_error_where_the_config_requires_it(gpu: dict[str, str | None], transformer: Any) -> None:
    gpu["fp8"] = BROKEN
    assert choose(train_config(fast=True), transformer, CUDA) == FAST
    with pytest.raises(UserError, match=f"^fp8 = true is not available: {BROKEN}; write fp8 = false$"):
        choose(train_config(fast=True, fp8=True), transformer, CUDA)
    gpu |= {"fp8": None, "plain": BROKEN}
    with pytest.raises(UserError, match=f'^fast = true is not available: {BROKEN}; write fast = "auto"$'):
        choose(train_config(fast=True), transformer, CUDA)
    with pytest.raises(UserError, match=f"^fp8 = true is not available: {BROKEN}; write fp8 = false$"):
        choose(train_config(fp8=True), transformer, CUDA)


def test_problems_of_ranks_count(gpu: dict[str, str | None], transformer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 has another kind of GPU, whose kernels are broken."""
    others: list[str | None] = [None, BROKEN, None]  # of the config, of the kernels, of torch.compile
    monkeypatch.setattr(ProcessGroups, "first_problem", lambda self, problem: problem or others.pop(0))
    assert choose(train_config(), transformer, CUDA) == ("compiled", BROKEN, None)
    assert others == [], "every rank takes part in every exchange"


def test_conflicting_keys_are_reported() -> None:
    def reported_keys(**settings: Any) -> list[str]:
        settings |= {"save_every_n_steps": 1}
        return [finding.key for finding in run_cross_checks(train_config(**settings), frozenset())]

    assert reported_keys(fast=True, compile=True) == ["fast"]
    assert reported_keys(activation_checkpointing="selective", compile=True) == ["activation_checkpointing"]
    assert reported_keys(activation_checkpointing="selective", fast=True) == []
    assert reported_keys(activation_checkpointing=0.5, compile=True) == []
    stages = {"pipeline_stages": 2}
    assert "activation_checkpointing" in reported_keys(activation_checkpointing=0.5, **stages)
    assert "activation_checkpointing" not in reported_keys(activation_checkpointing=True, **stages)

    def problems(**settings: Any) -> list[str]:
        findings = list(run_cross_checks(train_config(fp8=True, save_every_n_steps=1, **settings), frozenset()))
        assert all(finding.key == "fp8" for finding in findings)
        return [finding.problem for finding in findings]

    assert problems() == problems(fast=True) == []
    adapter = {"type": "lora", "rank": 4}
    for settings, word in (
        ({"fast": False}, "fast = false"),
        ({"compile": True}, "compile = true"),
        ({"adapter": adapter}, "an adapter"),
        ({"pipeline_stages": 2, "gradient_accumulation_steps": 2}, "pipeline_stages = 2"),
        ({"model": {"transformer_dtype": "float32"}}, "float32"),
    ):
        (problem,) = problems(**settings)
        assert word in problem


def test_fp8_needs_the_fast_blocks_and_a_gpu_with_fp8(transformer: Any) -> None:
    assert choose(train_config(fp8=True, fast=True), transformer) == FAST
    with pytest.raises(UserError, match=r"fp8 = true is not available: there is no GPU; write fp8 = false"):
        choose(train_config(fp8=True), transformer)
    assert why_no_fp8(SIZE, (9, 0)) is None
    assert why_no_fp8(SIZE, (8, 9)) is None
    assert "sm_80" in str(why_no_fp8(SIZE, (8, 0)))
    assert "multiple of 16" in str(why_no_fp8(replace(SIZE, num_heads=3, head_dim=8), (9, 0)))
