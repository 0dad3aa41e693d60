"""Preferences from a TOML: pairs of images in the cache, every kind of teacher, and resuming."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image, ImageFilter

from sd3_light.check import verb as check
from sd3_light.checkpoint.store import checkpoint_name
from sd3_light.config import SIZES, ConfigFaults
from sd3_light.config.faults import UserError
from sd3_light.cost.training_setup import TrainingSetup
from sd3_light.data.manifest import Manifest
from sd3_light.data.reader import ShardReader
from sd3_light.data.shards import read_origins
from sd3_light.flow.objectives import Preference
from sd3_light.train import verb as train
from sd3_light.train.verb import Resume
from tests.cases import combinations
from tests.checkpoints import same, tensors
from tests.project import Project
from tests.tiny_sd3 import perturbed

pytestmark = pytest.mark.usefixtures("unproven")

DPO = ("objective.dpo.beta=5.0", "eval_every_n_steps=2", 'eval_datasets=["eval.toml"]')
LORA = ("adapter.rank=2",)


def read(project: Project) -> dict[str, Any]:
    """Return (moments, moments.rejected) of every sample of the cache, by key."""
    found = {}
    manifest = Manifest.load(project.cache)
    for entry in manifest.shards:
        reader = ShardReader(project.cache / "shards" / entry.file, entry)
        origins = read_origins(project.cache / "shards" / entry.file)
        for row, origin in enumerate(origins):
            found[origin.key.rpartition("/")[2]] = reader.images(row, 0)
    return found


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory, raw_project: Project) -> Project:
    """A project whose rejected images are blurred, of another size, and in one case missing or the image itself."""
    project = start_from_weights(raw_project, tmp_path_factory.mktemp("pairs"))
    worse = project.images / "worse"
    worse.mkdir()
    for number, path in enumerate(sorted(project.images.glob("*.png"))):
        with Image.open(path) as image:
            blurred = image.filter(ImageFilter.GaussianBlur(3)).resize((2 * image.width, 2 * image.height))
            if number == 1:
                image.save(worse / path.name)
            elif number > 1:
                blurred.save(worse / f"{path.stem}.jpg")
    project.data(project.data_toml.read_text() + 'rejected = "images/worse"\n')
    project.build_cache(*DPO)
    return project


def start_from_weights(raw: Project, folder: Path) -> Project:
    """Return a project that continues a denoiser without zero weights: a prediction depends on every weight.

    It has an evaluation set, and no cache.
    """
    project = raw.copy(folder / "project")
    (project.folder / "eval.toml").write_text('resolutions = [64]\n[[directory]]\npath = "images"\n')
    project.train_toml.write_text(project.train_toml.read_text().replace('init = "random"', 'init = "start"'))
    transformer = perturbed(SIZES["tiny2"].transformer_config(), scale=0.02)
    transformer.save_pretrained(project.folder / "start" / "transformer")
    return project


def assert_resumes(project: Project, *keys: str) -> None:
    """Train four steps, and two of them again from the second checkpoint, with the same bits."""
    project.train(*keys)
    second = project.run / "checkpoints" / checkpoint_name(2)
    project.train(*keys, 'output_dir="again"', resume=Resume(second))
    assert project.losses("again") == {step: project.losses()[step] for step in (3, 4)}
    ours, theirs = (tensors(project.folder / run / "checkpoints" / checkpoint_name(4)) for run in ("run", "again"))
    assert same(ours, theirs)


def the_fault(read: Callable[..., object], *arguments: Any) -> str:
    with pytest.raises(ConfigFaults) as caught:
        read(*arguments)
    (only,) = caught.value.faults
    return str(only)


@pytest.fixture
def project(tmp_path: Path, pairs: Project) -> Project:
    return pairs.copy(tmp_path / "project")


def test_the_cache_has_both_images_of_a_pair(project: Project) -> None:
    samples = read(project)
    names = sorted(path.name for path in project.images.glob("*.png"))
    assert sorted(samples) == names[1:], "an image without a rejected one is left out, and rejected ones are no samples"
    for name, values in samples.items():
        assert list(values) == ["moments", "moments.rejected"]
        same = torch.equal(values["moments"], values["moments.rejected"])
        assert same == (name == names[1])
    rejects = (project.cache / "rejects.jsonl").read_text()
    assert '"no_rejected"' in rejects
    assert names[0] in rejects
    name = sorted(read(project))[3]
    before = read(project)[name]
    assert project.build_cache(*DPO)[0].encoded == 0
    Image.new("RGB", (64, 64), "teal").save((project.images / "worse" / name).with_suffix(".jpg"))
    assert project.build_cache(*DPO)[0].encoded > 0
    after = read(project)[name]
    assert torch.equal(before["moments"], after["moments"])
    assert not torch.equal(before["moments.rejected"], after["moments.rejected"])


TEACHERS: dict[str, tuple[str, ...]] = {
    "start": ("ema.enable=false",),
    "adapter": (*LORA, "ema.enable=false"),
    "average": ('objective.dpo.teacher="average"',),
    "folder": ('objective.dpo.teacher="./start"', 'cache_residence="host"'),
    "beside flow": ("objective.flow.weight=0.5", "gradient_accumulation_steps=2", "micro_batch_size_per_gpu=2"),
}


@pytest.mark.parametrize("kind", combinations(TEACHERS, fast=[("start",), ("adapter",), ("average",)]))
def test_preferences_train_and_resume_exactly(project: Project, kind: str) -> None:
    assert_resumes(project, *DPO, *TEACHERS[kind])
    steps = project.events("step")
    assert [event["step"] for event in steps] == [1, 2, 3, 4]
    if kind != "average":  # whose first value is the start, too
        assert steps[0]["dpo"] == pytest.approx(0.6931, abs=1e-3), "log 2: the model is its teacher"
    assert steps[0]["dpo"] != steps[3]["dpo"]
    assert ("flow" in steps[0]) == (kind == "beside flow")
    assert all(event["flow"] > 0 for event in project.events("eval")), "validation has no pairs"


def test_a_cache_without_pairs_is_refused(project: Project) -> None:
    project.data(project.data_toml.read_text().replace('rejected = "images/worse"\n', ""))
    project.build_cache("objective.flow.weight=1.0")
    with pytest.raises(UserError, match=r"reads the column 'moments\.rejected', and the cache has moments, "):
        train.run(project.load(), objective=lambda denoiser: Preference())


def test_check_counts_teacher_and_pairs_and_names_faults(project: Project) -> None:
    def setup(*keys: str) -> TrainingSetup:
        return check.run(project.load(*keys, "ema.enable=false")).setup

    plain, taught = setup(), setup(*DPO)
    weights = 4 * sum(plain.cost.layer_parameters)
    assert taught.other_models == plain.other_models + weights, "a copy in float32"
    assert setup(*DPO, 'objective.dpo.teacher="./start"').other_models == pytest.approx(taught.other_models, rel=0.05)
    assert setup(*DPO, *LORA).other_models == plain.other_models
    assert taught.batch == 2 * plain.batch, "both images of a pair"
    flops = [check.run(project.load(*keys)).data.rows[0].step_flops.value for keys in ((), DPO)]
    assert 2.5 < flops[1] / flops[0] < 2.7, "two passes, and two of the teacher without gradients"
    with pytest.raises(ConfigFaults, match=r"objective\.dpo\.teacher"):
        check.run(project.load(*DPO, 'objective.dpo.teacher="./nothing"'))

    fault = partial(the_fault, project.load)
    average = 'objective.dpo.teacher="average"'
    assert "write ema.enable = true" in fault(*DPO, average, "ema.enable=false")
    assert "objective.dpo: pipeline stages run one pass and no teacher" in fault(*DPO, "pipeline_stages=2")
    assert "[objective] is given too" in fault(*DPO, "pseudo_huber_c=0.1")
    text = project.data_toml.read_text()
    project.data(text + '[[directory]]\npath = "other"\n')
    assert "needs a rejected image beside every image, and directory[1]" in fault(*DPO)
    assert "directory[1].rejected: is missing here" in fault()
    project.data(text.replace('rejected = "images/worse"', ""))
    assert 'write rejected = "FOLDER" in every [[directory]]' in fault(*DPO)
