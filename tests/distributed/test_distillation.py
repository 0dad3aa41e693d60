"""Several processes distil as one does, and train with a training adapter: guidance, steps, steps of the average."""

import pytest

from sd3_light.config import SIZES
from tests.distributed.layouts import DDP, FSDP2, HAS_DEEPSPEED, ONE, ZERO2, Runs, launch_runs, same_steps
from tests.project import Project
from tests.unit.train.test_train_preferences import start_from_weights
from tests.unit.train.test_training_adapter import write_adapter

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
STEPS, SAVED = 4, 2
WIDTH = SIZES["tiny2"].width
SHARED = ("objective.distill.guidance=3.0", "model.uncond_text='empty'", "gradient_clipping=0.5", "ema.enable=true")
FEWER = ("objective.distill.steps=2", "objective.distill.teacher_steps=4")
KINDS = {
    "guidance": SHARED,
    "steps": (*SHARED, *FEWER),
    "average": (*SHARED, *FEWER, 'objective.distill.teacher="average"', "ema.decay=0.5"),
    "undone": ('model.training_adapter="undo.safetensors"', "gradient_clipping=0.5"),
}
LAYOUTS = (DDP, FSDP2, *((ZERO2,) if HAS_DEEPSPEED else ()))
RUNS: Runs = {
    f"{kind}-{layout.name}": (layout, KINDS[kind], None)
    for kind in KINDS
    for layout in (ONE, *LAYOUTS)
    if layout in (ONE, DDP) or kind in ("average", "undone")
}
RUNS = {**RUNS, "average-ddp-resumed": (DDP, KINDS["average"], "average-one")}


@pytest.fixture(scope="module")
def trained(raw_project: Project, tmp_path_factory: pytest.TempPathFactory) -> Project:
    project = start_from_weights(raw_project, tmp_path_factory.mktemp("trained"))
    write_adapter(project.folder, WIDTH)
    project.build_cache()
    launch_runs(project, RUNS, SAVED, tmp_path_factory.mktemp("jobs"))
    return project


@pytest.mark.parametrize("run", [name for name, (layout, *_) in RUNS.items() if layout is not ONE])
def test_every_layout_distils_alike(trained: Project, run: str) -> None:
    first = SAVED if run.endswith("resumed") else 0
    same_steps(trained, run, f"{run.partition('-')[0]}-one", first, STEPS)


def test_another_teacher_is_another_loss(trained: Project) -> None:
    """So that equal losses say something: the average teaches differently from the start."""
    losses = [[event["distill"] for event in trained.events("step", f"{kind}-one")] for kind in ("steps", "average")]
    assert losses[0][0] == pytest.approx(losses[1][0], rel=1e-4), "at first both are the start"
    assert losses[0][3] != pytest.approx(losses[1][3], rel=1e-3)
