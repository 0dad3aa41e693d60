"""Placeholder batches for processes that read no data."""

import pytest
import torch

from sd3_light.config import SIZES
from sd3_light.core.batch import Batch
from sd3_light.core.cost import Tokens
from sd3_light.cost.training_flops import step_flops
from sd3_light.data.order import Segment, build_order
from sd3_light.engines.feed import flops_counter, placeholder_steps
from sd3_light.families.sd3.cost import SD3Cost, image_tokens

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_process_without_data_opens_nothing_and_flops_are_those_of_all() -> None:
    """It needs neither dataset nor preparer; the batch sizes are those of its share of each step, in any bucket."""
    order = build_order(0, [([Segment(60, 1.0)], 12), ([Segment(60, 1.0)], 24)])
    steps = placeholder_steps(order.batch_size, 2, 3, 1)
    sizes = []
    for number, batches in zip(range(1, order.steps_per_epoch), steps, strict=False):
        assert len(batches) == 3
        sizes.append({batch.size for batch in batches})
        assert sizes[-1] == {order.batch_size(number) // 6}
        assert not any(batch.values for batch in batches)
    assert {2} in sizes
    assert {4} in sizes
    assert flops_counter(SD3Cost(SIZES["tiny2"]), 2)(next(steps)) == 0
    # the meter divides them by the number of processes: MFU is per GPU.
    cost, samples, tokens = SD3Cost(SIZES["tiny2"]), 3, 5
    values = {"noisy": torch.zeros(samples, 16, 4, 6), "prompt": torch.zeros(samples, tokens, 8)}
    batches = [Batch(samples, values)] * 2
    own = 2 * step_flops(cost, {Tokens(image_tokens(48, 32), tokens): samples})
    assert [flops_counter(cost, world)(batches) for world in (1, 4)] == [own, 4 * own]
