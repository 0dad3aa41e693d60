"""[metrics] in a run: what is measured, logged and marked, and how it continues after a stop."""

import json

import numpy as np
import pytest

from sd3_light.config.faults import UserError
from sd3_light.evaluate import against
from sd3_light.evaluate.against import AgainstOptions
from sd3_light.evaluate.distances import METRICS
from sd3_light.train import verb as train
from sd3_light.train.verb import Resume
from tests.judge_folders import write_clip, write_vision
from tests.project import Project

pytestmark = pytest.mark.usefixtures("unproven")

TABLE = """
[metrics]
dataset = "data.toml"
features = "judge"
every_n_steps = 2
images = 8
steps = 1
guidance = 1.0
best = "distance"
"""


@pytest.fixture
def measured(project: Project) -> Project:
    write_clip(project.folder / "judge")
    project.train_toml.write_text(project.train_toml.read_text() + TABLE)
    return project


def test_a_run_measures_marks_its_best_and_continues(measured: Project) -> None:
    train.run(measured.load("max_steps=3", 'save_dtype="float32"'))
    first = measured.events("metrics")
    assert [(event["step"], event["weights"], event["set"]) for event in first] == [
        (2, "ema", "data"),
        (3, "ema", "data"),
    ]
    assert all(event[metric]["low"] <= event[metric]["high"] for event in first for metric in METRICS)
    best = min(first, key=lambda event: event["distance"]["value"])
    link = measured.run / "exports" / "best"
    assert link.resolve().name == f"step-{best['step']:08d}"
    # the same captions, seeds and weights as `sd3-light evaluate --against`
    options = AgainstOptions(count=8, steps=1, guidance=1.0)
    scores = against.run([link], measured.data_toml, measured.folder / "judge", options).scores[str(link)]
    assert np.isclose(scores.estimates["distance"].value, best["distance"]["value"], rtol=0.02)  # type: ignore[union-attr]

    # the log says that nothing will be better
    with (measured.run / "log.jsonl").open("a") as log:
        log.write(json.dumps({"event": "metrics", "time": 0, "step": 3, "distance": {"value": -1}}) + "\n")
    assert train.run(measured.load("max_steps=9", "metrics.stop_after=1"), resume=Resume()).step == 5
    assert [event["step"] for event in measured.events("metrics")[3:]] == [4]
    reason = "1 measurements without a better distance than -1 of step 3"
    assert measured.events("stop")[-1]["reason"] == reason
    assert sorted(path.name for path in link.parent.glob("step-*")) == ["step-00000002", "step-00000003"]


def test_a_vision_model_has_no_retrieval(measured: Project) -> None:
    write_vision(measured.folder / "vision")
    with pytest.raises(UserError, match="needs a model that reads text"):
        train.run(measured.load('metrics.features="vision"', 'metrics.best="retrieval"'))
