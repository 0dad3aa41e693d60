"""A LoRA teaches the demo model a new word: the benchmark's prompts, its cells and its table; what is learned."""

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from sd3_light.assets import DEMO

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        yield importlib.import_module("lora_concept")
    for name in ("lora_concept", "common.world"):
        sys.modules.pop(name, None)


def bench(folder: Path, *options: str) -> str:
    command = [sys.executable, str(ROOT / "benchmarks" / "lora_concept.py"), str(folder), *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=1800)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_only_one_group_has_training_captions(script: Any, tmp_path: Path) -> None:
    script.write_images(tmp_path, seed=1)
    trained = {path.read_text(encoding="utf-8") for path in tmp_path.glob("*.txt")}
    assert len(list(tmp_path.glob("*.png"))) == 20
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "tokenizer_3")
    texts: dict[str, set[str]] = {}
    for name, prompt in script.Bench(tmp_path, 32, 20).groups():
        texts.setdefault(name, set()).add(prompt.text)
        assert len(tokenizer(prompt.text).input_ids) <= 16, "no prompt is cut"
        assert ("zorb" in prompt.text) == (name != "rest")
        assert name == "rest" or "red triangle" not in prompt.text
    assert texts.pop("captions") == trained
    assert len(texts["beside"]) > 25
    assert not trained & set().union(*texts.values())
    assert all(f"{words} " in " ".join(texts["counts"]) for words in ("three zorbs", "four zorbs"))


def write_result(script: Any, folder: Path, cell: Any, word: float, rest: float = 0.9, **facts: Any) -> None:
    line = {**cell.__dict__, "groups": {**dict.fromkeys(script.GROUPS, word), "rest": rest}, "recipe": "a", **facts}
    (folder / "cells").mkdir(parents=True, exist_ok=True)
    (folder / "cells" / f"{cell.name}-a.json").write_text(json.dumps(line), encoding="utf-8")


def test_results_are_joined_and_the_best_is_first(script: Any, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    write_result(script, first, script.Cell(1e-9, 4, 0, 4, 1), 0.0)
    write_result(script, first, script.Cell(1e-4, 4, 400, 4, 1), 0.5)
    write_result(script, first, script.Cell(1e-3, 4, 400, 4, 1), 1.0, rest=0.2)
    write_result(script, second, script.Cell(1e-4, 4, 400, 4, 2), 0.7)
    write_result(script, second, script.Cell(2e-4, 4, 400, 4, 1), 0.9)
    script.show(first, [second])
    rows = [row.split("|")[1:] for row in (first / "table.md").read_text(encoding="utf-8").splitlines()[2:]]
    assert [row[0].strip() for row in rows] == ["base", "0.0002", "0.0001", "0.001"], "forgetting counts"
    assert rows[2][4:6] == [" 2 ", " 0.60 ±0.10 "], "the standard error"
    assert script.read_results([first, second], "b") == {}


def test_the_plan_follows_from_finished_cells_in_as_many_lanes(script: Any, tmp_path: Path) -> None:
    for steps, lanes, seconds in ((200, 2, 30.0), (400, 2, 50.0), (800, 1, 1000.0)):
        write_result(script, tmp_path, script.Cell(1e-4, 4, steps, 4, 1), 0.5, lanes=lanes, seconds=seconds)
    missing = [script.Cell(1e-4, 4, 800, 4, seed) for seed in (2, 3)]
    results = script.read_results([tmp_path])
    text = "2 cells are missing, 1,600 steps: about 1.5 minutes in 2 lanes, by 2 finished cells"
    assert script.plan_of(missing, results, lanes=2) == text, "10 s and 0.1 s per step each"
    assert script.plan_of(missing, results, lanes=4) == "2 cells are missing, 1,600 steps"


def test_a_failed_cell_is_named_and_others_continue(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Lane:
        def __init__(self, bench: Any, number: int) -> None:
            pass

        def run(self, cell: Any, deadline: float) -> dict[str, Any] | None:
            groups = dict.fromkeys(script.GROUPS, 0.5)
            return None if cell.seed == 2 else {**cell.__dict__, "groups": groups, "recipe": "a", "seconds": 1.0}

        def close(self) -> None:
            closed.append(self)

    closed: list[Lane] = []
    monkeypatch.setattr(script, "_Lane", Lane)
    (tmp_path / "cells").mkdir()
    cells = [script.Cell(1e-4, 4, 400, 4, seed) for seed in (1, 2, 3)]
    script.run_lanes(script.Bench(tmp_path, 2, 2), cells, lanes=1, deadline=float("inf"))
    assert {cell.seed for cell in script.read_results([tmp_path])} == {1, 3}
    assert f"{cells[1].name} failed; see {tmp_path / 'lane-0.log'}" in capsys.readouterr().out
    assert len(closed) == 2, "the process that ended, and the one after it"
    script.run_lanes(script.Bench(tmp_path, 2, 2), cells[1:2], lanes=1, deadline=0.0)
    assert capsys.readouterr().out == "", "time is over"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_toy_form_runs_in_lanes_and_continues(tmp_path: Path) -> None:
    bench(tmp_path, "--toy", "--minutes", "0")
    assert not list((tmp_path / "cells").iterdir()), "no cell ends in time"
    printed = bench(tmp_path, "--toy", "--lanes", "2")
    assert "3 cells are missing, 6 steps" in printed
    results = {path: path.read_text(encoding="utf-8") for path in (tmp_path / "cells").iterdir()}
    assert sorted(json.loads(text)["steps"] for text in results.values()) == [0, 2, 4]
    again = bench(tmp_path, "--toy", "--lanes", "2")
    assert "0 cells are missing" in again
    assert again.partition("| lr")[2] == printed.partition("| lr")[2]
    assert {path: path.read_text(encoding="utf-8") for path in (tmp_path / "cells").iterdir()} == results


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_new_concept_is_learned_and_others_are_kept(tmp_path: Path) -> None:
    cell = ("--lr", "5e-4", "--rank", "16", "--steps", "400", "--batch", "4", "--seeds", "1", "--prompts", "16")
    bench(tmp_path, *cell)
    lines = [json.loads(path.read_text()) for path in (tmp_path / "cells").iterdir()]
    base, learned = (line["groups"] for line in sorted(lines, key=lambda line: line["steps"]))
    assert base["captions"] <= 0.1, "chance"
    assert learned["captions"] >= 0.8
    assert learned["rest"] >= base["rest"] - 0.15
