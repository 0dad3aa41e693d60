"""The export of a run that `--best` chooses."""

import json
from pathlib import Path
from typing import Any

import pytest

from sd3_light.checkpoint.store import checkpoint_name
from sd3_light.config.faults import UserError
from sd3_light.export.chosen import best_export


def write_run(run: Path, losses: dict[int, Any]) -> Path:
    events = []
    for step, loss in losses.items():
        (run / "exports" / checkpoint_name(step)).mkdir(parents=True)
        events.append({"event": "eval", "step": step, "set": "held_out", "weights": "ema", "flow": loss})
        events.append({"event": "export", "step": step, "weights": "ema"})
    (run / "log.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return run


def test_an_export_whose_loss_is_not_finite_is_not_the_best(tmp_path: Path) -> None:
    run = write_run(tmp_path, {1: 0.9, 2: 0.5, 3: "nan", 4: "inf", 5: None})
    assert best_export(run).name == checkpoint_name(2)
    with pytest.raises(UserError, match="was evaluated at its step with a finite loss; write eval_datasets"):
        best_export(write_run(tmp_path / "no loss", {1: "nan"}))
