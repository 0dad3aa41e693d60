"""Order facts, which give positions in the order their meaning, and the distribution of samples to ranks."""

from types import SimpleNamespace
from typing import Any

import pytest

from sd3_light.checkpoint.progress import Progress
from sd3_light.core.registry import starting_weights
from sd3_light.data.order import Segment, build_order
from sd3_light.engines import Launch
from sd3_light.engines.feed import order_facts
from sd3_light.engines.processes import ProcessGroups
from sd3_light.train import verb as train
from sd3_light.train.folder import RunFolder
from tests.project import Project

SEGMENTS = [Segment(8), Segment(5, 1.5)]


def facts(seed: int = 0, segments: Any = SEGMENTS, batch: int = 4, window: int = 16, drop: bool = False) -> Any:
    return order_facts(build_order(seed, [(segments, batch), ([Segment(3)], batch)], window, drop))


def test_equal_orders_have_equal_facts() -> None:
    assert facts() == facts()
    others = [SEGMENTS[::-1], [Segment(7), Segment(6, 1.5)], [Segment(8), Segment(5, 1.4)], [*SEGMENTS, Segment(1)]]
    changed = [facts(seed=1), facts(batch=2), facts(window=4), facts(drop=True)]
    changed += [facts(segments=segments) for segments in others]
    assert len({str(each) for each in (facts(), *changed)}) == 9


@pytest.mark.parametrize(("nodes", "by_segment"), [((4, 2), True), ((3, 3), True), ((6,), False)])
def test_all_ranks_share_samples_alike(cached_project: Project, monkeypatch: Any, nodes: Any, by_segment: bool) -> None:
    """With two pipeline stages a node can have as many processes as there are replicas."""
    seen: list[tuple[int, bool]] = []

    def batches(data: Any, order: Any, rank: int, world: int, micro: int, by_segment: bool = False) -> Any:
        assert world == 3
        seen.append((rank, by_segment))
        return SimpleNamespace(prefetch_step=lambda step: None)

    monkeypatch.setattr("sd3_light.engines.feed.MicroBatches", batches)  # reads samples
    monkeypatch.setattr("sd3_light.train.context.MicroBatches", batches)  # prefetches the first ones
    monkeypatch.setattr("sd3_light.train.context.start_process_group", lambda *_: ProcessGroups())
    loaded = cached_project.load("pipeline_stages=2")
    start = starting_weights(loaded.train.model)
    preparer = SimpleNamespace(prepare_into=None)
    state: Any = SimpleNamespace(engine=None, averages=None, dropout=None, preparer=preparer, begin_step=None)
    locations = [(size, local_rank) for size in nodes for local_rank in range(size)]
    for rank, (size, local_rank) in enumerate(locations):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(size))
        launch = Launch(rank, local_rank, 6)
        context = train.open_context(loaded, start, launch, RunFolder(loaded, False), None, True)
        train._make_run(context, state, Progress(), None)
    assert seen == [(rank % 3, by_segment) for rank in range(6) for _ in range(2)]
