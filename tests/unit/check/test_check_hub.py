"""Ids of the hub in a config: downloaded into its cache once; otherwise one line with the remedy."""

import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from sd3_light.check import verb as check
from sd3_light.config import ConfigFaults
from sd3_light.config.hub_ids import HubId
from sd3_light.downloads import download
from sd3_light.model.folder import missing_parts
from tests.fake_hub import COMMIT, FakeHub, serve_hub, use_hub
from tests.project import Project
from tests.warm import REAL_PYTHON

MODEL = "owner/sd3"


@pytest.fixture
def hub(tmp_path: Path, raw_project: Project, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub with the project's model, with files that are not needed, and its images."""
    model = tmp_path / "served"
    shutil.copytree(raw_project.model, model)
    for name in ("sd3.safetensors", "vae/diffusion_pytorch_model.fp16.safetensors", "text_encoders/t5.safetensors"):
        (model / name).parent.mkdir(exist_ok=True)
        (model / name).write_bytes(b"not needed")
    fake = FakeHub(repos={f"models/{MODEL}": model, "datasets/owner/images": raw_project.images.parent})
    with serve_hub(fake):
        use_hub(fake, tmp_path / "hub", monkeypatch)
        yield fake


def faults(project: Project, *overrides: str) -> list[str]:
    with pytest.raises(ConfigFaults) as caught:
        check.load(project.train_toml, overrides)
    return [f"{fault.key}: {fault.problem}" for fault in caught.value.faults]


def test_a_model_is_downloaded_once_and_without_needless_files(hub: FakeHub, fresh_project: Project) -> None:
    loaded = check.load(fresh_project.train_toml, [f"model.diffusers_path={MODEL}"])
    folder = loaded.train.model.diffusers_path
    assert folder.name == COMMIT
    assert folder.is_absolute()
    expected = {path.relative_to(fresh_project.model) for path in fresh_project.model.rglob("*") if path.is_file()}
    downloaded = {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}
    assert downloaded <= expected
    assert {path.name for path in expected - downloaded} <= {"NOTE.md", "hashes.json"}
    hub.requests.clear()
    assert check.load(fresh_project.train_toml, [f"model.diffusers_path=hf://{MODEL}"]) == loaded
    assert hub.requests == [], "the cache has everything"


def test_a_folder_takes_precedence_over_an_id(hub: FakeHub, fresh_project: Project) -> None:
    folder = fresh_project.train_toml.parent / MODEL
    shutil.copytree(fresh_project.model, folder)
    loaded = check.load(fresh_project.train_toml, [f"model.diffusers_path={MODEL}"])
    assert loaded.train.model.diffusers_path == folder
    assert hub.requests == []


@pytest.mark.parametrize("inner", ["", "/" + "images"])
def test_a_dataset_is_trained_from_the_hub(hub: FakeHub, fresh_project: Project, inner: str) -> None:
    text = fresh_project.data_toml.read_text(encoding="utf-8")
    name = fresh_project.images.name
    assert f'path = "{name}"' in text
    inner = inner.replace("images", name)
    fresh_project.data_toml.write_text(
        text.replace(f'path = "{name}"', f'path = "hf://datasets/owner/images{inner}"'), encoding="utf-8"
    )
    loaded = check.load(fresh_project.train_toml)
    (directory,) = loaded.dataset.directories
    assert directory.path.is_dir()
    assert directory.name == name, "not the commit: its samples keep their identity when the repository changes"
    assert check.run(loaded).data.samples == 40
    assert any("datasets/owner/images/resolve" in request for request in hub.requests)


def test_an_interrupted_download_continues(hub: FakeHub, fresh_project: Project) -> None:
    folder = download(HubId("owner/images", "dataset"))
    image = next(path for path in sorted(folder.rglob("*")) if path.is_symlink())
    image.unlink()
    hub.requests.clear()
    assert download(HubId("owner/images", "dataset")) == folder
    assert image.is_file()
    assert len([request for request in hub.requests if "/resolve/" in request]) <= 2, "only the missing file"


@pytest.mark.parametrize(
    ("refusal", "expected"),
    [
        ((403, "GatedRepo"), "gated; accept its conditions at {address}/owner/sd3, then run `hf auth login`"),
        ((401, "GatedRepo"), "gated; accept its conditions at {address}/owner/sd3, then run `hf auth login`"),
        ((404, "RepoNotFound"), "no such model on the hub; check the spelling; if it is private, run `hf auth login`"),
        ((500, "Internal"), "cannot reach the hub"),
    ],
)
def test_a_refusal_is_one_line_with_the_remedy(
    hub: FakeHub, fresh_project: Project, refusal: tuple[int, str], expected: str
) -> None:
    hub.refusals[f"models/{MODEL}"] = refusal
    (fault,) = faults(fresh_project, f"model.diffusers_path={MODEL}")
    assert fault.startswith(f"model.diffusers_path: {MODEL}: {expected.format(address=hub.address)}")
    assert "\n" not in fault


@pytest.mark.parametrize(
    ("file", "kind", "expected"),
    [
        ("model_index.json", "FluxFillPipeline", "takes images beside the text, which a dataset here does not"),
        ("model_index.json", "KolorsPipeline", "of no known family; give a folder of StableDiffusion3Pipeline"),
        ("modular_model_index.json", "FluxModularPipeline", "a modular pipeline has no complete model folder; give"),
        ("README.md", "", "the repository has no model_index.json, so it is not a diffusers folder"),
    ],
)
def test_a_model_that_is_not_trained_is_refused_before_its_weights_are_downloaded(
    hub: FakeHub, fresh_project: Project, tmp_path: Path, file: str, kind: str, expected: str
) -> None:
    for name, text in ((file, json.dumps({"_class_name": kind})), ("flux.gguf", ""), ("vae/a.safetensors", "")):
        (tmp_path / "other" / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / "other" / name).write_text(text)
    hub.repos["models/owner/other"] = tmp_path / "other"
    (fault,) = faults(fresh_project, "model.diffusers_path=owner/other")
    assert expected in fault
    assert "\n" not in fault
    assert not any("vae" in request or "gguf" in request for request in hub.requests)


def test_a_variant_that_is_not_trained_is_refused_by_its_configs(
    hub: FakeHub, fresh_project: Project, tmp_path: Path
) -> None:
    """As Wan 2.2 with two denoisers."""
    index = {"_class_name": "WanPipeline", "transformer": ["diffusers", "WanTransformer3DModel"]}
    index["transformer_2"] = index["transformer"]
    for name, content in (("model_index.json", index), ("transformer/config.json", {}), ("vae/config.json", {})):
        (tmp_path / "other" / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / "other" / name).write_text(json.dumps(content))
    (tmp_path / "other" / "transformer/diffusion_pytorch_model.safetensors").write_bytes(b"large")
    hub.repos["models/owner/other"] = tmp_path / "other"
    (fault,) = faults(fresh_project, "model.diffusers_path=owner/other")
    assert "owner/other: it has two denoisers" in fault
    assert not any("safetensors" in request for request in hub.requests)


def test_an_unknown_revision_or_folder_is_named(hub: FakeHub, fresh_project: Project) -> None:
    (fault,) = faults(fresh_project, f"model.diffusers_path=hf://{MODEL}@v9")
    assert "owner/sd3@v9: no such revision on the hub" in fault
    with pytest.raises(Exception, match="the repository has no file or folder 'nowhere'"):
        download(HubId("owner/images", "dataset", inner="nowhere"))


def test_offline_and_without_a_connection_a_downloaded_model_is_used(
    hub: FakeHub, fresh_project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(constants, "HF_HUB_OFFLINE", True)
        (fault,) = faults(fresh_project, f"model.diffusers_path={MODEL}")
    assert "not in the local cache, and HF_HUB_OFFLINE is set; connect, or give a folder" in fault
    assert hub.requests == []
    check.load(fresh_project.train_toml, [f"model.diffusers_path={MODEL}"])
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    check.load(fresh_project.train_toml, [f"model.diffusers_path={MODEL}"])
    (fault,) = faults(fresh_project, "model.diffusers_path=owner/other")
    assert "owner/other: cannot reach the hub (" in fault


def test_other_faults_are_reported_before_a_download(hub: FakeHub, fresh_project: Project) -> None:
    shutil.rmtree(fresh_project.images)
    assert [fault.partition(":")[0] for fault in faults(fresh_project, f"model.diffusers_path={MODEL}")] == [
        "directory[0].path"
    ]
    keys = [fault.partition(":")[0] for fault in faults(fresh_project, f"model.diffusers_path={MODEL}", "max_steps=x")]
    assert keys == ["max_steps", "directory[0].path"]
    assert hub.requests == []


@pytest.mark.parametrize("value", ["hf://datasets/owner/images", "hf://owner", "hf://owner/name/vae", "hf://a/../b"])
def test_what_is_not_a_model_id_is_a_fault(fresh_project: Project, value: str) -> None:
    (fault,) = faults(fresh_project, f"model.diffusers_path={value}")
    assert "not a model on the hub: write hf://OWNER/NAME" in fault


def test_a_dataset_needs_its_prefix(fresh_project: Project) -> None:
    fresh_project.data_toml.write_text('resolutions = [64]\n[[directory]]\npath = "hf://owner/images"\n')
    assert "not a dataset on the hub: write hf://datasets/OWNER/NAME" in faults(fresh_project)[0]


def test_the_download_command_of_the_guide_leaves_a_complete_folder(hub: FakeHub, tmp_path: Path) -> None:
    """The real `hf` command, on a repository with the extra files of Stability's."""
    guide = (Path(__file__).parents[3] / "docs" / "start" / "guide.md").read_text(encoding="utf-8")
    (line,) = (line for line in guide.splitlines() if line.startswith("hf download "))
    repo = line.split()[2]
    hub.repos[f"models/{repo}"] = hub.repos[f"models/{MODEL}"]
    environment = {**os.environ, "HF_ENDPOINT": hub.address, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "home")}
    command = [str(Path(REAL_PYTHON).parent / "hf"), *shlex.split(line)[1:]]
    process = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    folder = tmp_path / "models" / "sd3.5-medium"
    assert missing_parts(folder, transformer=False) == ()
    names = [path.name for path in folder.rglob("*.safetensors")]
    assert not any("fp16" in name or name in ("sd3.safetensors", "t5.safetensors") for name in names)
