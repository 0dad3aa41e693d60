"""Several processes train SD3 with reference images as one does: replicas, shards and pipeline stages."""

from pathlib import Path

import pytest
import torch

from sd3_light.checkpoint.reading import open_checkpoint
from sd3_light.checkpoint.store import checkpoint_name
from sd3_light.world.edits import AFTER, BEFORE, draw_edits, write_edits
from tests.distributed.layouts import DDP, FSDP2, HAS_DEEPSPEED, ONE, PIPE, ZERO2, Job, Layout, launch
from tests.project import Project

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
STEPS, SAVED = 4, 2
LAYOUTS = (DDP, FSDP2, *((ZERO2, PIPE) if HAS_DEEPSPEED else ()))
KEYS = ("model.references=2", "model.reference_dropout_prob=0.3", "gradient_clipping=0.5", "ema.enable=true")
DATA = f"""
size_buckets = [[64, 64]]

[[directory]]
path = "pairs/{AFTER}"
references = ["pairs/{BEFORE}", "pairs/{AFTER}"]
"""


def job(project: Project, layout: Layout, name: str, checkpoint: Path | None = None) -> Job:
    return Job(str(project.train_toml), name, layout, KEYS, None if checkpoint is None else str(checkpoint))


@pytest.fixture(scope="module")
def trained(raw_project: Project, tmp_path_factory: pytest.TempPathFactory) -> Project:
    project = raw_project.copy(tmp_path_factory.mktemp("trained") / "project")
    write_edits(project.folder / "pairs", draw_edits(16, 1, held_out=False), 64)
    project.data(DATA)
    project.build_cache(*KEYS)
    launch([job(project, ONE, "one")], tmp_path_factory.mktemp("one"))
    resumed = job(project, DDP, "ddp-resumed", saved(project, "one", SAVED))
    launch([*(job(project, layout, layout.name) for layout in LAYOUTS), resumed], tmp_path_factory.mktemp("two"))
    return project


def saved(project: Project, run: str, step: int) -> Path:
    return Path(project.folder / run / "checkpoints" / checkpoint_name(step))


@pytest.mark.parametrize("run", [*(layout.name for layout in LAYOUTS), "ddp-resumed"])
def test_every_layout_trains_with_references_alike(trained: Project, run: str) -> None:
    expected = {event["step"]: event for event in trained.events("step", "one")}
    steps = trained.events("step", run)
    first = SAVED if run.endswith("resumed") else 0
    assert [event["step"] for event in steps] == list(range(first + 1, STEPS + 1))
    for event in steps:
        for name in ("loss", "grad_norm", "param_norm"):
            assert event[name] == pytest.approx(expected[event["step"]][name], rel=1e-4), (name, event["step"])
    ours, theirs = (open_checkpoint(saved(trained, name, STEPS)) for name in (run, "one"))
    assert set(ours.shapes) == set(theirs.shapes)
    for name in list(theirs.shapes)[:20]:
        torch.testing.assert_close(ours.tensor(name), theirs.tensor(name), rtol=1e-3, atol=1e-4)
