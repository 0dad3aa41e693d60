"""The table of layouts in docs/reference/multi-node.md is what the formulas of `check` give."""

from pathlib import Path
from typing import Any

import pytest

from sd3_light.config import SIZES
from sd3_light.core.cost import Tokens
from sd3_light.cost.gpu_memory import gpu_memory
from tests.modules import load_module

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def layouts() -> Any:
    return load_module("layouts", ROOT / "scripts" / "layouts.py")


def test_the_table_is_what_the_formulas_give(layouts: Any, page: Any) -> None:
    lines = page("docs/reference/multi-node.md").prose
    for table in (layouts.table(), layouts.traffic_table()):
        first = lines.index(table[0])
        rows = lines[first : lines.index("", first)]
        assert rows == table, "run `python scripts/layouts.py --write`"


def test_more_sharding_takes_less_memory(layouts: Any) -> None:
    """The largest of four pipeline stages also takes less than the larger of two."""
    size, tokens = SIZES["sd3.5_medium"], Tokens(4096, 333)
    takes = {name: gpu_memory(layouts.setup_of(name, size, tokens, 4)).total for name in layouts.LAYOUTS}
    assert takes["FSDP2"] < takes["ZeRO-3"] < takes["ZeRO-2"] < takes["ZeRO-1"] < takes["DDP"]
    assert takes["4 stages, ZeRO-1"] < takes["2 stages, ZeRO-1"] < takes["ZeRO-1"]


def test_the_tables_are_put_in_their_places(layouts: Any, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    heads = [table[0] for table in (layouts.table(), layouts.traffic_table())]
    page.write_text(f"before\n\n{heads[0]}\n| old |\n\nbetween\n\n{heads[1]}\n| old |\n\nafter\n")
    layouts.write(page)
    expected = ["before", "", *layouts.table(), "", "between", "", *layouts.traffic_table(), "", "after"]
    assert page.read_text().splitlines() == expected
