"""Distillation from a TOML: guidance and fewer calls, with every teacher, resuming, and what exports say."""

import json
from functools import partial
from pathlib import Path

import pytest

from sd3_light.check import verb as check
from sd3_light.checkpoint.store import checkpoint_name
from sd3_light.config import ConfigFaults
from sd3_light.config.faults import UserError
from sd3_light.core.registry import with_family_values
from sd3_light.cost.training_setup import TrainingSetup
from sd3_light.evaluate.verb import require_eval_sets
from sd3_light.model.base_values import unlearnt_steps, with_base_values
from tests.cases import combinations
from tests.project import Project
from tests.unit.train.test_train_preferences import assert_resumes, start_from_weights, the_fault

pytestmark = pytest.mark.usefixtures("unproven")

GUIDANCE = ("objective.distill.guidance=3.0", "model.uncond_text='empty'")
STEPS = (*GUIDANCE, "objective.distill.steps=2", "objective.distill.teacher_steps=4")
LORA = ("adapter.rank=2",)
EVAL = ("eval_every_n_steps=2", 'eval_datasets=["eval.toml"]')


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory, raw_project: Project) -> Project:
    project = start_from_weights(raw_project, tmp_path_factory.mktemp("distill"))
    project.build_cache(*EVAL)
    return project


@pytest.fixture
def project(tmp_path: Path, started: Project) -> Project:
    return started.copy(tmp_path / "project")


KINDS: dict[str, tuple[str, ...]] = {
    "guidance": (*GUIDANCE, "ema.enable=false"),
    "guidance, adapter": (*GUIDANCE, *LORA, "ema.enable=false"),
    "steps": STEPS,
    "steps, adapter, average": (*STEPS, *LORA, 'objective.distill.teacher="average"', "ema.enable=true"),
    "steps, folder": (*STEPS, 'objective.distill.teacher="./start"', 'cache_residence="host"'),
    "zeros without text": (*STEPS, "model.uncond_text='zero'", 'model.text_tokens="real"'),
}


@pytest.mark.parametrize("kind", combinations(KINDS, fast=[("guidance",), ("steps",)]))
def test_distillation_trains_and_resumes_exactly(project: Project, kind: str) -> None:
    keys = (*EVAL, *KINDS[kind])
    if "real" in KINDS[kind][-1]:
        project.build_cache(*keys)
    assert_resumes(project, *keys)
    steps = project.events("step")
    assert [event["step"] for event in steps] == [1, 2, 3, 4]
    assert all(event["distill"] > 0 for event in steps)
    assert "flow" not in steps[0]
    assert all(event["flow"] > 0 for event in project.events("eval"))


def test_the_export_of_few_steps_says_how_it_is_sampled(project: Project) -> None:
    project.train(*STEPS, "objective.distill.steps=4", 'output_dir="run"')
    export = project.run / "exports" / checkpoint_name(4)
    assert json.loads((export / "sd3_light.json").read_text())["sampling"] == {"steps": 4, "guidance": 1.0}
    assert json.loads((export / "scheduler" / "scheduler_config.json").read_text())["shift_terminal"] == 0.25
    card = (export / "README.md").read_text()
    assert "num_inference_steps=4, guidance_scale=1, generator=seed" in card
    assert "guidance_scale=4.0" not in card
    assert "| sampling | 4 steps, guidance 1 |" in card
    # a run that continues these weights draws its samples so, and passes it on
    loaded = with_family_values(project.load(f'model.init="{export}"'))
    assert (loaded.train.sampling.steps, loaded.train.sampling.guidance) == (4, 1.0)
    assert with_base_values(loaded.train.model).last_time == 0.25
    assert "made for 4 steps, which training towards images unlearns" in (unlearnt_steps(loaded.train) or "")
    assert unlearnt_steps(project.load(*STEPS, f'model.init="{export}"').train) is None
    undo = project.load(f'model.init="{export}"', 'model.training_adapter="undo.safetensors"')
    assert unlearnt_steps(undo.train) is None
    user = with_family_values(project.load(f'model.init="{export}"', "sampling.steps=7"))
    assert (user.train.sampling.steps, user.train.sampling.guidance) == (7, 1.0)
    one = with_family_values(project.load(*STEPS, "objective.distill.steps=1", f'model.init="{export}"'))
    assert one.train.model.last_time == 0.0, "one call goes from noise to image"


def test_check_counts_the_teacher_and_names_faults(project: Project) -> None:
    def setup(*keys: str) -> TrainingSetup:
        return check.run(project.load(*keys, "ema.enable=false")).setup

    plain, taught = setup(), setup(*STEPS)
    weights = 4 * sum(plain.cost.layer_parameters)
    assert taught.other_models == plain.other_models + weights, "a copy in float32"
    assert setup(*STEPS, *LORA).other_models == plain.other_models
    assert taught.batch == plain.batch
    flops = [check.run(project.load(*keys)).data.rows[0].step_flops.value for keys in ((), GUIDANCE, STEPS)]
    assert 1.6 < flops[1] / flops[0] < 1.8, "two passes of the teacher"
    assert 2.3 < flops[2] / flops[0] < 2.5, "four"

    fault = partial(the_fault, project.load)
    average = 'objective.distill.teacher="average"'
    assert "write ema.enable = true" in fault(*STEPS, average, "ema.enable=false")
    assert "objective.distill: pipeline stages run one pass" in fault(*STEPS, "pipeline_stages=2")
    assert "trains at its own times, without [objective.flow]" in fault(*STEPS, "objective.flow.weight=1.0")
    assert "most_guidance: is not above guidance" in fault(*STEPS, "objective.distill.most_guidance=2.0")
    assert "steps: the teacher takes fewer steps" in fault(*STEPS, "objective.distill.steps=8")
    assert "saves nothing without steps and guidance" in fault("objective.distill.guidance=1.0")
    with pytest.raises(UserError, match="distils a teacher, and its validation loss is the distance from it"):
        require_eval_sets(project.load(*GUIDANCE, *EVAL))
    with pytest.raises(ConfigFaults, match="takes no guidance as a number"):
        check.run(project.load(*GUIDANCE, "objective.distill.most_guidance=6.0"))
