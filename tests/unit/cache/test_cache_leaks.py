"""`check` and `cache` name the images that an evaluation set shares with the training set."""

import shutil
from pathlib import Path

import pytest
from PIL import Image

from sd3_light.cache import leaks
from sd3_light.check import verb as check
from sd3_light.check.conclusion import Target, conclude
from sd3_light.sources import catalogue, decode
from sd3_light.world import write_dataset
from tests.judge_folders import write_vision
from tests.project import Project

EVAL = ('eval_datasets=["val.toml"]', "eval_every_n_steps=5")


@pytest.fixture
def leaking(fresh_project: Project) -> Project:
    """The evaluation set has four other images, a copy of a training image, and one that was scaled."""
    folder = fresh_project.folder / "val"
    write_dataset(folder, 4, seed=99)
    (folder / "captions.json").unlink(missing_ok=True)
    for path in folder.glob("*.png"):
        path.with_suffix(".txt").write_text("an image", encoding="utf-8")
    shutil.copy(fresh_project.images / "000003.png", folder / "copy.png")
    with Image.open(fresh_project.images / "000007.png") as image:
        image.resize((2 * image.width, 2 * image.height), Image.Resampling.BICUBIC).save(folder / "scaled.png")
    for name in ("copy", "scaled"):
        (folder / f"{name}.txt").write_text("an image", encoding="utf-8")
    toml = fresh_project.data_toml.read_text(encoding="utf-8").replace('"images"', '"val"')
    (fresh_project.folder / "val.toml").write_text(toml, encoding="utf-8")
    return fresh_project


def warnings(project: Project) -> list[str]:
    loaded = project.load(*EVAL)
    estimate = check.run(loaded)
    lines = conclude(loaded.train, estimate, Target(on_cpu=True))
    return [text for label, text in lines if label == "warning" and "not held out" in text]


SENTENCE = "val is not held out: 2 of its 6 images are in the training set (1 with the same bytes, 1 similar), such as"
PAIRS = ("val#0/copy.png and images#0/000003.png", "val#0/scaled.png and images#0/000007.png")


def test_check_and_cache_name_the_same_leaks(leaking: Project, capsys: pytest.CaptureFixture[str]) -> None:
    (before,) = warnings(leaking)
    leaking.build_cache(*EVAL)
    printed = " ".join(capsys.readouterr().err.split())
    (after,) = warnings(leaking)
    for text in (before, printed, after):
        assert SENTENCE in text
        assert all(pair in text for pair in PAIRS)
        assert "remove them from one of the two" in text
    (path,) = (Path(leaking.load(*EVAL).eval_datasets["val"].cache_dir) / "catalogue").glob("*.leaks.json")
    path.write_bytes(b"[{")
    leaking.build_cache(*EVAL)
    assert SENTENCE in " ".join(capsys.readouterr().err.split())


def test_thumbnails_are_computed_once(leaking: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    leaking.build_cache(*EVAL)
    monkeypatch.setattr(decode, "make_thumbnail", lambda *_: pytest.fail("an image is decoded again"))
    monkeypatch.setattr(leaks, "_compare", lambda *_: pytest.fail("the sets are compared again"))
    assert len(warnings(leaking)) == 1
    leaking.build_cache(*EVAL)
    leaking.build_cache()  # without the set, the catalogue keeps its thumbnails
    leaking.build_cache(*EVAL)


def test_a_catalogue_without_thumbnails_still_shows_equal_bytes(leaking: Project) -> None:
    """`check` reads the listing of an earlier cache rather than all images."""
    leaking.build_cache()
    (text,) = warnings(leaking)
    assert "1 of its 6 images is in the training set (1 with the same bytes)" in text
    sources = catalogue.make_sources(leaking.load(*EVAL).dataset.directories, compared=True)
    assert catalogue.read_last_listing(leaking.cache, sources[0]) is not None


def test_a_catalogue_keeps_kept_duplicates(leaking: Project) -> None:
    """Thumbnails alone do not drop similar images."""
    with Image.open(leaking.images / "000007.png") as image:
        image.resize((2 * image.width, 2 * image.height), Image.Resampling.BICUBIC).save(leaking.images / "twice.png")
    (leaking.images / "twice.txt").write_text("an image", encoding="utf-8")
    samples = leaking.build_cache()[0].counts["used"]
    assert leaking.build_cache(*EVAL)[0].counts["used"] == samples


def test_true_images_of_metrics_are_compared_too(leaking: Project) -> None:
    write_vision(leaking.folder / "vision")
    table = ("metrics.dataset='val.toml'", "metrics.features='vision'", "metrics.every_n_steps=2")
    loaded = leaking.load(*table)
    (leak,) = check.run(loaded).leaks
    assert leak.sentence().startswith(SENTENCE.replace("val is", "the dataset of [metrics] is"))
    both = leaking.load(*table, *EVAL)
    assert [leak.name for leak in check.run(both).leaks] == ["val"], "the same set is named once"
