"""The conclusion of `check`: whether a run fits, how long it takes and how much disk it needs."""

import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from sd3_light import system
from sd3_light.assets import DEMO
from sd3_light.check import conclusion
from sd3_light.check import verb as check
from sd3_light.check.verb import Target, conclude
from sd3_light.config import SIZES, EmaConfig
from sd3_light.config.schema_tables import EmaTrack
from sd3_light.cost.disk_space import RunSteps, run_disk
from sd3_light.cost.drawing_memory import drawing_bytes
from sd3_light.model.folder import count_weights
from sd3_light.system import Gpu, visible_gpus
from sd3_light.tensor_file import header_bytes
from tests.unit.check.conftest import shown

PRETRAIN = 'size = "demo"\ntrain_type = "sd3_light_pretrain"'
GIB = 1 << 30
UNKNOWN_GPU = " per GPU, estimated; --gpu-memory GIB says whether it fits"


@pytest.fixture
def concluded(files: Any) -> Callable[..., dict[str, str]]:
    """Return the conclusion of a config with four images."""
    files.squares(4)

    def lines(target: Target, top: str = "", world_size: int | None = None, **changes: str) -> dict[str, str]:
        loaded = files.load(top=top, **{"model": PRETRAIN, **changes})
        return dict(conclude(loaded.train, check.run(loaded, world_size), target))

    return lines


def test_a_cpu_run_has_no_line_about_gpus(files: Any, concluded: Callable[..., dict[str, str]]) -> None:
    lines = concluded(Target(on_cpu=True))
    assert "GPU memory" not in lines
    time = r"of training steps on \d+ CPU cores \(4 to 60 GFLOP/s per core; not measured\)"
    assert re.fullmatch(rf"(less than a second|.* s to .* s) {time}", lines["time"])
    soon = concluded(Target(on_cpu=True, cpu_speed=1e12))["time"]
    assert re.fullmatch(r"less than a second of training steps on \d+ CPU cores, by a few steps timed here", soon)
    longer = {"top": "max_steps = 100000"}
    assert re.fullmatch(rf".* s to .* {time}", concluded(Target(on_cpu=True), **longer)["time"])
    measured = concluded(Target(on_cpu=True, cpu_speed=1e9), **longer)["time"]
    assert re.fullmatch(r"about .* of training steps on \d+ CPU cores, by a few steps timed here", measured)
    assert lines["device"].startswith("CPU: no GPU is visible; --gpu-memory GIB or --processes N")
    loaded = files.load(model=PRETRAIN)
    estimate = check.run(loaded)
    for explain in (False, True):
        text = shown(check.render(estimate, conclude(loaded.train, estimate, Target(on_cpu=True)), explain, True))
        assert ("FLOPs per step" in text) == explain, "formulas only on request"
        assert "CUDA" not in text
        assert "context" not in text
        assert text.splitlines()[0].endswith("no faults and the run fits")


def test_the_first_line_says_whether_it_fits(files: Any, concluded: Callable[..., dict[str, str]]) -> None:
    small, large = Gpu("NVIDIA H200", 100 << 20), Gpu("NVIDIA H200", 140 * GIB)
    needed = concluded(Target(small))["GPU memory"]
    assert needed.startswith("does not fit: ")
    assert "NVIDIA H200 has 100 MiB; lower micro_batch_size_per_gpu" in needed
    assert concluded(Target(large))["GPU memory"].startswith("fits: ")
    assert concluded(Target(None), world_size=2)["GPU memory"].endswith(UNKNOWN_GPU)
    loaded = files.load(model=PRETRAIN)
    estimate = check.run(loaded)
    text = shown(check.render(estimate, conclude(loaded.train, estimate, Target(small))))
    assert text.splitlines()[0].endswith(": no faults, but the run does not fit")


