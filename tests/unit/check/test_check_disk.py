"""Faults that only the disk shows are reported by key, all together."""

import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import pytest
from safetensors.torch import save_file

from sd3_light.check import disk
from sd3_light.check import verb as check
from sd3_light.check.verb import disk_faults
from sd3_light.config import ConfigFaults, Fault
from sd3_light.data.manifest import CACHE_FORMAT, Manifest, ShardEntry
from sd3_light.families.sd3.positions import position_table
from sd3_light.tensor_file import header_bytes

PRETRAIN = 'train_type = "sd3_light_pretrain"\nsize = "demo"\n'
Single = Callable[..., Fault]


def test_missing_parts_are_named(files: Any, only_fault: Single) -> None:
    assert disk_faults(files.load()) == []
    check.require(files.load())
    for part in (
        "model_index.json",
        "vae/config.json",
        "vae/diffusion_pytorch_model.safetensors",
        "text_encoder_2/model.safetensors",
        "tokenizer_3/tokenizer.json",
        "scheduler/scheduler_config.json",
    ):
        (files.sd3 / part).rename(files.folder / "aside")
        fault = only_fault()
        assert fault.key == "model.diffusers_path"
        assert part in fault.problem
        (files.folder / "aside").rename(files.sd3 / part)
    for part in ("vae", "text_encoder_3", "tokenizer"):
        shutil.rmtree(files.sd3 / part)
    assert len(disk_faults(files.load())) == 5  # config and weights of two models, and a tokenizer
    dataset = 'resolutions = [64]\n[[directory]]\npath = "nowhere"\n'
    with pytest.raises(ConfigFaults, match="6 problems"):
        check.require(files.load(dataset=dataset))
    shutil.rmtree(files.sd3)
    assert only_fault().problem == "no such folder"


def test_an_unfinished_folder_of_parts_is_one_fault(files: Any, only_fault: Single) -> None:
    """`sd3-light parts` trains in a folder of it, which stays."""
    (files.sd3 / "training").mkdir()
    assert disk_faults(files.load(model=PRETRAIN)) == []
    shutil.rmtree(files.sd3 / "vae")
    (files.sd3 / "text_encoder_3/model.safetensors").unlink()
    fault = only_fault(model=PRETRAIN)
    assert (fault.key, fault.problem) == ("model.diffusers_path", "the folder is unfinished")
    assert fault.hint == f"run `sd3-light parts DATA {files.sd3}` again"


def test_the_values_of_continued_weights_are_checked(files: Any, only_fault: Single) -> None:
    """A model of sd3-light that was trained with zeros takes no negative prompt unless the config says otherwise."""
    keys = {"top": "max_steps = 4", "model": ""}
    keys["tables"] = '[sampling]\nprompts = ["a"]\nevery_n_steps = 2\nnegative_prompt = "blurry"\n'
    (files.sd3 / "vae/diffusion_pytorch_model.safetensors").write_bytes(header_bytes([]))
    files.denoiser("sd3/transformer")
    assert disk_faults(files.load(**keys)) == []
    (files.sd3 / "sd3_light.json").write_text('{"text": {"uncond_text": "zero"}}')
    fault = only_fault(**keys)
    assert (fault.key, fault.problem) == ("sampling.negative_prompt", 'has no effect with model.uncond_text = "zero"')
    assert disk_faults(files.load(**{**keys, "model": 'uncond_text = "empty"'})) == []
    (files.sd3 / "sd3_light.json").unlink()
    (files.sd3 / "scheduler/scheduler_config.json").write_text('{"shift": 5000.0}')
    fault = only_fault(**keys)
    assert (fault.key, "its scheduler has shift 5000; write model.shift" in fault.problem) == (
        "model.diffusers_path",
        True,
    )


def test_an_index_requires_the_weights_it_names(files: Any, only_fault: Single) -> None:
    (files.sd3 / "text_encoder_3/model.safetensors").rename(files.sd3 / "text_encoder_3/model-1-of-2.safetensors")
    index = {"weight_map": {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}}
    files.json("sd3/text_encoder_3/model.safetensors.index.json", index)
    assert "text_encoder_3/model-2-of-2.safetensors" in only_fault().problem


def test_the_denoiser_is_needed_only_if_weights_start_there(files: Any) -> None:
    faults = disk_faults(files.load(model=""))
    assert ["transformer/" in fault.problem for fault in faults] == [True, True]
    files.denoiser("sd3/transformer")
    assert disk_faults(files.load(model="")) == []


