"""The pages of `sd3-light ui` without a server: runs, comparisons, samples."""

import fcntl
import io
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from PIL import Image

from sd3_light.checkpoint.lock import is_locked, locked_folder
from sd3_light.report import run_log
from sd3_light.sample.png import save_png
from sd3_light.ui import folders as folders_module
from sd3_light.ui.folders import Folders, folder_id
from sd3_light.ui.playground import Playground
from sd3_light.ui.run_pages import compare_page, comparison_charts, run_page, run_row, runs_page
from sd3_light.ui.sample_pages import sample_image, samples_page
from tests.refusals import refused
from tests.unit.pages.parsed_page import ParsedPage
from tests.unit.ui.conftest import PROMPTS, SEEDS, write_grid, write_run

HOLD = "import sys, time; from pathlib import Path; from sd3_light.checkpoint.lock import locked_folder\n"
HOLD += "with locked_folder(Path(sys.argv[1])): print('held', flush=True); time.sleep(600)"


@contextmanager
def held(run: Path) -> Iterator[None]:
    """Lock a run folder from another process, as a run that trains does."""
    run.mkdir(exist_ok=True)
    process = subprocess.Popen([sys.orig_argv[0], "-c", HOLD, str(run)], stdout=subprocess.PIPE)
    try:
        assert process.stdout.readline() == b"held\n"
        yield
    finally:
        process.kill()
        process.wait()


def test_the_cache_of_a_run_is_found_elsewhere(tmp_path: Path) -> None:
    """`sd3-light ui runs` shows the data of `runs/a`, whose cache is beside `runs`."""
    run, cache = write_run(tmp_path / "runs" / "a"), tmp_path / "data.cache"
    (tmp_path / "data.toml").write_text('resolutions = [64]\n[[directory]]\npath = "images"\n')
    model = '[model]\ntype = "sd3"\ndiffusers_path = "sd3"\n'
    dataset = f'output_dir = "."\ndataset = "{tmp_path / "data.toml"}"\nmax_steps = 1\nsave_every_n_steps = 1\n'
    (run / "config.toml").write_text(dataset + model)
    assert Folders([tmp_path / "runs"]).caches() == {}, "it does not exist yet"
    (cache / "shards").mkdir(parents=True)
    (cache / "manifest.json").touch()
    assert list(Folders([tmp_path / "runs"]).caches().values()) == [cache]
    assert len(Folders([tmp_path]).caches()) == 1, "once"
    (tmp_path / "data.toml").unlink()
    assert Folders([tmp_path / "runs"]).caches() == {}


def test_runs_and_caches_are_found_and_models_are_not(runs: Path) -> None:
    for name in ("model/transformer", "first/exports/step-1"):
        (runs / name).mkdir(parents=True)
        (runs / name / "log.jsonl").touch()
    (runs / "deep" / "denoiser").mkdir()
    for name in ("log.jsonl", "config.json"):
        (runs / "deep" / "denoiser" / name).touch()
    (runs / "cache" / "shards").mkdir(parents=True)
    (runs / "cache" / "manifest.json").touch()
    write_run(runs / "1" / "2" / "3" / "4")
    folders = Folders([runs])
    assert {path.name for path in folders.runs().values()} == {"first", "second"}
    assert [path.name for path in folders.caches().values()] == ["cache"]
    assert list(Folders([runs / "first"]).runs().values()) == [runs / "first"]


