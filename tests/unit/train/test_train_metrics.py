"""[metrics] and [sampling] in a run: what is measured, drawn and logged, and how it continues after a stop."""

import json
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sd3_light.config.faults import UserError
from sd3_light.evaluate import against
from sd3_light.evaluate.against import AgainstOptions
from sd3_light.evaluate.distances import METRICS
from sd3_light.export.card_facts import newest_samples
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
KEYS = ('sampling.prompts=["a star"]', "sampling.every_n_steps=2", "sampling.steps=1", "max_steps=3")


@pytest.fixture
def measured(project: Project) -> Project:
    write_clip(project.folder / "judge")
    project.train_toml.write_text(project.train_toml.read_text() + TABLE)
    return project


def test_a_run_measures_marks_its_best_and_continues(measured: Project) -> None:
    train.run(measured.load("max_steps=3", 'save_dtype="float32"'))
    first = measured.events("metrics")
    assert [event["step"] for event in first] == [2, 3]
    assert {(event["weights"], event["set"]) for event in first} == {("ema", "data")}
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


def drawn_at(project: Project, *keys: str) -> list[int]:
    project.build_cache(*KEYS, *keys)
    train.run(project.load(*KEYS, *keys))
    return [event["step"] for event in project.events("sample")]


def test_samples_are_drawn_before_the_first_and_after_the_last_step(project: Project) -> None:
    assert drawn_at(project, "sampling.before_first_step=true") == [0, 2, 3]
    names = sorted(path.name for path in (project.run / "samples").iterdir())
    assert names == [f"step-0000000{step}.png" for step in (0, 2, 3)]
    export = project.run / "exports" / "step-00000003"
    assert "## Samples\n\n![Images with their prompts](samples.jpg)" in (export / "README.md").read_text()
    with Image.open(export / "samples.jpg") as shown, Image.open(project.run / "samples" / names[-1]) as grid:
        assert (shown.format, shown.size) == ("JPEG", grid.size)


def test_samples_are_drawn_at_chosen_steps(project: Project) -> None:
    keys = ("sampling.at_steps=[1, 9]", "sampling.after_last_step=false")
    assert drawn_at(project, *keys) == [1, 2]


def test_a_card_shows_the_newest_samples_as_a_small_image(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "samples").mkdir()
    for step, side in ((2, 40), (4, 4000), (6, 60)):
        Image.new("RGB", (side, side // 2)).save(tmp_path / "samples" / f"step-{step:08d}.png")
    assert newest_samples(tmp_path, 1) == {}
    assert Image.open(BytesIO(newest_samples(tmp_path, 3)["samples.jpg"])).size == (40, 20)
    assert Image.open(BytesIO(newest_samples(tmp_path, 5)["samples.jpg"])).size == (2048, 1024)
    (tmp_path / "samples" / "step-00000002.png").write_bytes(b"not a PNG")
    assert newest_samples(tmp_path, 2) == {}
    assert "the card has no samples: " in capsys.readouterr().err
