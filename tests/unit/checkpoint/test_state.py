"""The list of what a checkpoint holds, and the counters."""

import json

import torch

from sd3_light.checkpoint.state import EMA, WEIGHTS, Progress, gather, of_kind


def test_progress_counts_steps_samples_and_skips() -> None:
    progress = Progress().after(8, taken=True).after(4, taken=False).after(8, taken=True)
    assert progress == Progress(step=3, samples=20, skipped=1)


def test_progress_survives_json() -> None:
    progress = Progress(7, 2**40, 2)
    assert Progress(**json.loads(json.dumps(progress.as_dict()))) == progress


def test_gather_names_every_kind_and_of_kind_takes_them_apart() -> None:
    weights = {"block.a": torch.ones(2), "b": torch.zeros(3)}
    optimizer = {"exp_avg/b": torch.full((3,), 2.0), "step/b": torch.tensor(5.0)}
    average = {name: weight + 1 for name, weight in weights.items()}
    tensors = gather(weights, optimizer, average)
    assert set(tensors) == {"param/block.a", "param/b", "exp_avg/b", "step/b", "ema/block.a", "ema/b"}
    assert {name: t.tolist() for name, t in of_kind(tensors, WEIGHTS).items()} == {"block.a": [1, 1], "b": [0, 0, 0]}
    assert {name: t.tolist() for name, t in of_kind(tensors, EMA).items()} == {"block.a": [2, 2], "b": [1, 1, 1]}
    assert of_kind(tensors, "exp") == {}  # a kind is a whole word


def test_gather_without_average_and_without_gradients() -> None:
    tensors = gather({"a": torch.nn.Parameter(torch.ones(2))}, {}, None)
    assert set(tensors) == {"param/a"}
    assert not tensors["param/a"].requires_grad
