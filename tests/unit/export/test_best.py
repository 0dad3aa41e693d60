"""The best measurement of a run, and the link to its export."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from sd3_light.checkpoint.store import checkpoint_name
from sd3_light.config.faults import UserError
from sd3_light.export import best as module
from sd3_light.export.best import BestMeasurement, best_name, mark_best, restore_best
from sd3_light.export.chosen import best_export, choose_model


@pytest.mark.parametrize(("metric", "values"), [("kid", (3.0, 2.0, 2.0, 4.0)), ("retrieval", (0.1, 0.5, 0.5, 0.2))])
def test_better_is_lower_or_higher(metric: str, values: tuple[float, ...]) -> None:
    best = BestMeasurement(metric)
    assert [best.add(10 * number, value) for number, value in enumerate(values)] == [True, True, False, False]
    assert (best.value, best.step, best.since) == (values[1], 10, 2)


def test_the_log_of_a_run_has_its_best(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    assert BestMeasurement.of_log(log, "kid", 100).value is None
    rows = [(10, 5.0), (20, 1.0), (30, 4.0), (20, 3.0), (30, 2.0), (40, 0.5)]  # a resume repeated 20 and 30
    events = [{"event": "metrics", "step": step, "kid": {"value": value}, "retrieval": None} for step, value in rows]
    events.append({"event": "step", "step": 1})
    log.write_text("".join(json.dumps({"time": 0, **event}) + "\n" for event in events))
    best = BestMeasurement.of_log(log, "kid", 35)
    assert (best.value, best.step, best.since) == (2.0, 30, 0)
    assert BestMeasurement.of_log(log, "retrieval", 35).value is None


def make_exports(folder: Path, *steps: int) -> list[Path]:
    paths = [folder / f"step-{step:08d}" for step in steps]
    for path in paths:
        path.mkdir(parents=True)
        (path / "model_index.json").touch()
    return paths


def test_the_link_moves_to_the_best_export(tmp_path: Path) -> None:
    first, second = make_exports(tmp_path / "run" / "exports", 2, 4)
    assert best_name(first.parent) is None
    for export in (second, first):
        mark_best(export)
        assert (first.parent / "best").resolve() == export.resolve()
    assert sorted(path.name for path in first.parent.iterdir()) == ["best", first.name, second.name]
    assert choose_model(tmp_path / "run", best=True).folder.name == first.name
    assert choose_model(tmp_path / "run").folder.name == second.name
    assert choose_model(first.parent / "best").folder == first.parent / "best"


def test_a_resumed_run_links_the_best_export_before_its_step(tmp_path: Path) -> None:
    first, second = make_exports(tmp_path, 2, 4)
    mark_best(second)
    second.rename(tmp_path / "abandoned-step-4")
    restore_best(tmp_path, BestMeasurement("kid", 1.0, 2))
    assert best_name(tmp_path) == first.name
    restore_best(tmp_path, BestMeasurement("kid"))
    assert best_name(tmp_path) is None
    restore_best(tmp_path / "missing", BestMeasurement("kid", 1.0, 2))


def test_a_lack_of_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(Path, "symlink_to", Mock(side_effect=PermissionError(1, "Operation not permitted")))
    mark_best(make_exports(tmp_path, 2)[0])
    assert "cannot be written (Operation not permitted); the best export is step-00000002" in capsys.readouterr().err
    assert module.best_name(tmp_path) is None


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
