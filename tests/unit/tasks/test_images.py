"""`ImageFolder`: sources, buckets, rejects and validation of dataset TOMLs for scripts, decoded when they are used."""

import io
import json
import multiprocessing
import pickle
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from sd3_light.config.faults import UserError
from sd3_light.report.inspect import verb as inspect_verb
from sd3_light.sources.decode import Decoded
from sd3_light.tasks import DiffusionTrainingModule, ImageFolder, ProcessedDataset, unit
from sd3_light.tasks import datasets as module
from sd3_light.tasks.processed import write_file_manifest
from sd3_light.tasks.sides import Sides, parse_sides
from tests.unit.tasks import toy
from tests.unit.tasks.toy import process, steps, train

KEYS: dict[str, Any] = {"size_buckets": [[64, 32], [32, 32]]}
DIVIDED: dict[str, Any] = {"resolutions": [32], "validation": True}


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


def test_images_have_buckets_or_are_left_out(folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
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
    data.write_rejects(tmp_path)
    assert json.loads((tmp_path / "rejects.jsonl").read_text())["reason"] == reject.reason
    assert f"left out 1 inputs: 1 {reject.reason}" in capsys.readouterr().err
    (tmp_path / "exclude.txt").write_text("images#0/2.png\nimages#0/6.png\n", encoding="utf-8")
    data = ImageFolder(folder, exclude=str(tmp_path / "exclude.txt"), **KEYS)
    assert {data[index]["prompt"] for index in range(len(data))} == {f"image {number}" for number in (0, 1, 3, 4, 5)}
    assert data.rejects == ()
    toml = tmp_path / "data.toml"
    toml.write_text('size_buckets = [[64, 32], [32, 32]]\n[[directory]]\npath = "images"\n', encoding="utf-8")
    of_toml, of_folder = ImageFolder(toml), ImageFolder(folder, **KEYS)
    assert [of_toml[index]["prompt"] for index in range(6)] == [of_folder[index]["prompt"] for index in range(6)]
    with pytest.raises(UserError, match=r"data.toml has its own keys; write resolutions there"):
        ImageFolder(toml, resolutions=[64])


def test_images_are_decoded_once_to_check_and_again_to_be_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decode = Mock(wraps=module.decode_images)
    monkeypatch.setattr(module, "decode_images", decode)
    data = ImageFolder(folder, num_workers=0, **KEYS)
    assert decode.call_count == len(data) == 6
    assert len(pickle.dumps(data)) < 20_000, "no pixels are kept"
    data[2]
    assert decode.call_count == 7


def test_a_catalogue_is_kept_for_later_runs(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    truncate(folder, "3.png")
    first = ImageFolder(folder, catalogue=tmp_path / "catalogue", **KEYS)

    again = Mock(side_effect=AssertionError("probed or decoded again"))
    monkeypatch.setattr("sd3_light.sources.catalogue.probe_images", again)
    monkeypatch.setattr(module, "decode_images", again)
    second = ImageFolder(folder, catalogue=tmp_path / "catalogue", num_workers=0, **KEYS)
    assert len(second) == len(first) == 5
    assert second.rejects == first.rejects


def truncate(folder: Path, name: str) -> None:
    """Write an image whose header is complete and whose data is cut."""
    data = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 255, (48, 96, 3), dtype=np.uint8)
    Image.fromarray(noise).save(data, "PNG")
    (folder / name).write_bytes(data.getvalue()[: len(data.getvalue()) // 2])
    (folder / name).with_suffix(".txt").write_text("a cut image", encoding="utf-8")


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_images_that_cannot_be_decoded_are_left_out_with_the_reason(folder: Path, workers: int, capsys: Any) -> None:
    before = ImageFolder(folder, **KEYS)
    truncate(folder, "00.png")
    data = ImageFolder(folder, num_workers=workers, size_buckets=[[64, 32], [32, 32]])
    assert [sample.key for sample in data._samples] == [sample.key for sample in before._samples]
    reasons = {Path(reject.key).name: reject.reason for reject in data.rejects}
    assert reasons == {"6.png": "not_an_image", "00.png": "truncated"}
    assert "1 truncated (the file is truncated)" in capsys.readouterr().err
    both = ImageFolder(folder, num_workers=workers, resolutions=[32, 64])
    assert len(both) == 12
    assert len(both.rejects) == 2, "an image of two resolutions is listed once"


def test_an_image_that_is_repaired_is_used_again(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {**KEYS, "catalogue": tmp_path / "catalogue", "num_workers": 0}
    truncate(folder, "0.png")
    assert len(ImageFolder(folder, **keys)) == 5
    Image.new("RGB", (96, 48)).save(folder / "0.png")
    assert len(ImageFolder(folder, **keys)) == 6
    for note in (tmp_path / "catalogue").rglob("*.checked.json"):
        note.write_text("[1", encoding="utf-8")
    assert len(ImageFolder(folder, **keys)) == 6, "a damaged note is written again"
    keys["catalogue"] = tmp_path / "other"
    with monkeypatch.context() as patch:
        patch.setattr(module, "decode_images", lambda tasks: [Decoded(reason="unreadable")] * len(tasks))
        with pytest.raises(UserError, match="has no usable image"):
            ImageFolder(folder, **keys)
    assert len(ImageFolder(folder, **keys)) == 6, "an unreadable one is tried again"


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
    truncate(tmp_path / "empty", "a.png")
    with pytest.raises(UserError, match=r"has no usable image: 1 truncated \(the file is truncated\); check path"):
        ImageFolder(tmp_path / "empty", **KEYS)
    data = ImageFolder(folder, **KEYS)
    Image.new("RGB", (96, 48)).save(folder / "0.png")
    index = next(index for index in range(6) if data._samples[index].captions == ("image 0",))
    with pytest.raises(UserError, match=r"0.png was usable when .* \(.*\); restore it before .*, or start again"):
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


def test_masks_have_the_size_of_latents(folder: Path, tmp_path: Path) -> None:
    """By the factor of the VAE; all samples have one."""
    masks = tmp_path / "masks"
    masks.mkdir()
    mask = Image.new("L", (96, 48), 0)
    mask.paste(255, (0, 0, 48, 48))
    mask.save(masks / "0.png")
    for factor, mask_of_0, side in ((8, [[1, 1, 1, 1, 0, 0, 0, 0]] * 4, 4), (16, [[1, 1, 0, 0]] * 2, 2)):
        keys = {**KEYS, "vae_factor": factor, "catalogue": tmp_path / "catalogue"}
        data = ImageFolder(folder, mask_path=str(masks), **keys)
        items = {data[index]["prompt"]: data[index] for index in range(6)}
        assert items["image 0"]["mask"].tolist() == mask_of_0
        assert torch.equal(items["image 4"]["mask"], torch.ones(side, side))
    with pytest.raises(UserError, match="vae_factor = 64 does not divide the sides of a bucket"):
        ImageFolder(folder, vae_factor=64, **KEYS)
    with pytest.raises(UserError, match="vae_factor is 0; give the pixels of a latent pixel's side"):
        ImageFolder(folder, vae_factor=0, **KEYS)


def test_a_task_trains_on_a_folder_in_one_stage_or_two(folder: Path, tmp_path: Path) -> None:
    data = ImageFolder(folder, num_workers=0, **KEYS)
    one = steps(train(tmp_path / "one", Tiny(), data, batch_size=2, num_epochs=2), "loss")
    stored = process(tmp_path / "processed", data, Tiny())
    assert len(one) == 6
    assert steps(train(tmp_path / "two", Tiny(), stored, batch_size=2, num_epochs=2), "loss") == one
    assert "6.png" in (tmp_path / "processed" / "rejects.jsonl").read_text(encoding="utf-8")
    with pytest.raises(UserError, match=r"processed is the processed data of a script, not a cache: 6 samples in 2 sh"):
        inspect_verb.run(tmp_path / "processed")
    write_file_manifest(tmp_path, {}, 0)
    with pytest.raises(UserError, match=r"manifest.json lists the sample files of a script's data process, not the sh"):
        inspect_verb.run(tmp_path)


def test_a_cut_image_changes_no_byte_of_the_processed_data(folder: Path, tmp_path: Path) -> None:
    def shards(name: str) -> dict[str, bytes]:
        data = ImageFolder(folder, num_workers=0, **KEYS)
        process(tmp_path / name, data, Tiny(), num_workers=2)
        return {path.name: path.read_bytes() for path in sorted((tmp_path / name / "shards").iterdir())}

    whole = shards("whole")
    truncate(folder, "00.png")
    assert shards("cut") == whole
    assert shards("whole") == whole, "started again"
    for name in ("whole", "cut"):
        assert len(ProcessedDataset(tmp_path / name)) == 6
        assert '"reason": "truncated"' in (tmp_path / name / "rejects.jsonl").read_text(encoding="utf-8")


def _opened(folder: Path, catalogue: Path) -> tuple[list[str], list[str]]:
    data = ImageFolder(folder, catalogue, num_workers=0, **KEYS)
    return [sample.key for sample in data._samples], sorted(reject.reason for reject in data.rejects)


def test_processes_that_share_a_catalogue_have_the_same_samples(folder: Path, tmp_path: Path) -> None:
    truncate(folder, "00.png")
    with multiprocessing.get_context("fork").Pool(3) as pool:
        results = pool.starmap(_opened, [(folder, tmp_path / "catalogue")] * 3)
    assert results == [_opened(folder, tmp_path / "own")] * 3
    assert len(results[0][0]) == 6
    assert results[0][1] == ["not_an_image", "truncated"]


def test_a_task_resumes_when_an_image_that_was_deleted_is_restored(folder: Path, tmp_path: Path) -> None:
    resume = partial(train, tmp_path / "run", Tiny(), batch_size=2, num_epochs=2, resume=True)
    train_on = ImageFolder(folder, num_workers=0, **KEYS)
    content = (folder / "0.png").read_bytes()
    (folder / "0.png").unlink()
    with pytest.raises(UserError, match=r"0.png was usable when .*; restore it before you resume"):
        resume(train_on)
    if (tmp_path / "run" / "checkpoints").is_dir():  # a step was taken before the image was needed
        with pytest.raises(UserError, match="was trained on other data"):
            resume(ImageFolder(folder, num_workers=0, **KEYS))
    (folder / "0.png").write_bytes(content)
    assert resume(ImageFolder(folder, num_workers=0, **KEYS))[-1]["step"] == 6


@pytest.fixture
def images(tmp_path: Path) -> Path:
    path = tmp_path / "images"
    path.mkdir()
    add_images(path, range(12))
    return path


def add_images(images: Path, numbers: range) -> None:
    """Write images that differ from each other in every part."""
    for number in numbers:
        pixels = np.random.default_rng(number).integers(0, 256, (4, 4, 3), dtype=np.uint8)
        Image.fromarray(pixels).resize((40, 40), Image.Resampling.NEAREST).save(images / f"{number}.png")
        (images / f"{number}.txt").write_text(f"image {number}", encoding="utf-8")


class Recorded(ImageFolder):
    def __getitem__(self, index: int) -> dict[str, Any]:
        self.seen = [*getattr(self, "seen", []), index]
        return super().__getitem__(index)


def train_tiny(out: Path, data: Any, **settings: Any) -> list[dict[str, Any]]:
    return toy.train(out, Tiny(), data, engine="torch", **settings)


def test_training_leaves_out_evaluated(images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = Recorded(images, **DIVIDED)
    assert "validation: 2 of 12 images are held out" in capsys.readouterr().err
    assert isinstance(data.sides, Sides)
    held = data.sides.indices("validation")
    assert len(held) == 2
    events = train_tiny(tmp_path / "out", data, eval_steps=5, num_epochs=1)
    assert len(toy.steps(events)) == 10, "an epoch of the others"
    assert [event["set"] for event in events if event["event"] == "eval"] == ["validation", "validation"]
    assert set(data.seen) == set(range(12))
    alone = Recorded(images, **DIVIDED)
    with pytest.raises(UserError, match="ImageFolder with validation needs eval_steps beside it"):
        train_tiny(tmp_path / "without", alone)
    train_tiny(tmp_path / "late", alone, eval_steps=100, num_epochs=1)
    assert set(alone.seen[:10]) == set(range(12)) - set(held), "what is held out is read after the last step"
    assert set(alone.seen[10:]) == set(held)


def test_two_stages_hold_out_the_same_images(images: Path, tmp_path: Path) -> None:
    data = ImageFolder(images, **DIVIDED)
    processed = process(tmp_path / "cache", data, Tiny(), shard_size=5)
    assert processed.sides == data.sides
    there = ProcessedDataset((tmp_path / "cache").as_uri(), stream_cache_dir=tmp_path / "fetched")
    assert there.sides == data.sides
    settings: dict[str, Any] = {"eval_steps": 5, "num_epochs": 1}
    one = train_tiny(tmp_path / "one", data, **settings)
    two = train_tiny(tmp_path / "two", processed, **settings)
    for kind, value in (("step", "loss"), ("eval", "flow")):
        first, second = ([event[value] for event in events if event["event"] == kind] for events in (one, two))
        assert first == pytest.approx(second, rel=1e-6)
    train_tiny(tmp_path / "window", processed, **settings, shuffle_window=1)
    other = ImageFolder(images, resolutions=[32])
    events = train_tiny(tmp_path / "out", data, eval_steps=10, num_epochs=1, eval_dataset=other)
    assert [event["set"] for event in events if event["event"] == "eval"] == ["validation", "eval"]


def test_a_folder_that_is_not_divided_stays_so(images: Path, tmp_path: Path) -> None:
    data = ImageFolder(images, resolutions=[32])
    assert data.sides is None
    assert process(tmp_path / "cache", data, Tiny()).sides is None
    with pytest.raises(UserError, match="eval_steps needs eval_dataset beside it, or ImageFolder with validation"):
        train_tiny(tmp_path / "out", data, eval_steps=5)
    data = ImageFolder(images, resolutions=[32, 64], validation=True)
    by_prompt: dict[str, set[str]] = {}
    for index, side in enumerate(data.sides.names):
        by_prompt.setdefault(data[index]["prompt"], set()).add(side)
    assert len(data) == 24
    assert all(len(sides) == 1 for sides in by_prompt.values())
    assert parse_sides(["train", "validation"], 2).indices("validation") == [1]
    for names in (["train"], ["train", "test"]):
        with pytest.raises(ValueError, match="not valid"):
            parse_sides(names, 2)


def test_a_catalogue_remembers_the_sides(images: Path, tmp_path: Path) -> None:
    def names(data: ImageFolder) -> dict[str, str]:
        return {data[index]["prompt"]: side for index, side in enumerate(data.sides.names)}

    before = names(ImageFolder(images, catalogue=tmp_path / "catalogue", **DIVIDED))
    add_images(images, range(12, 80))
    assert before.items() <= names(ImageFolder(images, catalogue=tmp_path / "catalogue", **DIVIDED)).items()
