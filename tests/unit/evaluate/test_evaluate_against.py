"""Models against true images: table, JSON and page. The images are given; `tests/e2e/test_run.py` draws some."""

import importlib
import json
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from sd3_light.assets import DEMO
from sd3_light.config.faults import UserError
from sd3_light.evaluate import against
from sd3_light.evaluate.against import COLUMNS, IMAGES_FILE, SHUFFLED, TRUE, AgainstOptions
from sd3_light.evaluate.distances import METRICS
from sd3_light.evaluate.nearest import BY_CAPTION, BY_CAPTION_IN_GROUP, ORACLE
from sd3_light.export.open_pipeline import open_policy
from tests.judge_folders import write_clip, write_vision
from tests.unit.pages.parsed_page import ParsedPage


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve held-out images with a caption in another style each, two model folders, a judge."""
    root = tmp_path_factory.mktemp("against")
    for part, style in (("held_out", "flat"), ("train", "round")):
        (root / part / style).mkdir(parents=True)
        for number in range(12):
            pixels = np.random.default_rng([number, part == "train"]).integers(0, 256, (16, 16, 3), np.uint8)
            Image.fromarray(pixels).save(root / part / style / f"{number}.png")
        captions = {f"{number}.png": f"<{number}>, {style}" for number in range(12)}
        (root / part / style / "captions.json").write_text(json.dumps(captions))
    (root / "data.toml").write_text('resolutions = [16]\n[[directory]]\npath = "held_out/flat"\n')
    (root / "train.toml").write_text('resolutions = [16]\n[[directory]]\npath = "train/round"\n')
    for model in ("good", "noise"):
        (root / model).mkdir()
        (root / model / "model_index.json").write_text("{}")
    write_clip(root / "judge")
    return root


@pytest.fixture(autouse=True)
def drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw nothing: the good model returns the truth, the other one noise."""

    def draw(chosen: Any, truths: Any, *_: Any) -> Any:
        noise = np.random.default_rng(9).integers(0, 256, (len(truths), 16, 16, 3), np.uint8)
        return [truth.pixels for truth in truths] if chosen.folder.name == "good" else list(noise)

    monkeypatch.setattr(against, "draw", draw)
    of_demo = open_policy(DEMO)
    monkeypatch.setattr(against, "open_policy", lambda *_: of_demo)


def test_models_and_baselines_in_one_table(folder: Path, tmp_path: Path) -> None:
    out, page, models = tmp_path / "new" / "scores.json", tmp_path / "page.html", [folder / "good", folder / "noise"]
    options = AgainstOptions(training=folder / "train.toml")
    measured = against.run(models, folder / "data.toml", folder, options, out, page)
    good, noise = map(str, models)
    assert list(measured.scores) == [TRUE, SHUFFLED, BY_CAPTION, ORACLE, good, noise]
    written = json.loads(out.read_text())
    rows = written["rows"]
    assert (written["captions"], written["among"], written["guidance"]) == (12, 12, 4.0)
    assert rows[good]["distance"]["value"] == pytest.approx(0, abs=1e-9)
    assert rows[noise]["distance"]["value"] > 0.001
    assert all(rows[good][metric] == rows[TRUE][metric] for metric in METRICS[:5])
    assert (rows[good]["psnr"]["value"], rows[TRUE]["psnr"]) == (60, None)
    assert rows[good]["kid_difference"] == {"value": 0, "low": 0, "high": 0}
    assert rows[noise]["each"]["rows"] == list(range(12))
    assert all(len(rows[noise]["each"][metric]) == 12 for metric in ("retrieval", "distance", "psnr", "edges"))
    assert rows[BY_CAPTION]["images"] == 12
    assert written["training"] == str(folder / "train.toml")
    assert rows[SHUFFLED]["frechet"] is None
    shown = StringIO()
    Console(width=300, file=shown).print(measured.table())
    assert all(name in shown.getvalue() for name in (TRUE, BY_CAPTION, ORACLE, good, "KID - true", "PSNR"))
    narrow = StringIO()
    Console(width=80, file=narrow).print(measured.table())
    assert "…" not in narrow.getvalue(), "headings are whole in a terminal of 80 columns"
    parsed = ParsedPage(page)
    assert len(parsed.attributes("img")) == 12 * 5
    assert "<3>, flat" in parsed.text
    assert "finds" in parsed.text
    with pytest.MonkeyPatch.context() as patch:  # the figure of docs/evidence/results.md is made from the page
        patch.syspath_prepend(str(Path(__file__).parents[3] / "scripts"))
        pairs = importlib.import_module("results_grid").read_pairs(page, noise)
    assert [pair.distance for pair in pairs] == pytest.approx(rows[noise]["each"]["distance"], abs=5.1e-4)


