"""The benchmark of all commands at real size, with a tiny model: it runs what is asked and what that needs."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.real_size import SCRIPT, bench, rows_of, short_form

PUBLISHED = {"sd3": 2.243, "sd3_large": 8.057, "flux": 11.901, "flux2": 3.876, "qwen_image": 20.430}
PUBLISHED |= {"z_image": 6.155, "sana": 1.604, "wan": 1.419}
"""Billions of parameters."""


@pytest.fixture(scope="module")
def script() -> Any:
    """The benchmark as a module."""
    folder = str(SCRIPT.parent)
    sys.path.insert(0, folder)
    try:
        return importlib.import_module("real_size")
    finally:
        sys.path.remove(folder)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("family", ["sd3", "flux"])
def test_a_journey_runs_with_those_that_it_needs(family: str, tmp_path: Path) -> None:
    """The same as on a GPU, at real width: `tests/gpu/test_real_size.py`."""
    rows = short_form(family, tmp_path / "out", "--toy", "--depth", "2")
    assert not rows["train lora"]["left_out"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_journeys_without_time_are_listed(tmp_path: Path) -> None:
    done = bench("sd3", tmp_path / "out", "--toy", "--journey", "check", "--minutes", "0")
    assert done.returncode == 1
    assert rows_of(tmp_path / "out")["check"]["failure"] == "not run: new failed"
    assert "| check | 0.0 |  |  |  |  |  |  |  |  | not run: new failed |" in done.stdout
    unknown = bench("sd3", tmp_path / "out", "--toy", "--journey", "fly").stderr.rstrip()
    assert unknown.endswith("new all, cache all, train all, export all")


def test_large_models_leave_out_what_does_not_fit(script: Any) -> None:
    plan = script.Plan(Path("work"), script.Model("flux", encoders="deep"), 11_901_408_320)
    journeys = {journey.name: journey for journey in plan.journeys()}
    assert plan.left_out("merge") == "left out: 11.9 B parameters; see --depth third"
    assert not plan.left_out("train lora")
    assert journeys["train lora"].needs == ("forget encoders",)
    assert journeys["forget encoders"].needs == ("cache", "sample")
    assert "to file" not in journeys, "only SD3 has single files"
    third = script.Plan(Path("work"), script.Model("flux", "third", "deep"), 3_943_806_272)
    assert not third.left_out("train all")
    assert {journey.name for journey in third.journeys()} == journeys.keys() - {"forget encoders"}


def test_numbers_far_from_their_estimates_are_marked(script: Any, tmp_path: Path) -> None:
    row = script.Result("train", measured={"gpu": 10.0, "host": 10.0}, estimated={"gpu": 10.7, "host": 8.0})
    assert not row.deviates("gpu")
    assert row.deviates("host")
    assert not row.deviates("disk")
    assert "| 10 | 10.7 | 10 | 8 ! |" in script._line(row)
    import torch
    from safetensors.torch import load_file, save_file

    path = tmp_path / "a.safetensors"
    save_file({"a": torch.ones(1 << 20)}, path)
    before = path.stat()
    script.forget_values(path)
    after = path.stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert after.st_blocks < before.st_blocks / 10
    assert torch.equal(load_file(path)["a"], torch.zeros(1 << 20))


@pytest.mark.parametrize(
    ("family", "parameters"),
    [pytest.param(*each, marks=pytest.mark.slow if "sd3" in each[0] else ()) for each in PUBLISHED.items()],
)
def test_models_have_their_published_sizes(script: Any, family: str, parameters: float) -> None:
    count = script.denoiser_parameters(script.Model(family))
    assert count / 1e9 == pytest.approx(parameters, abs=5e-4)
    assert script.denoiser_parameters(script.Model(family, "third")) < 0.45 * count