def test_the_duration_is_known_for_measured_gpus(concluded: Callable[..., dict[str, str]]) -> None:
    text = concluded(Target(Gpu("NVIDIA H200")), top="max_steps = 100000")["time"]
    # 4 blocks of 1.8 ms each: a small model is limited by the shortest times of its kernels
    speed = "49% of its peak with fast blocks"
    assert text == f"about 12 min of training steps on 1 x NVIDIA H200 ({speed} in CUDA graphs, measured)"
    text = concluded(Target(Gpu("NVIDIA H200")), top="max_steps = 100000\ncuda_graphs = false")["time"]
    # 9 ms each: by their launches
    assert text == f"about 1 h of training steps on 1 x NVIDIA H200 ({speed}, measured)"
    unknown = concluded(Target(Gpu("a GPU")))["time"]
    assert unknown.startswith("unknown: no speed was measured on this kind")
    assert "`sd3-light check TOML --gpu H200`" in unknown
    by_memory = concluded(Target(Gpu("the GPU", 24 * GIB)), top="max_steps = 100000\ncuda_graphs = false")["time"]
    peaks = r"10% to 50% of the peaks of GPUs with this memory, A10G to 4090; `sd3-light check TOML --gpu H200`"
    assert re.match(rf"[\d.]+ s to 1 h of training steps on 1 GPU \({peaks}", by_memory), by_memory
    others = concluded(Target(Gpu("NVIDIA A100")), top="max_steps = 100000")["time"]
    shares = r"\(10% to 50% of its peak: no speed was measured on this kind of GPU\)"
    assert re.fullmatch(rf".* s to 1 h of training steps on 1 x NVIDIA A100 {shares}", others)
    real = concluded(
        Target(Gpu("NVIDIA H200")), "max_steps = 100000", world_size=2, model=f'{PRETRAIN}\ntext_tokens = "real"'
    )["time"]
    assert real.startswith("at most ")
    assert real.endswith("several GPUs were not measured)")


def test_disk_counts_checkpoints_and_exports_that_are_kept(
    concluded: Callable[..., dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    top = "max_steps = 100\nsave_every_n_steps = 30\ncheckpoint_every_n_steps = 10\n"
    text = concluded(Target(on_cpu=True), top=top)["disk, run"]
    assert ": 4 checkpoints of " in text, "three are kept while the next is written"
    assert ", 4 exports of " in text, "three and the last"
    text = concluded(Target(on_cpu=True), top=f"{top}keep_last_n_checkpoints = 0\nkeep_last_n_exports = 1")["disk, run"]
    assert ": 10 checkpoints of " in text
    assert ", 2 exports of " in text
    monkeypatch.setattr(shutil, "disk_usage", lambda _: type("Usage", (), {"free": 5 << 20}))
    lines = concluded(Target(on_cpu=True), top=top)
    assert lines["disk, run"].startswith("does not fit: ")
    assert "; 5 MiB are free; choose another output_dir, or a lower keep_last_n_checkpoints" in lines["disk, run"]
    assert lines["disk, cache"].startswith("fits: ")


def test_disk_counts_the_best_export_too(files: Any) -> None:
    files.image("0.png", 64, 64)
    top = "max_steps = 100\nsave_every_n_steps = 10\nkeep_last_n_exports = 2\n"
    loaded = files.load(model=PRETRAIN, top=top)
    setup = check.run(loaded).setup
    steps = RunSteps(100, 10, 8)
    assert ", 3 exports of " in run_disk(loaded.train, setup, steps)[1], "two are kept while the next is written"
    evaluated = loaded.train.model_copy(update={"eval_every_n_steps": 10})
    assert ", 4 exports of " in run_disk(evaluated, setup, steps)[1]


def test_files_that_the_run_has_written_count_as_space_for_it(
    files: Any, concluded: Callable[..., dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a run in progress would not fit any more."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1 << 20}))
    assert concluded(Target(on_cpu=True))["disk, run"].startswith("does not fit: ")
    checkpoint = files.folder / "runs/checkpoints/step-1/state.safetensors"
    checkpoint.parent.mkdir(parents=True)
    with checkpoint.open("wb") as file:
        file.truncate(1 << 30)
    (checkpoint.parent / "link").hardlink_to(checkpoint)
    assert concluded(Target(on_cpu=True))["disk, run"].startswith("does not fit: "), "links take no space"
    (checkpoint.parent / "link").unlink()
    line = concluded(Target(on_cpu=True))["disk, run"]
    assert line.startswith("fits: ")
    assert line.endswith("; 1 MiB are free and 1 GiB already written")


def test_another_machine_is_not_judged_by_the_disk_and_memory_of_this_one(
    files: Any, concluded: Callable[..., dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1}))
    monkeypatch.setattr(conclusion, "available_memory", lambda: 1)
    here, there = concluded(Target(on_cpu=True)), concluded(Target(None, elsewhere=True))
    for label in ("disk, cache", "disk, run", "host memory"):
        assert here[label].startswith("does not fit: ")
        assert there[label] in here[label]
        assert "fit" not in there[label]
    assert "fit" not in there["cache residence"].replace("as much", "")
    assert "write cache_residence = 'stream', or lower num_dataloader_workers" in here["host memory"]
    estimate = check.run(files.load(model=PRETRAIN))
    first, *_ = shown(check.render(estimate, list(there.items()))).splitlines()
    assert first.endswith(": no faults"), "the GPU's memory is unknown"


def test_prompts_and_captions_that_are_cut_have_a_line(files: Any) -> None:
    for name in ("tokenizer", "tokenizer_3"):
        shutil.copytree(DEMO / name, files.folder / "sd3" / name, dirs_exist_ok=True)
    (files.sd3 / "vae/diffusion_pytorch_model.safetensors").write_bytes(header_bytes([]))
    files.image("short.png", 64, 64, caption="a star")
    sampling = '[sampling]\nevery_n_steps = 5\nprompts = ["a star", "{}"]'

    def lines(prompt: str) -> dict[str, str]:
        loaded = files.load(model=PRETRAIN, tables=sampling.format(prompt))
        return dict(conclude(loaded.train, check.run(loaded), Target(on_cpu=True)))

    assert not {"prompt", "captions train"} & lines("a blue star").keys()
    files.image("long.png", 64, 64, caption="a red star " * 20)
    cut = lines("a red star " * 20)
    assert cut["prompt"].startswith("warning: the prompt 'a red star a red star")
    assert "T5 reads 12 of its" in cut["prompt"]
    assert cut["captions train"].startswith("of 2 captions 1 exceed CLIP's 16 tokens, 1 exceed t5_max_length = 12")
    assert "shorten them, or raise t5_max_length" in cut["captions train"]
    assert "tokens: 'a red star a red star" in cut["captions train"]


def test_gpus_are_found_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system.shutil, "which", lambda _: "nvidia-smi")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    reply = subprocess.CompletedProcess([], 0, "NVIDIA H200, 143771\nNVIDIA H200, 143771\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: reply)
    assert visible_gpus() == [Gpu("NVIDIA H200", 143771 << 20)] * 2
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, "No devices were found"))
    assert visible_gpus() == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: reply)
    assert visible_gpus() == []


