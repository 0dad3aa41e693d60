"""Hostile files: exit code 2 and one line, or a reject; never a bug report, a hang or a huge read."""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import SD3Transformer2DModel
from safetensors.torch import load_file

from sd3_light.checkpoint.index import why_incomplete
from sd3_light.checkpoint.reading import open_checkpoint
from sd3_light.checkpoint.store import commit, temporary_folder, write_part
from sd3_light.config import SIZES
from sd3_light.config.faults import UserError
from sd3_light.core.registry import family_named
from sd3_light.core.start import WeightsStart
from sd3_light.encoding.vae import load_vae
from sd3_light.engines.protocol import TensorPiece
from sd3_light.export import open_pipeline as open_pipeline_module
from sd3_light.export import proof_process
from sd3_light.export.lora_file import write_lora
from sd3_light.families.sd3.sample_texts import TextPolicy
from sd3_light.families.sd3.text import load_text_model
from sd3_light.model.folder import TEXT_ENCODER_FOLDERS
from sd3_light.model.lora_layers import LoraModule
from tests.hostile import Outcome, run_cli
from tests.project import Project

DEEP = "[" * 100_000 + "]" * 100_000
DEEP_OBJECT = '{"a":' * 100_000 + "1" + "}" * 100_000
WEIGHTS = "diffusion_pytorch_model"
CPU = torch.device("cpu")


def refused(*arguments: object, seconds: float = 20) -> str:
    """Run a command that must exit with code 2 and return its message."""
    outcome = run_cli(*arguments, seconds=seconds)
    assert outcome.code == 2, outcome
    assert "bug in sd3-light" not in outcome.err
    return outcome.err


def accepted(*arguments: object) -> Outcome:
    outcome = run_cli(*arguments, seconds=60)
    assert outcome.code == 0, outcome
    return outcome


@pytest.fixture(scope="module")
def good_model(tmp_path_factory: pytest.TempPathFactory, demo_parts: Path) -> Path:
    """A complete model folder. Read-only: tests use copies."""
    folder = tmp_path_factory.mktemp("models") / "good"
    shutil.copytree(demo_parts, folder, copy_function=os.link)
    size = replace(SIZES["tiny2"], num_layers=1)
    SD3Transformer2DModel(**size.transformer_config()).save_pretrained(folder / "transformer")
    return folder


@pytest.fixture
def model(tmp_path: Path, good_model: Path) -> Path:
    return Path(shutil.copytree(good_model, tmp_path / "model"))


@pytest.fixture
def finetune(tmp_path: Path, raw_project: Project, model: Path) -> Project:
    """A project that fine-tunes a model that the test may damage."""
    project = raw_project.copy(tmp_path / "project")
    text = project.train_toml.read_text().replace(str(project.model), str(model)).replace('init = "random"', "")
    project.train_toml.write_text(text.replace('train_type = "sd3_light_pretrain"', "").replace('size = "tiny2"', ""))
    return Project(project.folder, model)


# --- pipes, devices and long names -------------------------------------------------------------


def test_pipes_huge_files_and_huge_numbers_are_no_configs_and_sources(fresh_project: Project, tmp_path: Path) -> None:
    os.mkfifo(fresh_project.folder / "pipe.toml")
    assert "not a regular file" in refused("check", fresh_project.folder / "pipe.toml")
    assert "not a regular file" in refused("check", "/dev/zero")
    assert "not a regular file" in refused("check", fresh_project.train_toml, "--set", "dataset=pipe.toml")
    with open(tmp_path / "a.toml", "wb") as file:
        file.truncate(1 << 40)
    assert "larger than" in refused("check", tmp_path / "a.toml")
    for name in ("a.tar", "a.parquet"):
        os.mkfifo(fresh_project.folder / name)
        fresh_project.data(f'size_buckets = [[64, 64]]\n[[directory]]\npath = "{name}"\n')
        assert "directory[0].path" in refused("check", fresh_project.train_toml)
    data = 'resolutions = [64]\nenable_ar_bucket = true\nnum_ar_buckets = 1000000000\n[[directory]]\npath = "images"\n'
    fresh_project.data(data)
    assert "num_ar_buckets: out of range" in refused("check", fresh_project.train_toml)


