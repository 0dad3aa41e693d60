"""What a run is fed with where a process needs nothing of its micro-batches."""

from typing import Any

import torch

from sd3_light.data.order import Segment, make_order
from sd3_light.engines import Launch
from sd3_light.model.start import WeightsStart
from sd3_light.training.data import flops_counter, training_steps


class Config:
    gradient_accumulation_steps = 3


def test_a_process_that_is_not_fed_opens_nothing() -> None:
    """No data set and no preparer are there; sizes are those of its share of each step, whatever bucket it is of."""
    order = make_order(0, [([Segment(60, 1.0)], 12), ([Segment(60, 1.0)], 24)])
    nothing: Any = None
    steps = training_steps(Config(), nothing, order, Launch(0, 0, 2), nothing, nothing, fed=False)(1)  # type: ignore[arg-type]
    sizes = []
    for number, batches in zip(range(1, order.steps_per_epoch), steps, strict=False):
        assert len(batches) == 3
        sizes.append({len(features[0]) for features, _ in batches})
        assert sizes[-1] == {order.batch_size(number) // 6}
        assert all(features[0].device == torch.device("meta") for features, _ in batches)
    assert {2} in sizes
    assert {4} in sizes
    start: Any = WeightsStart
    assert flops_counter(start, 2)(next(steps)) == 0
