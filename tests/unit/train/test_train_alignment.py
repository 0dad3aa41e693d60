"""[objective.alignment] in whole runs: cached features of a teacher, and the run's average."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from sd3_light.check.disk import disk_faults
from sd3_light.check.estimate import estimate_run
from sd3_light.checkpoint.reading import open_checkpoint
from sd3_light.checkpoint.store import checkpoint_name
from sd3_light.config import load_config
from sd3_light.config.faults import UserError
from sd3_light.core.cost import Layout
from sd3_light.core.registry import starting_weights
from sd3_light.train import verb as train
from tests.judge_folders import write_vision
from tests.project import Project
from tests.unit.train.test_train_preferences import assert_resumes

HEAD = "heads.alignment.weight"
FLOW = "objective.flow={}"


@pytest.fixture(scope="module")
def cached(raw_project: Project, tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project with a teacher whose features are in the cache."""
    project = raw_project.copy(tmp_path_factory.mktemp("aligned") / "project")
    write_vision(project.folder / "teacher")
    text = project.train_toml.read_text(encoding="utf-8")
    text = text.replace("[model]\n", '[model]\nteacher_path = "teacher"\n')
    project.train_toml.write_text(text, encoding="utf-8")
    project.build_cache()
    return project


@pytest.fixture
def aligned(cached: Project, tmp_path: Path) -> Project:
    return cached.copy(tmp_path / "project")


def terms(project: Project, run: str = "run") -> dict[int, float]:
    return {event["step"]: event["alignment"] for event in project.events("step", run)}


@pytest.mark.parametrize("projector", ["conv", "mlp"])
def test_a_block_is_aligned_with_cached_features_until_a_share_of_the_run(aligned: Project, projector: str) -> None:
    table = f'objective.alignment={{until=0.5, projector="{projector}"}}'
    aligned.train(FLOW, table)
    aligned.train(FLOW, table, 'output_dir="resident"', 'cache_residence="host"')
    assert terms(aligned, "resident") == terms(aligned)
    logged = terms(aligned)
    assert all(0.5 < logged[step] < 1.5 for step in (1, 2))
    assert logged[3] == logged[4] == 0
    flow = {event["step"]: event["flow"] for event in aligned.events("step")}
    for step, loss in aligned.losses().items():
        assert loss == pytest.approx(flow[step] + 0.5 * logged[step], rel=1e-6)


def test_the_projector_learns_and_is_checkpointed_but_not_averaged_or_exported(aligned: Project) -> None:
    """Tokens that skip the block are left out."""
    routing = "model.routing={share=0.5, first_block=2, last_block=3}"
    keys = ("objective.alignment={block=2}", "model.num_layers=4", "save_every_n_steps=4")
    aligned.train(FLOW, *keys, routing)
    assert all(0.5 < value < 1.5 for value in terms(aligned).values())
    first, last = (open_checkpoint(aligned.run / "checkpoints" / checkpoint_name(step)) for step in (2, 4))
    assert not torch.equal(first.tensor(f"param/{HEAD}"), last.tensor(f"param/{HEAD}"))
    assert f"ema/{HEAD}" not in last.shapes
    (file,) = (aligned.run / "exports" / checkpoint_name(4) / "transformer").glob("*.safetensors")
    with safe_open(file, "pt") as tensors:
        assert not [name for name in tensors.keys() if "heads" in name]  # noqa: SIM118


@pytest.mark.parametrize("table", ["{until=0.75}", '{teacher="average", until=0.75}'])
def test_a_run_resumes_with_the_same_bits(aligned: Project, table: str) -> None:
    term = (FLOW, f"objective.alignment={table}", "model.num_layers=4")
    assert_resumes(aligned, *term)
    assert terms(aligned, "again") == {step: terms(aligned)[step] for step in (3, 4)}
    assert terms(aligned)[3] > 0 == terms(aligned)[4]


def test_a_cache_without_features_is_named(aligned: Project) -> None:
    text = aligned.train_toml.read_text(encoding="utf-8").replace('teacher_path = "teacher"\n', "")
    aligned.train_toml.write_text(text, encoding="utf-8")
    shutil.rmtree(aligned.cache)
    aligned.build_cache()
    overrides = [FLOW, "objective.alignment={}", 'model.teacher_path="teacher"']
    with pytest.raises(UserError, match="teacher"):
        train.run(load_config(aligned.train_toml, overrides))


def test_check_counts_column_projector_and_the_pass_of_the_average(aligned: Project) -> None:
    loaded = aligned.load(FLOW, "objective.alignment={}", "model.num_layers=4")
    start = starting_weights(loaded.train.model)
    whole = estimate_run(loaded, start, Layout(1, False))
    plain = estimate_run(aligned.load("model.num_layers=4"), start, Layout(1, False))
    text = aligned.train_toml.read_text(encoding="utf-8")
    aligned.train_toml.write_text(text.replace('teacher_path = "teacher"\n', ""), encoding="utf-8")
    without = estimate_run(aligned.load("model.num_layers=4"), start, Layout(1, False))
    aligned.train_toml.write_text(text, encoding="utf-8")
    tokens = sum(row.samples * row.bucket.area // 256 for row in whole.data.rows)
    assert plain.data.cache.value == whole.data.cache.value
    assert whole.data.cache.value - without.data.cache.value == 16 * tokens
    width = whole.setup.cost.width
    assert whole.setup.other_models - plain.setup.other_models == 16 * 9 * width * 256
    pairs = zip(whole.data.rows, plain.data.rows, strict=True)
    more = [row.step_flops.value - other.step_flops.value for row, other in pairs]
    expected = [6 * 9 * width * 256 * row.tokens.image * row.global_batch for row in whole.data.rows]
    assert more == expected
    average = aligned.load(FLOW, 'objective.alignment={teacher="average"}', "model.num_layers=4")
    taught = estimate_run(average, start, Layout(1, False))
    assert taught.run_flops.value > 1.25 * plain.run_flops.value
    (aligned.folder / "teacher" / "preprocessor_config.json").unlink()
    (fault,) = disk_faults(aligned.load())
    assert fault.key == "model.teacher_path"
    assert "preprocessor_config.json" in fault.problem
