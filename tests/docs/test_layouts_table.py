"""The tables of memory and of cache sizes in the pages are what the formulas give."""

import re
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


def test_the_table_is_what_the_formulas_give_in_its_place(layouts: Any, page: Any, tmp_path: Path) -> None:
    lines = page("docs/reference/multi-node.md").prose
    for table in (layouts.table(), layouts.traffic_table()):
        first = lines.index(table[0])
        rows = lines[first : lines.index("", first)]
        assert rows == table, "run `python scripts/layouts.py --write`"
    # the largest of four pipeline stages also takes less than the larger of two.
    size, tokens = SIZES["sd3.5_medium"], Tokens(4096, 333)
    takes = {name: gpu_memory(layouts.setup_of(name, size, tokens, 4)).total for name in layouts.LAYOUTS}
    assert takes["FSDP2"] < takes["ZeRO-3"] < takes["ZeRO-2"] < takes["ZeRO-1"] < takes["DDP"]
    assert takes["4 stages, ZeRO-1"] < takes["2 stages, ZeRO-1"] < takes["ZeRO-1"]
    page = tmp_path / "page.md"
    heads = [table[0] for table in (layouts.table(), layouts.traffic_table())]
    page.write_text(f"before\n\n{heads[0]}\n| old |\n\nbetween\n\n{heads[1]}\n| old |\n\nafter\n")
    layouts.write(page)
    expected = ["before", "", *layouts.table(), "", "between", "", *layouts.traffic_table(), "", "after"]
    assert page.read_text().splitlines() == expected


CLIP_TOKENS, T5_TOKENS = 77, 256


def megabytes(clip: int, t5: int) -> float:
    """Return those of a sample at 256 px with one caption, by the page."""
    latents = 2 * 16 * 32 * 32 * 2
    text = (clip * 768 + clip * 1280 + t5 * 4096 + 2048) * 2
    return (latents + text) / 1e6


def test_the_table_is_what_the_formula_gives(page: Any) -> None:
    rows = [
        re.fullmatch(r"\| (\d+) \| ([\d.]+) MB \| ([\d.]+) MB \|", line)
        for line in page("docs/formats/cache-format.md").prose
    ]
    found = [row for row in rows if row is not None]
    assert len(found) == 3
    for row in found:
        t5 = int(row[1])
        assert float(row[2]) == pytest.approx(megabytes(min(t5 + 1, CLIP_TOKENS), t5), abs=1e-3)
        assert float(row[3]) == pytest.approx(megabytes(CLIP_TOKENS, T5_TOKENS), abs=1e-3)
