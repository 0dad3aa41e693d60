"""Several processes draw the prompts of one, get its rewards, and resume its runs."""

import pytest
import torch

from sd3_light.checkpoint.reading import open_checkpoint
from tests.distributed.layouts import DDP, FSDP2, HAS_DEEPSPEED, ONE, ZERO1, ZERO2, Runs, launch_runs, saved
from tests.project import Project
from tests.unit.train.test_train_preferences import start_from_weights
from tests.unit.train.test_train_rewards import PROMPTS, REWARD

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
STEPS, SAVED = 5, 2
KEYS = (f"max_steps={STEPS}", "checkpoint_every_n_steps=1", "reward.kl=0.1", "gradient_clipping=0.5")
ODD = ("reward.prompts_per_draw=3", "reward.images_per_prompt=3")
"""Nine images: two processes draw them in three batches of four, of which one has images of the first too."""
RUNS: Runs = {
    "one": (ONE, KEYS, None),
    "odd-one": (ONE, (*KEYS, *ODD), None),
    "ddp": (DDP, KEYS, None),
    "odd-ddp": (DDP, (*KEYS, *ODD), None),
    "fsdp2": (FSDP2, KEYS, None),
    "ddp-from-one": (DDP, KEYS, "one"),
}
if HAS_DEEPSPEED:
    RUNS = {**RUNS, "zero1": (ZERO1.accumulating(1), KEYS, None), "zero2-from-one": (ZERO2, KEYS, "one")}
"""Those that resume begin inside a window of three steps."""


@pytest.fixture(scope="module")
def trained(raw_project: Project, tmp_path_factory: pytest.TempPathFactory) -> Project:
    project = start_from_weights(raw_project, tmp_path_factory.mktemp("trained"))
    (project.folder / "prompts.txt").write_text("\n".join(PROMPTS), encoding="utf-8")
    scored = REWARD.replace('"python"', '"tests.distributed.scores:redness"').replace(
        "per_prompt = 3", "per_prompt = 8"
    )
    project.train_toml.write_text(project.train_toml.read_text() + scored)
    project.build_cache()
    launch_runs(project, RUNS, SAVED, tmp_path_factory.mktemp("jobs"))
    return project


@pytest.mark.parametrize("run", [name for name, (layout, *_) in RUNS.items() if layout is not ONE])
def test_every_layout_draws_and_trains_alike(trained: Project, run: str) -> None:
    one = "odd-one" if "odd" in run else "one"
    expected = {event["step"]: event for event in trained.events("step", one)}
    for event in trained.events("step", run):
        for name in ("loss", "reward", "kl", "grad_norm"):
            assert event[name] == pytest.approx(expected[event["step"]][name], rel=2e-3, abs=1e-6), name
    draws = {event["step"]: event for event in trained.events("reward", one)}
    assert list(draws) == [0, 3]
    for event in trained.events("reward", run):
        for name in ("reward", "reward_deviation", "diversity"):
            assert event[name] == pytest.approx(draws[event["step"]][name], rel=1e-3), name
    ours, theirs = (open_checkpoint(saved(trained, name, STEPS)) for name in (run, one))
    assert set(ours.shapes) == set(theirs.shapes), "a checkpoint belongs to the run, not to its layout"
    torch.testing.assert_close(
        ours.tensor("objective/latents"), theirs.tensor("objective/latents"), rtol=1e-3, atol=1e-3
    )
    torch.testing.assert_close(ours.tensor("objective/rewards"), theirs.tensor("objective/rewards"), rtol=0, atol=5e-3)
    assert theirs.tensor("objective/rewards").std() > 0.2
