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
    for name in ("lora_concept", "world_runs"):
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


def test_results_are_joined_and_the_best_is_first(script: Any, tmp_path: Path) -> None:
    def line(lr: float, steps: int, seed: int, word: float, rest: float) -> str:
        groups = {**dict.fromkeys(script.GROUPS, word), "rest": rest}
        cell = {"lr": lr, "rank": 4, "steps": steps, "batch": 4, "seed": seed}
        return json.dumps({**cell, "groups": groups, "recipe": "a"}) + "\n"

    first, second = tmp_path / "results.jsonl", tmp_path / "other.jsonl"
    first.write_text(line(1e-9, 0, 1, 0.0, 0.9) + line(1e-4, 400, 1, 0.5, 0.9) + line(1e-3, 400, 1, 1.0, 0.2))
    second.write_text(line(1e-4, 400, 2, 0.7, 0.9) + line(2e-4, 400, 1, 0.9, 0.9))
    script.show(tmp_path, [second])
    rows = [row.split("|")[1:] for row in (tmp_path / "table.md").read_text(encoding="utf-8").splitlines()[2:]]
    assert [row[0].strip() for row in rows] == ["base", "0.0002", "0.0001", "0.001"], "forgetting counts"
    assert rows[2][4:6] == [" 2 ", " 0.60 ±0.14 "]
    assert script.read_results([first, second], "b") == {}


@pytest.mark.slow
def test_a_toy_form_runs_and_continues(tmp_path: Path) -> None:
    table = bench(tmp_path, "--toy")
    assert table.count("\n| ") >= 3
    results = (tmp_path / "results.jsonl").read_text(encoding="utf-8")
    assert [json.loads(line)["steps"] for line in results.splitlines()] == [0, 2, 4]
    assert bench(tmp_path, "--toy") == table
    assert (tmp_path / "results.jsonl").read_text(encoding="utf-8") == results, "finished cells are skipped"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_new_concept_is_learned_and_others_are_kept(tmp_path: Path) -> None:
    cell = ("--lr", "5e-4", "--rank", "16", "--steps", "400", "--batch", "4", "--seeds", "1", "--prompts", "16")
    bench(tmp_path, *cell)
    base, learned = (json.loads(line)["groups"] for line in (tmp_path / "results.jsonl").read_text().splitlines())
    assert base["captions"] <= 0.1, "chance"
    assert learned["captions"] >= 0.8
    assert learned["rest"] >= base["rest"] - 0.15