def make_device(path: Path) -> None:
    """Make a link to a device, as an ordinary user may; reading it never ends."""
    path.symlink_to("/dev/zero")


SPECIAL = {
    **dict.fromkeys(("extra.png", "extra.txt", "a.tar", "a.parquet"), "unreadable"),
    **dict.fromkeys(("metadata.json", "metadata.jsonl", "metadata.csv"), "broken_table"),
}


@pytest.mark.parametrize("make", [os.mkfifo, make_device], ids=["pipe", "device"])
@pytest.mark.parametrize("name", SPECIAL)
def test_pipes_among_images_are_rejected(fresh_project: Project, name: str, make: Callable[[Path], object]) -> None:
    """As images, captions, tables and containers."""
    images = fresh_project.images
    if name == "extra.png":
        (images / "extra.txt").write_text("a pipe")
    if name == "extra.txt":
        shutil.copy(min(images.glob("*.png")), images / "extra.png")
    make(images / name)
    assert f"rejected 1: {SPECIAL[name]}" in accepted("check", fresh_project.train_toml).out


@pytest.mark.parametrize("path", ["x" * 5000, "x/" * 2500, "~no_such_user/x", "a\\u0000b", "x" * 300])
def test_impossible_paths_are_faults(raw_project: Project, path: str) -> None:
    for key in ("output_dir", "dataset", "cache_dir", "model.diffusers_path", "model.init"):
        assert f"{key}: " in refused("check", raw_project.train_toml, "--set", f'{key}="{path}"')


@pytest.mark.parametrize("path", ["x" * 5000, "~no_such_user/x", "a\\u0000b"])
def test_impossible_paths_of_a_dataset_are_faults(fresh_project: Project, path: str) -> None:
    fresh_project.data(f'size_buckets = [[64, 64]]\n[[directory]]\npath = "{path}"\nmask_path = "{path}"\n')
    message = refused("check", fresh_project.train_toml)
    assert "directory[0].path: " in message
    assert "directory[0].mask_path: " in message
    refused("check", fresh_project.train_toml, "--set", f'eval_datasets=["{path}"]')


@pytest.mark.parametrize("verb", ["check", "inspect", "report", "convert", "sample", "lora"])
def test_a_long_name_on_the_command_line_is_refused(tmp_path: Path, verb: str) -> None:
    rest = {"convert": [tmp_path / "a.safetensors"], "sample": ["a prompt"]}.get(verb, [])
    arguments = ["lora", "convert"] if verb == "lora" else [verb]
    message = refused(*arguments, "x" * 5000, *(rest if verb != "lora" else [tmp_path / "a.safetensors"]))
    assert "x" * 50 in message


# --- TOML --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        "x = " + "[" * 3000 + "]" * 3000,
        "x = " + "{a = " * 3000 + "1" + "}" * 3000,
        ".".join(["a"] * 3000) + " = 1",
        "seed = " + "9" * 6000,
        "output_dir = " + "9" * 4000,
        f"[{'.'.join(['a'] * 3000)}]\nb = 1",
    ],
    ids=["lists", "tables", "dotted", "digits", "4000 digits", "header"],
)
def test_deep_toml_and_long_numbers_are_faults(fresh_project: Project, line: str) -> None:
    text = fresh_project.train_toml.read_text()
    fresh_project.train_toml.write_text(line + "\n" + text)
    assert "train.toml" in refused("check", fresh_project.train_toml)
    fresh_project.train_toml.write_text(text)
    fresh_project.data(line + '\n[[directory]]\npath = "images"\n')
    assert "data.toml" in refused("check", fresh_project.train_toml)


