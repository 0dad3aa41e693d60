"""`sd3-light sample` with the demo's model: stock images, names, metadata, grid, shares, refusals."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from sd3_light.assets import DEMO
from sd3_light.checkpoint.store import checkpoint_name
from sd3_light.config.faults import UserError
from sd3_light.engines import Launch
from sd3_light.export.lora_stack import Lora
from sd3_light.export.lycoris_file import write_lycoris
from sd3_light.export.weights_fingerprint import file_fingerprint, model_fingerprint
from sd3_light.model.adapter_layers import LycorisModule
from sd3_light.sample import verb as sample
from sd3_light.sample.image_requests import PromptRow, read_prompt_rows
from sd3_light.sample.verb import SampleOptions, assign_rows
from tests.leftovers import leave

FAST = SampleOptions(steps=2)
ROWS = [
    PromptRow("a large red circle"),
    PromptRow("two small blue squares, a star", steps=1),
    PromptRow("白色背景上有一个大的红色圆形"),
]


def model_folder(folder: Path, vae: Path = DEMO / "vae", **text: object) -> Path:
    """The demo's model with another text policy or VAE."""
    folder.mkdir()
    for part in Path(DEMO).iterdir():
        (folder / part.name).symlink_to(vae if part.name == "vae" else part)
    facts = {"text": {"t5_max_length": 16, "uncond_text": "empty", "text_tokens": "padded", **text}}
    (folder / "sd3_light.json").write_text(json.dumps(facts))
    return folder


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("models") / "tiny")


def pixels(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image)


def texts(path: Path) -> dict[str, str]:
    with Image.open(path) as image:
        chunks: dict[str, str] = image.text  # type: ignore[attr-defined]
    return chunks


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_euler_equals_the_stock_image_bit_for_bit(model: Path, tmp_path: Path) -> None:
    from diffusers import StableDiffusion3Pipeline

    row = PromptRow("a large red circle", 11, "blue", 80, 48, 3, 2.5)
    assert sample.run(model, [row], [0], tmp_path / "out", SampleOptions()) == tmp_path / "out" / "grid.png"
    pipe = StableDiffusion3Pipeline.from_pretrained(model, dtype=torch.float32, local_files_only=True)
    pipe.set_progress_bar_config(disable=True)
    settings = {"max_sequence_length": 16, "num_inference_steps": 3, "guidance_scale": 2.5, "width": 80, "height": 48}
    generator = torch.Generator("cpu").manual_seed(11)
    stock = pipe(row.prompt, negative_prompt=row.negative_prompt, generator=generator, **settings).images[0]
    assert np.array_equal(pixels(tmp_path / "out" / "00000.png"), np.asarray(stock))


def test_images_contain_their_parameters(model: Path, tmp_path: Path) -> None:
    options = SampleOptions(steps=2, guidance=3.5, negative_prompt="blue", sampler="dpm++")
    sample.run(model, ROWS, [5], tmp_path, options)
    text = texts(tmp_path / "00001.png")
    assert set(text) == {"parameters", "sd3_light"}
    prompt, negative, parameters = text["parameters"].split("\n")
    assert (prompt, negative) == ("two small blue squares, a star", "Negative prompt: blue")
    assert parameters == "Steps: 1, Sampler: DPM++ 2M, CFG scale: 3.5, Seed: 5, Size: 64x64, Model: tiny"
    facts = json.loads(texts(tmp_path / "00002.png")["sd3_light"])
    assert facts.pop("made_by").startswith("sd3-light ")
    assert facts.pop("fingerprint") == model_fingerprint(model)
    expected = {"prompt": ROWS[2].prompt, "negative_prompt": "blue", "seed": 5, "steps": 2, "guidance": 3.5}
    expected |= {"width": 64, "height": 64, "sampler": "dpm++", "shift": 1.0, "dtype": "float32", "device": "cpu"}
    expected |= {"threads": 1, "model": "tiny", "loras": []}
    assert facts == expected | {"t5_max_length": 16, "uncond_text": "empty", "text_tokens": "padded"}


