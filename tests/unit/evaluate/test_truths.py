"""The true images, and copies of them in the nearest other style."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from sd3_light.config.faults import UserError
from sd3_light.evaluate.truths import load_truths, style_copies
from sd3_light.sources.preprocess import Pixels

COLOURS = {"flat": (250, 0, 0), "round": (200, 60, 0), "ink": (0, 0, 250)}
CONCEPTS = [f"concept {number}" for number in range(4)]


@pytest.fixture(scope="module")
def icons(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three styles of four concepts; `flat` images of all but the last concept are held out, and one `round` image."""
    root = tmp_path_factory.mktemp("icons")
    cells = []
    for style, colour in COLOURS.items():
        for number, concept in enumerate(CONCEPTS):
            held_out = (style == "flat" and number < 3) or (style == "round" and number == 2)
            folder = root / ("held_out" if held_out else "train") / style
            folder.mkdir(parents=True, exist_ok=True)
            image = Image.new("RGB", (32, 32), colour)
            image.paste((number * 60,) * 3, (8, 8, 16, 16))
            image.save(folder / f"{number}.png")
            (folder / f"{number}.json").write_text("{}")
            cells.append({"file": f"{style}/{number}.png", "concept": concept, "style": style, "held_out": held_out})
    captions = {f"{number}.png": [f"{concept}, flat", f"{concept}，扁平"] for number, concept in enumerate(CONCEPTS)}
    (root / "held_out" / "flat" / "captions.json").write_text(json.dumps(captions))
    (root / "held_out.toml").write_text('resolutions = [16, 32]\n[[directory]]\npath = "held_out/flat"\n')
    (root / "cells.json").write_text(json.dumps(cells))
    return root


def embed(images: Sequence[Pixels]) -> Tensor:
    """Return the mean colours: styles differ in them, concepts hardly."""
    return torch.tensor(np.stack([image.reshape(-1, 3).mean(0) for image in images]))


def test_truths_come_once_at_their_largest_size_in_all_languages(icons: Path) -> None:
    truths = load_truths(icons / "held_out.toml", 10)
    assert [truth.size for truth in truths] == [(32, 32)] * 3
    assert len({truth.path for truth in truths}) == 3
    assert {"扁平" in truth.caption for truth in truths} == {True, False}
    some = load_truths(icons / "held_out.toml", 2)
    assert [truth.path for truth in some] == [truth.path for truth in truths[:2]]
    assert not list(icons.glob("*.cache"))


def test_a_copy_is_the_same_concept_in_the_nearest_style_that_is_not_held_out(icons: Path) -> None:
    truths = load_truths(icons / "held_out.toml", 10)
    copies = style_copies(truths, embed([truth.pixels for truth in truths]), icons / "cells.json", embed)
    assert list(copies) == [0, 1, 2]
    for row, (pixels, vector) in copies.items():
        assert tuple(pixels[0, 0]) == COLOURS["ink" if CONCEPTS[2] in truths[row].caption else "round"]
        assert pixels[12, 12].tolist() == truths[row].pixels[12, 12].tolist()
        assert torch.equal(vector, embed([pixels])[0])


def test_each_concept_has_its_own_nearest_style(icons: Path) -> None:
    """Files may also be relative to the list itself, without a split."""
    rows = json.loads((icons / "cells.json").read_text())
    for row in rows:
        row["file"] = f"{'held_out' if row.pop('held_out') else 'train'}/{row['file']}"
    some = [row for row in rows if row["style"] != "round" or row["concept"] == CONCEPTS[1]]
    (icons / "some.json").write_text(json.dumps(some))
    truths = load_truths(icons / "held_out.toml", 10)
    copies = style_copies(truths, embed([truth.pixels for truth in truths]), icons / "some.json", embed)
    colours = {truths[row].caption.split(",")[0].split("，")[0]: tuple(copy[0][0, 0]) for row, copy in copies.items()}
    assert colours == {name: COLOURS["round" if name == CONCEPTS[1] else "ink"] for name in CONCEPTS[:3]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[", "cannot be read"),
        ('[{"file": "a.png"}]', "is not a list of objects with concept, style and a file"),
        ('[{"file": "../a.png", "concept": "a", "style": "b"}]', "is not a list of objects with concept, style"),
        ('[{"file": "a\\u0000", "concept": "a", "style": "b"}]', "is not a list of objects with concept, style"),
        ("[]", "has no other style of any image"),
    ],
)
def test_other_files_than_cells_are_refused(icons: Path, tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "cells.json").write_text(text)
    truths = load_truths(icons / "held_out.toml", 10)
    with pytest.raises(UserError, match=message):
        style_copies(truths, embed([truth.pixels for truth in truths]), tmp_path / "cells.json", embed)
