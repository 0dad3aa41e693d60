"""The demo recipe's numbers, step by step, against those that tests/golden keeps.

After a change that is meant to change them:  python tests/e2e/test_golden.py --write
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from sd3_light.assets import DEMO
from sd3_light.config import load_config
from sd3_light.engines import Launch
from sd3_light.journeys import cache_then_train
from sd3_light.recipes import FOLDER as RECIPES
from sd3_light.runlog import read_log
from sd3_light.world import write_dataset

GOLDEN = Path(__file__).parents[1] / "golden" / "demo_pretrain.json"
PICTURES, HELD_OUT, STEPS = 256, 32, 40
OVERRIDES = (f"max_steps={STEPS}", "logging_steps=1", f"eval_every_n_steps={STEPS}")
COLUMNS = ("samples", "loss", "grad_norm", "lr")
TOLERANCE = {"loss": 1e-4, "grad_norm": 5e-4, "eval": 1e-4}
"""Relative, because other CPUs add up in other orders, and every step multiplies the difference. Measured against
AVX-512 after 40 steps, cache included: AVX2 1.2e-6 in the loss and 1.6e-5 in the gradient's norm, plain SSE 5.2e-6 and
9.8e-5, two threads 1.3e-6 and 4.3e-6. A mistake in the mathematics moves the loss by far more."""

Numbers = dict[str, Any]


def lay_out(folder: Path) -> Path:
    """The recipe as it is shipped, beside fewer pictures; its train TOML."""
    shutil.copytree(RECIPES / "demo", folder)
    shutil.copytree(DEMO, folder / "model", ignore=shutil.ignore_patterns("transformer"))
    write_dataset(folder / "data" / "train", PICTURES, seed=1)
    write_dataset(folder / "data" / "held_out", HELD_OUT, seed=2, held_out=True)
    return folder / "pretrain.toml"


def measure(recipe: Path, run: str, *overrides: str) -> Numbers:
    """Train by the recipe: a row of `COLUMNS` for every step, and the evaluation at the end."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sd3_light.export.diffusers_folder.prove", lambda *_: {})
        cache_then_train(load_config(recipe, (*OVERRIDES, f'output_dir="{run}"', *overrides)), Launch())
    events = list(read_log(recipe.parent / run / "log.jsonl"))
    steps = [event for event in events if event["event"] == "step"]
    assert [event["step"] for event in steps] == list(range(1, STEPS + 1))
    evals = [event for event in events if event["event"] == "eval"]
    return {
        "steps": [[event[name] for name in COLUMNS] for event in steps],
        "eval": {event["weights"]: {key: event[key] for key in event if key.startswith("flow")} for event in evals},
    }


def written(numbers: Numbers) -> str:
    """The golden file: a header, and one line a step."""
    head = {
        "what": f"sd3_light/recipes/demo/pretrain.toml, {PICTURES} pictures, {' '.join(OVERRIDES)}",
        "made_by": "python tests/e2e/test_golden.py --write",
        "made_with": f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, one thread",
        "columns": COLUMNS,
        "eval": numbers["eval"],
    }
    rows = ",\n  ".join(json.dumps(row) for row in numbers["steps"])
    return f'{json.dumps(head, indent=1)[:-2]},\n "steps": [\n  {rows}\n ]\n}}\n'


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lay_out(tmp_path_factory.mktemp("golden") / "demo")


@pytest.fixture(scope="module")
def measured(recipe: Path) -> Numbers:
    return measure(recipe, "one")


@pytest.fixture(scope="module")
def golden() -> Numbers:
    found: Numbers = json.loads(GOLDEN.read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize("name", ["loss", "grad_norm"])
def test_every_step_is_as_it_was(measured: Numbers, golden: Numbers, name: str) -> None:
    ours, theirs = ([row[COLUMNS.index(name)] for row in numbers["steps"]] for numbers in (measured, golden))
    assert ours == pytest.approx(theirs, rel=TOLERANCE[name])


@pytest.mark.parametrize("name", ["samples", "lr"])
def test_what_is_arithmetic_is_the_same_everywhere(measured: Numbers, golden: Numbers, name: str) -> None:
    ours, theirs = ([row[COLUMNS.index(name)] for row in numbers["steps"]] for numbers in (measured, golden))
    assert ours == pytest.approx(theirs, rel=1e-12)


def test_the_evaluation_is_as_it_was(measured: Numbers, golden: Numbers) -> None:
    assert list(golden["eval"]) == list(measured["eval"]) == ["raw", "ema"]
    for weights, losses in golden["eval"].items():
        assert len(losses) == 10, "the mean, and nine quantiles of time"
        assert measured["eval"][weights] == pytest.approx(losses, rel=TOLERANCE["eval"])


def test_on_one_machine_it_is_the_same_bit_for_bit(recipe: Path, measured: Numbers) -> None:
    """From the same cache, with workers that prepare the batches."""
    assert measure(recipe, "two", "num_dataloader_workers=2") == measured


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit(__doc__)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        GOLDEN.write_text(written(measure(lay_out(Path(place, "demo")), "run")), encoding="utf-8")
    print(f"wrote {GOLDEN}")
