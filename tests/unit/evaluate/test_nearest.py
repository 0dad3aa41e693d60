"""The true images of a dataset, and training images as answers: by captions alone, and by the true image."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from sd3_light.evaluate.nearest import BY_CAPTION, BY_CAPTION_IN_GROUP, ORACLE, CaptionIndex, training_answers, words
from sd3_light.evaluate.truths import Truth, load_truths
from sd3_light.sources.preprocess import Pixels

TRAINING = {
    "flat": {"a red panda, flat style": (10, 0, 0), "a boat, flat style": (20, 0, 0)},
    "ink": {"a panda, ink style": (30, 0, 0), "a black boat, ink style": (40, 0, 0), "一只熊猫，墨水风格": (50, 0, 0)},
}


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


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("training")
    for group, images in TRAINING.items():
        (root / group).mkdir()
        for number, (caption, colour) in enumerate(images.items()):
            Image.new("RGB", (48, 32), colour).save(root / group / f"{number}.png")
            (root / group / f"{number}.txt").write_text(caption, encoding="utf-8")
    tables = "".join(f'[[directory]]\npath = "{group}"\n' for group in TRAINING)
    (root / "data.toml").write_text(f"resolutions = [16, 32]\n{tables}")
    return root / "data.toml"


def truth(caption: str, group: str, red: int) -> Truth:
    return Truth(caption, np.full((32, 32, 3), (red, 0, 0), np.uint8), Path("none.png"), group)


def embed(images: Sequence[Pixels]) -> Tensor:
    """Return vectors of length 1 whose angles are the mean reds."""
    angles = torch.tensor([float(image[..., 0].mean()) / 100 for image in images], dtype=torch.float64)
    return torch.stack([angles.cos(), angles.sin()], 1)


def reds(answers: dict[int, Pixels]) -> dict[int, int]:
    return {row: int(pixels[16, 16, 0]) for row, pixels in answers.items()}


def test_captions_choose_without_the_true_image(training: Path) -> None:
    truths = [truth("panda, ink style", "flat", 41), truth("熊猫，墨水风格", "ink", 12), truth("a boat", "other", 51)]
    answers = training_answers(training, truths, embed([one.pixels for one in truths]), embed)
    assert reds(answers[BY_CAPTION]) == {0: 30, 1: 50, 2: 20}
    assert reds(answers[BY_CAPTION_IN_GROUP]) == {0: 10, 1: 50}, "a group without training images has no answer"
    assert reds(answers[ORACLE]) == {0: 40, 1: 10, 2: 50}, "only the oracle sees the true image"
    darker = [Truth(one.caption, one.pixels // 2, one.path, one.group) for one in truths]
    again = training_answers(training, darker, embed([one.pixels for one in darker]), embed)
    for name in (BY_CAPTION, BY_CAPTION_IN_GROUP):
        assert reds(again[name]) == reds(answers[name])
    assert reds(again[ORACLE]) != reds(answers[ORACLE])
    assert all(pixels.shape == (32, 32, 3) for rows in answers.values() for pixels in rows.values())
    index = CaptionIndex(["panda, style", "boat, style", "boat, style", "cup, style"])
    assert index.nearest("a cup, style") == 3
    assert index.nearest("boat") == 1, "the first of equal ones"
    assert index.nearest("boat", np.array([True, False, True, False])) == 2
    assert index.nearest("unknown words") == 0
    assert words("Panda_2, 熊猫!") == {"panda", "2", "熊", "猫"}


def test_one_group_makes_no_second_row(training: Path, tmp_path: Path) -> None:
    toml = tmp_path / "flat.toml"
    toml.write_text(f"resolutions = [32]\n[[directory]]\npath = {json.dumps(str(training.parent / 'flat'))}\n")
    answers = training_answers(toml, [truth("boat", "flat", 0)], embed([np.zeros((2, 2, 3), np.uint8)]), embed)
    assert list(answers) == [BY_CAPTION, ORACLE]
