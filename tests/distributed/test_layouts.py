"""Every layout of the torch and DeepSpeed engines trains alike and resumes the others' checkpoints.

Without DeepSpeed only the layouts of the torch engine are tested.
"""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

from sd3_light.checkpoint.reading import open_checkpoint
from sd3_light.checkpoint.store import checkpoint_name
from sd3_light.config import SIZES
from sd3_light.core.cost import Tokens
from sd3_light.cost.gpu_memory import checkpoint_copy_bytes, state_bytes
from sd3_light.cost.partition import stage_bounds
from sd3_light.cost.training_setup import TrainingSetup
from sd3_light.families.sd3.cost import SD3Cost
from sd3_light.families.sd3.random_weights import new_transformer
from sd3_light.train.verb import Resume
from tests.distributed.layouts import (
    DDP,
    DS_ONE,
    FSDP2,
    HAS_DEEPSPEED,
    LAYOUTS,
    ONE,
    PIPE,
    PIPE4,
    PIPES,
    ROOT,
    WITHOUT_DEEPSPEED,
    ZERO0,
    ZERO1,
    ZERO2,
    ZERO3,
    Job,
    Layout,
    launch,
)
from tests.project import Project

pytestmark = pytest.mark.timeout(1800)  # the first test runs all jobs
needs_deepspeed = pytest.mark.skipif(not HAS_DEEPSPEED, reason="DeepSpeed is not installed")
STEPS, SAVED = 4, 2
NO_EVALUATION = ("eval_datasets=[]", "eval_every_n_steps=9")
BIAS = "proj_out.bias"
# two small matrices, as CPUs without bfloat16 take seconds for a large one
MUON_FREEZES = ("pos_embed.*", "*.1.*", "*.0.norm*", "*.0.ff*", "*.0.attn.add*", "*.0.attn.to_[!qk]*")
MUON = ('optimizer.type="muon"', f"freeze={json.dumps(MUON_FREEZES)}", "max_steps=4", "checkpoint_every_n_steps=2")
NOT_COMPARED = {"proof.json", "config.toml"}  # they contain durations, the run's folder and layout


@pytest.fixture(scope="module")
def rich(tmp_path_factory: pytest.TempPathFactory, raw_project: Project) -> Project:
    """A cached project with real tokens in three buckets, masks for every other image, text reconstruction,
    pseudo-Huber, effective clipping, an average, an evaluation, and some frozen weights."""
    project = raw_project.copy(tmp_path_factory.mktemp("rich") / "project")
    (project.folder / "masks").mkdir()
    for number, path in enumerate(sorted(project.images.glob("*.png"))[::2]):
        with Image.open(path) as image:
            mask = Image.new("L", image.size, 0)
        mask.paste(255, (0, 0, 16 + 4 * (number % 8), mask.height))
        mask.save(project.folder / "masks" / path.name)
    project.data(project.data_toml.read_text() + 'mask_path = "masks"\n')
    project.hold_out(6)
    text = project.train_toml.read_text()
    for old, new in (
        ("max_steps = 4", f'max_steps = {STEPS}\nfreeze = ["pos_embed.*"]\neval_datasets = ["eval.toml"]'),
        ("checkpoint_every_n_steps = 2", f"checkpoint_every_n_steps = {SAVED}\neval_every_n_steps = {STEPS}"),
        ("seed = 3", "seed = 3\npseudo_huber_c = 0.1\ngradient_clipping = 0.1\neval_micro_batch_size_per_gpu = 4"),
        ("t5_max_length = 16", 't5_max_length = 16\ntext_tokens = "real"\ntext_recon_gamma = 0.25'),
        ('save_dtype = "float32"', 'save_dtype = "bfloat16"'),
    ):
        assert old in text
        text = text.replace(old, new)
    project.train_toml.write_text(text)
    project.build_cache()
    return project


