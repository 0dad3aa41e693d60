"""`ImageFolder`: sources, buckets and rejects of dataset TOMLs for scripts, decoded when they are used."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from sd3_light.config.faults import UserError
from sd3_light.runlog import read_log
from sd3_light.tasks import (
    DiffusionTrainingModule,
    ImageFolder,
    ModelLogger,
    ProcessedDataset,
    launch_data_process_task,
    launch_training_task,
    unit,
)
from sd3_light.tasks import datasets as module


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Four wide and two square images with captions, one without, one that is broken and one that is too small."""
    path = tmp_path / "images"
    path.mkdir()
    for number in range(6):
        size = (96, 48) if number < 4 else (64, 64)
        Image.new("RGB", size, (40 * number, 10, 90)).save(path / f"{number}.png")
        (path / f"{number}.txt").write_text(f"image {number}", encoding="utf-8")
    (path / "6.png").write_bytes(b"not an image")
    (path / "6.txt").write_text("broken", encoding="utf-8")
    return path


KEYS: dict[str, Any] = {"size_buckets": [[64, 32], [32, 32]]}


def test_images_have_their_bucket_and_unusable_ones_are_listed(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = ImageFolder(folder, **KEYS)
    assert len(data) == 6
    by_prompt = {data[index]["prompt"]: (data[index], data.bucket_of(index)) for index in range(6)}
    for number in range(6):
        item, bucket = by_prompt[f"image {number}"]
        assert bucket == ((32, 64) if number < 4 else (32, 32))
        assert item["image"].size == (bucket[1], bucket[0])
        assert item["image"].getpixel((3, 3)) == (40 * number, 10, 90)
        assert item["captions"] == [f"image {number}"]
    (reject,) = data.rejects
    assert reject.key.endswith("6.png")
    assert data.rejects_as_json()[0]["reason"] == reject.reason
    assert f"left out 1 inputs: 1 {reject.reason}" in capsys.readouterr().err


def test_a_dataset_toml_gives_the_same_samples(folder: Path, tmp_path: Path) -> None:
    toml = tmp_path / "data.toml"
    toml.write_text('size_buckets = [[64, 32], [32, 32]]\n[[directory]]\npath = "images"\n', encoding="utf-8")
    assert [item["prompt"] for item in map(ImageFolder(toml).__getitem__, range(6))] == [
        item["prompt"] for item in map(ImageFolder(folder, **KEYS).__getitem__, range(6))
    ]
    with pytest.raises(UserError, match=r"data.toml has its own keys; write resolutions there"):
        ImageFolder(toml, resolutions=[64])


def test_nothing_is_decoded_before_it_is_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[Any] = []
    real = module.decode_images
    monkeypatch.setattr(module, "decode_images", lambda tasks: decoded.append(tasks) or real(tasks))
    data = ImageFolder(folder, num_workers=0, **KEYS)
    assert not decoded
    assert len(pickle.dumps(data)) < 20_000
    data[2]
    assert len(decoded) == 1


def test_a_catalogue_is_kept_for_later_runs(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = ImageFolder(folder, catalogue=tmp_path / "catalogue", **KEYS)

    def probe(*_: Any) -> Any:
        raise AssertionError("probed again")

    monkeypatch.setattr("sd3_light.sources.catalogue.probe_images", probe)
    assert len(ImageFolder(folder, catalogue=tmp_path / "catalogue", **KEYS)) == len(first)


def test_masks_have_the_size_of_latents(folder: Path, tmp_path: Path) -> None:
    masks = tmp_path / "masks"
    masks.mkdir()
    mask = Image.new("L", (96, 48), 0)
    mask.paste(255, (0, 0, 48, 48))
    mask.save(masks / "0.png")
    data = ImageFolder(folder, mask_path=str(masks), **KEYS)
    items = {item["prompt"]: item for item in map(data.__getitem__, range(6))}
    assert items["image 0"]["mask"].shape == (4, 8)
    assert items["image 0"]["mask"].mean() == pytest.approx(0.5)
    assert torch.equal(items["image 4"]["mask"], torch.ones(4, 4)), "all samples have one"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"resolutionz": [64]}, "ImageFolder: resolutionz: unknown key"),
        ({"resolutions": [64], "flip": True}, "ImageFolder: flip has no effect in scripts; remove it"),
        ({"resolutions": [64], "num_repeats": 3}, "num_repeats has no effect in scripts"),
        ({}, "resolutions: is required and missing"),
    ],
)
def test_wrong_keys_are_one_line(folder: Path, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        ImageFolder(folder, **keys)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_an_empty_folder_and_an_image_that_changed_are_named(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"empty has no usable image: no file with a caption ends in .*; check path"):
        ImageFolder(tmp_path / "empty", resolutions=[64])
    data = ImageFolder(folder, **KEYS)
    Image.new("RGB", (96, 48)).save(folder / "0.png")
    index = next(index for index in range(6) if data._samples[index].captions == ("image 0",))
    with pytest.raises(UserError, match=r"0.png cannot be used \(.*\); remove or repair it"):
        data[index]


@unit("latents")
def to_latents(module: Any, image: Any) -> Tensor:
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)
    return pixels[:, ::8, ::8].float() / 127.5 - 1


class Tiny(DiffusionTrainingModule):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Conv2d(3, 3, 3, padding=1), [to_latents])

    def denoise(self, noisy: Tensor, t: Tensor, inputs: Any) -> Tensor:
        velocity: Tensor = self.transformer(noisy)
        return velocity


def test_a_task_trains_on_a_folder_in_one_stage_or_two(folder: Path, tmp_path: Path) -> None:
    data = ImageFolder(folder, num_workers=0, **KEYS)
    settings: dict[str, Any] = {"num_workers": 0, "batch_size": 2, "num_epochs": 2, "engine": "torch"}
    launch_training_task(None, data, Tiny(), ModelLogger(tmp_path / "one"), 1e-2, **settings)
    launch_data_process_task(None, data, Tiny(), ModelLogger(tmp_path / "processed"), num_workers=0)
    stored = ProcessedDataset(tmp_path / "processed")
    launch_training_task(None, stored, Tiny(), ModelLogger(tmp_path / "two"), 1e-2, **settings)
    losses = [
        [event["loss"] for event in read_log(tmp_path / name / "log.jsonl") if event["event"] == "step"]
        for name in ("one", "two")
    ]
    assert len(losses[0]) == 6
    assert losses[0] == losses[1]
    assert "6.png" in (tmp_path / "processed" / "rejects.jsonl").read_text(encoding="utf-8")
