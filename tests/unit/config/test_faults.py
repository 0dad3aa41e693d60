"""All faults are in one report, each with a readable message."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from sd3_light.config import ConfigFaults, Fault, load_config, validation
from sd3_light.config.faults import MOST_SHOWN
from sd3_light.config.validation import is_secret_key
from tests.refusals import refused
from tests.unit.config.conftest import DATASET, faults_of

OnlyFault = Callable[..., Fault]
LOCATION = "a path, or a URL such as s3://bucket/folder without credentials"


def test_ten_faults_in_three_files_come_in_one_report(files: Any) -> None:
    (files.folder / "eval.toml").write_text('resolutions = [250]\n[[directory]]\npath = "a"\nflip = "yes"\n')
    dataset = 'num_repeat = 2\nresolutions = [256]\n[[directory]]\npath = "a"\n[[directory]]\nnum_repeats = -1\n'
    faults = files.faults(
        top='epochs = "ten"\nmicro_batch_size = 4\neval_datasets = ["eval.toml"]\npipeline_stages = 2\nzero_stage = 0',
        model="text_recon_gamma = 0.1\ntext_recon_target_layer = 15\nuncond_text_dropout_prob = 1.5",
        tables='[optimizer]\ntype = "automagic"',
        dataset=dataset,
    )
    assert {(Path(fault.file).name, fault.key) for fault in faults} == {
        ("train.toml", "epochs"),
        ("train.toml", "micro_batch_size"),
        ("train.toml", "zero_stage"),
        ("train.toml", "model.text_recon_target_layer"),
        ("train.toml", "model.uncond_text_dropout_prob"),
        ("train.toml", "optimizer.type"),
        ("data.toml", "num_repeat"),
        ("data.toml", "directory[1].path"),
        ("data.toml", "directory[1].num_repeats"),
        ("eval.toml", "resolutions"),
        ("eval.toml", "directory[0].flip"),
    }
    text = str(ConfigFaults(faults))
    assert text.startswith("11 problems in the config\n")
    assert len(text.splitlines()) == 12
    assert "pydantic" not in text


def test_files_in_place_of_each_other_are_one_fault(files: Any, only_fault: OnlyFault) -> None:
    files.write()
    (fault,) = faults_of(files.dataset_path)
    assert fault.problem == "this is a dataset TOML, not a train TOML"
    assert fault.hint == "give the train TOML that names it: dataset = ..."
    fault = only_fault(top='dataset = "train.toml"')
    assert fault.file == str(files.train_path)
    assert fault.problem == "this is a train TOML, not a dataset TOML"


@pytest.mark.parametrize(
    ("line", "problem", "allowed", "hint"),
    [
        ('warmup_steps = "64"', "wrong type", "an integer >= 0", "write it without quotes"),
        ("warmup_steps = 1.5", "wrong type", "an integer >= 0", None),
        ("warmup_steps = true", "wrong type", "an integer >= 0", None),
        ("gradient_clipping = true", "wrong type", "a number >= 0", None),
        ("gradient_clipping = inf", "must be finite", "a number >= 0", None),
        ('gradient_clipping = "1e-4"', "wrong type", "a number >= 0", "write it without quotes"),
        ('fp8 = "true"', "wrong type", "true or false", "write it without quotes"),
        ("fp8 = 1", "wrong type", "true or false", None),
        ('compile = "true"', "unknown value", 'true, false or "auto"', None),
        ("compile = 1", "unknown value", 'true, false or "auto"', None),
        ("output_dir = 3", "wrong type", "a path", None),
        ('output_dir = ""', "wrong type", "a path", None),
        ("cache_dir = 3", "wrong type", LOCATION, None),
        ('cache_dir = ""', "wrong type", LOCATION, None),
        ('freeze = "all"', "wrong type", "a list, each a string", None),
        ("zero_stage = 4", "out of range", "an integer >= 0 and <= 3", None),
        ("pseudo_huber_c = 0", "out of range", "a number > 0", None),
        ('parallel = "fsdp"', "unknown value", '"ddp", "fsdp2"', 'did you mean "fsdp2"?'),
        ('save_dtype = "BFloat16"', "unknown value", '"float32", "bfloat16", "float16"', 'did you mean "bfloat16"?'),
    ],
)
def test_readable_messages(only_fault: OnlyFault, line: str, problem: str, allowed: str, hint: str | None) -> None:
    fault = only_fault(line)
    key, _, value = line.partition(" = ")
    assert (fault.key, fault.problem, fault.value, fault.allowed, fault.hint) == (key, problem, value, allowed, hint)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("micro_batch_size_per_gpu = 0", "not a batch size"),
        ("micro_batch_size_per_gpu = [256, 64]", "not a list of [resolution, size] pairs"),
        ("micro_batch_size_per_gpu = [[256, 64], [256, 32]]", "contains the resolution 256 twice"),
    ],
)
def test_batch_size_faults(only_fault: OnlyFault, line: str, problem: str) -> None:
    fault = only_fault(line)
    assert (fault.key, fault.problem) == ("micro_batch_size_per_gpu", problem)
    assert fault.allowed is not None


@pytest.mark.parametrize(
    ("tables", "key", "hint"),
    [
        ("[optimizer]\nlearning_rte = 1", "optimizer.learning_rte", None),
        ("[optimizer]\nweight_decy = 1", "optimizer.weight_decy", "did you mean `weight_decay`?"),
        ("[optimizer]\nlearning_rate = 1", "optimizer.learning_rate", "did you mean `lr`?"),
        ("[adapter]\nnetwork_dim = 1", "adapter.network_dim", "did you mean `rank`?"),
        ("[ema]\nlearning_rate = 1", "ema.learning_rate", "did you mean `lr` in [optimizer]?"),
        ('[optimizer]\nimage_dir = "a"', "optimizer.image_dir", "did you mean `path` in the dataset TOML?"),
        ("[optimizer]\nt5_max_length = 1", "optimizer.t5_max_length", "`t5_max_length` belongs in [model]"),
        ("[ema]\nseed = 1", "ema.seed", "`seed` belongs at the top level, above the first [table]"),
        ("[ema]\nresolutions = [1]", "ema.resolutions", "`resolutions` belongs in the dataset TOML"),
        ("[ema]\nweight_decays = 1", "ema.weight_decays", "did you mean `weight_decay` in [optimizer]?"),
        ("[ema]\npower_width = 1", "ema.power_width", "`power_width` belongs in [[ema.track]]"),
        ("[optimiser]\nlr = 1", "optimiser", "did you mean `optimizer`?"),
    ],
)
def test_unknown_keys_get_a_suggestion(only_fault: OnlyFault, tables: str, key: str, hint: str | None) -> None:
    fault = only_fault(tables=tables)
    assert (fault.key, fault.problem, fault.hint) == (key, "unknown key", hint)


def test_unknown_keys_of_the_dataset(only_fault: OnlyFault) -> None:
    dataset = 'resolutions = [256]\n[[directory]]\npath = "a"\nmask_pth = "b"'
    fault = only_fault(dataset=dataset)
    assert (fault.key, fault.hint) == ("directory[0].mask_pth", "did you mean `mask_path`?")
    fault = only_fault(dataset='mask_path = "m"\nresolutions = [256]\n[[directory]]\npath = "a"')
    assert (fault.key, fault.hint) == ("mask_path", "`mask_path` belongs in [[directory]]")
    fault = only_fault(dataset='seed = 1\nresolutions = [256]\n[[directory]]\npath = "a"')
    assert (fault.key, fault.hint) == ("seed", "`seed` belongs in the train TOML")


@pytest.mark.parametrize(
    ("tables", "key"),
    [
        ("[optimizer]\nbetas = [0.9]", "optimizer.betas[1]"),
        ("[optimizer]\nbetas = [0.9, 1.0]", "optimizer.betas[1]"),
        ("[optimizer]\nbetas = [0.9, 0.99, 0.999]", "optimizer.betas"),
        ("[sampling]\nseeds = [1, -2]", "sampling.seeds[1]"),
        ("[[ema.track]]\nname = 'a b'\ndecay = 0.9", "ema.track[0].name"),
        ("[[ema.track]]\nname = 'a'", "ema.track[0]"),
        ("[[ema.track]]\nname = 'a'\ndecay = 0.9\npower_width = 0.1", "ema.track[0]"),
        ("[ema]\ndecay = 1.0", "ema.decay"),
        ("[[adapter]]\nrank = 1", "adapter"),
    ],
)
def test_key_paths_reach_into_lists(only_fault: OnlyFault, tables: str, key: str) -> None:
    assert only_fault(tables=tables).key == key


def test_missing_tables_and_keys(files: Any) -> None:
    files.write()
    files.train_path.write_text("max_steps = 1\nsave_every_n_steps = 1\n")
    faults = faults_of(files.train_path)
    assert {fault.key for fault in faults} == {"output_dir", "dataset", "model"}
    assert {fault.problem for fault in faults} == {"is required and missing"}


def test_syntax_error_names_the_line(files: Any) -> None:
    files.write(dataset="resolutions = [256]\n\npath = = 3\n")
    (fault,) = faults_of(files.train_path)
    assert (Path(fault.file).name, fault.key) == ("data.toml", "line 3")
    files.train_path.write_text('a = """never closed\n')
    refused("line 2: TOML syntax", load_config, files.train_path)