def job(project: Project, layout: Layout, *keys: str, source: Layout | None = None, run: str = "") -> Job:
    """Return a run of a layout, from the start or from another layout's checkpoint."""
    name = run or (layout.name if source is None else f"{layout.name}-from-{source.name}")
    checkpoint = None if source is None else str(saved(project, source))
    return Job(str(project.train_toml), name, layout, keys, checkpoint)


def saved(project: Project, layout: Layout, step: int = SAVED, run: str = "") -> Path:
    return Path(project.folder / (run or layout.name) / "checkpoints" / checkpoint_name(step))


def export_again(project: Project, layout: Layout) -> Job:
    """Return a resume of the reference run in this layout, as if killed before its last export: only the export is
    left to do."""
    name = f"{layout.name}-export"
    shutil.copytree(project.folder / ONE.name, project.folder / name, ignore=shutil.ignore_patterns("exports"))
    checkpoint = str(saved(project, layout, STEPS, name))
    return Job(str(project.train_toml), name, layout, partition_keys(layout), checkpoint)


def partition_keys(layout: Layout, split: int | None = None) -> tuple[str, ...]:
    """Return keys for a partition that differs from the default: uniform, or split before a given layer."""
    if layout.stages == 1:
        return ()
    if split is None:
        return ('partition_method="uniform"',)
    return 'partition_method="manual"', f"partition_split=[{split}]"


def require_same_curve(
    project: Project, run: str, layout: Layout, reference: str = ONE.name, rel: float = 1e-5, evaluated: bool = True
) -> None:
    """Compare every loss, the gradient norm and the weight norm of every step of the run, and its evaluation."""
    starts = project.events("start", run) + project.events("resume", run)
    assert [event["engine"] for event in starts] == [layout.engine]
    assert starts[0]["world"] == layout.world_size
    expected = {event["step"]: event for event in project.events("step", reference)}
    steps = project.events("step", run)
    assert len(steps) >= STEPS - SAVED
    assert [event["step"] for event in steps] == list(range(starts[0]["step"] + 1, len(expected) + 1))
    for event in steps:
        other = expected[event["step"]]
        for key in {"loss", "flow", "text_recon", "grad_norm", "param_norm"} & set(other):
            # text reconstruction starts at zero: its tolerance is relative to the loss
            limit = rel * other["loss"] if key == "text_recon" else 0
            assert event[key] == pytest.approx(other[key], rel=rel, abs=limit), f"{run}: {key} at {event['step']}"
        assert event["band"] == pytest.approx(other["band"], rel=rel), run
    ours, theirs = project.events("eval", run), project.events("eval", reference)
    if not evaluated:
        assert ours == []
        return
    assert [event["weights"] for event in ours] == [event["weights"] for event in theirs] != []
    for event, other in zip(ours, theirs, strict=True):
        for key in ("flow", "flow@0.1", "flow@0.9"):
            assert event[key] == pytest.approx(other[key], rel=rel), f"{run}: {key}"


def content(folder: Path) -> dict[str, bytes]:
    files = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in files.items() if name not in NOT_COMPARED}


# --- each layout writes a checkpoint and reads another's -------------------------------------------

FAST = {DDP: 'activation_checkpointing="selective"', ZERO1: "compile=false"}
# one per code path of ours; the others are slow, below
READS = {DS_ONE: ONE, DDP: PIPE, FSDP2: ZERO3, ZERO1: DDP, PIPE: FSDP2, ZERO3: ZERO1}
POISONED: tuple[Layout, ...] = (PIPE, ZERO3)
EXPORTS: tuple[Layout, ...] = (FSDP2, PIPE, ZERO3)
RESUMED_BY_ONE: tuple[Layout, ...] = (PIPE,)
DRAWN: tuple[Layout, ...] = (DDP, FSDP2)
if not HAS_DEEPSPEED:
    READS, POISONED, EXPORTS, RESUMED_BY_ONE = {DDP: FSDP2, FSDP2: DDP}, (DDP, FSDP2), (DDP, FSDP2), (FSDP2,)


