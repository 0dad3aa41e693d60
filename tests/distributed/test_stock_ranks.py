"""A stock family on two processes (gloo) trains like one, with every engine."""

import pytest

from tests.distributed.layouts import DDP, FSDP2, HAS_DEEPSPEED, ONE, ZERO1, ZERO2, Job, launch
from tests.families import make_pipeline
from tests.project import Project
from tests.stock_project import LORA, write_project

SHARDED = {"full": (DDP, FSDP2, *((ZERO1, ZERO2) if HAS_DEEPSPEED else ())), "lora": (DDP, FSDP2)}
KEYS = ("eval_every_n_steps=2", "max_steps=3", "checkpoint_every_n_steps=100")


@pytest.fixture(scope="module", params=[pytest.param("full", marks=pytest.mark.slow), "lora"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def project(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Project:
    folder = tmp_path_factory.mktemp(kind)
    make_pipeline("flux").save_pretrained(folder / "model")
    project = write_project(folder, folder / "model")
    if kind == "lora":
        project.train_toml.write_text(project.train_toml.read_text() + LORA.replace("dropout = 0.1", ""))
    for layouts in ((ONE,), SHARDED[kind]):
        launch([Job(str(project.train_toml), layout.name, layout, KEYS) for layout in layouts], folder)
    return project


def test_processes_train_like_one(project: Project, kind: str) -> None:
    alone = project.losses("one")
    assert list(alone) == [1, 2, 3]
    evaluated = [event["flow"] for event in project.events("eval", "one")]
    for layout in SHARDED[kind]:
        assert project.losses(layout.name) == pytest.approx(alone, rel=1e-4), layout
        losses = [event["flow"] for event in project.events("eval", layout.name)]
        assert losses == pytest.approx(evaluated, rel=1e-4), layout
