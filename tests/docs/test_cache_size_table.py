"""The table of bytes per sample in docs/formats/cache-format.md is what the formula above it gives."""

import re
from typing import Any

import pytest

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
