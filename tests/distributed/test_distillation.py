"""Several processes distil as one does, and train with a training adapter: guidance, steps, steps of the average."""

from pathlib import Path

import pytest

from sd3_light.config import SIZES
from tests.distributed.layouts import DDP, FSDP2, HAS_DEEPSPEED, ONE, ZERO2, Job, Layout, launch, same_steps, saved
from tests.project import Project
from tests.unit.train.test_train_preferences import write_start
from tests.unit.train.test_training_adapter import write_adapter

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
STEPS, SAVED = 4, 2
WIDTH = SIZES["tiny2"].width
SHARED = ("objective.distill.guidance=3.0", "model.uncond_text='empty'", "gradient_clipping=0.5", "ema.enable=true")
KINDS = {
    "guidance": SHARED,
    "steps": (*SHARED, "objective.distill.steps=2", "objective.distill.teacher_steps=4"),
    "average": (
        *SHARED,
        "objective.distill.steps=2",
        "objective.distill.teacher_steps=4",
        'objective.distill.teacher="average"',
        "ema.decay=0.5",
    ),
    "undone": ('model.training_adapter="undo.safetensors"', "gradient_clipping=0.5"),
}
LAYOUTS = (DDP, FSDP2, *((ZERO2,) if HAS_DEEPSPEED else ()))
RUNS = [(kind, layout) for kind in KINDS for layout in LAYOUTS if layout is DDP or kind in ("average", "undone")]


def job(project: Project, kind: str, layout: Layout, checkpoint: Path | None = None) -> Job:
    source = None if checkpoint is None else str(checkpoint)
    name = f"{kind}-{layout.name}" if checkpoint is None else f"{kind}-{layout.name}-resumed"
    return Job(str(project.train_toml), name, layout, KINDS[kind], source)


@pytest.fixture(scope="module")
def trained(raw_project: Project, tmp_path_factory: pytest.TempPathFactory) -> Project:
    project = raw_project.copy(tmp_path_factory.mktemp("trained") / "project")
    project.train_toml.write_text(project.train_toml.read_text().replace('init = "random"', 'init = "start"'))
    write_start(project)
    write_adapter(project.folder, WIDTH)
    project.build_cache()
    launch([job(project, kind, ONE) for kind in KINDS], tmp_path_factory.mktemp("one"))
    resumed = [job(project, "average", DDP, saved(project, "average-one", SAVED))]
    launch([*(job(project, *each) for each in RUNS), *resumed], tmp_path_factory.mktemp("two"))
    return project


@pytest.mark.parametrize("run", [*(f"{kind}-{layout.name}" for kind, layout in RUNS), "average-ddp-resumed"])
def test_every_layout_distils_alike(trained: Project, run: str) -> None:
    first = SAVED if run.endswith("resumed") else 0
    same_steps(trained, run, f"{run.partition('-')[0]}-one", first, STEPS)


def test_another_teacher_is_another_loss(trained: Project) -> None:
    """So that equal losses say something: the average teaches differently from the start."""
    losses = [[event["distill"] for event in trained.events("step", f"{kind}-one")] for kind in ("steps", "average")]
    assert losses[0][0] == pytest.approx(losses[1][0], rel=1e-4), "at first both are the start"
    assert losses[0][3] != pytest.approx(losses[1][3], rel=1e-3)
