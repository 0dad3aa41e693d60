"""The script that was written from a tutorial about DiffSynth's loop runs unchanged, in one stage and two."""

import runpy
import sys
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file

from sd3_light.runlog import read_log

SCRIPT = Path(__file__).with_name("tutorial_script.py")


def losses(out: Path) -> list[float]:
    return [event["loss"] for event in read_log(out / "log.jsonl") if event["event"] == "step"]


def test_the_script_of_the_tutorial_runs_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two stages have the losses of one, and only the LoRA is saved."""
    torch.set_num_threads(1)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    for task in ("one", "data_process", "train"):
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), str(tmp_path), task])
        AcceleratorState._reset_state(reset_partial_state=True)
        runpy.run_path(str(SCRIPT), run_name="__main__")
    AcceleratorState._reset_state(reset_partial_state=True)
    assert len(list((tmp_path / "cache" / "0").glob("*.pth"))) == 4
    assert losses(tmp_path / "one") == losses(tmp_path / "train")
    assert len(losses(tmp_path / "one")) == 4
    saved = load_file(tmp_path / "train" / "epoch-1.safetensors")
    assert set(saved) == {"pipe.dit.lora_A.weight", "pipe.dit.lora_B.weight"}
    assert saved["pipe.dit.lora_B.weight"].abs().max() > 0
