"""The scripts that make docs/evidence/results.md: joined tables, the blind sheet, and the steps and their times."""

import csv
import importlib
import json
import math
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sd3_light.evaluate.against import COLUMNS, IMAGES_FILE, SHUFFLED, TRUE
from sd3_light.evaluate.nearest import BY_CAPTION, BY_CAPTION_IN_GROUP, ORACLE

SCRIPTS = Path(__file__).parents[3] / "scripts"
COUNT = 12


def load(name: str) -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPTS))
        return importlib.import_module(name)


# --- joined scores -------------------------------------------------------------------------------


def row(values: list[float], rows: list[int] | None = None) -> dict[str, Any]:
    each = dict.fromkeys(COLUMNS[2:], values)
    of_sets = {metric: {"value": values[0], "low": values[0] - 0.196, "high": values[0] + 0.196} for metric in COLUMNS}
    return {**of_sets, "each": {"rows": rows or list(range(len(values))), **each}}


def write_scores(path: Path, model: list[float]) -> Path:
    truth = {**row([1.0] * COUNT), "each": {"rows": list(range(COUNT)), "retrieval": [1.0] * COUNT}}
    truth |= dict.fromkeys(metric for metric in COLUMNS if metric != "retrieval")
    rows = {TRUE: truth, BY_CAPTION: row([0.5] * COUNT), ORACLE: row([0.5] * 3, [0, 4, 8]), path.stem: row(model)}
    path.write_text(json.dumps({"rows": rows}))
    return path


