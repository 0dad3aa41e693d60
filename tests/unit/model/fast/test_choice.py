"""Which blocks a run uses: the fast ones, or the stock ones with a reason."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sd3_light.config import SIZES, TrainConfig
from sd3_light.config.cross_checks import run_cross_checks
from sd3_light.config.faults import UserError
from sd3_light.engines import Launch
from sd3_light.model.fast.choice import why_no_fp8, why_stock_by_config, why_stock_on_device
from sd3_light.model.random_weights import new_transformer
from sd3_light.stages.train.train_state import choose_blocks

SIZE = SIZES["tiny2"]


def train_config(**keys: Any) -> TrainConfig:
    model = {"train_type": "sd3_light_pretrain", "diffusers_path": "model", "size": "tiny2", **keys.pop("model", {})}
    settings = {"output_dir": "run", "dataset": "data.toml", "max_steps": 1, "model": model, **keys}
    return TrainConfig.model_validate(settings, context={"base": Path.cwd()})


def test_gpus_use_the_fast_blocks_unless_the_config_rules_them_out() -> None:
    assert why_stock_by_config(train_config(), SIZE) is None
    assert why_stock_by_config(train_config(parallel="fsdp2"), SIZE) is None, "one process shards nothing"
    assert why_stock_by_config(train_config(), SIZE, by_deepspeed=True) is None, "one stage runs the whole module"
    assert why_stock_by_config(train_config(zero_stage=3), SIZE) is None, "the torch engine has no ZeRO"
    reasons = [
        why_stock_by_config(train_config(fast=False), SIZE),
        why_stock_by_config(train_config(compile=True), SIZE),
        why_stock_by_config(train_config(adapter={"type": "lora", "rank": 4}), SIZE),
        why_stock_by_config(train_config(zero_stage=3), SIZE, by_deepspeed=True),
        why_stock_by_config(train_config(pipeline_stages=2), SIZE),
        why_stock_by_config(train_config(parallel="fsdp2"), SIZE, world=2),
        why_stock_by_config(train_config(), SIZES["sd3.5_medium"]),
        why_stock_by_config(train_config(model={"transformer_dtype": "float32"}), SIZE),
    ]
    words = ["fast", "compile", "adapter", "ZeRO-3", "pipeline", "fsdp2", "second attention", "transformer_dtype"]
    assert [word in str(reason) for word, reason in zip(words, reasons, strict=True)] == [True] * len(words)


def test_a_cpu_uses_the_stock_blocks_unless_fast_is_true() -> None:
    assert why_stock_on_device(train_config(), "cpu") == "there is no GPU"
    assert why_stock_on_device(train_config(fast=True, model={"text_tokens": "real"}), "cpu") is None


def test_unavailable_fast_blocks_are_an_error() -> None:
    transformer, cpu = new_transformer(SIZE.transformer_config(), 0), torch.device("cpu")
    assert choose_blocks(train_config(fast=True), SIZE, transformer, Launch(), cpu, by_deepspeed=False)
    assert not choose_blocks(train_config(), SIZE, transformer, Launch(), cpu, by_deepspeed=False)
    assert not choose_blocks(train_config(fast=False), SIZE, transformer, Launch(), cpu, by_deepspeed=False)
    with pytest.raises(UserError, match=r'fast = true is not available: ZeRO-3.*write fast = "auto"'):
        choose_blocks(train_config(fast=True, zero_stage=3), SIZE, transformer, Launch(), cpu, by_deepspeed=True)
    choose_blocks(train_config(fast=True), SIZE, None, Launch(), cpu, by_deepspeed=True)
    for keys in ({"fast": True}, {"fp8": True}):
        with pytest.raises(UserError, match="ZeRO-3"):
            choose_blocks(train_config(zero_stage=3, **keys), SIZE, None, Launch(), cpu, by_deepspeed=True)


def test_conflicting_keys_are_reported() -> None:
    def reported_keys(**settings: Any) -> list[str]:
        settings |= {"save_every_n_steps": 1}
        return [finding.key for finding in run_cross_checks(train_config(**settings), frozenset())]

    assert reported_keys(fast=True, compile=True) == ["fast"]
    assert reported_keys(activation_checkpointing="selective", compile=True) == ["activation_checkpointing"]
    assert reported_keys(activation_checkpointing="selective", fast=True) == []


def test_fp8_needs_the_fast_blocks_and_a_gpu_with_fp8() -> None:
    transformer, cpu = new_transformer(SIZE.transformer_config(), 0), torch.device("cpu")
    assert choose_blocks(train_config(fp8=True, fast=True), SIZE, transformer, Launch(), cpu, by_deepspeed=False)
    with pytest.raises(UserError, match=r"fp8 = true is not available: there is no GPU; write fp8 = false"):
        choose_blocks(train_config(fp8=True), SIZE, transformer, Launch(), cpu, by_deepspeed=False)
    assert why_no_fp8(SIZE, (9, 0)) is None
    assert why_no_fp8(SIZE, (8, 9)) is None
    assert "sm_80" in str(why_no_fp8(SIZE, (8, 0)))
    assert "multiple of 16" in str(why_no_fp8(replace(SIZE, num_heads=3, head_dim=8), (9, 0)))


def test_keys_that_conflict_with_fp8_are_reported() -> None:
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
