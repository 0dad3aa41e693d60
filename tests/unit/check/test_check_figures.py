"""The numbers of `check` for programs, and the line about exports."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from sd3_light.check import verb as check
from sd3_light.check.verb import Target, conclude, figures
from sd3_light.cost.host_memory import CUDA_BYTES, INTERPRETER_BYTES, export_seconds
from sd3_light.system import Gpu

GIB = 1 << 30
GPU = Target(Gpu("NVIDIA H200", 140 * GIB))
PRETRAIN = 'size = "demo"\ntrain_type = "sd3_light_pretrain"'
LORA = {"model": "", "tables": "[adapter]\nrank = 4"}


@pytest.fixture
def numbers(files: Any) -> Callable[..., tuple[dict[str, Any], dict[str, str], Any]]:
    """Return the figures, the conclusion and the estimate of a config with four images."""
    files.denoiser("sd3/transformer")
    files.squares(4)

    def of(target: Target, **changes: str) -> tuple[dict[str, Any], dict[str, str], Any]:
        loaded = files.load(**{"model": PRETRAIN, **changes})
        estimate = check.run(loaded)
        lines = conclude(loaded.train, estimate, target)
        return figures(loaded.train, estimate, target, lines), dict(lines), estimate

    return of


def test_the_figures_are_those_of_the_estimate(numbers: Callable[..., Any]) -> None:
    found, lines, estimate = numbers(GPU)
    gpu = estimate.gpu
    assert found["train"]["gpu_bytes"] + found["train"]["gpu_context_bytes"] == gpu.total
    assert found["cache"]["disk_bytes"] == estimate.data.cache.value
    assert found["does_not_fit"] == []
    assert found["train"]["host_bytes"] > INTERPRETER_BYTES + CUDA_BYTES + estimate.host.value
    assert found["export"]["disk_bytes"] == 2 * estimate.setup.cost.parameters
    assert json.loads(json.dumps(found)) == found
    assert lines["export"].startswith("all weights and their proof take about ")


def test_an_adapter_is_proven_without_memory_for_its_base(numbers: Callable[..., Any]) -> None:
    whole, _, _ = numbers(GPU)
    adapter, lines, estimate = numbers(GPU, **LORA)
    assert lines["export"].startswith("the adapter and its proof take about ")
    assert " on 16 cores, and " in lines["export"]
    assert adapter["export"]["seconds"] == round(export_seconds(estimate.setup), 1)
    assert adapter["export"]["disk_bytes"] < whole["export"]["disk_bytes"]


@pytest.mark.parametrize("command", ["cache", "train"])
def test_a_cpu_has_no_gpu_memory(numbers: Callable[..., Any], command: str) -> None:
    found, _, _ = numbers(Target(on_cpu=True))
    assert found[command].keys() == {"disk_bytes"}
    assert found["sample"] == {}


def test_what_does_not_fit_is_listed(numbers: Callable[..., Any]) -> None:
    found, _, _ = numbers(Target(Gpu("NVIDIA H200", 100 << 20)))
    assert found["does_not_fit"] == ["GPU memory"]