@pytest.mark.parametrize("value", ["[" * 3000 + "]" * 3000, "9" * 6000])
def test_deep_values_of_set_are_faults(raw_project: Project, value: str) -> None:
    assert "error: " in refused("check", raw_project.train_toml, "--set", f"seed={value}")


def test_numbers_without_sense_are_out_of_range(raw_project: Project) -> None:
    numbers = {"model.num_layers": 10**9, "model.sigmoid_scale": 1e30, "adapter.rank": 10**12}
    for key, value in (*numbers.items(), ("model.shift", 1e30), ("model.shift", 1e-30)):
        assert f"{key}: out of range" in refused("check", raw_project.train_toml, "--set", f"{key}={value}")


@pytest.mark.parametrize(
    "protocol", ["nothing", "dask", "reference", "jupyter", "dir", "filecache", "zip", "blockcache"]
)
def test_a_protocol_that_cannot_be_used_is_a_fault(raw_project: Project, protocol: str) -> None:
    url = f"{protocol}://folder/x"
    assert url in refused("check", raw_project.train_toml, "--set", f"cache_dir={url}")


# --- model folders -----------------------------------------------------------------------------

CONFIGS = [f"{part}/config.json" for part in ("transformer", "vae", "text_encoder", "text_encoder_2", "text_encoder_3")]


@pytest.mark.parametrize("file", [*CONFIGS, "tokenizer/tokenizer_config.json", "scheduler/scheduler_config.json"])
def test_a_damaged_config_of_a_model_is_a_fault(finetune: Project, file: str) -> None:
    for text in (DEEP_OBJECT, "[]", "{", '{"a": ' + "9" * 6000 + "}", "\udcff"):
        (finetune.model / file).write_bytes(text.encode("utf-8", "surrogateescape"))
        assert f"{finetune.model / file} " in refused("check", finetune.train_toml)


def test_a_pipe_in_a_model_folder_is_refused(finetune: Project) -> None:
    (finetune.model / "transformer/config.json").unlink()
    os.mkfifo(finetune.model / "transformer/config.json")
    assert "transformer/config.json" in refused("check", finetune.train_toml)


POSITIONS = {"max_position_embeddings": ["x"]}
CHANNELS = [5, "x" * 4, [1] * 10**5]
WRONG: dict[str, dict[str, Any]] = {
    "transformer/config.json": {
        "num_layers": ["two", 0, -1, 10**9, 1.5, None, [1], True],
        "num_attention_heads": ["x", 0, 10**12],
        "attention_head_dim": [None, 10**12],
        "joint_attention_dim": ["x", 10**12],
        "pooled_projection_dim": [{}, 10**12],
        "sample_size": [[], -1],
        "pos_embed_max_size": ["x", 10**9],
        "dual_attention_layers": [5, "x", ["a"], [[1]], {"a": 1}],
        "qk_norm": [5, "x"],
        "_class_name": [5],
        "patch_size": ["2"],
    },
    "text_encoder/config.json": {"hidden_size": ["x", 10**12, -1], "projection_dim": [[]], **POSITIONS},
    "text_encoder_3/config.json": {"d_model": ["x", 10**12, 1e30, None]},
    "vae/config.json": {"latent_channels": ["x"], "block_out_channels": CHANNELS, "scaling_factor": ["x", None]},
    "tokenizer/tokenizer_config.json": {"model_max_length": [-5, 0, 1.5e-300]},
    "scheduler/scheduler_config.json": {"shift": ["x", [1], -1, 1e30], "use_dynamic_shifting": ["x"]},
}


@pytest.mark.parametrize("file", WRONG)
def test_a_wrong_type_in_a_model_folder_is_a_fault(finetune: Project, file: str) -> None:
    path = finetune.model / file
    good = json.loads(path.read_text())
    for key, values in WRONG[file].items():
        for value in values:
            path.write_text(json.dumps({**good, key: value}))
            assert f"{key} " in refused("check", finetune.train_toml)
        if not file.startswith("tokenizer"):
            out = finetune.folder / "a.safetensors"
            assert f"{key} " in refused("convert", finetune.model, out, "--text-encoders")


