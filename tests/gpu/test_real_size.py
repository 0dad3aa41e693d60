"""A LoRA project at real width with two blocks of each kind: every command works, and its memory is measured."""

from pathlib import Path

import pytest

from tests.real_size import short_form

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize("family", ["sd3", "flux"])
def test_a_lora_of_two_blocks_at_real_width(family: str, tmp_path: Path) -> None:
    rows = short_form(family, tmp_path / "out", "--depth", "2")
    assert rows["train lora"]["measured"]["gpu"] > 0
    assert rows["train lora"]["estimated"]["gpu"] > 0
    assert rows["train lora"]["estimated"]["host"] > 0
    assert rows["sample"]["estimated"]["gpu"] > 0
