"""Loading a valid config."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from sd3_light.config import LoadedConfig, TrainConfig, batch_size_for, load_config, resolved_toml

EVERYTHING = """
epochs = 3
cache_dir = "../cache"
eval_datasets = ["data.toml", {name = "held-out", config = "sub/eval.toml"}]
micro_batch_size_per_gpu = [[256, 64], [[320, 192], 32]]
pipeline_stages = 2
partition_method = "manual"
partition_split = [8]
lr_scheduler = "step"
lr_step_size = 10
lr_step_gamma = 0.5
pseudo_huber_c = 0.03
"""
TABLES = """
[ema]
enable = true
[[ema.track]]
name = "slow"
decay = 0.999
[[ema.track]]
name = "wide"
power_width = 0.1
[adapter]
rank = 8
init_from_existing = "lora.safetensors"
[sampling]
prompts = ["a \\"quoted\\" cat", "猫"]
seeds = [1, 2]
every_n_steps = 5
[monitoring]
enable_wandb = true
wandb_api_key = "sk-very-secret"
"""
DATASET = """
resolutions = [256, [320, 192]]
num_repeats = 2
caption_prefix = "x"
[[directory]]
path = "images"
num_repeats = 0.5
[[directory]]
path = "/elsewhere"
flip = true
"""


@pytest.fixture
def everything(files: Any) -> LoadedConfig:
    (files.folder / "sub").mkdir()
    (files.folder / "sub" / "eval.toml").write_text('resolutions = [256]\n[[directory]]\npath = "photos"\n')
    return files.load(EVERYTHING, 'init = "weights"', TABLES, DATASET)


def test_paths_are_absolute_and_relative_to_their_toml(everything: LoadedConfig, tmp_path: Path, files: Any) -> None:
    train = everything.train
    assert everything.path == tmp_path / "train.toml"
    assert train.output_dir == tmp_path / "out"
    assert train.cache_dir == tmp_path.parent / "cache"
    assert train.model.init == tmp_path / "weights"
    assert train.adapter is not None
    assert train.adapter.init_from_existing == tmp_path / "lora.safetensors"
    assert everything.eval_datasets["held-out"].directories[0].path == tmp_path / "sub" / "photos"
    assert [directory.path for directory in everything.dataset.directories] == [tmp_path / "images", Path("/elsewhere")]
    assert everything.dataset.cache_dir == tmp_path.parent / "cache"
    assert everything.eval_datasets["held-out"].cache_dir == tmp_path.parent / "cache-eval-held-out"
    loaded = files.load('eval_datasets = ["sub/eval.toml"]')
    assert loaded.dataset.cache_dir == tmp_path / "data.cache"
    assert loaded.eval_datasets["eval"].cache_dir == tmp_path / "sub" / "eval.cache"


def test_directories_override_the_dataset_and_batches_the_resolution(everything: LoadedConfig) -> None:
    first, second = everything.dataset.directories
    assert (first.num_repeats, second.num_repeats) == (0.5, 2.0)
    assert (first.flip, second.flip) == (False, True)
    assert first.caption_prefix == second.caption_prefix == "x"
    assert first.resolutions == ((256, 256), (320, 192))
    batch = everything.train.micro_batch_size_per_gpu
    assert batch_size_for(batch, (256, 256)) == 64
    assert batch_size_for(batch, (320, 192)) == 32
    assert batch_size_for(7, (256, 256)) == 7
    assert everything.train.eval_micro_batch_size_per_gpu == batch


def test_directory_sizes_replace_inherited_resolutions(files: Any) -> None:
    dataset = "resolutions = [256]\nenable_ar_bucket = true\nmin_ar = 0.5\n"
    dataset += '[[directory]]\npath = "a"\n[[directory]]\npath = "b"\nsize_buckets = [[320, 192]]\n'
    first, second = files.load(dataset=dataset).dataset.directories
    assert (first.resolutions, first.enable_ar_bucket) == (((256, 256),), True)
    assert (second.resolutions, second.enable_ar_bucket, second.size_buckets) == ((), False, ((320, 192),))


@pytest.mark.parametrize("line", ["shuffle_tags = true", 'cache_shuffle_delimiter = "|"\ncache_shuffle_num = 3'])
def test_shuffle_keys_agree_after_loading(files: Any, line: str) -> None:
    directory = files.load(dataset=f'resolutions = 256\n{line}\n[[directory]]\npath = "a"').dataset.directories[0]
    assert directory.shuffle_tags
    assert directory.cache_shuffle_num == (3 if "3" in line else 1)


def test_defaults_that_follow_other_keys(files: Any) -> None:
    train = files.load(model='dtype = "float32"', tables="[adapter]\nrank = 8").train
    assert train.model.transformer_dtype == "float32"
    assert train.adapter.alpha == 8.0
    assert files.load().train.model.transformer_dtype == "bfloat16"


@pytest.mark.parametrize("key", ["dataloader_prefetch_per_worker", "prefetch_batches_per_worker"])
def test_both_spellings_of_prefetch(files: Any, key: str) -> None:
    assert files.load(f"{key} = 3").train.dataloader_prefetch_per_worker == 3
    overridden = load_config(files.write(f"{key} = 3"), ["prefetch_batches_per_worker=4"])
    assert overridden.train.dataloader_prefetch_per_worker == 4


def test_byte_order_mark_is_accepted(files: Any) -> None:
    path = files.write()
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert load_config(path).train.max_steps == 10


def test_frozen(everything: LoadedConfig) -> None:
    with pytest.raises(ValidationError):
        everything.train.seed = 1  # type: ignore[misc]
    with pytest.raises(ValidationError):
        everything.train.model.shift = 3.0  # type: ignore[misc]
    with pytest.raises(ValidationError):
        everything.dataset.directories[0].flip = True  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        everything.train = everything.train  # type: ignore[misc]


def _without_api_key(train: TrainConfig) -> TrainConfig:
    return train.model_copy(update={"monitoring": train.monitoring.model_copy(update={"wandb_api_key": None})})


def test_resolved_copy_gives_an_equal_config(everything: LoadedConfig, tmp_path: Path) -> None:
    copy = tmp_path / "run" / "config.toml"
    copy.parent.mkdir()
    text = resolved_toml(everything)
    copy.write_text(text, encoding="utf-8")
    again = load_config(copy)
    assert _without_api_key(again.train) == _without_api_key(everything.train)
    assert (again.dataset, again.eval_datasets) == (everything.dataset, everything.eval_datasets)
    assert resolved_toml(again) == text


def test_secret_is_stored_but_never_shown(everything: LoadedConfig) -> None:
    key = everything.train.monitoring.wandb_api_key
    assert key is not None
    assert key.get_secret_value() == "sk-very-secret"
    texts = [repr(everything), str(everything.train), everything.train.model_dump_json(), resolved_toml(everything)]
    assert not any("very-secret" in text for text in texts)
    assert "wandb_api_key" not in resolved_toml(everything)


def test_overrides_are_toml_values_and_bare_words(files: Any) -> None:
    overrides = ["optimizer.lr=3e-4", "optimizer.betas=[0.9, 0.95]", "parallel=fsdp2", "sampling.prompts=['a', 'b']"]
    overrides += ["sampling.every_n_steps=2", "output_dir=some/new folder", "model.text_tokens='real'", "compile=true"]
    train = load_config(files.write(), overrides).train
    assert (train.optimizer.lr, train.optimizer.betas) == (3e-4, (0.9, 0.95))
    assert (train.parallel, train.model.text_tokens, train.compile) == ("fsdp2", "real", True)
    assert train.sampling.prompts == ("a", "b")
    assert train.output_dir == files.folder / "some" / "new folder"