def poisoned(project: Project, layout: Layout) -> Job:
    """Return a short run whose second and third steps are skipped.

    With ZeRO, DeepSpeed itself skips steps with a non-finite gradient; it does not look at the loss.
    """
    keys = ("max_steps=4", *NO_EVALUATION, *partition_keys(layout, split=1))
    return replace(job(project, layout, *keys, run=f"{layout.name}-poisoned"), poisoned={2: "latents", 3: "loss"})


def write_active_blocks(folder: Path) -> None:
    """Write a denoiser whose modulations are random instead of zero, as after some training."""
    transformer = new_transformer(SIZES["tiny3"].transformer_config(), 0)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in transformer.named_parameters():
        if ".norm1" in name:
            torch.nn.init.normal_(parameter, std=0.4, generator=generator)
    transformer.save_pretrained(folder / "transformer")


def drawn(project: Project, layout: Layout) -> Job:
    """Return a short run with routed tokens, LayerSync and position crops; that of DDP uses the fast blocks.

    It starts from `write_active_blocks`: new blocks change nothing, so all of them would have the same tokens.
    """
    keys = ("max_steps=2", *NO_EVALUATION, f"fast={str(layout == DDP).lower()}")
    keys += ('model.size="tiny3"', 'model.init="active"', "model.routing.share=0.4", "model.layer_sync.weight=0.5")
    return job(project, layout, *keys, "model.position_crop_side=9", run=f"{layout.name}-drawn")


def fast(project: Project, layout: Layout) -> Job:
    return job(project, layout, "fast=true", FAST[layout], run=f"{layout.name}-fast")