def test_rows_and_seeds_make_numbered_images(model: Path, tmp_path: Path) -> None:
    """A row with its own seed is used once, the others with each seed."""
    table = tmp_path / "prompts.csv"
    table.write_text("prompt,seed,width,steps\na star,,,\na star,9,80,1\n", encoding="utf-8")
    out = tmp_path / "deep" / "out"
    assert sample.run(model, read_prompt_rows(table), [1, 2], out, SampleOptions(2, grid=False)) == out
    images = [json.loads(texts(out / f"0000{number}.png")["sd3_light"]) for number in range(3)]
    assert [(facts["seed"], facts["width"], facts["steps"]) for facts in images] == [(1, 64, 2), (2, 64, 2), (9, 80, 1)]
    assert len(files(out)) == 3
    assert not np.array_equal(pixels(out / "00000.png"), pixels(out / "00001.png"))


def test_a_prompt_that_is_cut_is_named_once(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [PromptRow("a star"), PromptRow("a red star " * 12), PromptRow("b", negative_prompt="no blue star " * 12)]
    sample.run(model, rows, [1, 2], tmp_path / "out", SampleOptions(1, guidance=1.0, grid=False))
    lines = [line for line in capsys.readouterr().err.splitlines() if "is cut" in line]
    assert len(lines) == 2
    assert lines[0].startswith("warning: the prompt 'a red star a red star")
    assert "T5 reads 16 of its" in lines[0]
    assert "'no blue star" in lines[1]


@pytest.mark.parametrize("text_tokens", [pytest.param("padded", marks=pytest.mark.slow), "real"])
def test_batch_and_split_do_not_change_a_byte(tmp_path: Path, demo_parts: Path, text_tokens: str) -> None:
    model = model_folder(tmp_path / "tiny", demo_parts / "vae", text_tokens=text_tokens, uncond_text="zero")
    for batch in (1, 8):
        sample.run(model, ROWS, [1, 2], tmp_path / f"batch{batch}", SampleOptions(2, batch=batch))
    for rank in (2, 1, 0):  # the main process last: it waits for the images of the others
        sample.run(model, ROWS, [1, 2], tmp_path / "split", FAST, Launch(rank, rank, 3))
    expected = files(tmp_path / "batch8")
    assert len(expected) == 7
    assert files(tmp_path / "batch1") == expected
    assert files(tmp_path / "split") == expected


def test_all_processes_have_about_the_same_work(tmp_path: Path) -> None:
    rows = [PromptRow("a", width=64 if number % 2 else 1024) for number in range(11)]
    shares = [assign_rows(rows, rank, 4) for rank in range(4)]
    assert sorted(number for share in shares for number in share) == list(range(11))
    assert all(share == sorted(share) for share in shares)
    large = [sum(rows[number].width == 1024 for number in share) for share in shares]
    assert max(large) - min(large) <= 1
    assert assign_rows(rows[:1], 3, 4) == []
    sample.run(tmp_path / "no model", ROWS[:1], [0], tmp_path / "out", FAST, Launch(1, 1, 2))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("rank", "name"), [(1, "00001.png"), (0, "grid.png")])
def test_nothing_is_overwritten_by_several_processes(tmp_path: Path, rank: int, name: str) -> None:
    """The error comes before the model is loaded. They do not communicate, so they cannot agree on other numbers."""
    (tmp_path / name).write_bytes(b"mine")
    with pytest.raises(UserError, match=rf"{name} already exists; choose another folder with --out"):
        sample.run(tmp_path / "no model", [ROWS[0]] * 2, [0], tmp_path, FAST, Launch(rank, rank, 2))
    assert files(tmp_path) == {name: b"mine"}


def test_numbers_continue_in_a_folder_with_images(model: Path, tmp_path: Path) -> None:
    assert sample.run(model, ROWS[:2], [0], tmp_path, FAST) == tmp_path / "grid.png"
    before = files(tmp_path)
    assert sample.run(model, ROWS[:2], [0], tmp_path, FAST) == tmp_path / "grid-00002.png"
    after = files(tmp_path)
    assert sorted(after.keys() - before.keys()) == ["00002.png", "00003.png", "grid-00002.png"]
    assert {name: after[name] for name in before} == before, "nothing is overwritten"
    assert after["00002.png"] == before["00000.png"], "the same request"
    (tmp_path / "00007.png").write_bytes(b"mine")
    leftover, other = leave(tmp_path / "00009.png"), leave(tmp_path / "notes.txt")
    sample.run(model, ROWS[:1], [0], tmp_path, FAST)
    assert files(tmp_path).keys() - after.keys() == {"00007.png", "00008.png", "grid-00008.png", other.name}
    assert not leftover.exists(), "of a killed process"


