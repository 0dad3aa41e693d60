"""Heads, a teacher, another network and drawn batches train alike in every layout, which resume each other's runs."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from sd3_light.checkpoint.reading import open_checkpoint
from sd3_light.checkpoint.store import checkpoint_name
from sd3_light.config.faults import UserError
from sd3_light.engines import Launch
from sd3_light.engines.deepspeed import make_engine
from tests.distributed.layouts import DDP, DS_ONE, FSDP2, HAS_DEEPSPEED, ONE, ZERO1, ZERO2, ZERO3, Job, Layout, launch
from tests.distributed.objective import HEAD, whole_objective
from tests.project import Project

pytestmark = pytest.mark.timeout(1800)
STEPS, SAVED = 4, 2
READS: dict[Layout, Layout | None] = {ONE: DDP, DDP: None, FSDP2: ONE}
"""The layouts, and whose checkpoint each resumes."""
if HAS_DEEPSPEED:
    READS = {ONE: ZERO3, DDP: None, FSDP2: ZERO2, ZERO1: DDP, ZERO2: None, ZERO3: FSDP2, DS_ONE: None}


def job(project: Project, layout: Layout, source: Layout | None = None) -> Job:
    name = layout.name if source is None else f"{layout.name}-from-{source.name}"
    checkpoint = None if source is None else str(saved(project, source.name, SAVED))
    return Job(str(project.train_toml), name, layout, ("gradient_clipping=0.5",), checkpoint, objective=True)


def saved(project: Project, run: str, step: int = STEPS) -> Path:
    return Path(project.folder / run / "checkpoints" / checkpoint_name(step))


@pytest.fixture(scope="module")
def trained(raw_project: Project, tmp_path_factory: pytest.TempPathFactory) -> Project:
    project = raw_project.copy(tmp_path_factory.mktemp("trained") / "project")
    project.build_cache()
    own = [job(project, layout) for layout in READS]
    resumed = [job(project, layout, source) for layout, source in READS.items() if source]
    for world, jobs in ((1, own), (2, own + resumed), (1, resumed)):
        launch([each for each in jobs if each.layout.world_size == world], tmp_path_factory.mktemp("jobs"))
    return project


@pytest.mark.parametrize("layout", READS, ids=lambda layout: layout.name)
def test_every_layout_trains_alike(trained: Project, layout: Layout) -> None:
    """From the start, and from another layout's checkpoint (the job checks that it loads bit for bit)."""
    expected = {event["step"]: event for event in trained.events("step", ONE.name)}
    source = READS[layout]
    runs = {layout.name: 0} if source is None else {layout.name: 0, f"{layout.name}-from-{source.name}": SAVED}
    for run, first in runs.items():
        steps = trained.events("step", run)
        assert [event["step"] for event in steps] == list(range(first + 1, STEPS + 1))
        for event in steps:
            other = expected[event["step"]]
            for key in ("loss", "flow", "alignment", "distance", "deceit", "grad_norm", "param_norm"):
                limit = 1e-5 * other["loss"]
                assert event[key] == pytest.approx(other[key], rel=1e-5, abs=limit), f"{run}: {key} at {event['step']}"
        ours, theirs = (open_checkpoint(saved(trained, name)) for name in (run, ONE.name))
        assert set(ours.shapes) == set(theirs.shapes), "a checkpoint belongs to the run, not to its layout"
        for name in (f"param/{HEAD}", "network/critic.weight", "network.exp_avg_sq/critic.bias"):
            torch.testing.assert_close(ours.tensor(name), theirs.tensor(name), rtol=1e-4, atol=1e-6)


def test_heads_are_checkpointed_but_not_averaged_or_exported(trained: Project) -> None:
    names = set(open_checkpoint(saved(trained, ONE.name)).shapes)
    assert {f"param/{HEAD}", f"exp_avg/{HEAD}", "network/critic.weight"} <= names
    assert f"ema/{HEAD}" not in names
    folder = trained.folder / FSDP2.name / "exports" / checkpoint_name(STEPS) / "transformer"
    (file,) = folder.glob("*.safetensors")
    with safe_open(file, "pt") as tensors:
        assert not [name for name in tensors.keys() if "heads" in name or "critic" in name]  # noqa: SIM118


@pytest.mark.skipif(not HAS_DEEPSPEED, reason="DeepSpeed is not installed")
@pytest.mark.parametrize(("stages", "zero", "layout"), [(2, 1, "pipeline stages do"), (1, 0, "ZeRO 0 does")])
def test_layouts_that_split_the_model_are_refused(trained: Project, stages: int, zero: int, layout: str) -> None:
    from types import SimpleNamespace

    size = SimpleNamespace(config=SimpleNamespace(num_attention_heads=2, attention_head_dim=4))
    module = SimpleNamespace(objective=whole_objective(size))
    train = trained.load(f"pipeline_stages={stages}", "zero_stage=1").train
    config = train.model_copy(update={"zero_stage": zero})
    with pytest.raises(
        UserError, match=rf"^the objective has heads, which {layout} not run; write pipeline_stages = 1"
    ):
        make_engine(module, config, replace(Launch(), world_size=2), torch.device("cpu"))  # type: ignore[arg-type]