def test_init_names_a_folder_with_a_denoiser_or_of_one(files: Any, only_fault: Single) -> None:
    assert only_fault(model='init = "random"').key == "model.size"
    model = 'train_type = "sd3_light_pretrain"\ninit = "start"'
    assert only_fault(model=model).problem == "no such folder"
    (files.folder / "start").mkdir()
    assert [fault.key for fault in disk_faults(files.load(model=model))] == ["model.init", "model.init"]
    files.denoiser("start/transformer")
    assert disk_faults(files.load(model=model)) == []
    model = model.replace("start", "other")
    folder = files.denoiser("other")
    assert disk_faults(files.load(model=model)) == []
    (folder / "diffusion_pytorch_model.safetensors").unlink()
    assert "diffusion_pytorch_model.safetensors" in only_fault(model=model).problem


@pytest.mark.parametrize(
    ("keys", "fault"),
    [
        ("num_layers = 5", "model.num_layers"),
        ("qk_norm = false", "model.qk_norm"),
        ('size = "tiny3"', "model.size"),
        ('size = "demo"\nnum_layers = 5', "model.num_layers"),
    ],
)
def test_a_key_that_disagrees_with_the_weights_is_a_fault(
    files: Any, only_fault: Single, keys: str, fault: str
) -> None:
    files.denoiser("sd3/transformer")
    reported = only_fault(model=keys)
    assert reported.key == fault
    assert str(files.sd3 / "transformer") in reported.problem
    files.denoiser("sd3/transformer", num_layers=6)
    assert disk_faults(files.load(model='size = "demo"\nnum_layers = 6\nqk_norm = true')) == []


@pytest.mark.parametrize(
    ("file", "content", "problem"),
    [
        ("vae/config.json", {"latent_channels": 4, "block_out_channels": [8] * 4}, "4 latent channels"),
        ("vae/config.json", {"latent_channels": 16, "block_out_channels": [8] * 3}, "shrinks images 4 times"),
        ("text_encoder_3/config.json", {"d_model": 512}, "T5 is 512 wide"),
        ("text_encoder_2/config.json", {"hidden_size": 112, "projection_dim": 64}, "pooled text is 176 wide"),
        ("text_encoder/config.json", {"hidden_size": 160, "projection_dim": 112}, "(160 + 112) are wider than T5"),
        ("tokenizer/tokenizer_config.json", {"model_max_length": 100}, "CLIP encoders accept at most 77"),
        ("tokenizer_3/tokenizer_config.json", {"model_max_length": 10}, "1 to 10"),
        ("vae/config.json", ["a list"], "is not a JSON object"),
    ],
)
def test_frozen_parts_match(files: Any, only_fault: Single, file: str, content: object, problem: str) -> None:
    files.json(f"sd3/{file}", content)
    fault = only_fault()
    assert fault.key == ("model.t5_max_length" if "tokenizer_3" in file else "model.diffusers_path")
    assert problem in str(fault)


@pytest.mark.parametrize(
    ("model", "tables", "key", "valid"),
    [
        ("", "[model.routing]\nlast_block = 4", "model.routing", "[model.routing]\nlast_block = 3"),
        ("", "[model.layer_sync]\nlate_block = 4", "model.layer_sync", "[model.layer_sync]\nlate_block = 3"),
        ("position_crop_side = 17", "", "model.position_crop_side", ""),
        ("text_recon_gamma = 0.1\ntext_recon_target_layer = 3", "", "model.text_recon_target_layer", ""),
    ],
)
def test_blocks_and_places_exist_in_the_weights(
    files: Any, only_fault: Single, model: str, tables: str, key: str, valid: str
) -> None:
    files.denoiser("sd3/transformer")
    assert only_fault(model=model, tables=tables).key == key
    assert disk_faults(files.load(tables=valid)) == []


def test_buckets_fit_the_position_table(files: Any, only_fault: Single) -> None:
    dataset = 'resolutions = [256]\nenable_ar_bucket = true\n[[directory]]\npath = "images"\n'
    fault = only_fault(dataset=dataset)
    assert fault.key == "directory[0].resolutions"
    assert "ends at 256 px" in fault.problem
    assert "256x256" not in (fault.value or "")
    assert disk_faults(files.load(dataset=dataset.replace("true", "false"))) == []