@pytest.mark.parametrize(
    "name", ["../other.safetensors", "/etc/passwd", "a/../../b.safetensors", "x" * 300, "a\0b", "."]
)
def test_an_index_cannot_name_files_elsewhere(finetune: Project, name: str) -> None:
    folder = finetune.model / "transformer"
    weights = folder / f"{WEIGHTS}.safetensors"
    index = {"weight_map": dict.fromkeys(load_file(weights), name)}
    weights.rename(finetune.model / "other.safetensors")
    (folder / f"{WEIGHTS}.safetensors.index.json").write_text(json.dumps(index))
    for command in (["check", finetune.train_toml], ["convert", finetune.model, finetune.folder / "a.safetensors"]):
        assert f"{WEIGHTS}.safetensors.index.json" in refused(*command)
    assert not (finetune.folder / "a.safetensors").exists()


def as_pickle(folder: Path, stem: str, pickle: str) -> None:
    """Replace the weights of a part by a pickle, which the libraries would fall back to."""
    torch.save(load_file(folder / f"{stem}.safetensors"), folder / pickle)
    (folder / f"{stem}.safetensors").unlink()


@pytest.mark.parametrize("part", ["text_encoder", "vae"])
def test_a_pickle_is_never_opened(finetune: Project, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An index that names no safetensors file would let diffusers and transformers fall back to `.bin`."""
    stem = "model" if part == "text_encoder" else WEIGHTS
    folder = finetune.model / part
    as_pickle(folder, stem, "pytorch_model.bin" if stem == "model" else f"{stem}.bin")
    (folder / f"{stem}.safetensors.index.json").write_text('{"weight_map": {}}')
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("a pickle was opened"))
    assert "names no file" in refused("cache", finetune.train_toml)


def test_every_reader_of_a_model_refuses_pickles(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also without the checks of the command line, which find the missing file first."""
    as_pickle(model / "transformer", WEIGHTS, f"{WEIGHTS}.bin")
    as_pickle(model / "vae", WEIGHTS, f"{WEIGHTS}.bin")
    as_pickle(model / "text_encoder", "model", "pytorch_model.bin")
    start = WeightsStart("folder", model / "transformer", SIZES["tiny2"], "")
    padded, real = (TextPolicy(16, "empty", kind) for kind in ("padded", "real"))
    readers: list[Callable[[], object]] = [
        lambda: load_vae(model, CPU, torch.float32),
        lambda: load_text_model("clip_l", model, CPU, torch.float32),
        lambda: family_named("sd3").weights.load(start, 0),
        lambda: open_pipeline_module._load(model, family_named("sd3"), padded, torch.float32),
        lambda: open_pipeline_module._load(model, family_named("sd3"), real, torch.float32),
        lambda: proof_process.load_pipeline(model, torch.float32, False, list(TEXT_ENCODER_FOLDERS)),
        lambda: proof_process.load_base("SD3Transformer2DModel", str(model / "transformer"), torch.float32),
    ]
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("a pickle was opened"))
    for read in readers:
        with pytest.raises((UserError, OSError), match="safetensors"):
            read()


# --- safetensors headers -----------------------------------------------------------------------


def header(text: str | bytes, length: int | None = None) -> bytes:
    data = text if isinstance(text, bytes) else text.encode()
    return (len(data) if length is None else length).to_bytes(8, "little") + data


