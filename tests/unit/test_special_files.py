"""Special files in folders from others: in the place of any file of a run, a cache or a model they are refused or
replaced. No command waits, or reads without end."""

import os
import shutil
from pathlib import Path

import pytest

from sd3_light.config.faults import UserError
from sd3_light.inputs import lines_of, open_regular, read_limited, regular_handle, require_regular
from sd3_light.model.part_configs import check_files
from tests.cases import combinations
from tests.hostile import run_cli
from tests.project import Project, quick_caching
from tests.special_files import SPECIAL, replace

RUN_FILES = ("config.toml", "log.jsonl", "samples/step-00000002.png")
RESUMED_FILES = (".lock", "log.jsonl", "checkpoints/STEP/index.json", "checkpoints/STEP/rank-00000.safetensors")
CACHE_FILES = (
    *("manifest.json", "duplicates.jsonl", "rejects.jsonl", "parts.json", "shards/*.safetensors", "shards/*.arrow"),
    *("shards/*.json", "catalogue/images-*.json", "catalogue/plan-*.arrow", "catalogue/plan-*.json"),
    *("catalogue/plan-*.jsonl", "catalogue/parts/*.arrow", "prompts/*.safetensors"),
)
FAST_REPORTS = [("pipe", "config.toml"), ("device", "config.toml"), ("huge", "log.jsonl"), ("pipe", RUN_FILES[2])]
FAST_RESUMED = [("pipe", ".lock"), ("pipe", "log.jsonl"), ("device", RESUMED_FILES[3])]
FAST_CACHES = [("shards/*.arrow", "pipe"), ("rejects.jsonl", "huge")]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, cached_project: Project) -> Project:
    """A finished run with samples, whose paths are relative. Read-only: tests use copies."""
    project = cached_project.copy(tmp_path_factory.mktemp("finished") / "project")
    text = project.train_toml.read_text(encoding="utf-8").replace("max_steps = 4", "max_steps = 2")
    sampling = '\n[sampling]\nprompts = ["a star"]\nevery_n_steps = 2\nsteps = 1\n'
    project.train_toml.write_text(f"{text}{sampling}", encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sd3_light.export.diffusers_folder.prove", lambda *_: {})
        project.train()
    return project


@pytest.fixture
def copied(tmp_path: Path, finished: Project, monkeypatch: pytest.MonkeyPatch) -> Project:
    monkeypatch.setattr("sd3_light.export.diffusers_folder.prove", lambda *_: {})
    return finished.copy(tmp_path / "project")


def run(*arguments: object) -> str:
    """Run a command, which must neither hang nor fail by a bug; return what it printed about it."""
    with quick_caching():
        outcome = run_cli(*arguments, seconds=120)
    assert outcome.code in (0, 2), outcome
    return outcome.err


@pytest.mark.parametrize(("kind", "name"), combinations(SPECIAL, RUN_FILES, fast=FAST_REPORTS))
def test_a_report_is_written_or_refused(copied: Project, kind: str, name: str) -> None:
    replace(copied.run / name, kind)
    page = copied.folder / "page.html"
    message = run("report", copied.run, "--out", page)
    assert page.is_file() != (name == "log.jsonl"), message


@pytest.mark.parametrize(("kind", "name"), combinations(["pipe", "device", "huge"], RESUMED_FILES, fast=FAST_RESUMED))
def test_a_run_is_not_resumed_from_special_files(copied: Project, kind: str, name: str) -> None:
    step = next((copied.run / "checkpoints").iterdir()).name
    replace(copied.run / name.replace("STEP", step), kind)
    message = run("train", copied.train_toml, "--resume", "--set", "max_steps=3")
    if (kind, name) != ("huge", ".lock"):
        assert name.split("/")[-1] in message or "not a regular file" in message or "resume" in message, message


@pytest.mark.parametrize(("name", "kind"), combinations(CACHE_FILES, ["pipe", "device", "huge"], fast=FAST_CACHES))
def test_a_cache_with_special_files_is_refused_or_built_again(copied: Project, name: str, kind: str) -> None:
    replace(min(copied.cache.glob(name)), kind)
    run("inspect", copied.cache, "--out", copied.folder / "page.html")
    run("cache", copied.train_toml)


@pytest.mark.parametrize("kind", SPECIAL)
def test_model_files_are_checked_before_libraries_open_them(tmp_path: Path, kind: str) -> None:
    """Links to regular files are those of a hub cache. What is missing, and folders, the libraries report."""
    blobs, folder = tmp_path / "blobs", tmp_path / "snapshot"
    for each in (blobs, folder):
        each.mkdir()
    (blobs / "0123").write_text("{}")
    (folder / "config.json").symlink_to("../blobs/0123")
    (folder / "missing.json").symlink_to("../blobs/4567")
    check_files(folder, tmp_path / "none")
    for name in ("tokenizer.json", "model.safetensors", "merges.txt"):
        replace(folder / name, kind)
        if kind in ("folder", "loop"):
            check_files(folder)
        else:
            with pytest.raises(UserError, match=f"{folder / name} cannot be read .*; download or export it again"):
                check_files(folder)
        shutil.rmtree(folder / name) if kind == "folder" else (folder / name).unlink()


@pytest.mark.parametrize("kind", SPECIAL)
def test_special_files_are_refused_and_regular_ones_opened(tmp_path: Path, kind: str) -> None:
    path, link, regular = tmp_path / "special", tmp_path / "link", tmp_path / "regular"
    replace(path, kind)
    regular.write_bytes(b"first\nsecond")
    link.symlink_to(regular)
    assert read_limited(link) == b"first\nsecond"
    for flags in (os.O_RDONLY, os.O_RDWR | os.O_CREAT, os.O_WRONLY | os.O_APPEND | os.O_CREAT):
        os.close(regular_handle(link, flags))
        if kind != "huge":
            with pytest.raises(OSError, match=r"regular file|directory|symbolic links"):
                regular_handle(path, flags)
    with pytest.raises(OSError, match=r"regular file|directory|symbolic links|larger than 1 MiB"):
        require_regular(path, 1 << 20)
    if kind == "huge":
        with open_regular(path) as file, pytest.raises(ValueError, match="more than 1 MiB"):
            list(lines_of(file, 1 << 20))
    with open_regular(link) as file:
        assert list(lines_of(file, 6)) == [b"first\n", b"second"]