@pytest.fixture(scope="module")
def trained(rich: Project, tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project trained in every layout from the start and from another's checkpoint; some layouts export too."""
    project = rich.copy(tmp_path_factory.mktemp("trained") / "project")
    write_active_blocks(project.folder / "active")
    for world in (1, 2):
        layouts = [layout for layout in (ONE, *READS) if layout.world_size == world]
        jobs = [job(project, layout) for layout in layouts]
        jobs += [job(project, layout, *NO_EVALUATION, source=READS[layout]) for layout in layouts if layout in READS]
        jobs += [export_again(project, layout) for layout in EXPORTS if layout.world_size == world]
        jobs += [drawn(project, layout) for layout in (ONE, *DRAWN) if layout.world_size == world]
        jobs += [poisoned(project, layout) for layout in (ONE, *POISONED) if layout.world_size == world]
        launch(jobs, tmp_path_factory.mktemp("jobs"))
    return project


@pytest.mark.parametrize("layout", READS, ids=lambda layout: layout.name)
def test_every_layout_trains_alike(trained: Project, layout: Layout) -> None:
    """From the start, and from another layout's checkpoint (the job checks that it loads bit for bit).

    Only the first evaluates, which takes longer than its steps.
    """
    require_same_curve(trained, layout.name, layout)
    require_same_curve(trained, f"{layout.name}-from-{READS[layout].name}", layout, evaluated=False)


@pytest.mark.slow  # test_sharded_muon.py compares the optimizer itself
def test_muon_trains_alike_with_sharded_weights(rich: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process and FSDP2, from the start and from each other's checkpoints."""
    monkeypatch.setattr("sd3_light.export.diffusers_folder.prove", lambda *_: {})
    project = rich.copy(tmp_path / "project")
    project.train(*job(project, ONE, *MUON).overrides)
    resumed = replace(job(project, FSDP2, *MUON, run="resumed"), checkpoint=str(saved(project, ONE, 2)))
    launch([job(project, FSDP2, *MUON), resumed], tmp_path)
    project.train(*job(project, ONE, *MUON, run="back").overrides, resume=Resume(saved(project, FSDP2, 2)))
    expected = project.events("step", ONE.name)
    for run, first in ((FSDP2.name, 0), ("resumed", 2), ("back", 2)):
        steps = project.events("step", run)
        assert len(steps) == 4 - first
        for event, other in zip(steps, expected[first:], strict=True):
            for key in ("loss", "grad_norm", "param_norm"):
                assert event[key] == pytest.approx(other[key], rel=1e-5), f"{run}: {key} at {event['step']}"
    kinds = {name.partition("/")[0] for name in open_checkpoint(saved(project, FSDP2, 2)).shapes}
    assert kinds == {"param", "ema", "momentum_buffer", "exp_avg", "exp_avg_sq", "step"}


@pytest.mark.parametrize("layout", DRAWN, ids=lambda layout: layout.name)
def test_routing_alignment_and_crops_train_alike(trained: Project, layout: Layout) -> None:
    """Which tokens are routed does not depend on the layout."""
    expected = trained.events("step", f"{ONE.name}-drawn")
    steps = trained.events("step", f"{layout.name}-drawn")
    assert len(steps) == len(expected) == 2
    assert trained.events("start", f"{layout.name}-drawn")[0]["engine"] == layout.engine
    assert all(event["layer_sync"] > 0.01 for event in expected)
    for event, other in zip(steps, expected, strict=True):
        for key in ("loss", "flow", "layer_sync", "grad_norm", "param_norm"):
            assert event[key] == pytest.approx(other[key], rel=1e-4 if layout == DDP else 1e-5), key


@pytest.mark.parametrize("layout", EXPORTS, ids=lambda layout: layout.name)
def test_every_layout_exports_the_same_bytes(trained: Project, layout: Layout) -> None:
    """As one process does."""
    expected = content(trained.folder / ONE.name / "exports" / checkpoint_name(STEPS))
    exported = content(trained.folder / f"{layout.name}-export" / "exports" / checkpoint_name(STEPS))
    assert "transformer/diffusion_pytorch_model.safetensors" in expected
    card = exported["README.md"].replace(f"name: {layout.name}-export".encode(), f"name: {ONE.name}".encode())
    exported["README.md"] = card  # the card contains the run's name
    assert set(exported) == set(expected), layout.name
    assert not [name for name in expected if exported[name] != expected[name]], layout.name


@pytest.mark.parametrize("layout", POISONED, ids=lambda layout: layout.name)
def test_a_non_finite_step_is_skipped(trained: Project, layout: Layout) -> None:
    """Weights, moments and Adam's step count are unchanged, so later steps equal those of one process."""
    run, reference = f"{layout.name}-poisoned", "one-poisoned"
    assert [event["step"] for event in trained.events("skip", run)] == [2, 3]
    steps, expected = trained.events("step", run), trained.events("step", reference)
    assert [event["skipped"] for event in steps] == [event["skipped"] for event in expected] == [0, 1, 2, 2]
    for number in (0, 3):
        for key in ("loss", "grad_norm", "param_norm"):
            assert steps[number][key] == pytest.approx(expected[number][key], rel=1e-5), f"{run}: {key}"
    counts = [open_checkpoint(saved(trained, layout, 4, run)).tensor(f"step/{BIAS}") for run in (run, reference)]
    assert [int(count) for count in counts] == [2, 2]


@pytest.mark.parametrize("source", RESUMED_BY_ONE, ids=lambda layout: layout.name)
def test_one_process_resumes_other_layouts(trained: Project, source: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sd3_light.export.diffusers_folder.prove", lambda *_: {})
    resumed = job(trained, ONE, source=source)
    trained.train(*resumed.overrides, resume=Resume(saved(trained, source)))
    require_same_curve(trained, resumed.run, ONE)


@pytest.mark.parametrize("layout", [ONE, *READS], ids=lambda layout: layout.name)
def test_memory_per_process_matches_the_formula(trained: Project, layout: Layout) -> None:
    """Compare the formula with the weights, moments and averages of each rank and with the size of its checkpoint."""
    setup = TrainingSetup(
        SD3Cost(SIZES["tiny2"]), Tokens(16, 16), 1, ema_tracks=1, world_size=layout.world_size, parallel=layout.parallel
    )
    setup = replace(setup, deepspeed=layout.deepspeed, zero=layout.zero, stages=layout.stages)
    for rank in range(layout.world_size):
        case = replace(setup, stage=rank // setup.replicas)
        measured = json.loads((trained.folder / layout.name / f"held-{rank}.json").read_text())
        # the formula includes frozen weights, 1% here; ZeRO pads its shards
        count = case.trained_parameters
        assert measured["weights"] == pytest.approx(4 * count / case.shards, rel=0.03)
        assert measured["averages"] == pytest.approx(4 * count / case.shards, rel=0.03)
        assert measured["moments"] == pytest.approx(8 * count / case.moment_shards, rel=0.03)
        extra = 4 * count * case.uses_ddp + (layout.zero == 3 and layout.deepspeed) * (200_000_000 + 2 * count)
        assert sum(measured.values()) == pytest.approx(state_bytes(case).value - extra, rel=0.03)
    written = [file.stat().st_size for file in saved(trained, layout).glob("rank-*.safetensors")]
    assert checkpoint_copy_bytes(setup).value == pytest.approx(max(written), rel=0.15)


@needs_deepspeed
@pytest.mark.parametrize(("run", "method", "split"), [("poisoned", "manual", (1,)), ("export", "uniform", ())])
def test_stages_are_partitioned_as_configured(trained: Project, run: str, method: str, split: tuple[int, ...]) -> None:
    weights = SIZES["tiny2"].layer_parameters()
    bounds = stage_bounds(weights, 2, method, split)
    for rank in range(2):
        measured = json.loads((trained.folder / f"{PIPE.name}-{run}" / f"held-{rank}.json").read_text())
        # part of the first layer is frozen
        assert measured["weights"] == pytest.approx(4 * sum(weights[bounds[rank] : bounds[rank + 1]]), rel=0.1)


def test_the_reference_run_uses_every_feature(trained: Project) -> None:
    """Clipping is active, text reconstruction contributes, and the average differs from the weights."""
    steps = trained.events("step", ONE.name)
    assert all(event["grad_norm"] > 0.1 for event in steps)
    assert steps[-1]["text_recon"] > 0
    raw, ema = (event["flow"] for event in trained.events("eval", ONE.name))
    assert raw != pytest.approx(ema, rel=1e-4)


# --- the full matrix (slow) ------------------------------------------------------------------------


@pytest.mark.slow
@needs_deepspeed
def test_other_layouts_draw_skip_and_use_fast_blocks_alike(trained: Project, tmp_path: Path) -> None:
    """The gradients of fast blocks reach the stock parameters, where DDP and ZeRO expect them."""
    jobs = [drawn(trained, ZERO1), drawn(trained, ZERO3), poisoned(trained, ZERO0), poisoned(trained, ZERO1)]
    launch([*jobs, *(fast(trained, layout) for layout in FAST)], tmp_path)
    for layout in (ZERO1, ZERO3):
        test_routing_alignment_and_crops_train_alike(trained, layout)
    for layout in (ZERO0, ZERO1):
        test_a_non_finite_step_is_skipped(trained, layout)
    for layout in FAST:
        require_same_curve(trained, f"{layout.name}-fast", layout, rel=1e-4)


@pytest.mark.slow
@needs_deepspeed
def test_middle_stages_train_alike(trained: Project, tmp_path: Path) -> None:
    """They read no micro-batches, in training or evaluation."""
    launch([job(trained, PIPE4), job(trained, PIPE4, source=ZERO3)], tmp_path)
    require_same_curve(trained, PIPE4.name, PIPE4)
    require_same_curve(trained, f"{PIPE4.name}-from-{ZERO3.name}", PIPE4)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_layout_resumes_from_every_other(rich: Project, tmp_path: Path) -> None:
    """Each layout runs once to write and once per checkpoint to read."""
    project = rich.copy(tmp_path / "matrix")
    for world in (1, 2, 4):
        launch([job(project, layout) for layout in LAYOUTS if layout.world_size == world], tmp_path, 1200)
    for world in (1, 2, 4):
        readers = [layout for layout in LAYOUTS if layout.world_size == world]
        launch([job(project, reader, source=writer) for reader in readers for writer in LAYOUTS], tmp_path, 2400)
    for world in (1, 2, 4):
        launch([export_again(project, layout) for layout in LAYOUTS if layout.world_size == world], tmp_path, 600)
    if HAS_DEEPSPEED:
        keys = ("fast=true", "activation_checkpointing=true")
        launch([job(project, ZERO2, *keys, run="zero2-fast")], tmp_path, 600)
        require_same_curve(project, "zero2-fast", ZERO2, rel=1e-4)
    for layout in LAYOUTS:
        test_memory_per_process_matches_the_formula(project, layout)
        test_every_layout_exports_the_same_bytes(project, layout)
        require_same_curve(project, layout.name, layout)
        for other in LAYOUTS:
            require_same_curve(project, f"{layout.name}-from-{other.name}", layout)


RECON, CLIP, AVERAGE = "model.text_recon_gamma=0", "gradient_clipping=0", "ema.enable=false"
FEATURES = {
    "none": (RECON, CLIP, AVERAGE),
    "recon": (CLIP, AVERAGE),
    "clipping": (RECON, AVERAGE),
    "average": (RECON, CLIP),
    "checkpointing": ("activation_checkpointing=true",),
}
"""Feature -> overrides that disable the others."""


@pytest.mark.slow
@needs_deepspeed
def test_torch_layouts_are_tested_without_deepspeed() -> None:
    """Runs this file as if DeepSpeed were not installed."""
    command = [sys.executable, "-m", "pytest", __file__, "-q", "-rA", "-m", "not slow", "-p", "no:cacheprovider"]
    environment = {**os.environ, WITHOUT_DEEPSPEED: "1"}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
    for name in ("test_every_layout_trains_alike", "test_every_layout_exports_the_same_bytes"):
        assert {f"{name}[ddp]", f"{name}[fsdp2]"} <= {line.rpartition("::")[2] for line in done.stdout.splitlines()}
    assert "zero" not in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(3600)
@needs_deepspeed
@pytest.mark.parametrize("masks", [True, False])
def test_each_feature_in_each_layout(rich: Project, tmp_path: Path, masks: bool) -> None:
    """Stages 1 and 2, data parallel 1 and 2, accumulation 1 and 4, each feature alone, with and without masks, real
    tokens and pseudo-Huber."""
    project = rich.copy(tmp_path / "features")
    if not masks:
        project.data(project.data_toml.read_text().replace('mask_path = "masks"\n', ""))
        text = project.train_toml.read_text().replace('text_tokens = "real"\n', "")
        project.train_toml.write_text(text.replace("pseudo_huber_c = 0.1\n", ""))
        project.build_cache()
    layouts = [layout.accumulating(micro) for layout in (DS_ONE, ZERO1, PIPE, PIPES, PIPE4) for micro in (1, 4)]
    for world in (1, 2, 4):
        jobs = [job(project, ONE, *keys, run=f"one-{name}") for name, keys in FEATURES.items() if world == 1]
        jobs += [
            job(project, layout, *keys, run=f"{layout.name}{layout.accumulation}-{name}")
            for layout in layouts
            if layout.world_size == world
            for name, keys in FEATURES.items()
        ]
        launch(jobs, tmp_path, 2400)
    for layout in layouts:
        for name in FEATURES:
            require_same_curve(project, f"{layout.name}{layout.accumulation}-{name}", layout, f"one-{name}")
