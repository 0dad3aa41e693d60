"""Faults of [adapter] that check finds before weights are loaded, and its estimate of a valid one."""

from collections.abc import Callable
from typing import Any

import pytest

from sd3_light.check import verb as check
from sd3_light.config import ConfigFaults, Fault
from tests.unit.check.conftest import shown

FROM_FOLDER = ""


def tables(keys: str) -> str:
    return f"[adapter]\n{keys}"


@pytest.mark.parametrize(
    ("keys", "key", "problem"),
    [
        ('target_modules = ["attn.toq"]', "adapter.target_modules", "attn.toq: no linear layer matches"),
        ('init_from_existing = "nowhere.safetensors"', "adapter.init_from_existing", "no such file or folder"),
    ],
)
def test_a_fault_names_the_key(files: Any, only_fault: Callable[..., Fault], keys: str, key: str, problem: str) -> None:
    files.denoiser("sd3/transformer")
    fault = only_fault(model=FROM_FOLDER, tables=tables(keys))
    assert fault.key == key
    assert problem in fault.problem


def test_an_adapter_on_random_weights_is_a_fault(files: Any, only_fault: Callable[..., Fault]) -> None:
    assert only_fault(tables=tables("rank = 4")).key == "model.train_type"
    with pytest.raises(ConfigFaults, match="needs trained weights"):
        files.load(model='size = "demo"\ntrain_type = "sd3_light_pretrain"\ninit = "random"', tables=tables("rank = 4"))


@pytest.mark.parametrize(
    ("top", "keys", "fault"),
    [
        ('freeze = ["pos_embed.*"]', "rank = 4", "freeze"),
        ("", 'type = "lokr"\nuse_dora = true', "adapter.use_dora"),
        ("", 'type = "loha"\nbase_bits = 8', "adapter.base_bits"),
        ('parallel = "fsdp2"', "base_bits = 4", "adapter.base_bits"),
        ("pipeline_stages = 2", "base_bits = 4", "adapter.base_bits"),
        ("", 'base_bits = "4"', "adapter.base_bits"),
        ('swap_blocks = "all"\nparallel = "fsdp2"', "", "swap_blocks"),
        ("swap_blocks = 3\npipeline_stages = 2", "", "swap_blocks"),
        ('swap_blocks = "most"', "", "swap_blocks"),
        ("swap_blocks = -1", "", "swap_blocks"),
        ("swap_blocks = true", "", "swap_blocks"),
        ("", "base_bits = 2", "adapter.base_bits"),
    ],
)
def test_incompatible_keys(files: Any, top: str, keys: str, fault: str) -> None:
    files.denoiser("sd3/transformer")
    with pytest.raises(ConfigFaults) as caught:
        files.load(top=top, model=FROM_FOLDER, tables=tables(keys))
    assert [item.key for item in caught.value.faults] == [fault]


def test_the_estimate_counts_trained_parameters(files: Any) -> None:
    files.denoiser("sd3/transformer")
    files.squares(3)
    full, adapter = (check.run(files.load(model=FROM_FOLDER, tables=text)) for text in ("", tables("rank = 4")))
    assert full.setup.adapter is None
    assert sum(adapter.setup.adapter or ()) == 31 * 4 * (256 + 256)
    assert adapter.gpu.state.value < full.gpu.state.value / 5
    assert adapter.run_flops.value < full.run_flops.value
    assert "63,488" in shown(check.render(adapter))


def test_the_estimate_counts_blocks_in_host_memory(files: Any) -> None:
    files.denoiser("sd3/transformer")
    files.squares(3)
    whole, swapped = (
        check.run(files.load(top=top, model=FROM_FOLDER, tables=tables("rank = 4"))) for top in ("", "swap_blocks = 4")
    )
    hosted = swapped.setup.host_bytes
    assert hosted > 0
    assert swapped.host.value - whole.host.value == hosted
    assert swapped.gpu.state.value - whole.gpu.state.value == swapped.setup.frozen_bytes - whole.setup.frozen_bytes < 0
    text = shown(check.render(swapped), width=400)
    assert f"{hosted / 2**20:.0f} MiB pinned for blocks in host memory" in text
    assert "frozen (with buffers for" in text
