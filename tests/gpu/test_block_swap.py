"""Blocks in pinned host memory on a GPU: the same numbers, and less GPU memory."""

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from sd3_light.config import SIZES, TrainConfig
from sd3_light.core.compiling import compile_blocks
from sd3_light.core.registry import family_named
from sd3_light.engines import Launch
from sd3_light.engines.torch import TorchEngine
from sd3_light.export.trainable import load_what_trains
from sd3_light.families.sd3.module import SD3TrainingModule
from sd3_light.families.sd3.random_weights import new_transformer
from sd3_light.model import host_inputs
from sd3_light.model.block_swap import BlockSwap
from tests.gpu.test_engine import batch

DEVICE = torch.device("cuda", 0)


def make_engine(folder: Path, base_bits: int, **keys: Any) -> TorchEngine:
    adapter = {"rank": 4, "target_modules": ["attn.to_*", "ff.net.*"], "base_bits": base_bits}
    model = {"type": "sd3", "diffusers_path": "folder"}
    settings = {"output_dir": "out", "dataset": "data.toml", "max_steps": 9, "model": model, "adapter": adapter}
    settings |= {"compile": False, **keys}
    config = TrainConfig.model_validate(settings, context={"base": folder})
    denoiser: Any = load_what_trains(config, family_named("sd3").weights.start(config.model), DEVICE)
    if config.compile:
        compile_blocks(denoiser)
    return TorchEngine(SD3TrainingModule(denoiser, config), config, Launch(), DEVICE)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    transformer = new_transformer({**SIZES["tiny2"].transformer_config(), "num_layers": 6}, 0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in transformer.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    transformer.save_pretrained(tmp_path / "folder" / "transformer")
    return tmp_path


@pytest.mark.parametrize("keys", [{}, {"activation_checkpointing": True}, {"compile": True}], ids=str)
@pytest.mark.parametrize("bits", [16, 8])
def test_swapped_blocks_compute_the_same_numbers(folder: Path, bits: int, keys: dict[str, Any]) -> None:
    results = []
    for swap in (0, "all", 4):
        torch.compiler.reset()
        engine = make_engine(folder, bits, swap_blocks=swap, **keys)
        inputs = batch(0)
        first = engine.denoise(inputs)
        losses = [engine.train_step([batch(0), batch(1)], 1e-2).read().losses["loss"] for _ in range(5)]
        results.append((first, losses))
        del engine
        gc.collect()
    for first, losses in results[1:]:
        assert torch.equal(first, results[0][0])
        assert losses[0] == results[0][1][0]
        assert losses == pytest.approx(results[0][1], rel=1e-3), "attention sums its gradients in any order"


@pytest.mark.parametrize("swap", [0, "all"])
def test_inputs_in_host_memory_give_the_same_bits(folder: Path, monkeypatch: pytest.MonkeyPatch, swap: Any) -> None:
    """Every copy begins late: what does not wait for it computes something else."""
    monkeypatch.setattr(host_inputs, "_SMALLEST", 1)
    moved: list[int] = []
    for name in ("_pack", "_load"):
        plain = getattr(host_inputs._HostInputs, name)

        def late(self: Any, *given: Any, plain: Any = plain, name: str = name) -> Any:
            with torch.cuda.stream(self._stream):
                torch.cuda._sleep(2_000_000)
            result = plain(self, *given)
            moved.append(name == "_load" or isinstance(result, host_inputs._Input))
            return result

        monkeypatch.setattr(host_inputs._HostInputs, name, late)
    results = []
    with sdpa_kernel(SDPBackend.MATH):  # whose gradients are the same every time
        for level in (True, "host"):
            engine = make_engine(folder, 16, activation_checkpointing=level, swap_blocks=swap)
            losses = [engine.train_step([batch(0), batch(1)], 1e-2).read().losses["loss"] for _ in range(4)]
            results.append((losses, [weight.clone() for weight in engine.weights.values()]))
            del engine
            gc.collect()
    assert sum(moved) > 100
    assert results[0][0] == results[1][0]
    assert all(torch.equal(*pair) for pair in zip(results[0][1], results[1][1], strict=True))


def test_weights_are_pinned_until_the_model_is_freed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    swaps: list[BlockSwap] = []
    start = BlockSwap.start

    def record(swap: BlockSwap) -> None:
        start(swap)
        swaps.append(swap)

    monkeypatch.setattr(BlockSwap, "start", record)
    engine = make_engine(folder, 16, swap_blocks="all")
    (swap,) = swaps
    assert len(swap._pinned) == len(swap._host) == 6
    assert all(memory.is_pinned() for memory in swap._host)
    alive = weakref.ref(swap)
    del engine, swap
    swaps.clear()
    gc.collect()
    assert alive() is None
