"""Prior preservation and preferences as tasks: class pictures are drawn once, and a LoRA learns what is preferred."""

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from PIL import Image
from torch.utils.data import Dataset

from sd3_light.config.faults import UserError
from sd3_light.runlog import read_log
from sd3_light.tasks import ClassPictures, FlowMatchDPOLoss, ModelLogger, WithPrior, launch_training_task
from tests.unit.tasks.toy import Pictures, Toy


def test_class_pictures_are_drawn_once(tmp_path: Path) -> None:
    drawn: list[tuple[str, int]] = []

    def make(prompt: str, seed: int) -> Image.Image:
        drawn.append((prompt, seed))
        return Image.new("RGB", (4, 4), (seed, 0, 0))

    for count in (2, 3):
        pictures = ClassPictures(tmp_path, "a dog", count, make, {"model": "demo"})
    assert drawn == [("a dog", 0), ("a dog", 1), ("a dog", 2)], "only what is missing"
    item = pictures[2]
    assert item["prompt"] == "a dog"
    assert item["image"].getpixel((0, 0)) == (2, 0, 0)
    ClassPictures(tmp_path, "a dog", 1, make, {"model": "other"})
    ClassPictures(tmp_path, "a cat", 1, make, {"model": "demo"})
    assert drawn[3:] == [("a dog", 0), ("a cat", 0)], "another model or prompt draws anew"
    with pytest.raises(UserError, match="0 class pictures"):
        ClassPictures(tmp_path, "a dog", 0, make, {})


def test_class_pictures_count_by_their_weight(tmp_path: Path) -> None:
    """With weight 0 they change nothing but the mean over the batch."""
    both = WithPrior(Pictures(2), Pictures(2), 0.0)
    assert [both[index]["loss_weight"] for index in range(4)] == [1.0, 1.0, 0.0, 0.0]
    model = Toy()
    samples = [{"data": both[index], "data_id": index, "epoch": 0, "repeat": 0} for index in range(4)]
    each = model.each(samples)
    assert (each[:2] > 0).all()
    assert (each[2:] == 0).all()
    assert torch.equal(each[:2], model.each([{**one, "data": Pictures(2)[at]} for at, one in enumerate(samples[:2])]))


class Pairs(Dataset[Any]):
    """A picture that is liked, ones, and one that is not, minus ones."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"latents": torch.ones(3, 4, 4), "rejected": -torch.ones(3, 4, 4)}


def test_a_lora_learns_a_preference(tmp_path: Path) -> None:
    model = Toy(adapter=True)
    model.units, model.loss = (), FlowMatchDPOLoss(beta=20.0)
    wishes: dict[str, Any] = {"num_workers": 0, "save_steps": 100, "batch_size": 4, "num_epochs": 20}
    launch_training_task(Accelerator(cpu=True), Pairs(), model, ModelLogger(tmp_path), 1e-2, **wishes)
    losses = [event["loss"] for event in read_log(tmp_path / "log.jsonl") if event["event"] == "step"]
    assert losses[0] == pytest.approx(0.6931, abs=1e-3), "an adapter that does nothing yet prefers nothing"
    assert sum(losses[-5:]) / 5 < 0.5
    whole = Toy()
    whole.units, whole.loss = (), FlowMatchDPOLoss()
    with pytest.raises(UserError, match="train an adapter"):
        whole.each([Pairs()[0]])
