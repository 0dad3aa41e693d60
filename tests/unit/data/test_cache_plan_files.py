"""The plan on disk: written once, by one process, without holding the whole dataset in memory."""

import gc
import json
import shutil
import time
import tracemalloc
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sd3_light.config import DirectoryConfig
from sd3_light.data import cache_plan as module
from sd3_light.data.cache_plan import make_cache_plan
from sd3_light.sources import catalogue as catalogue_module
from sd3_light.sources.catalogue import Catalogue, InputRow, Listing, make_sources
from sd3_light.sources.claims import Claims
from tests.refusals import refused
from tests.unit.sources.catalogues import FORK, IDENTITY, directory, names_in, plan_for, shard_files, start, write_image
from tests.waiting import HANG_SECONDS

pytestmark = pytest.mark.usefixtures("small_parts")


def test_an_unchanged_plan_is_reused(images: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (images / "03.png").write_bytes(b"no image")
    before = plan_for(cache, images)
    monkeypatch.setattr(module, "_Planner", lambda *_: pytest.fail("it was planned again"))
    after = plan_for(cache, images)
    assert after.shards == before.shards
    assert after.counts == before.counts
    assert after.counts.rejected == {"not_an_image": 1}
    assert [names_in(after, shard) for shard in after.shards] == [names_in(before, shard) for shard in before.shards]


@pytest.mark.parametrize("change", ["size", "identity", "setting", "file", "version"])
def test_a_change_makes_a_new_plan(images: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    plan_for(cache, images)
    planners: list[object] = []
    real = module._Planner
    monkeypatch.setattr(module, "_Planner", lambda *args: planners.append(args) or real(*args))
    if change == "file":
        write_image(images / "zz.png")
    if change == "version":
        monkeypatch.setattr(module, "PLAN_VERSION", module.PLAN_VERSION + 1)
    identity = {**IDENTITY, "vae": "another"} if change == "identity" else IDENTITY
    keys = {"min_ar": 0.6} if change == "setting" else {}
    plan_for(cache, [directory(images, **keys)], identity, 16 if change == "size" else 8)
    assert len(planners) == 1


def test_a_plan_without_its_counts_is_rebuilt(images: Path, cache: Path) -> None:
    """The planner was killed between the two files."""
    before = shard_files(plan_for(cache, images))
    (counts,) = (cache / "catalogue").glob("plan-*.json")
    counts.unlink()
    (plan,) = (cache / "catalogue").glob("plan-*.arrow")
    plan.write_bytes(b"")
    assert shard_files(plan_for(cache, images)) == before


def test_a_plan_with_unreadable_inputs_is_rebuilt(images: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The catalogue retries them under the same name."""
    real = catalogue_module.probe_images

    def probe_images(locations: Sequence[Any]) -> list[Any]:
        return [
            catalogue_module.Probe(reason="unreadable") if location.image.path.endswith("07.png") else probe
            for location, probe in zip(locations, real(locations), strict=True)
        ]

    with monkeypatch.context() as patch:
        patch.setattr(catalogue_module, "probe_images", probe_images)
        before = plan_for(cache, images)
        assert before.counts.rejected == {"unreadable": 1}
    after = plan_for(cache, images)
    assert after.counts.rejected == {}
    assert shard_files(after) == shard_files(plan_for(cache.with_name("other"), images))


def test_the_most_recently_used_plans_are_kept(images: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for size in (8, 9, 10, 11, 12, 13, 14, 15, 8, 16):
        plan_for(cache, images, size=size)
    assert len(list((cache / "catalogue").glob("plan-*.arrow"))) == 8
    assert len(list((cache / "catalogue").glob("plan-*.json"))) == 8
    monkeypatch.setattr(module, "_Planner", lambda *_: pytest.fail("it was planned again"))
    for size in (8, 10, 16):
        plan_for(cache, images, size=size)
    with pytest.raises(pytest.fail.Exception):
        plan_for(cache, images, size=9)


def plan_and_hang(cache: Path, images: Path, ready: Any) -> None:
    def hang(*_: object) -> None:
        ready.send("planning")
        time.sleep(600)

    module._Planner.write = hang  # type: ignore[method-assign]
    plan_for(cache, images)


def test_the_work_of_a_killed_planner_is_taken_over(images: Path, cache: Path) -> None:
    expected = shard_files(plan_for(cache.with_name("other"), images))
    ours, theirs = FORK.Pipe()
    process = start(plan_and_hang, cache, images, theirs)
    assert ours.poll(HANG_SECONDS)
    assert list((cache / "claims").glob("plan-*.claim"))
    process.kill()
    process.join()
    assert shard_files(plan_for(cache, images)) == expected


def test_a_living_planner_is_waited_for(images: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = shard_files(plan_for(cache, images))
    aside = cache.with_name("aside")
    aside.mkdir()
    plans = list((cache / "catalogue").glob("plan-*"))
    for path in plans:
        path.rename(aside / path.name)
    name = next(path.stem for path in plans)
    monkeypatch.setattr(module, "_Planner", lambda *_: pytest.fail("it was planned twice"))
    with Claims(cache / "claims") as other:
        other.take(name)
        waits: list[float] = []

        def sleep(seconds: float) -> None:
            waits.append(seconds)
            for path in aside.iterdir():
                path.rename(cache / "catalogue" / path.name)

        monkeypatch.setattr(time, "sleep", sleep)
        assert shard_files(plan_for(cache, images)) == expected
    assert len(waits) == 1


def probed_row(label: str, name: str, index: int) -> InputRow:
    return InputRow(f"{label}/{name}", f'["{name}"]', "", "1-1", ("a, b",), 64, 64, f"{index:032x}")


def write_listing(catalogue: Catalogue, config: DirectoryConfig, parts: int, rows: int) -> Listing:
    """Write a catalogue of invented probed rows: ``parts`` parts of ``rows`` rows."""
    (source,) = make_sources([config])
    digests = [f"{number:032x}" for number in range(parts)]
    (catalogue.folder / "parts").mkdir(parents=True)
    for number, digest in enumerate(digests):
        part = [probed_row(source.label, f"{number}-{index}.png", index) for index in range(rows)]
        catalogue_module.write_part(catalogue._part(digest), part)
    return Listing(source, tuple(digests), parts * rows)


@pytest.fixture
def large(cache: Path, tmp_path: Path) -> Iterator[tuple[Catalogue, list[Listing]]]:
    with Claims(cache / "claims") as claims:
        catalogue = Catalogue(cache, claims)
        yield catalogue, [write_listing(catalogue, directory(tmp_path), 24, 500)]


def test_planning_holds_few_shards(large: tuple[Catalogue, list[Listing]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SHARDS_PER_BATCH", 8)
    catalogue, (listing,) = large
    first, second = (replace(listing, parts=parts) for parts in (listing.parts[:12], listing.parts[12:]))
    peaks = []
    for part in (first, second, listing):
        gc.collect()  # at the same point of its counters each time
        tracemalloc.start()
        try:
            plan = make_cache_plan(catalogue, [part], IDENTITY, 256)
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    assert sum(shard.count for shard in plan.shards) == 12_000
    # a part of 500 rows and eight shards, whatever the number of samples: all samples would be 12 MB
    assert peaks[-1] < 1.5e6
    assert peaks[-1] - peaks[-2] < 8 * 6_000, "less than a number per sample"
    ids = np.concatenate([plan.ids(shard) for shard in plan.shards])
    assert len(np.unique(ids)) == 12_000
    for shard in (plan.shards[0], plan.shards[-1], plan.shards[50]):
        assert [member.identity for member in plan.members(shard)] == plan.ids(shard).tolist()


def test_a_plan_is_opened_without_reading_its_samples(cache: Path, images: Path) -> None:
    """Only the counts and one row per shard are read; samples are read from the catalogue on request."""
    plan = plan_for(cache, images)
    shutil.rmtree(cache / "catalogue" / "parts")
    assert sum(shard.count for shard in plan.shards) == 30
    assert len(np.concatenate([plan.ids(shard) for shard in plan.shards])) == 30
    refused("run again", plan.members, plan.shards[0])
    counts = json.loads(next((cache / "catalogue").glob("plan-*.json")).read_text())
    assert counts["pictures"] == 30
