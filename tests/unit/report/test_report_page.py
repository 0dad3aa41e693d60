"""The page of a run: self-contained, bounded in size, and complete as far as the log and the folder allow."""

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sd3_light.report import grids
from sd3_light.report.verb import write_run_page
from tests.refusals import refused
from tests.unit.pages.parsed_page import ParsedPage, assert_self_contained

HOSTILE = "<img src=http://127.0.0.1:9/x onerror=alert(1)>"


@pytest.fixture
def written(tmp_path: Path) -> Callable[..., tuple[ParsedPage, list[str]]]:
    """Return a function that writes the page of some events and returns it with its notes."""

    def make(events: Iterable[dict[str, Any]]) -> tuple[ParsedPage, list[str]]:
        lines = [json.dumps({"time": 1.8e9, **event}) + "\n" for event in events]
        (tmp_path / "log.jsonl").write_text("".join(lines))
        notes = write_run_page(tmp_path, tmp_path / "pages" / "page.html")
        return ParsedPage(tmp_path / "pages" / "page.html"), notes

    return make


Written = Callable[..., tuple[ParsedPage, list[str]]]


def grid(folder: Path, step: int, side: int = 40, weights: str = "ema", noise: bool = False) -> dict[str, Any]:
    file = folder / "samples" / f"step-{step:08d}-{weights}.png"
    file.parent.mkdir(exist_ok=True)
    pixels = np.random.default_rng(step).integers(0, 256, (side, side, 3), dtype=np.uint8)
    (Image.fromarray(pixels) if noise else Image.new("RGB", (side, side), "red")).save(file)
    name = str(file.relative_to(folder))
    return {"event": "sample", "step": step, "samples": 64 * step, "weights": weights, "file": name}


def run(steps: int = 20) -> list[dict[str, Any]]:
    fields = {"text_recon": 0.1, "lr": 1e-4, "grad_norm": 0.5, "param_norm": 9.0, "samples_per_second": 100.0}
    fields |= {"data_wait": 0.01, "mfu": 0.4, "gpu_memory_gib": 1.0, "gpu_reserved_gib": 2.0, "host_memory_gib": 3.0}
    groups = {"band": {"0.0-0.1": 0.7, "0.9-1.0": 0.8}, "ema_decay": {"ema": 0.99}}
    begin = {"event": "start", "step": 0, "total": steps, "world": 8, "device": "NVIDIA H200", "engine": "torch ddp"}
    record = {"event": "step", "samples": 64, "skipped": 1, "epoch": 0.5, "loss": 0.6, "flow": 0.5, **fields, **groups}
    evals = [
        {"event": "eval", "step": at, "set": name, "weights": kind, "flow": 0.4, "flow@0.1": 0.3, "flow@0.9": 0.5}
        for at in (0, steps)
        for name in ("held_out", "coco")
        for kind in ("raw", "ema")
    ]
    return [begin, *({**record, "step": at} for at in range(1, steps + 1)), *evals]


def titles(page: ParsedPage) -> list[str]:
    return re.findall(r"<h3>(.*?)</h3>", page.source)


def test_every_curve_has_its_chart_in_a_page_that_loads_nothing(written: Written) -> None:
    page, notes = written([*run(), {"event": "stop", "step": 20, "reason": HOSTILE}])
    assert notes == []
    assert_self_contained(page)
    assert page.attributes("img") == []
    assert HOSTILE in page.text
    assert len(page.attributes("script")) == 1
    eval_titles = ("mean over all t", "at each t, raw weights", "at each t, ema weights")
    assert titles(page) == [
        *("Loss", "Loss terms", "Loss by timestep"),
        *(f"{name}: {rest}" for name in ("held_out", "coco") for rest in eval_titles),
        *("Learning rate", "Gradient norm", "Parameter norm", "EMA decay"),
        *("Samples per second", "Data wait", "Model FLOPs utilization"),
        *("GPU memory, GiB", "Host memory, GiB"),
    ]
    for text in ("NVIDIA H200, 8 processes, torch ddp", "20 steps of 20", "t 0.9-1.0", "steps skipped"):
        assert text in page.text
    events = run(10)
    events.insert(6, {"event": "resume", "step": 5})
    events[3]["loss"] = "nan"
    page, _ = written(events)
    kinds = [attributes.get("class") for attributes in page.attributes("line")]
    assert kinds.count("mark nonfinite") == 1
    assert kinds.count("mark resume") == len(titles(page))


def test_events_are_listed_in_the_order_of_time_and_many_are_thinned_out(written: Written) -> None:
    events = [
        *run(3),
        {"event": "skip", "step": 2, "loss": "nan", "grad_norm": "inf", "time": 1.8e9 + 2},
        {"event": "checkpoint_failed", "step": 3, "reason": "No space left on device", "time": 1.8e9 + 4},
        {"event": "checkpoint", "step": 3, "file": "step-3", "stall_seconds": 0.4, "bytes": 8.9e9, "time": 1.8e9 + 3},
        {"event": "novelty", "step": 3, "thing": 7, "time": 1.8e9 + 5},
    ]
    page, _ = written(events)
    texts = ("skip", "8.9 GB, training waited 0.4 s", "No space left", "thing 7")
    positions = list(map(page.text.index, texts))
    assert positions == sorted(positions)
    saves = [{"event": "checkpoint", "step": at, "file": f"step-{at}"} for at in range(5000)]
    resumes = [{"event": "resume", "step": 1, "checkpoint": f"from-{at}"} for at in range(50)]
    page, _ = written([*run(3), *saves, *resumes])
    assert page.text.count("from-") == 50
    assert re.search(r"Not all events are shown: \d+ of 5,000 \(checkpoint\)", page.text)
    assert page.source.count("<tr") < 250