def test_joined_scores_have_errors_over_images_and_seeds(tmp_path: Path) -> None:
    join = load("join_scores")
    low, high = [0.6, 0.8] * (COUNT // 2), [0.8, 1.0] * (COUNT // 2)
    runs = join.read_runs([write_scores(tmp_path / "a.json", low), write_scores(tmp_path / "b.json", high)])
    over_images, over_seeds = np.var([0.7, 0.9] * 6, ddof=1) / COUNT, np.var([0.7, 0.9], ddof=1) / 2
    value = join.cell(runs, "model", "psnr")
    assert value.mean == pytest.approx(0.8)
    assert value.error == pytest.approx(math.sqrt(over_images + over_seeds))
    of_sets = join.cell(runs, "model", COLUMNS[0])
    assert of_sets.mean == pytest.approx(0.7)
    assert of_sets.error == pytest.approx(math.sqrt(0.1**2 + np.var([0.6, 0.8], ddof=1) / 2))
    less = join.difference(runs, ORACLE, "psnr")
    assert less.mean == pytest.approx(0.2), "of the three captions that the row has, all of the smaller values"
    assert join.cell(runs, TRUE, COLUMNS[0]) is None
    assert join.Value(0.21, 0.1).verdict(lower_is_better=False) == "better"
    assert join.Value(0.21, 0.1).verdict(lower_is_better=True) == "worse"
    assert join.Value(0.19, 0.1).verdict(lower_is_better=False) == ""
    assert join.Value(0.0, 0.0).verdict(lower_is_better=False) == ""


def test_a_table_of_one_seed_says_so(tmp_path: Path) -> None:
    join = load("join_scores")
    text = join.tables(join.read_runs([write_scores(tmp_path / "a.json", [0.9] * COUNT)]))
    assert "12 captions, one training seed: no error over seeds" in text
    assert f"| {BY_CAPTION} | 0.4 ± 0 better | 0.4 ± 0 worse | 0.4 ± 0 better | 0.4 ± 0 better |" in text


def test_files_of_other_captions_are_refused(tmp_path: Path) -> None:
    join = load("join_scores")
    files = [write_scores(tmp_path / "a.json", [0.9] * COUNT), write_scores(tmp_path / "b.json", [0.9] * 5)]
    with pytest.raises(SystemExit, match="different rows or captions"):
        join.read_runs(files)
    scores = json.loads(files[0].read_text())
    scores["rows"]["c"] = scores["rows"]["a"]
    files[0].write_text(json.dumps(scores))
    with pytest.raises(SystemExit, match="has 2 models"):
        join.read_runs(files)


# --- the blind sheet -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sheet() -> ModuleType:
    return load("blind_sheet")


@pytest.fixture
def saved(tmp_path: Path, sheet: ModuleType) -> Path:
    """Images of `evaluate --save`, the prompts as `fix` writes them, and the true images as a dataset."""
    images, truths = tmp_path / "images", tmp_path / "data"
    rows = {TRUE: "00", BY_CAPTION: "01", "runs/a": "02"}
    for number, folder in enumerate((*rows.values(), None)):
        path = truths if folder is None else images / folder
        path.mkdir(parents=True)
        for index in range(COUNT):
            pixels = np.random.default_rng([index, number % 3]).integers(0, 256, (32, 32, 3), np.uint8)
            Image.fromarray(pixels).save(path / f"{index}.png")
            if folder is None:
                (path / f"{index}.txt").write_text(f"caption {index}")
    (tmp_path / "data.toml").write_text('resolutions = [32]\n[[directory]]\npath = "data"\n')
    sheet.fix(tmp_path / "data.toml", tmp_path / "prompts.json", 8)
    fixed = json.loads((tmp_path / "prompts.json").read_text())
    order = [int(prompt["caption"].split()[1]) for prompt in fixed]
    order += [index for index in range(COUNT) if index not in order]
    for folder in rows.values():  # evaluate numbers the images in the order of their ids
        for index in range(COUNT):
            (images / folder / f"{index}.png").rename(images / folder / f"old-{index}.png")
        for place, index in enumerate(order):
            (images / folder / f"old-{index}.png").rename(images / folder / f"{place}.png")
    captions = [f"caption {index}" for index in order]
    (images / IMAGES_FILE).write_text(json.dumps({"captions": captions, "rows": rows}))
    return tmp_path


def answer(folder: Path, right: dict[int, bool]) -> Path:
    path = folder / "answers.csv"
    with path.open(newline="") as file:
        numbers = [int(line["item"]) for line in csv.DictReader(file)]
    path.write_text("item,right\n" + "".join(f"{number},{'y' if right[number] else 'n'}\n" for number in numbers))
    return path


def test_a_sheet_shows_no_origin_and_its_answers_are_scored(sheet: ModuleType, saved: Path) -> None:
    out = saved / "sheet"
    sheet.write(saved / "images", saved / "prompts.json", out, "runs/a", [BY_CAPTION])
    key = json.loads((out / "key.json").read_text())
    assert len(key["items"]) == 8 * 4
    assert key["orders"][0] != key["orders"][1]
    for judge in (1, 2):
        folder = out / f"judge-{judge}"
        expected = ["answers.csv", "page-01.png", "page-02.png", "sheet.html"]
        assert sorted(path.name for path in folder.iterdir()) == expected
        page = (folder / "sheet.html").read_text()
        assert page.count("<img") == 32
        assert not any(word in page for word in ("runs/a", TRUE, BY_CAPTION))
    answers = []
    for judge, order in enumerate(key["orders"], start=1):
        items = {number: key["items"][index] for number, index in enumerate(order, start=1)}
        # both judges accept the truth and reject wrong captions; the model gets 6 and 4 of 8
        right = {
            number: item["row"] == TRUE or (item["row"] == "runs/a" and item["prompt"] < (6 if judge == 1 else 4))
            for number, item in items.items()
        }
        answers.append(sheet.read_answers(answer(out / f"judge-{judge}", right), order))
    text = sheet.report(key, answers)
    error = np.std([1] * 4 + [0.5] * 2 + [0] * 2, ddof=1) / 8**0.5
    assert f"| runs/a | 8 | 0.75 | 0.50 | 0.625 ± {error:.3f} | 0.50 |" in text
    assert f"| {TRUE} | 8 | 1.00 | 1.00 | 1.000 ± 0.000 | 1.00 |" in text
    assert f"| {sheet.WRONG} | 8 | 0.00 | 0.00 | 0.000 ± 0.000 | 1.00 |" in text
    assert f"| {BY_CAPTION} | 8 | 0.625 ± {error:.3f} |" in text, "the paired difference"


def test_prompts_are_fixed_once_and_belong_to_their_images(sheet: ModuleType, saved: Path) -> None:
    with pytest.raises(SystemExit, match="already exists: the prompts are fixed once"):
        sheet.fix(saved / "data.toml", saved / "prompts.json", 8)
    true = saved / "images" / "00" / "3.png"
    Image.new("RGB", (32, 32)).save(true)
    with pytest.raises(SystemExit, match=r"prompt 3 of .* has another caption or true image"):
        sheet.write(saved / "images", saved / "prompts.json", saved / "sheet", "runs/a", [])
    with pytest.raises(SystemExit, match="has no row 'b'; it has: true images"):
        sheet.write(saved / "images", saved / "prompts.json", saved / "sheet", "b", [])


def test_an_item_without_an_answer_is_reported(sheet: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "answers.csv"
    path.write_text("item,right\n1,y\n2,\n")
    with pytest.raises(SystemExit, match="item 2 has no y or n"):
        sheet.read_answers(path, [0, 1])
    first = [True] * 25 + [False] * 25
    second = [True] * 20 + [False] * 5 + [True] * 10 + [False] * 15
    assert sheet.kappa(first, second) == pytest.approx(0.4)
    assert sheet.kappa([True, False], [False, True]) == -1
    assert sheet.kappa([True, True], [True, True]) == 1


# --- the run -------------------------------------------------------------------------------------


@pytest.fixture
def results() -> ModuleType:
    return load("results")


def touch(name: str) -> tuple[str, ...]:
    return ("touch", name)


def test_a_finished_step_is_not_repeated_and_a_failed_one_is(results: ModuleType, tmp_path: Path) -> None:
    fail = results.Step("b", ("false",))
    steps = [results.Step("a", touch("a")), fail, results.Step("c", touch("c"))]
    assert results.run_steps(tmp_path, iter(steps), time.monotonic() + 60) == 1
    (tmp_path / "a").unlink()
    steps[1] = replace(fail, command=touch("b"))
    assert results.run_steps(tmp_path, iter(steps), time.monotonic() + 60) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b", "c", "steps.jsonl"]
    assert results.times(tmp_path).count("| b |") == 1, "the seconds of both tries are added"


def test_a_step_that_outlasts_the_slot_saves_and_resumes(results: ModuleType, tmp_path: Path) -> None:
    saving = ("bash", "-c", "mkdir -p state; trap 'exit 75' TERM; while true; do sleep 0.1; done")
    steps = [results.Step("a", saving, Path("state"), touch("resumed")), results.Step("b", touch("b"))]
    assert results.run_steps(tmp_path, iter(steps), time.monotonic() + 3) == 75
    assert results.run_steps(tmp_path, iter(steps), time.monotonic() - 1) == 75, "nothing begins after the deadline"
    assert not (tmp_path / "resumed").exists()
    assert results.run_steps(tmp_path, iter(steps), time.monotonic() + 60) == 0
    assert (tmp_path / "resumed").exists()


def test_rows_that_the_scripts_name_are_those_of_evaluate(results: ModuleType) -> None:
    assert results.BASELINES == (BY_CAPTION, BY_CAPTION_IN_GROUP)
    assert SHUFFLED in load("join_scores").OTHERS