def test_other_judges_groups_and_missing_models(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a diffusers folder"):
        against.run([folder / "good", tmp_path], tmp_path / "missing.toml", tmp_path)
    with pytest.raises(UserError, match="is a folder; name the file of the page"):  # before any image is drawn
        against.run([folder / "good"], tmp_path / "missing.toml", folder, page=tmp_path)
    measured = against.run([folder / "noise"], folder / "data.toml", write_vision(tmp_path), AgainstOptions(count=9))
    scores = measured.scores[str(folder / "noise")].estimates
    assert len(measured.truths) == 9
    assert scores["retrieval"] is None
    assert all(scores[metric] is not None for metric in (*METRICS, *COLUMNS) if metric != "retrieval")
    # held-out images are in folders of the same names as those of training.
    tables = [f'[[directory]]\npath = "{folder / part}"\n' for part in ("train/round", "held_out/flat")]
    (tmp_path / "both.toml").write_text("resolutions = [16]\n" + "".join(tables))
    options = AgainstOptions(training=tmp_path / "both.toml")
    measured = against.run([folder / "good"], folder / "data.toml", folder, options)
    assert measured.scores[BY_CAPTION_IN_GROUP].estimates["psnr"].value == 60  # type: ignore[union-attr]


@pytest.mark.parametrize("shares", [True, False])
def test_a_shared_judge_is_noted(folder: Path, tmp_path: Path, monkeypatch: Any, capsys: Any, shares: bool) -> None:
    monkeypatch.setattr(against, "shares_captions", lambda features: shares)
    with pytest.raises(UserError, match=r"missing\.toml"):
        against.run([folder / "good"], tmp_path / "missing.toml", write_vision(tmp_path))
    assert ("learned from the same captions" in " ".join(capsys.readouterr().err.split())) is shares


def test_all_images_of_all_rows_are_saved(folder: Path, tmp_path: Path) -> None:
    options, save = AgainstOptions(count=9, training=folder / "train.toml"), tmp_path / "images"
    measured = against.run([folder / "good"], folder / "data.toml", folder, options, save=save)
    listed = json.loads((save / IMAGES_FILE).read_text())
    assert listed["true"] == TRUE
    assert listed["each"] == {name: against._each(measured.scores[name]) for name in listed["rows"]}
    assert listed["captions"] == [truth.caption for truth in measured.truths]
    assert list(listed["rows"]) == [TRUE, BY_CAPTION, ORACLE, str(folder / "good")]
    for row, truth in enumerate(measured.truths):
        for name in (TRUE, str(folder / "good")):
            with Image.open(save / listed["rows"][name] / f"{row}.png") as image:
                assert np.array_equal(np.asarray(image), truth.pixels)
        number = truth.caption.split(",")[0].strip("<>")
        chosen = folder / "train" / "round" / f"{number}.png"
        answer = save / listed["rows"][BY_CAPTION] / f"{row}.png"
        assert np.array_equal(np.asarray(Image.open(answer)), np.asarray(Image.open(chosen)))
    with pytest.raises(UserError, match="already exists"):
        against.run([folder / "good"], folder / "data.toml", folder, options, save=save)


def test_only_images_for_the_page_stay_in_memory(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(against, "_MOST_SHOWN", 3)
    judge, page = write_vision(tmp_path), tmp_path / "page.html"
    options = AgainstOptions(training=folder / "train.toml")
    measured = against.run([folder / "noise"], folder / "data.toml", judge, options, page=page)
    assert list(measured.images) == [TRUE, BY_CAPTION, ORACLE, str(folder / "noise")]
    assert all(list(images) == [0, 1, 2] for images in measured.images.values())
    assert len(ParsedPage(page).attributes("img")) == 3 * 4
    measured = against.run([folder / "noise"], folder / "data.toml", judge, options)
    assert not any(measured.images.values())