def test_unreadable_files(files: Any) -> None:
    refused("No such file", load_config, files.folder / "absent.toml")
    (files.folder / "project").mkdir()
    (files.folder / "empty").mkdir()
    for name in ("train.toml", "data.toml"):
        (files.folder / "project" / name).touch()
    refused(r"it is a folder; give one of its files: data\.toml, train\.toml", load_config, files.folder / "project")
    refused("it is a folder; give a TOML file; `sd3-light new` writes one", load_config, files.folder / "empty")
    files.train_path.write_bytes(b"seed = 1 # \xff\n")
    refused("not UTF-8", load_config, files.train_path)


def test_missing_dataset_files_are_named(files: Any) -> None:
    faults = files.faults('dataset = "gone.toml"\neval_datasets = [3, "lost.toml"]')
    assert [(fault.key, fault.problem) for fault in faults] == [
        ("eval_datasets[0]", "wrong type"),
        ("dataset", "no such file"),
        ("eval_datasets[1]", "no such file"),
    ]
    assert faults[1].value == str(files.folder / "gone.toml")


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("optimizer.lr=fast", "optimizer.lr"),
        ("optimizer.betas=[0.9, 2]", "optimizer.betas[1]"),
        ("optimizer.betas=[0.9", "optimizer.betas"),
        ("optimiser.lr=1", "optimiser"),
        ("dataset.resolutions=[512]", "dataset"),
        ("max_steps", "max_steps"),
        ("blocks_to_swap=3", "blocks_to_swap"),
        ("zero_stage=9", "zero_stage"),
    ],
)
def test_faults_of_overrides_name_the_flag(files: Any, override: str, key: str) -> None:
    (fault,) = files.faults(overrides=(override,))
    assert fault.file == "--set"
    assert fault.key.startswith(key)


