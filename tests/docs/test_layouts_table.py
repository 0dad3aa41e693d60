"""The table of layouts in docs/multi-node.md is what the formulas of `check` give."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from sd3_light.config import SIZES
from sd3_light.model.cost import Tokens
from sd3_light.model.memory import Case, gpu_memory

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def layouts() -> Any:
    spec = importlib.util.spec_from_file_location("layouts", ROOT / "benchmarks" / "layouts.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["docs/multi-node.md", "docs/zh/multi-node.md"])
def test_the_table_is_what_the_formulas_give(layouts: Any, page: Any, name: str) -> None:
    rows = layouts.rows()
    lines = page(name).prose
    first = lines.index(rows[0])
    assert lines[first : first + len(rows)] == rows
    assert lines[first + len(rows)] == "", "and no row more"


def test_derived_layouts_lie_between_those_of_check(layouts: Any) -> None:
    """ZeRO-1 between DDP and FSDP2; stages hold less of the weights; one process of one stage is one GPU and a copy."""
    case = Case(SIZES["sd3.5_medium"], Tokens(4096, 333), 4, ema_tracks=1, checkpointing=True, world=8)
    bytes_of = {layout: layouts.bytes_of(layout, case) for layout in layouts.LAYOUTS}
    assert bytes_of["FSDP2"] < bytes_of["ZeRO-3"] < bytes_of["ZeRO-1"] < bytes_of["DDP"]
    assert bytes_of["4 stages, ZeRO-1"] < bytes_of["2 stages, ZeRO-1"] < bytes_of["ZeRO-1"]
    alone = Case(SIZES["sd3.5_medium"], Tokens(4096, 333), 4, ema_tracks=1, checkpointing=True)
    extra = layouts.pipeline_bytes(alone) - gpu_memory(alone).total
    assert extra == layouts.NCCL_BYTES + 4 * alone.parameters