def test_a_shape_is_that_of_the_weights(files: Any, only_fault: Single) -> None:
    files.denoiser("trained", pos_embed_max_size=192)
    start, shape = 'train_type = "sd3_light_pretrain"\ninit = "trained"', "[model.shape]\nnum_layers = 4\nnum_heads = "
    assert disk_faults(files.load(model=start, tables=f"{shape}4")) == []
    fault = only_fault(model=start, tables=f"{shape}2")
    assert fault.key == "model.shape"
    assert "num_heads 4 (not 2)" in fault.problem


def test_the_vae_and_the_encoders_give_a_shape_its_widths(files: Any) -> None:
    files.json("sd3/vae/config.json", {"latent_channels": 4, "block_out_channels": [8] * 4})
    loaded = files.load(
        model='train_type = "sd3_light_pretrain"', tables="[model.shape]\nnum_layers = 3\nnum_heads = 2"
    )
    size = check.require(loaded).size
    assert (size.num_layers, size.width, size.text_width, size.pooled_width, size.latent_channels) == (
        3,
        128,
        256,
        224,
        4,
    )
    (files.sd3 / "vae/config.json").unlink()
    assert [fault.key for fault in disk_faults(loaded)] == ["model.diffusers_path"], "reported once"


def test_the_position_step_is_that_of_the_weights(files: Any, only_fault: Single) -> None:
    folder = files.denoiser("trained")
    start = f'{PRETRAIN}init = "trained"\nposition_step = '
    assert "contain another position table" in only_fault(model=f"{start}0.5").problem
    table = {"pos_embed.pos_embed": position_table(256, 16, 0.5).bfloat16()}
    save_file(table, folder / "diffusion_pytorch_model.safetensors")
    assert disk_faults(files.load(model=f"{start}0.5")) == []
    fault = only_fault(model=f"{start}0.25")
    assert (fault.key, fault.value) == ("model.position_step", "0.25")
    assert "contain a position table of step 0.5" in fault.problem
    (folder / "diffusion_pytorch_model.safetensors").write_bytes(b"damaged")
    assert "is not a complete safetensors file" in only_fault(model=f"{start}0.5").problem


@pytest.mark.parametrize(
    ("keys", "fault"),
    [
        ('path = "nowhere"', "directory[0].path"),
        ('path = "data.toml"', "directory[0].path"),
        ('path = "images"\nmask_path = "nowhere"', "directory[0].mask_path"),
        ('path = "images"\nmask_path = "data.toml"', "directory[0].mask_path"),
        ('path = "images"\ndefault_mask_file = "nowhere.png"', "directory[0].default_mask_file"),
        ('path = "images"\ndefault_mask_file = "images"', "directory[0].default_mask_file"),
        ('path = "images"\nexclude = "nowhere.txt"', "directory[0].exclude"),
        ('path = "images"\nexclude = "images"', "directory[0].exclude"),
    ],
)
def test_every_path_of_the_dataset_exists(files: Any, only_fault: Single, keys: str, fault: str) -> None:
    reported = only_fault(dataset=f"resolutions = [64]\n[[directory]]\n{keys}\n")
    assert (reported.key, reported.file) == (fault, str(files.folder / "data.toml"))


@pytest.mark.parametrize(
    ("keys", "fault"), [('output_dir = "file/runs"', "output_dir"), ('cache_dir = "file"', "cache_dir")]
)
def test_output_folders_can_be_created(files: Any, only_fault: Single, keys: str, fault: str) -> None:
    (files.folder / "file").touch()
    reported = only_fault(top=keys)
    assert reported.key == fault
    assert reported.problem.endswith(f"{files.folder / 'file'} is a file")


def test_a_cache_at_a_url_needs_no_local_images(files: Any) -> None:
    dataset = 'resolutions = [64]\n[[directory]]\npath = "nowhere"\n'
    (files.folder / "val.toml").write_text(dataset)
    top = 'eval_datasets = ["val.toml"]\n'
    assert disk_faults(files.load(top=top + 'cache_dir = "memory://cache"', dataset=dataset)) == []
    faults = disk_faults(files.load(top=top, dataset=dataset))
    assert [fault.file for fault in faults] == [str(files.folder / name) for name in ("data.toml", "val.toml")]


@pytest.mark.parametrize(
    ("keys", "fault", "problem"),
    [
        ('cache_dir = "s4://bucket/x"', "cache_dir", "fsspec does not support the protocol 's4'"),
        ('cache_dir = "memory://x"\nstream_cache_dir = "file"', "stream_cache_dir", "is a file"),
    ],
)
def test_a_cache_at_a_url_needs_a_protocol_and_a_local_folder(
    files: Any, only_fault: Single, keys: str, fault: str, problem: str
) -> None:
    (files.folder / "file").touch()
    reported = only_fault(top=keys)
    assert reported.key == fault
    assert problem in reported.problem


