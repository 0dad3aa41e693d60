"""`ImageFolder` with `validation`: a part of the images is held out of training, in one stage and in two."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sd3_light.config.faults import UserError
from sd3_light.tasks import ImageFolder, ProcessedDataset
from sd3_light.tasks.sides import Sides, parse_sides
from tests.unit.tasks import toy
from tests.unit.tasks.test_images import Tiny
from tests.unit.tasks.toy import process

KEYS: dict[str, Any] = {"resolutions": [32], "validation": True}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "images"
    path.mkdir()
    rng = np.random.default_rng(0)
    for number in range(12):
        pixels = rng.integers(0, 256, (4, 4, 3), dtype=np.uint8)
        Image.fromarray(pixels).resize((40, 40), Image.Resampling.NEAREST).save(path / f"{number}.png")
        (path / f"{number}.txt").write_text(f"image {number}", encoding="utf-8")
    return path


class Recorded(ImageFolder):
    """Notes which samples are read."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.seen = [*getattr(self, "seen", []), index]
        return super().__getitem__(index)


def train(out: Path, data: Any, **settings: Any) -> list[dict[str, Any]]:
    return toy.train(out, Tiny(), data, engine="torch", **settings)


def test_training_leaves_out_evaluated(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = Recorded(folder, **KEYS)
    assert "validation: 2 of 12 images are held out" in capsys.readouterr().err
    assert isinstance(data.sides, Sides)
    held = data.sides.indices("validation")
    assert len(held) == 2
    events = train(tmp_path / "out", data, eval_steps=5, num_epochs=1)
    assert len(toy.steps(events)) == 10, "an epoch of the others"
    assert [event["set"] for event in events if event["event"] == "eval"] == ["validation", "validation"]
    assert set(data.seen) == set(range(12))
    alone = Recorded(folder, **KEYS)
    with pytest.raises(UserError, match="ImageFolder with validation needs eval_steps beside it"):
        train(tmp_path / "without", alone)
    train(tmp_path / "late", alone, eval_steps=100, num_epochs=1)
    assert set(alone.seen[:10]) == set(range(12)) - set(held), "what is held out is read after the last step"
    assert set(alone.seen[10:]) == set(held)


def test_two_stages_hold_out_the_same_images(folder: Path, tmp_path: Path) -> None:
    data = ImageFolder(folder, **KEYS)
    processed = process(tmp_path / "cache", data, Tiny(), shard_size=5)
    assert processed.sides == data.sides
    there = ProcessedDataset((tmp_path / "cache").as_uri(), stream_cache_dir=tmp_path / "fetched")
    assert there.sides == data.sides
    settings: dict[str, Any] = {"eval_steps": 5, "num_epochs": 1}
    one = train(tmp_path / "one", data, **settings)
    two = train(tmp_path / "two", processed, **settings)
    for kind, value in (("step", "loss"), ("eval", "flow")):
        first, second = ([event[value] for event in events if event["event"] == kind] for events in (one, two))
        assert first == pytest.approx(second, rel=1e-6)
    train(tmp_path / "window", processed, **settings, shuffle_window=1)
    other = ImageFolder(folder, resolutions=[32])
    events = train(tmp_path / "out", data, eval_steps=10, num_epochs=1, eval_dataset=other)
    assert [event["set"] for event in events if event["event"] == "eval"] == ["validation", "eval"]


def test_a_folder_that_is_not_divided_stays_so(folder: Path, tmp_path: Path) -> None:
    data = ImageFolder(folder, resolutions=[32])
    assert data.sides is None
    assert process(tmp_path / "cache", data, Tiny()).sides is None
    with pytest.raises(UserError, match="eval_steps needs eval_dataset beside it, or ImageFolder with validation"):
        train(tmp_path / "out", data, eval_steps=5)
    data = ImageFolder(folder, resolutions=[32, 64], validation=True)
    by_prompt: dict[str, set[str]] = {}
    for index, side in enumerate(data.sides.names):
        by_prompt.setdefault(data[index]["prompt"], set()).add(side)
    assert len(data) == 24
    assert all(len(sides) == 1 for sides in by_prompt.values())
    assert parse_sides(["train", "validation"], 2).indices("validation") == [1]
    for names in (["train"], ["train", "test"]):
        with pytest.raises(ValueError, match="not valid"):
            parse_sides(names, 2)


def test_a_catalogue_remembers_the_sides(folder: Path, tmp_path: Path) -> None:
    def names(data: ImageFolder) -> dict[str, str]:
        return {data[index]["prompt"]: side for index, side in enumerate(data.sides.names)}

    before = names(ImageFolder(folder, catalogue=tmp_path / "catalogue", **KEYS))
    rng = np.random.default_rng(1)
    for number in range(12, 80):
        pixels = rng.integers(0, 256, (4, 4, 3), dtype=np.uint8)
        Image.fromarray(pixels).resize((40, 40), Image.Resampling.NEAREST).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"image {number}", encoding="utf-8")
    assert before.items() <= names(ImageFolder(folder, catalogue=tmp_path / "catalogue", **KEYS)).items()