@pytest.mark.parametrize("residence", ["stream", "host", "device"])
def test_it_says_where_the_cache_fits(
    concluded: Callable[..., dict[str, str]], monkeypatch: pytest.MonkeyPatch, residence: str
) -> None:
    top = f'cache_residence = "{residence}"'
    whole = concluded(Target(), 'cache_residence = "device"')["GPU memory"].removesuffix(UNKNOWN_GPU)
    for free, word in ((1 << 40, "fits"), (1 << 10, "does not fit")):
        monkeypatch.setattr(conclusion, "available_memory", lambda free=free: free)
        line = concluded(Target(Gpu("NVIDIA H200", free)), top)["cache residence"]
        assert re.match(rf'{residence}; "host" takes \S+ \S+ of host memory per process \({word}: ', line)
        assert f'"device" as much GPU memory ({word}: {whole} in total)' in line
    assert f'"device" as much GPU memory ({whole} in total)' in concluded(Target(), top)["cache residence"]
    assert "device" not in concluded(Target(on_cpu=True))["cache residence"]


def test_it_says_what_auto_picks(concluded: Callable[..., dict[str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """By the rules of training."""

    def picked(target: Target, top: str = "max_steps = 1000", **keys: Any) -> str:
        return concluded(target, top, **keys)["cache residence"].partition('; "host" takes ')[0]

    large, small = Gpu("NVIDIA H200", 140 * GIB), Gpu("NVIDIA H200", GIB // 2)
    monkeypatch.setattr(conclusion, "available_memory", lambda: 10 * GIB)
    assert re.fullmatch(
        r"auto picks device \(it takes \S+ KiB; GPU memory has room for 1\d\d GiB beside training\)",
        picked(Target(large)),
    )
    assert re.fullmatch(
        r"auto picks host \(.*; half of the free host memory is 5 GiB per process\)", picked(Target(small))
    )
    assert picked(Target(small), world_size=2).endswith("half of the free host memory is 2.5 GiB per process)")
    monkeypatch.setattr(conclusion, "available_memory", lambda: 10)
    assert picked(Target(small)).startswith("auto picks stream (")
    assert picked(Target(on_cpu=True)) == "auto picks stream (on a CPU the model takes longer than reading)"
    assert picked(Target(small, elsewhere=True)).endswith("; the free host memory is unknown)")
    assert picked(Target()) == "auto, by the memory of the GPUs when training starts"


SAMPLING = '[sampling]\nprompts = ["a star"]\nevery_n_steps = 5\nguidance = '
DROPOUT = "enable_uncond_text_dropout = true\n"


@pytest.mark.parametrize(
    ("top", "model", "tables", "warning"),
    [
        ("", "", SAMPLING + "4.0", "sampling.guidance = 4 compares with a prediction without text"),
        ("", DROPOUT + "uncond_text_dropout_prob = 0.0", SAMPLING + "4.0", "sampling.guidance = 4 compares"),
        ("", DROPOUT, SAMPLING + "4.0", None),
        ("", "", SAMPLING + "1.0", None),
        ("", "", "", None),
        ("epochs = 5\nwarmup_steps = 2", "", "", None),
        ("max_steps = 3\nwarmup_steps = 3", "", "", "warmup_steps = 3 is not shorter than the run of 3 steps"),
    ],
)
def test_guidance_without_text_dropout_and_a_warm_up_as_long_as_the_run_are_warnings(
    files: Any, concluded: Callable[..., dict[str, str]], top: str, model: str, tables: str, warning: str | None
) -> None:
    (files.sd3 / "vae/diffusion_pytorch_model.safetensors").write_bytes(header_bytes([]))
    lines = concluded(Target(None), top=top, model=f"{PRETRAIN}\nposition_step = 0.5\n{model}", tables=tables)
    assert lines["trains"].endswith(f"({SIZES['demo'].num_parameters():,} parameters, position step 0.5)")
    assert ("warning" in lines) == (warning is not None)
    assert lines.get("warning", "").startswith(warning or "")


def test_a_line_says_whether_sampling_works_in_phases(
    files: Any, concluded: Callable[..., dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def line(memory: int | None) -> str:
        return concluded(Target(Gpu("NVIDIA H200", memory)))["sample"]

    assert line(140 * GIB).startswith("keeps all parts loaded: ")
    assert line(GIB).startswith("works in phases in float32 and bfloat16: text encoders, denoiser, VAE (")
    assert line(GIB).endswith(" in bfloat16, of 1 GiB)")
    loaded = files.load(model=PRETRAIN)
    weights = {**count_weights(loaded.train.model.diffusers_path), "transformer": SIZES["demo"].num_parameters()}
    half = drawing_bytes(weights, 2)
    assert line(half).startswith("keeps all parts loaded in bfloat16, and works in phases in float32: ")
    assert line(half - 1).startswith("works in phases in float32 and bfloat16")
    assert line(None).endswith(" in bfloat16; with less memory works in phases")
    monkeypatch.setattr(conclusion, "available_memory", lambda: 1 << 20)
    assert concluded(Target(on_cpu=True))["sample"].startswith("works in phases")


@pytest.mark.parametrize(
    ("decay", "interval", "steps", "line"),
    [
        (0.98, 1, 400, "decay 0.978 at the last step, not 0.98, which the ramp reaches at step 441; "),
        (0.978, 1, 400, "decay 0.978 at the last step, reached at step 400; the average covers about the last 45 of "),
        (0.98, 1, 900, "decay 0.98 at the last step, reached at step 441; the average covers about the last 50 of 900"),
        (0.999, 10, 400, "decay 0.8163 at the last step, not 0.999, which the ramp reaches at step 89,910; "),
        (0.99, 100, 99, "warning: it is never updated, as update_every = 100 exceeds the 99 steps"),
    ],
)
def test_the_decay_at_the_last_step_is_shown(files: Any, decay: float, interval: int, steps: int, line: str) -> None:
    files.image("0.png", 64, 64)
    loaded = files.load(model=PRETRAIN)
    estimate = replace(check.run(loaded), total_steps=steps)
    assert "EMA" not in dict(conclude(loaded.train, estimate, Target(on_cpu=True)))
    for track in ({}, {"track": (EmaTrack(name="long", decay=decay), EmaTrack(name="wide", power_width=0.1))}):
        ema = EmaConfig(enable=True, decay=decay, update_every=interval, **track)
        lines = dict(conclude(loaded.train.model_copy(update={"ema": ema}), estimate, Target(on_cpu=True)))
        assert lines["EMA"].startswith(line)
        assert lines.get("EMA long") == (lines["EMA"] if track else None)
        assert "EMA wide" not in lines