def test_new_runs_are_found_later(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(folders_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    folders = Folders([runs])
    assert len(folders.runs()) == 2
    write_run(runs / "third")
    now[0] += 9.9
    assert len(folders.runs()) == 2
    now[0] += 0.2
    assert len(folders.runs()) == 3
    now[0] += 20
    shutil.rmtree(runs / "third")
    folders.add_run(runs / "starting")
    assert {path.name for path in folders.runs().values()} == {"first", "second", "starting"}
    assert run_row(folders, folder_id(runs / "starting")).status == "no step yet"


def test_a_damaged_or_lost_run_does_not_hide_the_others(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (runs / "first" / "log.jsonl").write_text("not JSON\n{}\n")
    text = ParsedPage(runs_page(Folders([runs]))).text
    assert "log.jsonl" in text
    assert "finished at step 40" in text
    folders = Folders([runs])
    known = folders.runs()
    shutil.rmtree(runs / "first")
    monkeypatch.setattr(folders_module, "_SCAN_SECONDS", 0.0)
    answers = iter([known])
    monkeypatch.setattr(folders, "runs", lambda: next(answers, {}))
    assert "second" in runs_page(folders)


def test_only_the_new_lines_of_a_log_are_read(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parse = Mock(wraps=run_log.parse_event)
    monkeypatch.setattr(run_log, "parse_event", parse)
    folders, log = Folders([runs]), runs / "first" / "log.jsonl"
    run_page(folders, folder_id(runs / "first"))
    for step in (41, 42):
        num_lines = len(log.read_text().splitlines())
        record = {"event": "step", "step": step, "samples": 4 * step, "loss": 0.5, "time": 1.8e9 + step}
        with log.open("a") as file:
            file.write(json.dumps(record) + "\n")
        parse.reset_mock()
        run_page(folders, folder_id(runs / "first"))
        assert {call.args[1] for call in parse.call_args_list} == {num_lines + 1}
        assert f"at step {step}" in ParsedPage(runs_page(folders)).text
    folders = Folders([runs])
    report = folders.report(runs / "first")
    assert folders.report(runs / "first") is report
    with (runs / "first" / "log.jsonl").open("a") as log:
        log.write(json.dumps({"event": "stop", "step": 40, "reason": "save_quit", "time": 1.8e9 + 41}) + "\n")
    assert folders.report(runs / "first").status == "stopped at step 40: save_quit"


def test_the_lock_tells_whether_a_run_is_running(runs: Path, tmp_path: Path) -> None:
    folders, first = Folders([runs]), runs / "first"
    assert not is_locked(first)
    assert run_row(folders, folder_id(first)).status == "at step 40; not running"
    with held(first):
        assert is_locked(first)
        row = run_row(folders, folder_id(first))
        assert row.status == "at step 40; running"
        assert row.report.seconds_left == pytest.approx(40)
        assert "40 s left" in ParsedPage(runs_page(folders)).text
        assert "Save and stop" in ParsedPage(run_page(folders, folder_id(first))).text
    assert not is_locked(first)
    (tmp_path / ".lock").touch()
    assert not is_locked(tmp_path)
    with locked_folder(tmp_path):
        pass
    with (tmp_path / ".lock").open("w") as file:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_run_has_the_sections_of_its_report_and_links_instead_of_data(runs: Path) -> None:
    run_id = folder_id(runs / "first")
    page = ParsedPage(run_page(Folders([runs]), run_id, "the console", ["a note"]))
    for text in ("Loss", "Validation", "Events", "the console", "a note", "steps of 80"):
        assert text in page.text
    sources = [attributes["src"] for tag, attributes in page.elements if tag == "img"]
    assert sources == [f"/runs/{run_id}/sample?file=samples/step-{step:08d}.png" for step in (10, 20, 30, 40)]
    assert "data:image" not in page.source
    assert "connect-src 'self'" in page.policy
    folders = Folders([runs])
    for page in (compare_page, samples_page):
        refused("no run is chosen", page, folders, [])
        refused("no run nothing", page, folders, ["nothing"])
    refused("unknown order 'y'; use one of newest, name", runs_page, folders, "", "y")


def test_runs_are_compared_line_by_line(runs: Path) -> None:
    folders = Folders([runs])
    reports = {name: folders.report(runs / path) for name, path in (("a", "first"), ("b", "deep/second"))}
    charts = {chart.title: chart for chart in comparison_charts(reports)}
    loss, validation = charts["Loss, smoothed"], charts["held_out, ema weights: mean over all t"]
    for chart in (loss, validation):
        assert [(line.name, line.color) for line in chart.lines] == [("a", "c0 d0"), ("b", "c1 d0")]
    for first, second in zip(validation.lines[0].points, validation.lines[1].points, strict=True):
        assert second == (first[0], pytest.approx(first[1] + 0.1))
    assert [line.source for line in loss.lines] == [("a", "loss", "mean"), ("b", "loss", "mean")]
    report = Folders([runs]).report(runs / "first")
    charts = comparison_charts({str(number): report for number in range(30)})
    assert len({line.color for line in charts[0].lines}) == 30
    assert not any(chart.has_legend for chart in charts)
    first, second = folders.report(runs / "first"), folders.report(runs / "deep" / "second")
    del first.steps["lr"]
    charts = {chart.title: chart for chart in comparison_charts({"a": first, "b": second})}
    assert [(line.name, line.color) for line in charts["Learning rate"].lines] == [("b", "c1 d0")]


def test_runs_and_exports_of_one_name_are_told_apart(tmp_path: Path) -> None:
    ids = [folder_id(write_run(tmp_path / name / "run")) for name in "ab"]
    text = ParsedPage(compare_page(Folders([tmp_path]), ids)).text
    assert "a/run" in text
    assert "b/run" in text
    first, second = (folder_id(tmp_path / name / "run ä/") for name in "ab")
    assert first != second
    assert first.startswith("run---")
    for name in "ab":
        (write_run(tmp_path / name / "run") / "exports" / "step-00000010").mkdir(parents=True)
    playground = Playground(Folders([tmp_path]), tmp_path / "out", [tmp_path], pytest.fail)
    labels = [label for label, _ in playground.models().values()]
    assert len(set(labels)) == 3
    assert labels[:2] == [str(tmp_path), "run/step-00000010"]


def matrix_of(page: ParsedPage) -> dict[str, Any]:
    """Return what the page's script shows."""
    (section,) = [attributes for _, attributes in page.elements if attributes.get("id") == "matrix"]
    matrix: dict[str, Any] = json.loads(section["data-matrix"])
    return matrix


def test_samples_are_a_matrix_of_prompts_steps_and_runs(runs: Path) -> None:
    folders = Folders([runs])
    ids = [folder_id(runs / path) for path in ("first", "deep/second")]
    matrix = matrix_of(ParsedPage(samples_page(folders, ids)))
    assert matrix["keys"] == [[prompt, seed] for prompt in PROMPTS for seed in SEEDS]
    assert [(series["id"], series["weights"]) for series in matrix["series"]] == [(run_id, "ema") for run_id in ids]
    for series in matrix["series"]:
        assert [grid[0] for grid in series["grids"]] == [10, 20, 30, 40]
    assert matrix["layouts"] == [[0, 1, 2, 3]]
    filtered = matrix_of(ParsedPage(samples_page(folders, ids[:1], "RED")))
    assert filtered["keys"] == [[PROMPTS[0], seed] for seed in SEEDS]
    assert filtered["layouts"] == [[0, 1, -1, -1]]
    for number in range(4):
        with Image.open(io.BytesIO(sample_image(runs / "first", "samples/step-00000020.png", number))) as image:
            assert image.size == (128, 96)  # the grid enlarges twice
            assert image.convert("RGB").getcolors() == [(128 * 96, (20, 10 * number, 0))]


def test_grids_without_places_are_noted(tmp_path: Path) -> None:
    run = write_run(tmp_path / "old", cells=False)
    (run / "samples" / "step-00000010.png").unlink()
    write_grid(run / "samples" / "step-00000040.png", 40)
    page = ParsedPage(samples_page(Folders([tmp_path]), [folder_id(run)]))
    assert "old: 3 grids are missing or damaged" in page.text
    assert [len(series["grids"]) for series in matrix_of(page)["series"]] == [1]


def test_only_grids_inside_the_run_are_served(runs: Path) -> None:
    Image.new("RGB", (4, 4)).save(runs / "secret.png")
    for file in ("../secret.png", "/etc/passwd", "log.jsonl", "", "samples/none.png", "samples"):
        refused("", sample_image, runs / "first", file, None)
    for number, cells in enumerate(("[[0, 0, 9999, 9999]]", "[[0, 0, -1, 5]]", '["a"]', "[[[]]]", "{}", "[" * 500)):
        facts = {"prompts": ["a"], "seeds": [0], "cells": cells}
        save_png(Image.new("RGB", (8, 8)), runs / "first" / f"{number}.png", facts)
        refused("no image 0", sample_image, runs / "first", f"{number}.png", 0)
