"""When a run draws samples, and where its exports show them."""

from io import BytesIO
from pathlib import Path

import pytest
from PIL import Image

from sd3_light.export.card_facts import newest_samples
from sd3_light.train import verb as train
from tests.project import Project

pytestmark = pytest.mark.usefixtures("unproven")

KEYS = ('sampling.prompts=["a star"]', "sampling.every_n_steps=2", "sampling.steps=1", "max_steps=3")


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