def test_grids_have_a_slider_per_kind_of_weights(written: Written, tmp_path: Path) -> None:
    drawn = [grid(tmp_path, step, weights=kind) for step in (10, 20, 30) for kind in ("raw", "ema")]
    page, notes = written([*run(), *drawn, drawn[-1]])
    assert notes == []
    assert [slider["max"] for slider in page.attributes("input") if "name" not in slider] == ["2", "2"]
    names = [f"samples at step {step}" for step in (10, 20, 30)]
    assert [image["alt"] for image in page.attributes("img")] == 2 * names
    assert "step 30 · 1,920 samples seen" in page.text


def test_grids_that_cannot_be_shown_are_named(written: Written, tmp_path: Path) -> None:
    drawn = [grid(tmp_path, step) for step in (10, 20, 30)]
    (tmp_path / str(drawn[0]["file"])).unlink()
    (tmp_path / str(drawn[1]["file"])).write_bytes(b"not an image")
    Image.new("RGB", (40, 40)).save(tmp_path.parent / "secret.png")
    outside = {**drawn[0], "file": "../secret.png"}
    page, (note,) = written([*run(), *drawn, outside])
    assert "samples/step-00000010-ema.png is missing, and 2 more" in note
    assert note in page.text
    assert len(page.attributes("img")) == 1
    assert all("name" in each for each in page.attributes("input")), "there is no slider of grids"


def test_many_large_grids_stay_in_the_limit(written: Written, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grids, "MOST_GRIDS", 12)
    monkeypatch.setattr(grids, "MOST_BYTES", 100_000)
    drawn = [grid(tmp_path, step, side=120, noise=True) for step in range(1, 31)]
    page, _ = written([*run(), *drawn])
    shown = [str(image["alt"]) for image in page.attributes("img")]
    assert 2 <= len(shown) < 12
    assert (shown[0], shown[-1]) == ("samples at step 1", "samples at step 30")
    assert sum(len(image["src"] or "") for image in page.attributes("img")) <= 100_000
    assert f"{len(shown)} of 30 grids are shown" in page.text


def test_a_huge_grid_is_scaled_down(written: Written, tmp_path: Path) -> None:
    page, _ = written([*run(), grid(tmp_path, 1, side=3000)])
    (image,) = page.attributes("img")
    assert (image["width"], image["height"]) == ("1280", "1280")


def test_config_and_prompts_are_shown(written: Written, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(f'seed = 7\n[sampling]\nprompts = ["a red circle", "{HOSTILE}"]\n')
    page, _ = written([*run(), grid(tmp_path, 1)])
    assert "seed = 7" in page.text
    assert "2 prompts" in page.text
    assert page.text.count(HOSTILE) == 2
    (tmp_path / "config.toml").write_bytes(b"seed = \xff\n")
    page, _ = written([*run(), grid(tmp_path, 1)])
    assert "seed = \N{REPLACEMENT CHARACTER}" in page.text
    refused(r"--out: .* is a folder", write_run_page, tmp_path, tmp_path)


@pytest.mark.parametrize(("device", "unit"), [("CPU", "process"), ("NVIDIA H200", "GPU")])
def test_speed_is_per_process_on_a_cpu(written: Written, tmp_path: Path, device: str, unit: str) -> None:
    speed = {"samples_per_second": 1.0, "data_wait": 0.1, "tflops_per_gpu": 1.0}
    steps = [{"event": "step", "step": step, "loss": 1.0, **speed} for step in (1, 2)]
    written([{"event": "start", "step": 0, "total": 2, "world": 1, "device": device}, *steps])
    page = (tmp_path / "pages" / "page.html").read_text(encoding="utf-8")
    assert f"TFLOP/s per {unit}" in page
    assert ("All GPUs together" in page, "the GPU waited" in page) == (unit == "GPU", unit == "GPU")


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ([], "2027-01-15 08:00:00 UTC; last log entry 2027-01-15 08:00:07 UTC"),
        ([{"event": "stop", "step": 1, "reason": "SIGTERM", "time": 1.8e9 + 9}], "08:00:00 UTC to 2027-01-15 08:00:09"),
        ([{"event": "step", "step": 2, "time": 1.8e9 + 9}], "08:00:00 UTC to 2027-01-15 08:00:09 UTC"),
    ],
)
def test_a_run_in_progress_has_no_end(written: Written, tmp_path: Path, more: list[Any], expected: str) -> None:
    start = {"event": "start", "step": 0, "total": 2}
    written([start, {"event": "step", "step": 1, "loss": 0.5, "time": 1.8e9 + 7}, *more])
    assert expected in (tmp_path / "pages" / "page.html").read_text()


@pytest.mark.parametrize(
    "config", ["sampling = 3", "[sampling]\nprompts = 5", "a = " + "[" * 5000, "a = " + "9" * 6000, "[[sampling]]"]
)
def test_a_config_of_other_types_is_shown_without_prompts(written: Written, tmp_path: Path, config: str) -> None:
    (tmp_path / "config.toml").write_text(config)
    page, _ = written([*run(3), grid(tmp_path, 1)])
    assert "config.toml, as resolved by the run" in page.text
