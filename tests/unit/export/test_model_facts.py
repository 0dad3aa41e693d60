"""What a run stores about its model: the position table's step and the commonest bucket."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sd3_light.checkpoint.reading import Checkpoint, open_checkpoint
from sd3_light.config import SIZES
from sd3_light.config.faults import UserError
from sd3_light.core.start import WeightsStart
from sd3_light.data.manifest import ShardEntry
from sd3_light.data.order import Segment, build_order
from sd3_light.data.shard_table import BucketShards
from sd3_light.export.model_facts import ModelFacts, commonest_bucket
from sd3_light.train.resume import keep_position_table
from tests.checkpoints import write_checkpoint
from tests.refusals import refused

pytestmark = pytest.mark.usefixtures("one_thread")

CONFIG = SIZES["tiny2"].transformer_config()
RANDOM = WeightsStart("random", None, replace(SIZES["tiny2"], position_step=1.0), "")


def bucket(name: str) -> BucketShards:
    return BucketShards(name, (64, 64), (ShardEntry("a", name, (64, 64), "", 1, 1, "", ""),))


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        ({"256x256": (10, 1), "512x512": (9, 1)}, "256x256"),
        ({"256x256": (10, 1), "512x512": (9, 2)}, "512x512"),  # repeats count
        ({"256x256": (9, 1), "512x512": (9, 1), "304x208": (9, 1)}, "512x512"),  # the largest of equals
        ({"208x304": (9, 1), "304x208": (9, 1)}, "304x208"),
        ({"208x304": (3, 1), "304x208": (2, 1)}, "208x304"),  # smaller than a batch, and dropped: not counted
    ],
)
def test_the_commonest_bucket(samples: dict[str, tuple[int, float]], expected: str) -> None:
    parts = [([Segment(count, repeats)], 3) for count, repeats in samples.values()]
    order = build_order(0, parts, drop_small=True)
    assert commonest_bucket(tuple(map(bucket, samples)), order).bucket == expected


@pytest.mark.parametrize(
    ("size", "expected"),
    [((128, 128), 16), ((48, 48), 6), ((80, 48), 8), ((832, 1216), 126), ((16, 16), 2), ((1024, 16), 16)],
)
def test_an_export_draws_squares_of_the_trained_area(size: tuple[int, int], expected: int) -> None:
    config = ModelFacts(trained_at=size).export_config(CONFIG)
    assert config == {**CONFIG, "sample_size": expected}


def saved(folder: Path, **facts: Any) -> Checkpoint:
    return open_checkpoint(write_checkpoint(folder, 1, {"param/w": torch.zeros(1)}, facts))


def test_facts_are_read_back(tmp_path: Path) -> None:
    facts = ModelFacts(1 / 12, (128, 96))
    assert ModelFacts.of(saved(tmp_path, model=facts.as_dict())) == facts
    assert ModelFacts.of(saved(tmp_path / "fewer", model={"shift": 2.0})) == ModelFacts(shift=2.0)
    refused("is damaged", ModelFacts.of, saved(tmp_path / "no table", model=7))
    with pytest.raises(UserError, match="by a later version, with a model whose width this one does not know"):
        ModelFacts.of(saved(tmp_path / "more", model={"width": 7}))


DAMAGED: dict[str, list[Any]] = {"position_step": [0.0, "1", 9.0], "trained_at": [[64], [64, -1], 64]}
DAMAGED |= {"shift": [0.0, 3], "flux_shift": [1], "sqrt_shift": [None], "uncond_text": [["zero"]]}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in DAMAGED for value in DAMAGED[name]])
def test_damaged_facts_are_refused(tmp_path: Path, name: str, value: Any) -> None:
    with pytest.raises(UserError, match=f"{name} of its model is not a valid value"):
        ModelFacts.of(saved(tmp_path, model={**ModelFacts().as_dict(), name: value}))


def test_a_resumed_run_keeps_its_table(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The checkpoint decides."""
    resumed = saved(tmp_path, model=ModelFacts(0.5).as_dict())
    assert keep_position_table(RANDOM, resumed).size.position_step == 0.5
    assert "using the checkpoint's model.position_step = 0.5" in capfd.readouterr().err
    assert keep_position_table(RANDOM, None) == RANDOM
    weights = replace(RANDOM, kind="folder", folder=tmp_path)
    assert keep_position_table(weights, resumed) == weights, "its table is in the weights"
