"""The prompts of [sampling] are encoded with the cache, once, and again when they or the encoders change."""

import json
import time
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from sd3_light.cache import dataset_build as stage_prompts
from sd3_light.cache import shard_builder
from sd3_light.cache import verb as cache
from sd3_light.config import ModelConfig
from sd3_light.config.faults import UserError
from sd3_light.data.manifest import Manifest
from sd3_light.data.prompt_features import PROMPTS_FOLDER, prompt_file, read_prompt
from sd3_light.engines import Launch
from sd3_light.families.sd3.encoders import FrozenParts
from tests.cases import combinations
from tests.project import Project

PROMPTS = ("a large red circle on a white background", "两个蓝色的小方块")


def sampling(*prompts: str) -> tuple[str, ...]:
    return f"sampling.prompts={json.dumps(prompts)}", "sampling.every_n_steps=2"


def files(project: Project) -> set[str]:
    return {path.name for path in (project.cache / PROMPTS_FOLDER).glob("*")}


def recipe(project: Project) -> dict[str, Any]:
    return Manifest.load(project.cache).recipe


def names(project: Project, *prompts: str) -> set[str]:
    return {prompt_file(prompt, recipe(project)) for prompt in prompts}


@pytest.fixture
def no_encoders(monkeypatch: pytest.MonkeyPatch) -> None:
    fail = Mock(side_effect=AssertionError("an encoder was loaded"))
    monkeypatch.setattr("sd3_light.families.sd3.encoders.load_text_model", fail)


@pytest.mark.parametrize("text_tokens", ["padded", "real"])
def test_prompts_are_encoded_like_captions(fresh_project: Project, text_tokens: str) -> None:
    fresh_project.build_cache(*sampling(*PROMPTS), f'model.text_tokens="{text_tokens}"')
    assert files(fresh_project) == names(fresh_project, *PROMPTS)
    keys = {"diffusers_path": fresh_project.model, "t5_max_length": 16, "text_tokens": text_tokens}
    with FrozenParts(ModelConfig.model_construct(**keys), torch.device("cpu"), 4) as parts:
        for prompt in PROMPTS:
            expected = parts.encode_captions([prompt])
            features = read_prompt(fresh_project.cache, prompt, recipe(fresh_project))
            assert features is not None
            assert set(features) == {"clip_l", "clip_g", "t5", "clip_l.pooled", "clip_g.pooled"}
            for name, tensor in features.items():
                values = expected[name][0] if name.endswith(".pooled") else expected[f"{name}.tokens"]
                assert values.dtype == torch.bfloat16, name
                assert torch.equal(tensor, values), name


def test_a_prompt_that_is_cut_is_named_when_it_is_encoded(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    long = "a red star " * 12
    project.build_cache(*sampling("a star", long))
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "is cut" in line]
    assert line.startswith("cache: warning: the prompt 'a red star a red")
    assert "T5 reads 16 of its" in line
    project.build_cache(*sampling("a star", long))
    assert "is cut" not in capsys.readouterr().err, "only once"


@pytest.mark.usefixtures("no_encoders")
def test_without_prompts_and_in_a_dry_run_nothing_is_encoded_or_written(project: Project) -> None:
    project.build_cache()
    project.build_cache(*sampling(*PROMPTS), dry_run=True)
    project.build_cache(*sampling(*PROMPTS), dry_run=True, trust=True)
    assert not (project.cache / PROMPTS_FOLDER).exists()


def test_a_changed_prompt_is_encoded_the_old_one_pruned(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    project.build_cache(*sampling(*PROMPTS))
    capsys.readouterr()
    project.build_cache(*sampling(*reversed(PROMPTS)))
    assert "encoding" not in capsys.readouterr().err
    project.build_cache(*sampling(PROMPTS[0], "three stars"))
    output = capsys.readouterr().err
    assert "encoding 1 prompt of" in output
    assert "--prune" in output
    assert files(project) == names(project, *PROMPTS, "three stars")
    project.build_cache(*sampling(PROMPTS[0], "three stars"), prune=True)
    assert files(project) == names(project, PROMPTS[0], "three stars")


@pytest.mark.parametrize("key", ["text_tokens", "text_encoder_3", "tokenizer"])
def test_the_file_name_depends_on_all_text_settings(project: Project, key: str) -> None:
    current = recipe(project)
    assert prompt_file("a", current) != prompt_file("a", {**current, key: "other"})
    of_images = {"vae": "other", "preprocess": 0, "vae_dtype": "float16"}
    assert prompt_file("a", current) == prompt_file("a", {**current, **of_images})


@pytest.mark.parametrize(
    "damage", combinations(("truncated", "flipped bit", "not safetensors"), fast=[("flipped bit",)])
)
def test_a_damaged_file_is_encoded_again(project: Project, damage: str) -> None:
    project.build_cache(*sampling(*PROMPTS))
    path = project.cache / PROMPTS_FOLDER / prompt_file(PROMPTS[0], recipe(project))
    whole = path.read_bytes()
    flipped = whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:]
    path.write_bytes({"truncated": whole[:-9], "flipped bit": flipped, "not safetensors": b"[]"}[damage])
    assert read_prompt(project.cache, PROMPTS[0], recipe(project)) is None
    project.build_cache(*sampling(*PROMPTS))
    assert path.read_bytes() == whole


def test_prompts_are_added_to_a_writable_trusted_cache(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("os.access", lambda *_: False)
        project.build_cache(*sampling(*PROMPTS), trust=True)
        assert not (project.cache / PROMPTS_FOLDER).exists()
    project.build_cache(*sampling(*PROMPTS), trust=True)
    assert files(project) == names(project, *PROMPTS)


def test_other_processes_wait_for_the_main_one(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """They encode no prompts, and continue as soon as the last file exists."""
    loaded = project.load(*sampling(*PROMPTS))
    sleeps: list[float] = []

    def sleep(seconds: float) -> None:
        sleeps.append(seconds)
        cache.run(loaded, Launch(0, 0, 2))  # the main process, meanwhile

    monkeypatch.setattr(shard_builder, "time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic))
    with pytest.raises(UserError, match="sd3_manifest_timeout_sec"):
        stage_prompts.wait_for_prompts(project.cache, PROMPTS, recipe(project), timeout=0)
    cache.run(loaded, Launch(1, 1, 2))
    assert len(sleeps) == 1
    assert files(project) == names(project, *PROMPTS)


def test_evaluation_sets_have_separate_caches_without_prompts(project: Project) -> None:
    project.hold_out(4)
    reports = project.build_cache(*sampling(*PROMPTS), 'eval_datasets=["eval.toml"]')
    assert [report.folder.name for report in reports] == ["cache", "cache-eval-eval"]
    assert [report.counts["used"] for report in reports] == [40, 4]
    assert [(report.folder / PROMPTS_FOLDER).exists() for report in reports] == [True, False]


def test_a_cache_at_a_url_is_read_and_not_written(project: Project) -> None:
    project.build_cache(*sampling(PROMPTS[0]))
    url = f"file://{project.cache}"
    current = recipe(project)
    local, remote = (read_prompt(location, PROMPTS[0], current) for location in (project.cache, url))
    assert local is not None
    assert remote is not None
    assert all(torch.equal(local[name], remote[name]) for name in local)
    assert read_prompt(url, PROMPTS[1], current) is None
    project.build_cache(*sampling(*PROMPTS), f'cache_dir="{url}"')
    assert files(project) == names(project, PROMPTS[0])
