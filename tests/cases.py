"""Parameters of tests: all combinations of some values, of which `make test` runs a selection."""

from collections.abc import Collection, Iterable
from itertools import product
from typing import Any

import pytest


def combinations(*axes: Iterable[Any], fast: Collection[tuple[Any, ...]]) -> list[Any]:
    """Return every combination of a value per axis; those that are not ``fast`` are marked `slow`."""
    cases = list(product(*axes))
    assert all(case in cases for case in fast), "a fast case is not among the combinations"
    return [pytest.param(*case, marks=() if case in fast else pytest.mark.slow) for case in cases]
