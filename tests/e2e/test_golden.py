"""The demo recipe's numbers, step by step, against those that are kept in tests/golden.

After a change that is meant to change them:  python tests/e2e/test_golden.py --write
"""

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from sd3_light.assets import DEMO
from sd3_light.config import load_config
from sd3_light.engines import Launch
from sd3_light.journeys import cache_then_train
from sd3_light.recipes import FOLDER as RECIPES
from sd3_light.runlog import read_log
from sd3_light.world import write_dataset

GOLDEN = Path(__file__).parents[1] / "golden" / "demo_pretrain.json"
COMMAND = "python tests/e2e/test_golden.py --write"
PICTURES, HELD_OUT, STEPS = 256, 32, 40
OVERRIDES = (f"max_steps={STEPS}", "logging_steps=1", f"eval_every_n_steps={STEPS}")
TOLERANCE = 1e-4
"""Relative. Kinds of CPUs add up in other orders."""

Numbers = dict[str, Any]


def lay_out(folder: Path) -> Path:
    """The recipe as it is shipped, beside fewer pictures; its train TOML."""
    shutil.copytree(RECIPES / "demo", folder)
    shutil.copytree(DEMO, folder / "model", ignore=shutil.ignore_patterns("transformer"))
    write_dataset(folder / "data" / "train", PICTURES, seed=1)
    write_dataset(folder / "data" / "held_out", HELD_OUT, seed=2, held_out=True)
    return folder / "pretrain.toml"


def measure(recipe: Path, run: str, *overrides: str) -> Numbers:
    """Train by the recipe: loss, gradient norm and rate of every step, and the evaluation at the end."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sd3_light.export.folder.prove", lambda *_: {})
        cache_then_train(load_config(recipe, (*OVERRIDES, f'output_dir="{run}"', *overrides)), Launch())
    events = list(read_log(recipe.parent / run / "log.jsonl"))
    steps = [event for event in events if event["event"] == "step"]
    evals = [event for event in events if event["event"] == "eval"]
    assert [event["step"] for event in steps] == list(range(1, STEPS + 1))
    return {
        **{key: [event[key] for event in steps] for key in ("samples", "loss", "grad_norm", "lr")},
        "eval": {
            event["weights"]: {key: value for key, value in event.items() if key.startswith("flow")} for event in evals
        },
    }