def test_secrets_are_not_in_reports(files: Any) -> None:
    tables = '[monitoring]\nwandb_api_key = ["sk-1"]\nwandb_token = "sk-2"\n[monitorng]\nwandb_api_key = "sk-3"'
    overrides = ("monitoring.wandb_api_key sk-5", "a_token=[sk-6")
    faults = files.faults('api_key = "sk-4"', tables=tables, overrides=overrides)
    text = str(ConfigFaults(faults))
    assert len(faults) == 6
    assert "sk-" not in text
    assert "(hidden)" in text


def test_secret_key_names() -> None:
    assert all(is_secret_key(key) for key in ("wandb_api_key", "HF_TOKEN", "db-password", "secret"))
    assert not any(is_secret_key(key) for key in ("text_tokens", "uncond_text", "keep_last_n_exports"))


@pytest.mark.parametrize("key", ["wandb_api_kye", "wandb_apikey", "hf_tokn", "hftoken", "pasword", "wandb_api_keys"])
@pytest.mark.parametrize("table", ["monitoring", "montoring"])
def test_a_mistyped_secret_is_not_shown(files: Any, table: str, key: str) -> None:
    text = str(ConfigFaults(files.faults(tables=f'[{table}]\n{key} = "hunter2-hunter2"\n')))
    assert table in text
    assert "hunter2" not in text


@pytest.mark.parametrize("where", ["top", "tables", "dataset", "directory", "directories"])
def test_thousands_of_unknown_keys(files: Any, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    compare = Mock(wraps=validation._closest)
    monkeypatch.setattr(validation, "_closest", compare)
    keys = "".join(f"unknown_{number} = 1\n" for number in range(3000))
    tables = "".join(f"[unknown_{number}]\n" for number in range(3000))
    directories = "".join(f'[[directory]]\npath = "a{number}"\nunknown_{number} = 1\n' for number in range(3000))
    changed = {
        "top": {"top": keys},
        "tables": {"tables": tables},
        "dataset": {"dataset": keys + DATASET},
        "directory": {"dataset": DATASET + keys},
        "directories": {"dataset": "resolutions = [256]\n" + directories},
    }[where]
    with pytest.raises(ConfigFaults) as caught:
        files.load(**changed)
    lines = str(caught.value).splitlines()
    assert lines[0] == "3000 problems in the config"
    assert "unknown_0: unknown key; got" in lines[1]
    assert lines[-1] == f"  ... and {3000 - MOST_SHOWN:,} more"
    assert len(lines) == 2 + MOST_SHOWN
    assert len(caught.value.faults) == 3000
    assert len({call.args[0] for call in compare.call_args_list}) <= MOST_SHOWN


def test_all_faults_are_shown_up_to_the_limit(files: Any) -> None:
    text = refused("", files.load, "".join(f"unknown_{number} = 1\n" for number in range(MOST_SHOWN)))
    assert len(text.splitlines()) == 1 + MOST_SHOWN
    assert "more" not in text.splitlines()[-1]