def test_an_image_of_others_is_not_replaced(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_model = sample.open_model

    def open_slowly(*arguments: Any) -> sample.OpenModel:
        (tmp_path / "00000.png").write_bytes(b"mine")
        return open_model(*arguments)

    monkeypatch.setattr(sample, "open_model", open_slowly)
    with pytest.raises(UserError, match=r"00000.png already exists; choose another folder"):
        sample.run(model, ROWS[:1], [0], tmp_path, FAST)
    assert (tmp_path / "00000.png").read_bytes() == b"mine"


def test_a_run_folder_is_sampled_with_its_newest_or_best_export(model: Path, tmp_path: Path, capsys: Any) -> None:
    run, events = tmp_path / "run", []
    for step, loss in ((2, 0.5), (10, 0.7)):
        shutil.copytree(model, run / "exports" / checkpoint_name(step))
        events += [
            {"event": "eval", "step": step, "set": "held_out", "weights": "raw", "flow": 9 - loss},
            {"event": "eval", "step": step, "set": "held_out", "weights": "ema", "flow": loss},
            {"event": "export", "step": step, "weights": "ema"},
        ]
    (run / "log.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events), encoding="utf-8")
    for best, step in ((False, 10), (True, 2)):
        sample.run(run, ROWS[:1], [0], tmp_path / f"{best}", replace(FAST, best=best))
        assert f"using {run / 'exports' / checkpoint_name(step)}" in capsys.readouterr().err.replace("\n", "")


def test_best_needs_a_run_and_its_evaluations(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--best chooses among the exports of a run"):
        sample.run(model, ROWS[:1], [0], tmp_path / "out", replace(FAST, best=True))
    run = tmp_path / "run"
    run.mkdir()
    (run / "log.jsonl").touch()
    with pytest.raises(UserError, match="has no export yet; write one with `sd3-light export"):  # stopped early
        sample.run(run, ROWS[:1], [0], tmp_path / "out", FAST)
    (run / "exports").mkdir()
    with pytest.raises(UserError, match="has no export yet; write one with `sd3-light export"):
        sample.run(run, ROWS[:1], [0], tmp_path / "out", FAST)
    shutil.copytree(model, run / "exports" / checkpoint_name(2))
    with pytest.raises(UserError, match=r"--best: no export of .* was evaluated at its step"):
        sample.run(run, ROWS[:1], [0], tmp_path / "out", replace(FAST, best=True))


def test_an_adapter_is_sampled_on_its_base(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As a LoRA run exports it; its folder states the text policy of training."""
    adapter = tmp_path / "run" / "exports" / checkpoint_name(4)
    adapter.mkdir(parents=True)
    lora_file(adapter / "pytorch_lora_weights.safetensors", "transformer_blocks.0.attn.to_q", 1)
    text = {"text_tokens": "padded", "uncond_text": "zero", "t5_max_length": 9}
    (adapter / "sd3_light.json").write_text(json.dumps({"text": text}), encoding="utf-8")
    with pytest.raises(UserError, match=r"is an adapter, and no complete model folder is there; pass the model"):
        sample.run(tmp_path / "run", ROWS[:1], [0], tmp_path / "none", FAST)
    (adapter / "config.toml").write_text(f"[model]\ndiffusers_path = {json.dumps(str(model))}\n", encoding="utf-8")
    sample.run(tmp_path / "run", ROWS[:1], [0], tmp_path / "out", FAST)
    facts = json.loads(texts(tmp_path / "out" / "00000.png")["sd3_light"])
    assert [(lora["file"], lora["strength"]) for lora in facts["loras"]] == [("pytorch_lora_weights.safetensors", 1.0)]
    assert (facts["uncond_text"], facts["t5_max_length"]) == ("zero", 9)
    named = replace(FAST, loras=(Lora.parse(f"{tmp_path / 'run'}:0.5"), Lora.parse(str(adapter))))
    sample.run(model, ROWS[:1], [0], tmp_path / "named", named)
    facts = json.loads(texts(tmp_path / "named" / "00000.png")["sd3_light"])
    assert [lora["strength"] for lora in facts["loras"]] == [0.5, 1.0]
    assert facts["t5_max_length"] == 9, "as the LoRA was trained"
    assert f"texts are encoded as for {adapter}: t5_max_length = 9, " in " ".join(capsys.readouterr().err.split())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sd3_light.sample.phases.free_memory", lambda _: 1)
        sample.run(model, ROWS[:1], [0], tmp_path / "phases", named)
    facts = json.loads(texts(tmp_path / "phases" / "00000.png")["sd3_light"])
    assert facts["t5_max_length"] == 9, "also where the parts take turns"
    alone = Path(shutil.copy(adapter / "pytorch_lora_weights.safetensors", tmp_path / "alone.safetensors"))
    sample.run(model, ROWS[:1], [0], tmp_path / "alone", replace(FAST, loras=(Lora(alone),)))
    facts = json.loads(texts(tmp_path / "alone" / "00000.png")["sd3_light"])
    assert facts["t5_max_length"] != 9
    assert f"texts are encoded as for {model}: " in " ".join(capsys.readouterr().err.split())


def test_a_grid_waits_for_other_processes_until_a_timeout(tmp_path: Path) -> None:
    (tmp_path / "0.png").touch()
    sample._wait_for([tmp_path / "0.png"], 0.0)
    with pytest.raises(UserError, match=r"no grid: 1 images of other processes are missing.*--no-grid"):
        sample._wait_for([tmp_path / "0.png", tmp_path / "1.png"], 0.05, pause=0.01)


def test_a_grid_is_not_made_of_other_images(model: Path, tmp_path: Path) -> None:
    Image.new("RGB", (64, 64)).save(tmp_path / "00001.png")  # belongs to the other process, which would refuse
    with pytest.raises(UserError, match=r"no grid: .*00001.png was written by another command"):
        sample.run(model, ROWS[:2], [0], tmp_path, FAST, Launch(0, 0, 2))


def test_a_large_job_has_a_grid_of_its_first_images(model: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(sample, "_MAX_GRID_IMAGES", 2)
    monkeypatch.setattr("sd3_light.sample.grid._LARGEST_SIDE", 32)
    sample.run(model, ROWS[:1], [1, 2, 3], tmp_path, SampleOptions(1))
    assert "the grid shows the first 2 of 3 images" in capsys.readouterr().err
    with Image.open(tmp_path / "grid.png") as grid:
        assert grid.width == 8 + 2 * (4 * 32 + 8)  # shrunk to 32, then shown at 128


def lora_file(path: Path, layer: str, seed: int) -> tuple[Path, torch.Tensor]:
    """Write a LoRA of one layer; return its file and its update of the weight."""
    generator = torch.Generator().manual_seed(seed)
    down, up = torch.randn(2, 256, generator=generator) * 0.2, torch.randn(256, 2, generator=generator) * 0.2
    save_file({f"transformer.{layer}.lora_A.weight": down, f"transformer.{layer}.lora_B.weight": up}, path)
    return path, up @ down


def lokr_file(path: Path, layer: str, seed: int) -> tuple[Path, torch.Tensor]:
    """Write a LoKr of one layer; return its file and its update of the weight."""
    generator = torch.Generator().manual_seed(seed)
    first, second = (torch.randn(16, 16, generator=generator) * 0.2 for _ in range(2))
    return write_lycoris(path, {layer: LycorisModule({"lokr_w1": first, "lokr_w2": second})}), torch.kron(first, second)


def test_strengths_of_a_loaded_model_change_as_if_it_were_loaded_with_them(model: Path, tmp_path: Path) -> None:
    layer = "transformer_blocks.1.attn.to_v"
    files = [lora_file(tmp_path / f"{number}.safetensors", layer, number)[0] for number in (1, 2)]
    stacks = [tuple(map(Lora, files, strengths)) for strengths in ((0.8, -0.4), (0.3, 2.0))]
    first, second = (SampleOptions(2, loras=loras) for loras in stacks)
    opened = sample.open_model(model, first, Launch())
    chosen = opened.chosen
    assert sample.weights_key(chosen, first) == sample.weights_key(chosen, second)
    drawn = []
    for number, each in enumerate((opened, opened.adjusted(second), sample.open_model(model, second, Launch()))):
        (files_of,) = each.draw({0: each.request(ROWS[0], 0)}, tmp_path / str(number))
        drawn.append(files_of[0].read_bytes())
    assert drawn[1] == drawn[2] != drawn[0]
    lokr, _ = lokr_file(tmp_path / "3.safetensors", layer, 3)
    keys = [sample.weights_key(chosen, SampleOptions(loras=(Lora(lokr, strength),))) for strength in (1.0, 0.5)]
    assert keys[0] != keys[1], "it is merged into the weights"


@pytest.mark.filterwarnings("error:Already found a `peft_config`")
@pytest.mark.parametrize("make_second", [lora_file, lokr_file], ids=["lora", "lokr"])
def test_stacks_equal_the_merge(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_second: Any) -> None:
    layer = "transformer_blocks.1.attn.to_v"
    file_1, first = lora_file(tmp_path / "1.safetensors", layer, 1)
    file_2, second = make_second(tmp_path / "2.safetensors", layer, 2)
    options = SampleOptions(2, loras=(Lora(file_1, 0.8), Lora(file_2, -0.4)), grid=False)
    sample.run(model, ROWS[:1], [0], tmp_path / "stack", options)
    text = texts(tmp_path / "stack" / "00000.png")
    assert json.loads(text["sd3_light"])["loras"] == [
        {"file": "1.safetensors", "strength": 0.8, "fingerprint": file_fingerprint(file_1)},
        {"file": "2.safetensors", "strength": -0.4, "fingerprint": file_fingerprint(file_2)},
    ]
    assert 'LoRA: "1.safetensors:0.8, 2.safetensors:-0.4"' in text["parameters"]

    open_pipeline = sample.open_pipeline

    def merged(*args: Any) -> Any:
        pipe, policy = open_pipeline(*args)
        pipe.transformer.get_submodule(layer).weight.data += 0.8 * first - 0.4 * second
        return pipe, policy

    sample.run(model, ROWS[:1], [0], tmp_path / "plain", SampleOptions(2, grid=False))
    monkeypatch.setattr(sample, "open_pipeline", merged)
    sample.run(model, ROWS[:1], [0], tmp_path / "merged", SampleOptions(2, grid=False))
    images = [tmp_path / name / "00000.png" for name in ("stack", "merged", "plain")]
    stack, expected, plain = (pixels(path).astype(int) for path in images)
    assert np.abs(stack - expected).max() <= 1
    assert np.abs(stack - plain).max() > 5


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([], FAST, "no prompt; pass one"),
        (ROWS, SampleOptions(sampler="ddim"), "choose one of euler, heun, dpm"),
        (ROWS, SampleOptions(dtype="half"), "choose one of float32, bfloat16"),
        (ROWS, SampleOptions(width=70), "^image size 70x64: this model needs sides that are multiples of 16"),
        ([PromptRow("a", height=65, where="p.csv:7")], FAST, r"^p\.csv:7: image size 64x65: this model"),
    ],
)
def test_refusals(model: Path, tmp_path: Path, rows: list[PromptRow], options: SampleOptions, message: str) -> None:
    with pytest.raises(UserError, match=message):
        sample.run(model, rows, [0], tmp_path / "out", options)
    assert not (tmp_path / "out").exists()


def test_a_model_without_negative_text_takes_no_negative_prompt(tmp_path: Path) -> None:
    model = model_folder(tmp_path / "zero", uncond_text="zero")
    with pytest.raises(UserError, match=r'p.csv:2: the model was .* uncond_text = "zero" and takes no negative prompt'):
        sample.run(model, [PromptRow("a", negative_prompt="b", where="p.csv:2")], [0], tmp_path / "out", FAST)