HEADERS = {
    "2^50": header("{}", 1 << 50),
    "2^63": header("{}", (1 << 63) + 5),
    "deep": header('{"a": ' + DEEP + "}"),
    "a list": header("[]"),
    "no entry": header('{"a": 5}'),
    "shape": header('{"a": {"dtype": "F32", "shape": "x", "data_offsets": [0, 0]}}'),
    "huge shape": header('{"a": {"dtype": "F32", "shape": [1e300], "data_offsets": [0, 4]}}'),
    "many dimensions": header(json.dumps({"a": {"dtype": "F32", "shape": [2**62] * 50_000, "data_offsets": [0, 4]}})),
    "dimensions of 1": header(json.dumps({"a": {"dtype": "F32", "shape": [1] * 100_000, "data_offsets": [0, 4]}}))
    + bytes(4),
    "offsets": header('{"a": {"dtype": "F32", "shape": [1], "data_offsets": ["0", "4"]}}'),
    "dtype": header('{"a": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}}'),
    "metadata": header('{"__metadata__": {"sd3_light": ' + json.dumps(DEEP_OBJECT) + "}}"),
    "nothing": b"",
}


@pytest.mark.parametrize("kind", HEADERS)
def test_a_bad_header_is_refused_by_every_reader(finetune: Project, kind: str, tmp_path: Path) -> None:
    bad = tmp_path / "bad.safetensors"
    bad.write_bytes(HEADERS[kind])
    out = tmp_path / "out"
    refused("convert", bad, out, "--base", finetune.model)
    refused("lora", "convert", bad, tmp_path / "out.safetensors")
    refused("check", finetune.train_toml, "--set", f"model.init={bad}")
    for part, stem in (("transformer", WEIGHTS), ("vae", WEIGHTS)):
        shutil.copy(bad, finetune.model / part / f"{stem}.safetensors")
        refused("convert", finetune.model, tmp_path / "out.safetensors")
    if kind in ("deep", "metadata"):
        refused("cache", finetune.train_toml)
    assert not out.exists()
    assert not (tmp_path / "out.safetensors").exists()


def test_deep_metadata_of_a_lora_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    modules = {"transformer_blocks.0.attn.to_q": LoraModule(torch.ones(2, 128), torch.ones(128, 2))}
    tensors = load_file(write_lora(tmp_path / "good.safetensors", modules))
    for key in ("sd3_light", "lora_adapter_metadata"):
        save_file(tensors, tmp_path / "bad.safetensors", {key: DEEP_OBJECT})
        assert "nested" in refused("lora", "convert", tmp_path / "bad.safetensors", tmp_path / "out.safetensors")
    os.mkfifo(tmp_path / "pipe.safetensors")
    assert "pipe.safetensors" in refused("lora", "convert", tmp_path / "pipe.safetensors", tmp_path / "out.safetensors")


# --- manifests ---------------------------------------------------------------------------------


WRONG_MANIFEST: dict[str, list[Any]] = {"recipe": [5], "counts": [[1], {"used": "x"}], "shards": [5], "format": ["2"]}
WRONG_MANIFEST["places"] = ["x", {"directory:images#0": 5}]
WRONG_SHARD: dict[str, list[Any]] = {"bucket": [5, "x"], "resolution": [[64], ["a", "b"]], "count": ["x", -1]}
WRONG_SHARD |= {"bytes": [1.5], "sha256": [5], "fingerprint": [[]], "directory": [None]}
WRONG_SHARD["file"] = [5, "../../outside.safetensors", "/etc/passwd"]


def test_a_manifest_of_wrong_types_is_damaged(project: Project) -> None:
    path = project.cache / "manifest.json"
    good = path.read_text()
    for is_shard, wrong in enumerate((WRONG_MANIFEST, WRONG_SHARD)):
        for key, value in ((key, value) for key, values in wrong.items() for value in values):
            manifest = json.loads(good)
            (manifest["shards"][0] if is_shard else manifest)[key] = value
            path.write_text(json.dumps(manifest))
            assert str(path) in refused("inspect", project.cache)
    assert str(path) in refused("inspect", project.cache, "--out", project.folder / "page.html")
    refused("train", project.train_toml, "--trust_cache")


# --- checkpoints and logs ------------------------------------------------------------------------

