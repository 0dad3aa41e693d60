"""Several processes train SD3 with reference images as one does: replicas, shards and pipeline stages."""

import pytest

from sd3_light.world.edits import AFTER, BEFORE, draw_edits, write_edits
from tests.distributed.layouts import DDP, FSDP2, HAS_DEEPSPEED, ONE, PIPE, ZERO2, Runs, launch_runs, same_steps
from tests.project import Project

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
STEPS, SAVED = 4, 2
KEYS = ("model.references=2", "model.reference_dropout_prob=0.3", "gradient_clipping=0.5", "ema.enable=true")
LAYOUTS = (DDP, FSDP2, *((ZERO2, PIPE) if HAS_DEEPSPEED else ()))
RUNS: Runs = {layout.name: (layout, KEYS, None) for layout in (ONE, *LAYOUTS)}
RUNS = {**RUNS, "ddp-resumed": (DDP, KEYS, "one")}
DATA = f"""
size_buckets = [[64, 64]]

[[directory]]
path = "pairs/{AFTER}"
references = ["pairs/{BEFORE}", "pairs/{AFTER}"]
"""


@pytest.fixture(scope="module")
def trained(raw_project: Project, tmp_path_factory: pytest.TempPathFactory) -> Project:
    project = raw_project.copy(tmp_path_factory.mktemp("trained") / "project")
    write_edits(project.folder / "pairs", draw_edits(16, 1, held_out=False), 64)
    project.data(DATA)
    project.build_cache(*KEYS)
    launch_runs(project, RUNS, SAVED, tmp_path_factory.mktemp("jobs"))
    return project


@pytest.mark.parametrize("run", [name for name in RUNS if name != "one"])
def test_every_layout_trains_with_references_alike(trained: Project, run: str) -> None:
    same_steps(trained, run, "one", SAVED if run.endswith("resumed") else 0, STEPS)
