"""The features of a vision model in a cache: their values, and what an update encodes again."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from torch import Tensor

from sd3_light.cache.reuse import ValueCounts
from sd3_light.core.columns import TEACHER
from sd3_light.encoding.image_encoders import ImageEncoders
from sd3_light.encoding.teacher import VisionTeacher, projection, quantised, scaled_pixels, spatially_normalised
from sd3_light.evaluate.feature_model import save_feature_model
from sd3_light.model.vision import feature_width, vision_settings
from tests.judge_folders import SIDE, write_clip, write_vision
from tests.project import Project
from tests.refusals import refused
from tests.unit.cache.samples import readers


@pytest.fixture
def project(fresh_project: Project) -> Project:
    write_vision(fresh_project.folder / "teacher")
    text = fresh_project.train_toml.read_text(encoding="utf-8")
    text = text.replace("[model]\n", '[model]\nteacher_path = "teacher"\n')
    fresh_project.train_toml.write_text(text, encoding="utf-8")
    fresh_project.data(fresh_project.data_toml.read_text(encoding="utf-8") + "flip = true\n")
    return fresh_project


def samples(project: Project) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield the key of each sample, and its columns of images with both variants."""
    for entry, reader in readers(project):
        for row in range(entry.count):
            values = {name: reader.value(name, row) for name in ("moments", TEACHER)}
            yield f"{entry.bucket}-{reader.identity(row)}", values


def counts(project: Project, **flags: bool) -> ValueCounts:
    (report,) = project.build_cache(**flags)
    return report.values


def retrain(folder: Path) -> None:
    config = transformers.Dinov2Config.from_pretrained(folder)
    torch.manual_seed(5)
    transformers.Dinov2Model(config).save_pretrained(folder)


