"""Order facts: a position in the order means the same samples only if the facts are equal."""

from typing import Any

from sd3_light.data.order import Segment, build_order
from sd3_light.training.data import order_facts

SEGMENTS = [Segment(8), Segment(5, 1.5)]


def facts(
    seed: int = 0, segments: list[Segment] | None = None, batch: int = 4, window: int = 16, drop: bool = False
) -> dict[str, Any]:
    return order_facts(build_order(seed, [(segments or SEGMENTS, batch), ([Segment(3)], batch)], window, drop))


def test_equal_orders_have_equal_facts() -> None:
    assert facts() == facts()


def test_changes_of_the_order_change_its_facts() -> None:
    changed = [
        facts(seed=1),
        facts(batch=2),
        facts(window=4),
        facts(drop=True),
        facts(segments=SEGMENTS[::-1]),
        facts(segments=[Segment(7), Segment(6, 1.5)]),
        facts(segments=[Segment(8), Segment(5, 1.4)]),
        facts(segments=[*SEGMENTS, Segment(1)]),
    ]
    assert all(other != facts() for other in changed)
    assert len({str(other) for other in changed}) == len(changed)