PART = "rank-00000.safetensors"
INDICES: dict[str, Callable[[dict[str, Any]], object]] = {
    "no tensors": lambda index: index.pop("tensors"),
    "tensors": lambda index: index.update(tensors=5),
    "a tensor": lambda index: index["tensors"].update({"param/x": 5}),
    "ranges": lambda index: index["tensors"]["param/x"].update(ranges=[[1, 2]]),
    "shape": lambda index: index["tensors"]["param/x"].update(shape=100_000 * [-1]),
    "dtype": lambda index: index["tensors"]["param/x"].update(dtype="F3"),
    "huge": lambda index: index["tensors"]["param/x"].update(shape=[2**50], ranges=[[0, 2**50, PART, ""]]),
    "elsewhere": lambda index: index["files"].update({"../../x": 5}),
    "files": lambda index: index.update(files=[1]),
    "facts": lambda index: index.update(facts=5),
    "progress": lambda index: index.update(facts={"progress": {"step": "x"}}),
}


@pytest.mark.parametrize("text", [DEEP, DEEP_OBJECT, "[]", "5", "", "9" * 6000], ids=range(6))
def test_an_index_that_is_none_is_damaged(tmp_path: Path, finetune: Project, text: str) -> None:
    """Of a checkpoint, and of the weights in a model folder."""
    (tmp_path / "step-00000001").mkdir()
    (tmp_path / "step-00000001" / "index.json").write_text(text)
    assert str(why_incomplete(tmp_path / "step-00000001")).startswith("index.json ")
    with pytest.raises(UserError, match="step-00000001"):
        open_checkpoint(tmp_path / "step-00000001")
    (finetune.model / "transformer" / f"{WEIGHTS}.safetensors").unlink()
    index = finetune.model / "transformer" / f"{WEIGHTS}.safetensors.index.json"
    index.write_text(text)
    assert str(index) in refused("check", finetune.train_toml)


@pytest.mark.parametrize("kind", INDICES)
def test_an_index_of_wrong_types_with_the_right_hash_is_damaged(tmp_path: Path, kind: str) -> None:
    write_part(temporary_folder(tmp_path, 1), 0, [TensorPiece("param/x", torch.ones(4), 0, (4,))])
    path = commit(tmp_path, 1, [0], {"progress": {"step": 1}})
    content = json.loads((path / "index.json").read_text())
    INDICES[kind](content)
    content.pop("sha256")
    digest = hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    (path / "index.json").write_text(json.dumps({**content, "sha256": digest}))
    with pytest.raises(UserError, match=r"damaged \(index.json") as raised:
        _ = open_checkpoint(path).progress
    assert "\n" not in str(raised.value)
    assert kind != "shape" or "param/x: shape.0: Input should be greater" in str(raised.value)
    assert why_incomplete(path) is None or kind in ("elsewhere", "files")


@pytest.mark.parametrize(
    "text", ["5", '{"event": 3}', '{"event": "step", "time": 1}', '{"event": "a", "time": []}', DEEP]
)
def test_a_line_that_is_not_an_event_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "log.jsonl").write_text(text + "\n")
    assert "log.jsonl: line 1" in refused("report", tmp_path)


@pytest.mark.parametrize("verb", ["report", "inspect"])
def test_a_read_only_disk_is_named(tmp_path: Path, monkeypatch: Any, cached_project: Project, verb: str) -> None:
    """The temporary file cannot be removed there either."""

    def read_only(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    def busy(*_: object, **__: object) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    (tmp_path / "log.jsonl").write_text('{"event": "start", "time": 1.0}\n')
    monkeypatch.setattr(Path, "write_bytes", read_only)
    monkeypatch.setattr(Path, "unlink", busy)
    source = tmp_path if verb == "report" else cached_project.cache
    message = refused(verb, source, "--out", tmp_path / "page.html")
    assert f"cannot write {tmp_path / 'page.html'}: Read-only file system" in message
