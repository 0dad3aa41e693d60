"""A stock family on two processes (gloo) trains like one, with every engine."""

from pathlib import Path

import pytest

from tests.distributed.layouts import DDP, FSDP2, HAS_DEEPSPEED, ONE, ZERO1, ZERO2, Job, launch
from tests.families import make_pipeline
from tests.project import Project
from tests.stock_project import LORA, write_project

SHARDED = (DDP, FSDP2, *((ZERO1, ZERO2) if HAS_DEEPSPEED else ()))
KEYS = ("eval_every_n_steps=2", "max_steps=3", "checkpoint_every_n_steps=100")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    folder = tmp_path_factory.mktemp("stock")
    make_pipeline("flux").save_pretrained(folder / "model")
    project = write_project(folder, folder / "model")
    lora = folder / "lora.toml"
    lora.write_text(project.train_toml.read_text() + LORA.replace("dropout = 0.1", ""))
    tomls = {"full": project.train_toml, "lora": lora}
    for layouts in ((ONE,), SHARDED):
        kinds = {"full": layouts, "lora": layouts[:2]}
        jobs = [
            Job(str(tomls[kind]), f"{kind}-{layout.name}", layout, KEYS)
            for kind, some in kinds.items()
            for layout in some
        ]
        launch(jobs, folder)
    return project


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_processes_train_like_one(project: Project, kind: str) -> None:
    alone = project.losses(f"{kind}-one")
    assert list(alone) == [1, 2, 3]
    evaluated = [event["flow"] for event in project.events("eval", f"{kind}-one")]
    runs = [path.name for path in Path(project.folder).glob(f"{kind}-*") if path.name != f"{kind}-one"]
    assert len(runs) == (len(SHARDED) if kind == "full" else 2)
    for run in runs:
        assert project.losses(run) == pytest.approx(alone, rel=1e-4), run
        losses = [event["flow"] for event in project.events("eval", run)]
        assert losses == pytest.approx(evaluated, rel=1e-4), run