def test_a_cache_that_does_not_fit_into_memory_is_a_fault(files: Any, only_fault: Single) -> None:
    whole = 'sd3_streaming_dataset = false\ncache_dir = "cache"'
    assert disk_faults(files.load(top=whole)) == [], "there is no cache yet"
    entry = ShardEntry("a", "64x64", (64, 64), "set#0", 1, 5, "", "")
    manifest = Manifest({}, (replace(entry, bytes=10**15), entry), entry)
    files.json("cache/manifest.json", {"format": CACHE_FORMAT, **asdict(manifest)})
    assert disk_faults(files.load(top='cache_dir = "cache"')) == []
    fault = only_fault(top=whole)
    assert fault.key == "sd3_streaming_dataset"
    assert "takes 1000000.0 GB" in fault.problem
    named = only_fault(top='cache_residence = "host"\ncache_dir = "cache"')
    assert (named.key, named.value) == ("cache_residence", "host")
    assert disk_faults(files.load(top='cache_residence = "device"\ncache_dir = "cache"')) == [], "the GPU is not known"
    files.json("cache/manifest.json", {"format": CACHE_FORMAT, **asdict(replace(manifest, shards=(entry,)))})
    assert disk_faults(files.load(top=whole)) == []
    files.json("cache/manifest.json", {"shards": [{"bytes": 10**15}]})
    assert disk_faults(files.load(top=whole)) == [], "a damaged manifest is reported by the cache stage"


@pytest.mark.parametrize("package", ["wandb", "trackio"])
def test_a_missing_tracker_package_is_a_fault(
    files: Any, only_fault: Single, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    monkeypatch.setattr("sd3_light.runlog.trackers._is_installed", lambda name: name != package)
    fault = only_fault(tables="[monitoring]\nenable_wandb = true\nenable_trackio = true")
    assert fault.key == f"monitoring.enable_{package}"
    assert f"pip install 'sd3-light[{package}]'" in str(fault)
    assert disk_faults(files.load(tables=f"[monitoring]\nenable_{package} = true"), caching=True) == []


def test_metrics_need_a_dataset_and_a_model_folder(files: Any) -> None:
    table = '[metrics]\nevery_n_steps = 5\ndataset = "{}"\nfeatures = "judge"\n'
    keys = {fault.key for fault in disk_faults(files.load(tables=table.format("missing.toml")))}
    assert "metrics.features" in keys
    assert len(keys) == 2
    files.json("judge/config.json", {})
    (files.folder / "truth.toml").write_text('resolutions = [64, 4096]\n[[directory]]\npath = "nowhere"\n')
    faults = disk_faults(files.load(tables=table.format("truth.toml")))
    assert {fault.key for fault in faults} == {"directory[0].path", "directory[0].resolutions"}
    assert all(fault.file.endswith("truth.toml") for fault in faults)


# --- libraries that are not installed -------------------------------------------------------------


PRODIGY = '[optimizer]\ntype = "prodigy"'


def test_optimizers_and_few_bits_without_their_library(
    monkeypatch: pytest.MonkeyPatch, files: Any, only_fault: Single
) -> None:
    monkeypatch.setattr(disk, "find_spec", lambda name: None)
    fault = only_fault(tables=PRODIGY)
    assert fault.key == "optimizer.type"
    assert "prodigyopt" in fault.problem
    assert fault.hint is not None
    assert "`pip install 'sd3-light[prodigy]'`" in fault.hint
    assert disk_faults(files.load(tables=PRODIGY), caching=True) == [], "a cache needs no optimizer"
    assert disk_faults(files.load(tables='[optimizer]\ntype = "muon"')) == []
    monkeypatch.setattr(disk, "find_spec", lambda name: object())
    assert disk_faults(files.load(tables=PRODIGY)) == []
    monkeypatch.setattr(disk, "find_spec", lambda name: None)
    files.denoiser("sd3/transformer")
    fault = only_fault(model="", tables="[adapter]\nbase_bits = 4")
    assert (fault.key, fault.value) == ("adapter.base_bits", "4")
    assert fault.hint == "run `pip install 'sd3-light[bnb]'`, or write base_bits = 8"
