"""Prior preservation, preferences, and the script of a tutorial as tasks."""

import runpy
import sys
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from PIL import Image
from safetensors.torch import load_file

from sd3_light.config.faults import UserError
from sd3_light.runlog import read_log
from sd3_light.tasks import ClassPictures, FlowMatchDPOLoss, WithPrior
from tests.unit.tasks.toy import Images, Toy, steps, train


def test_class_images_are_weighted_and_drawn_once(tmp_path: Path) -> None:
    """With weight 0 they change only the mean over the batch."""
    both = WithPrior(Images(2), Images(2), 0.0)
    assert [both[index]["loss_weight"] for index in range(4)] == [1.0, 1.0, 0.0, 0.0]
    model = Toy()
    samples = [{"data": both[index], "data_id": index, "epoch": 0, "repeat": 0} for index in range(4)]
    each = model.each(samples)
    assert (each[:2] > 0).all()
    assert (each[2:] == 0).all()
    plain = [{**sample, "data": Images(2)[index]} for index, sample in enumerate(samples[:2])]
    assert torch.equal(each[:2], model.each(plain))
    drawn: list[tuple[str, int]] = []

    def make(prompt: str, seed: int) -> Image.Image:
        drawn.append((prompt, seed))
        return Image.new("RGB", (4, 4), (seed, 0, 0))

    for count in (2, 3):
        images = ClassPictures(tmp_path, "a dog", count, make, {"model": "demo"})
    assert drawn == [("a dog", 0), ("a dog", 1), ("a dog", 2)], "only what is missing"
    item = images[2]
    assert item["prompt"] == "a dog"
    assert item["image"].getpixel((0, 0)) == (2, 0, 0)
    ClassPictures(tmp_path, "a dog", 1, make, {"model": "other"})
    ClassPictures(tmp_path, "a cat", 1, make, {"model": "demo"})
    assert drawn[3:] == [("a dog", 0), ("a cat", 0)], "another model or prompt is drawn again"
    with pytest.raises(UserError, match="0 class images"):
        ClassPictures(tmp_path, "a dog", 0, make, {})


def test_a_lora_learns_a_preference(tmp_path: Path) -> None:
    model = Toy(adapter=True)
    model.units, model.loss = (), FlowMatchDPOLoss(beta=20.0)
    pair = {"latents": torch.ones(3, 4, 4), "rejected": -torch.ones(3, 4, 4)}
    events = train(tmp_path, model, [pair] * 8, save_steps=100, batch_size=4, num_epochs=20)
    losses = [loss for (loss,) in steps(events, "loss")]
    assert losses[0] == pytest.approx(0.6931, abs=1e-3), "a new adapter has no preference"
    assert sum(losses[-5:]) / 5 < 0.5
    whole = Toy()
    whole.units, whole.loss = (), FlowMatchDPOLoss()
    with pytest.raises(UserError, match="train an adapter"):
        whole.each([pair])


SCRIPT = Path(__file__).with_name("tutorial_script.py")


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
    one, two = (steps(list(read_log(tmp_path / name / "log.jsonl")), "loss") for name in ("one", "train"))
    assert one == two
    assert len(one) == 4
    saved = load_file(tmp_path / "train" / "epoch-1.safetensors")
    assert set(saved) == {"pipe.dit.lora_A.weight", "pipe.dit.lora_B.weight"}
    assert saved["pipe.dit.lora_B.weight"].abs().max() > 0
