"""Comparison of the checkpoints of two runs."""

from pathlib import Path

import torch

from tests.checkpoints import read_checkpoint


def assert_same_checkpoint(one: Path, two: Path) -> None:
    """Assert that two checkpoints have the same tensors, bit for bit, and the same counters."""
    (tensors, facts), (others, other_facts) = read_checkpoint(one), read_checkpoint(two)
    assert facts == other_facts
    assert set(tensors) == set(others)
    assert [name for name in tensors if not torch.equal(tensors[name], others[name])] == []
