"""Training towards a score: what is drawn and when, every kind of weights, and resuming inside and between draws."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sd3_light.check import verb as check
from sd3_light.checkpoint.store import checkpoint_name
from sd3_light.config import ConfigFaults
from sd3_light.config.faults import UserError
from sd3_light.evaluate.rewards import Images, open_reward, reward, scores, world_reward
from sd3_light.report.run_page import write_run_page
from sd3_light.train import verb as train
from sd3_light.train.verb import Resume
from sd3_light.world import render_scene
from sd3_light.world.captions import parse_caption
from tests import checkpoints
from tests.judge_folders import write_clip, write_vision
from tests.project import Project
from tests.unit.train.test_train_preferences import start_from_weights

pytestmark = pytest.mark.usefixtures("unproven")

PROMPTS = (
    "a large red circle on a white background",
    "a small blue star on a grey background",
    "two green squares on a black background",
)
REWARD = """
[reward]
score = "python"
prompts = "prompts.txt"
prompts_per_draw = 2
images_per_prompt = 3
every_n_steps = 3
steps = 2
"""
KEYS = ('output_dir="run"', "max_steps=5", "checkpoint_every_n_steps=1", "micro_batch_size_per_gpu=2")


def redness(images: Images, prompts: Sequence[str]) -> Any:
    return images[..., 0].mean((1, 2)) - images[..., 2].mean((1, 2))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, raw_project: Project) -> Project:
    """A project whose cache has the prompts of [reward], and a denoiser without zero weights."""
    project = start_from_weights(raw_project, tmp_path_factory.mktemp("rewards"))
    (project.folder / "prompts.txt").write_text("\n".join(PROMPTS) + "\n\n", encoding="utf-8")
    project.train_toml.write_text(project.train_toml.read_text() + REWARD)
    project.build_cache()
    return project


@pytest.fixture
def project(tmp_path: Path, built: Project) -> Project:
    return built.copy(tmp_path / "project")


def run(project: Project, *keys: str, score: Any = redness, resume: Resume | None = None, name: str = "run") -> Path:
    train.run(project.load(*KEYS, *keys, f'output_dir="{name}"'), resume=resume, reward=score)
    return project.folder / name / "checkpoints"


def tensors(folder: Path, step: int) -> dict[str, torch.Tensor]:
    return checkpoints.tensors(folder / checkpoint_name(step))


KINDS: dict[str, tuple[str, ...]] = {
    "all weights": ("reward.kl=0.5",),
    "adapter": ("adapter.rank=2",),
    "adapter, start": ("adapter.rank=2", 'reward.teacher="start"', "ema.enable=false"),
    "accumulated": ("gradient_accumulation_steps=2", "micro_batch_size_per_gpu=1"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_equals_the_whole(project: Project, kind: str) -> None:
    """From inside the first window of three steps (after 2), and from its end (after 3)."""
    keys = KINDS[kind]
    whole = run(project, *keys)
    expected = tensors(whole, 5)
    assert {"objective/latents", "objective/rewards", "objective/draw"} <= expected.keys()
    assert [event["step"] for event in project.events("reward")] == [0, 3]
    for first in (2, 3):
        again = run(project, *keys, resume=Resume(whole / checkpoint_name(first)), name=f"from-{first}")
        assert checkpoints.same(tensors(again, 5), expected), first
        assert [event["step"] for event in project.events("reward", f"from-{first}")] == [3]
    steps = project.events("step")
    assert [("kl" in event) for event in steps] == [kind == "all weights"] * 5
    assert all(event["reward"] > 0 for event in steps)
    distances = [event.get("distance") for event in project.events("reward")]
    if kind == "accumulated":
        assert distances == [None, None], "the start is not kept"
    else:
        assert distances[0] == pytest.approx(0, abs=1e-9)
        assert distances[1] > 1e-9
        write_run_page(project.run, project.folder / "report.html")
        page = (project.folder / "report.html").read_text(encoding="utf-8")
        for title in ("Score of drawn images", "Diversity", "Distance from the start", "Drawing"):
            assert f"<h3>{title}</h3>" in page
        assert page.index('id="rewards"') < page.index('id="validation"')


def test_prompts_that_change_inside_a_window_are_refused(project: Project) -> None:
    """Images of the checkpoint are of other prompts than those whose texts it would train on."""
    whole = run(project)
    file = project.folder / "prompts.txt"
    file.write_text("\n".join(PROMPTS[::-1]) + "\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"lacks the prompts of the checkpoint's images; .* multiple of 3 steps"):
        run(project, resume=Resume(whole / checkpoint_name(2)), name="inside")
    run(project, resume=Resume(whole / checkpoint_name(3)), name="between")
    assert [event["step"] for event in project.events("reward", "between")] == [3]


def test_prompts_and_seeds_are_functions_of_the_step(project: Project) -> None:
    """Other weights and another length change no prompt, and every prompt comes before one recurs."""
    seen: dict[str, list[list[str]]] = {"a": [], "b": []}

    def noting(name: str) -> Callable[[Images, Sequence[str]], Any]:
        def score(images: Images, prompts: Sequence[str]) -> Any:
            assert images.dtype == np.uint8
            assert images.shape[1:] == (64, 64, 3)
            seen[name].append(list(prompts))
            return np.arange(len(images)) / 7

        return score

    run(project, "max_steps=7", score=noting("a"), name="a")
    run(project, "max_steps=4", "optimizer.lr=1e-2", score=noting("b"), name="b")
    draws = [[text for batch in seen["a"][first : first + 3] for text in batch] for first in (0, 3, 6)]
    assert seen["b"] == seen["a"][:6]
    assert all([draw.count(text) for text in dict.fromkeys(draw)] == [3, 3] for draw in draws)
    assert {text for draw in draws for text in draw} == set(PROMPTS)
    firsts = [text for draw in draws for text in dict.fromkeys(draw)]
    assert sorted(firsts[:3]) == sorted(firsts[3:]) == sorted(PROMPTS)
    events = project.events("reward", "a")
    assert len({event["diversity"] for event in events}) == 3
    assert all(event["diversity"] > 0.5 for event in events), "seeds differ"
    assert "draw_share" not in events[0]
    assert 0 < events[1]["draw_share"] < 1


@reward
def brightness(images: Images, prompts: Sequence[str]) -> Any:
    return images.mean((1, 2, 3))


def test_an_installed_function_must_be_marked(project: Project) -> None:
    cpu = torch.device("cpu")
    assert open_reward(f"{__name__}:brightness", cpu) is brightness
    for name, problem in {
        f"{__name__}:redness": r"is not marked as a reward; write @sd3_light\.tasks\.reward above it",
        "shutil:rmtree": "is not marked as a reward",
        "shutil:os": r"shutil\.py defines no function os; correct the name",
        f"{__name__}:nothing": "defines no function nothing; correct the name",
        "__main__:main": "correct the name",
        "sys:exit": "install the package, or correct the name",
        "no_such_package.part:score": "install the package, or correct the name",
        "python": "a function that a script passes to",
    }.items():
        with pytest.raises(UserError, match=problem):
            open_reward(name, cpu)


def test_a_module_without_the_mark_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing a module runs it, so a config could run any program that is installed."""
    package = tmp_path / "some_package"
    package.mkdir()
    trap = f"from pathlib import Path\nPath({str(tmp_path / 'ran')!r}).touch()\n"
    (package / "__init__.py").write_text(trap)
    (package / "__main__.py").write_text(f"{trap}def score(images, prompts): ...\n")
    (package / "good.py").write_text("from sd3_light import tasks\n@tasks.reward\ndef score(images, prompts): ...\n")
    (package / "broken.py").write_text("def")
    monkeypatch.syspath_prepend(tmp_path)
    problems = {"some_package.__main__:score": "is not marked", "some_package.broken:score": "cannot be read"}
    for name, problem in {**problems, "some_package:score": "defines no function score"}.items():
        with pytest.raises(UserError, match=problem):
            open_reward(name, torch.device("cpu"))
    assert not (tmp_path / "ran").exists()
    assert callable(open_reward("some_package.good:score", torch.device("cpu")))
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("score", "problem"),
    [
        (lambda images, prompts: [float("nan")] * len(images), "is not finite for the prompt '"),
        (lambda images, prompts: 1.0, r"returned \[\] for 2 images; return one number for each"),
        (lambda images, prompts: {}["x"], "the reward .* raised KeyError"),
    ],
)
def test_a_bad_reward_is_named(project: Project, score: Any, problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        run(project, score=score)


def test_the_judge_of_the_world_scores_its_own_images(tmp_path: Path) -> None:
    images = [np.asarray(render_scene(parse_caption(text), 64, 64, np.random.default_rng(3))) for text in PROMPTS]
    assert world_reward(np.stack(images), PROMPTS) == [1.0, 1.0, 1.0]
    others = world_reward(np.stack(images), [*PROMPTS[1:], PROMPTS[0]])
    assert max(others) <= 0.5
    score = open_reward(write_clip(tmp_path / "clip"), torch.device("cpu"))
    images = np.random.default_rng(0).integers(0, 256, (3, 32, 32, 3), dtype=np.uint8)
    values = scores(score, images, ["a red circle", "a blue star", "a red circle"])
    assert values.shape == (3,)
    assert all(-1 <= value <= 1 for value in values)
    with pytest.raises(UserError, match="has no text encoder; give a CLIP folder"):
        open_reward(write_vision(tmp_path / "vision"), torch.device("cpu"))


def faults_of(load: Callable[..., object], *arguments: Any) -> str:
    with pytest.raises(ConfigFaults) as caught:
        load(*arguments)
    return "\n".join(map(str, caught.value.faults))


def test_faults_name_what_contradicts_rewards(project: Project) -> None:
    def faults(key: str) -> str:
        return faults_of(project.load, *KEYS, key)

    assert "reward.teacher: the run keeps no average" in faults("ema.enable=false")
    assert "objective: has no effect with [reward]" in faults("objective.flow.weight=1.0")
    assert "pseudo_huber_c: has no effect with [reward]" in faults("pseudo_huber_c=0.1")
    assert "reward.images_per_prompt" in faults("reward.images_per_prompt=1")
    assert "write pipeline_stages = 1" in faults("pipeline_stages=2")
    text = project.train_toml.read_text().replace("max_steps = 4", "epochs = 1")
    project.train_toml.write_text(text)
    with pytest.raises(ConfigFaults, match=r"max_steps: is required with \[reward\]"):
        project.load()


def test_check_names_what_is_missing_and_states_images_memory_and_time(project: Project) -> None:
    def faults(*keys: str) -> str:
        return faults_of(check.load, project.train_toml, [*KEYS, *keys])

    (project.folder / "odd.txt").write_text("a cat on a sofa\n", encoding="utf-8")
    (project.folder / "empty.txt").write_text("\n \n", encoding="utf-8")
    assert "reward.prompts: " in faults('reward.prompts="nothing.txt"')
    assert "has no prompt; write one per line" in faults('reward.prompts="empty.txt"')
    assert "there are 3 prompts" in faults("reward.prompts_per_draw=4")
    odd = faults('reward.prompts="odd.txt"', 'reward.score="world"', "reward.prompts_per_draw=1")
    assert "is not a caption of the demo world" in odd
    assert "is not a model folder" in faults('reward.score="./start"')
    assert "install the package" in faults('reward.score="no_such_package.part:score"')
    assert "is not marked as a reward" in faults('reward.score="shutil:rmtree"')
    assert "correct the name" in faults('reward.score="__main__:score"')
    single = ("reward.steps=1", "model.last_time=0.25")
    assert "reward.steps: the scheduler's last time is 0.25" in faults(*single)
    check.load(project.train_toml, [*KEYS, 'reward.score="world"'])
    plain = check.run(project.load(*KEYS))
    lines = plain.drawing
    assert lines.startswith("6 images of 64x64 every 3 steps in 2 sampler steps, ")
    assert "each trains 1 times" in lines
    weights = 4 * sum(plain.setup.cost.layer_parameters)
    held = check.run(project.load(*KEYS, "reward.kl=0.1"))
    assert held.setup.other_models == plain.setup.other_models + weights, "a copy of the start"
    adapted = check.run(project.load(*KEYS, "reward.kl=0.1", "adapter.rank=2"))
    assert adapted.setup.other_models == plain.setup.other_models, "an adapter is switched off"
    often = check.run(project.load(*KEYS, "reward.every_n_steps=1"))
    assert often.run_flops.value > plain.run_flops.value
