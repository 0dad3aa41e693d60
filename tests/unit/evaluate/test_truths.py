"""The true images of a dataset."""

import json
from pathlib import Path

import pytest
from PIL import Image

from sd3_light.evaluate.truths import load_truths


@pytest.fixture(scope="module")
def icons(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three images with captions in two languages."""
    root = tmp_path_factory.mktemp("icons")
    folder = root / "held_out" / "flat"
    folder.mkdir(parents=True)
    for number in range(3):
        Image.new("RGB", (32, 32), (number * 60, 0, 0)).save(folder / f"{number}.png")
    captions = {f"{number}.png": [f"concept {number}, flat", f"concept {number}，扁平"] for number in range(3)}
    (folder / "captions.json").write_text(json.dumps(captions))
    (root / "held_out.toml").write_text('resolutions = [16, 32]\n[[directory]]\npath = "held_out/flat"\n')
    return root


def test_truths_come_once_at_their_largest_size_in_all_languages(icons: Path) -> None:
    truths = load_truths(icons / "held_out.toml", 10)
    assert [truth.size for truth in truths] == [(32, 32)] * 3
    assert len({truth.path for truth in truths}) == 3
    assert {truth.group for truth in truths} == {"flat"}
    assert {"扁平" in truth.caption for truth in truths} == {True, False}
    some = load_truths(icons / "held_out.toml", 2)
    assert [truth.path for truth in some] == [truth.path for truth in truths[:2]]
    assert not list(icons.glob("*.cache"))
