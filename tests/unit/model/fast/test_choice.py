"""Which blocks a run takes: the fast ones where nothing stands in the way, and a word where something does."""

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
from sd3_light.stages.train.train_state import choose_blocks, require_blocks

SIZE = SIZES["tiny2"]


def table(**keys: Any) -> TrainConfig:
    model = {"train_type": "sd3_light_pretrain", "diffusers_path": "model", "size": "tiny2", **keys.pop("model", {})}
    given = {"output_dir": "run", "dataset": "data.toml", "max_steps": 1, "model": model, **keys}
    return TrainConfig.model_validate(given, context={"base": Path.cwd()})


def test_on_gpus_they_are_taken_unless_something_is_in_the_way() -> None:
    assert why_stock_by_config(table(), SIZE) is None
    assert why_stock_by_config(table(parallel="fsdp2"), SIZE) is None, "one process cuts nothing"
    assert why_stock_by_config(table(), SIZE, by_deepspeed=True) is None, "one stage runs the whole module"
    assert why_stock_by_config(table(zero_stage=3), SIZE) is None, "torch's engine knows no ZeRO"
    found = [
        why_stock_by_config(table(fast=False), SIZE),
        why_stock_by_config(table(compile=True), SIZE),
        why_stock_by_config(table(adapter={"type": "lora", "rank": 4}), SIZE),
        why_stock_by_config(table(zero_stage=3), SIZE, by_deepspeed=True),
        why_stock_by_config(table(pipeline_stages=2), SIZE),
        why_stock_by_config(table(parallel="fsdp2"), SIZE, world=2),
        why_stock_by_config(table(), SIZES["sd3.5_medium"]),
        why_stock_by_config(table(model={"transformer_dtype": "float32"}), SIZE),
    ]
    words = ["fast", "compile", "adapter", "ZeRO-3", "pipeline", "fsdp2", "second attention", "transformer_dtype"]
    assert [word in str(reason) for word, reason in zip(words, found, strict=True)] == [True] * len(words)


def test_a_cpu_uses_the_stock_blocks_unless_fast_is_true() -> None:
    assert why_stock_on_device(table(), "cpu") == "there is no GPU"
    assert why_stock_on_device(table(fast=True, model={"text_tokens": "real"}), "cpu") is None


def test_what_is_demanded_in_vain_is_a_fault() -> None:
    transformer, cpu = new_transformer(SIZE.transformer_config(), 0), torch.device("cpu")
    assert choose_blocks(table(fast=True), transformer, Launch(), cpu, by_deepspeed=False)
    assert not choose_blocks(table(), transformer, Launch(), cpu, by_deepspeed=False)
    assert not choose_blocks(table(fast=False), transformer, Launch(), cpu, by_deepspeed=False)
    with pytest.raises(UserError, match=r'fast = true cannot be had: ZeRO-3.*write fast = "auto"'):
        choose_blocks(table(fast=True, zero_stage=3), transformer, Launch(), cpu, by_deepspeed=True)
    require_blocks(table(fast=True), Launch(), by_deepspeed=True)
    for vain in ({"fast": True}, {"fp8": True}):
        with pytest.raises(UserError, match="ZeRO-3"):
            require_blocks(table(zero_stage=3, **vain), Launch(), by_deepspeed=True)


def test_two_ways_at_once_are_findings() -> None:
    def keys(**given: Any) -> list[str]:
        given |= {"save_every_n_steps": 1}
        return [finding.key for finding in run_cross_checks(table(**given), frozenset())]

    assert keys(fast=True, compile=True) == ["fast"]
    assert keys(activation_checkpointing="selective", compile=True) == ["activation_checkpointing"]
    assert keys(activation_checkpointing="selective", fast=True) == []


def test_fp8_needs_the_fast_blocks_and_a_gpu_that_knows_it() -> None:
    transformer, cpu = new_transformer(SIZE.transformer_config(), 0), torch.device("cpu")
    assert choose_blocks(table(fp8=True, fast=True), transformer, Launch(), cpu, by_deepspeed=False)
    with pytest.raises(UserError, match=r"fp8 = true cannot be had: there is no GPU; write fp8 = false"):
        choose_blocks(table(fp8=True), transformer, Launch(), cpu, by_deepspeed=False)
    assert why_no_fp8(SIZE, (9, 0)) is None
    assert why_no_fp8(SIZE, (8, 9)) is None
    assert "sm_80" in str(why_no_fp8(SIZE, (8, 0)))
    assert "multiple of 16" in str(why_no_fp8(replace(SIZE, num_heads=3, head_dim=8), (9, 0)))


def test_fp8_beside_what_it_cannot_join_is_a_finding() -> None:
    def problems(**given: Any) -> list[str]:
        found = list(run_cross_checks(table(fp8=True, save_every_n_steps=1, **given), frozenset()))
        assert all(finding.key == "fp8" for finding in found)
        return [finding.problem for finding in found]

    assert problems() == problems(fast=True) == []
    adapter = {"type": "lora", "rank": 4}
    for given, word in (
        ({"fast": False}, "fast = false"),
        ({"compile": True}, "compile = true"),
        ({"adapter": adapter}, "an adapter"),
        ({"pipeline_stages": 2, "gradient_accumulation_steps": 2}, "pipeline_stages = 2"),
        ({"model": {"transformer_dtype": "float32"}}, "float32"),
    ):
        (problem,) = problems(**given)
        assert word in problem