def test_a_cache_holds_the_features_of_images_and_of_mirrored_ones(project: Project) -> None:
    project.build_cache()
    teacher = VisionTeacher(project.folder / "teacher")
    stored = dict(samples(project))
    seen = 0
    for entry, reader in readers(project):
        width, height = map(int, entry.bucket.split("x"))
        grid = (height // 16, width // 16)
        (column,) = (column for column in reader.columns if column.name == TEACHER)
        assert column.shape == (16, *grid)
        assert column.dtype == "int8"
    for path in sorted(project.images.glob("*.png")):
        with Image.open(path) as image:
            if image.size != (64, 64):
                continue
            pixels = torch.from_numpy(np.asarray(image.convert("RGB")).copy())[None]
        expected = [quantised(teacher(pixels, (4, 4), flip)) for flip in (False, True)]
        both = torch.cat(expected).int()
        alike = [values[TEACHER].int() for values in stored.values() if values[TEACHER].shape == both.shape]
        matching = [each for each in alike if (each - both).abs().max() <= 1]
        assert matching, path
        seen += 1
    assert seen > 3


def test_another_teacher_encodes_its_column_alone(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    first = counts(project)
    before = dict(samples(project))
    retrain(project.folder / "teacher")
    calls: list[int] = []
    encode = ImageEncoders.encode_images

    def counted(self: ImageEncoders, pixels: Any, flip: bool) -> dict[str, Tensor]:
        calls.append(len(pixels))
        return encode(self, pixels, flip)

    monkeypatch.setattr(ImageEncoders, "encode_images", counted)
    monkeypatch.setattr("sd3_light.cache.dataset_build.measure_reconstructions", lambda *_: None)
    after = counts(project)
    assert not calls, "the VAE encodes nothing"
    assert (after.images, after.captions) == (first.images, 0)
    for key, values in samples(project):
        assert torch.equal(values["moments"], before[key]["moments"])
        assert not torch.equal(values[TEACHER], before[key][TEACHER])


def test_another_vae_keeps_the_features(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    project.build_cache()
    before = dict(samples(project))

    refuse = Mock(side_effect=AssertionError("the teacher sees no image"))
    monkeypatch.setattr(ImageEncoders, "encode_features", refuse)
    (report,) = project.build_cache('model.vae_dtype="float32"')
    assert report.values.images == len(before)
    assert all(torch.equal(values[TEACHER], before[key][TEACHER]) for key, values in samples(project))


def test_features_are_normalised_over_the_image_and_keep_their_direction() -> None:
    features = torch.randn(2, 6, 3, 4) * 7 + 40
    normalised = spatially_normalised(features)
    assert torch.allclose(normalised.mean((2, 3)), torch.zeros(2, 6), atol=1e-5)
    assert torch.allclose(normalised.std((2, 3), correction=0), torch.ones(2, 6), atol=1e-4)
    cosine = torch.nn.functional.cosine_similarity(quantised(normalised).float(), normalised, dim=1)
    assert cosine.min() > 0.999
    assert not quantised(spatially_normalised(torch.ones(1, 4, 2, 2))).any(), "an image without structure has none"


def test_wide_features_are_projected_and_keep_angles() -> None:
    matrix = projection(768)
    assert matrix is not None
    assert matrix.shape == (768, 256)
    assert torch.allclose(matrix.T @ matrix, torch.eye(256), atol=1e-5)
    assert projection(256) is None
    first, second = torch.randn(2, 64, 768, generator=torch.Generator().manual_seed(0))
    second = second + first
    exact = torch.nn.functional.cosine_similarity(first, second)
    projected = torch.nn.functional.cosine_similarity(first @ matrix, second @ matrix)
    assert (projected - exact).abs().mean() < 0.04


def write_convnext(folder: Path) -> Path:
    config = transformers.ConvNextConfig(hidden_sizes=[8, 12, 20, 24], depths=[1, 1, 1, 1], image_size=64)
    save_feature_model(transformers.ConvNextModel(config), Mock(), 64, folder)
    return folder


def write_registers(folder: Path) -> Path:
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "mlp_ratio": 1, "patch_size": 8}
    config = transformers.Dinov2WithRegistersConfig(**shape, image_size=SIDE, num_register_tokens=4)
    save_feature_model(transformers.Dinov2WithRegistersModel(config), Mock(), SIDE, folder)
    return folder


@pytest.mark.parametrize(
    ("write", "width"), [(write_vision, 16), (write_clip, 16), (write_convnext, 20), (write_registers, 16)]
)
def test_kinds_of_teachers(write: Any, width: int, tmp_path: Path) -> None:
    folder = write(tmp_path / "teacher")
    assert feature_width(vision_settings(folder).folder) == width
    teacher = VisionTeacher(folder)
    pixels = torch.randint(256, (2, 64, 64, 3), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    out = teacher(pixels, (4, 4))
    assert out.shape == (2, width, 4, 4)
    assert torch.isfinite(out).all()
    mirrored = teacher(pixels, (4, 4), flip=True)
    assert torch.allclose(mirrored, teacher(pixels.flip(2), (4, 4)), atol=1e-5)
    assert not torch.allclose(mirrored, out, atol=1e-2)


def test_rows_of_the_grid_are_rows_of_the_image(tmp_path: Path) -> None:
    """An image whose lower half is textured has its features there."""
    teacher = VisionTeacher(write_vision(tmp_path))
    pixels = torch.zeros(1, 32, 32, 3, dtype=torch.uint8)
    pixels[:, 16:] = torch.randint(256, (1, 16, 32, 3), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    with torch.no_grad():
        settings = teacher.settings
        cells = teacher._cells(scaled_pixels(pixels, settings.side, settings.mean, settings.std))
    assert cells[0, :, :2].std(dim=2).mean() < cells[0, :, 2:].std(dim=2).mean()


def test_a_folder_without_a_vision_model_is_refused(tmp_path: Path) -> None:
    folder = write_vision(tmp_path)
    (folder / "config.json").write_text('{"model_type": "dinov2"}')
    refused("states no hidden_size", feature_width, folder)
