"""The plan on disk: made once, by one process, without ever holding the whole set."""

import json
import multiprocessing
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
from sd3_light.config.faults import UserError
from sd3_light.data.building import cache_plan as module
from sd3_light.data.building import catalogue as catalogue_module
from sd3_light.data.building.cache_plan import make_cache_plan
from sd3_light.data.building.catalogue import Catalogue, InputRow, Listing, make_sources
from sd3_light.data.building.claims import Claims
from tests.unit.data.building.catalogues import RECIPE, directory, files, names, picture, planned

FORK = multiprocessing.get_context("fork")


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thirty rows fill a few parts."""
    monkeypatch.setattr(catalogue_module, "PART_ROWS", 16)
    monkeypatch.setattr(module, "_POLL_SECONDS", 0.01)


def test_a_plan_is_made_once(pictures: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (pictures / "03.png").write_bytes(b"no picture")
    before = planned(cache, pictures)
    monkeypatch.setattr(module, "_Planner", lambda *_: pytest.fail("it was planned again"))
    after = planned(cache, pictures)
    assert after.units == before.units
    assert after.counts == before.counts
    assert after.counts.rejected == {"not_an_image": 1}
    assert [names(after, unit) for unit in after.units] == [names(before, unit) for unit in before.units]


@pytest.mark.parametrize("what", ["size", "recipe", "setting", "file", "version"])
def test_another_plan_is_made_when_it_must_be(
    pictures: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    planned(cache, pictures)
    made: list[object] = []
    real = module._Planner
    monkeypatch.setattr(module, "_Planner", lambda *given: made.append(given) or real(*given))
    if what == "file":
        picture(pictures / "zz.png")
    if what == "version":
        monkeypatch.setattr(module, "PLAN_VERSION", module.PLAN_VERSION + 1)
    recipe = {**RECIPE, "vae": "another"} if what == "recipe" else RECIPE
    keys = {"min_ar": 0.6} if what == "setting" else {}
    planned(cache, [directory(pictures, **keys)], recipe, 16 if what == "size" else 8)
    assert len(made) == 1


def test_a_plan_without_its_counts_is_made_again(pictures: Path, cache: Path) -> None:
    """The planner was killed between the two files."""
    before = files(planned(cache, pictures))
    (counts,) = (cache / "catalogue").glob("plan-*.json")
    counts.unlink()
    (plan,) = (cache / "catalogue").glob("plan-*.arrow")
    plan.write_bytes(b"")
    assert files(planned(cache, pictures)) == before


def test_a_plan_of_unreadable_inputs_is_made_again(
    pictures: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The catalogue tries them again under the same name."""
    real = catalogue_module.probe_images

    def probe_images(places: Sequence[Any]) -> list[Any]:
        return [
            catalogue_module.Probe(reason="unreadable") if place.image.path.endswith("07.png") else one
            for place, one in zip(places, real(places), strict=True)
        ]

    with monkeypatch.context() as patch:
        patch.setattr(catalogue_module, "probe_images", probe_images)
        before = planned(cache, pictures)
        assert before.counts.rejected == {"unreadable": 1}
    after = planned(cache, pictures)
    assert after.counts.rejected == {}
    assert files(after) == files(planned(cache.with_name("other"), pictures))


def test_the_plans_that_were_used_last_are_kept(pictures: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for size in (8, 9, 10, 11, 12, 13, 14, 15, 8, 16):
        planned(cache, pictures, size=size)
    assert len(list((cache / "catalogue").glob("plan-*.arrow"))) == 8
    assert len(list((cache / "catalogue").glob("plan-*.json"))) == 8
    monkeypatch.setattr(module, "_Planner", lambda *_: pytest.fail("it was planned again"))
    for size in (8, 10, 16):
        planned(cache, pictures, size=size)
    with pytest.raises(pytest.fail.Exception):
        planned(cache, pictures, size=9)


def plan_and_hang(cache: Path, pictures: Path, ready: Any) -> None:
    def hang(*_: object) -> None:
        ready.send("planning")
        time.sleep(600)

    module._Planner.write = hang  # type: ignore[method-assign]
    planned(cache, pictures)


def test_a_killed_planner_is_taken_over(pictures: Path, cache: Path) -> None:
    expected = files(planned(cache.with_name("other"), pictures))
    ours, theirs = FORK.Pipe()
    process = FORK.Process(target=plan_and_hang, args=(cache, pictures, theirs))
    process.start()
    assert ours.poll(60)
    assert list((cache / "claims").glob("plan-*.claim"))
    process.kill()
    process.join()
    assert files(planned(cache, pictures)) == expected


def test_a_living_planner_is_waited_for(pictures: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it wrote is taken, and nothing is planned twice."""
    expected = files(planned(cache, pictures))
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

        monkeypatch.setattr(module.time, "sleep", sleep)
        assert files(planned(cache, pictures)) == expected
    assert len(waits) == 1


# --- many samples --------------------------------------------------------------------------------


def listed(catalogue: Catalogue, where: DirectoryConfig, parts: int, rows: int) -> Listing:
    """A catalogue of made-up rows that were looked at: ``parts`` parts of ``rows``."""
    (source,) = make_sources([where])
    digests = [f"{number:032x}" for number in range(parts)]
    (catalogue.folder / "parts").mkdir(parents=True)
    for number, digest in enumerate(digests):
        made = [
            InputRow(
                f"{source.label}/{number}-{at}.png",
                f'["{number}-{at}.png"]',
                "",
                "1-1",
                ("a, b",),
                64,
                64,
                f"{at:032x}",
            )
            for at in range(rows)
        ]
        catalogue_module._write_table(catalogue._part(digest), made)
    return Listing(source, tuple(digests), parts * rows)


@pytest.fixture
def large(cache: Path, tmp_path: Path) -> Iterator[tuple[Catalogue, list[Listing]]]:
    """12,000 samples."""
    with Claims(cache / "claims") as claims:
        catalogue = Catalogue(cache, claims)
        yield catalogue, [listed(catalogue, directory(tmp_path), 24, 500)]


def test_planning_holds_a_few_units_not_the_set(
    large: tuple[Catalogue, list[Listing]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_UNITS_A_BATCH", 8)
    catalogue, (listing,) = large
    make_cache_plan(
        catalogue, [replace(listing, parts=listing.parts[:1])], RECIPE, 256
    )  # what is loaded once is loaded
    tracemalloc.start()
    try:
        plan = make_cache_plan(catalogue, [listing], RECIPE, 256)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert sum(unit.count for unit in plan.units) == 12_000
    # a part of 500 rows and eight units; their places and ids alone would be more, the samples 12 MB
    assert peak < 1e6, f"{peak / 1e6:.1f} MB for 12,000 samples"
    ids = np.concatenate([plan.ids(unit) for unit in plan.units])
    assert len(np.unique(ids)) == 12_000
    for unit in (plan.units[0], plan.units[-1], plan.units[50]):
        assert [member.identity for member in plan.members(unit)] == plan.ids(unit).tolist()


def test_a_plan_is_opened_without_its_samples(cache: Path, pictures: Path) -> None:
    """The counts and a row a unit are read; samples come from the catalogue when their unit's turn comes."""
    plan = planned(cache, pictures)
    shutil.rmtree(cache / "catalogue" / "parts")
    assert sum(unit.count for unit in plan.units) == 30
    assert len(np.concatenate([plan.ids(unit) for unit in plan.units])) == 30
    with pytest.raises(UserError, match="run again"):
        plan.members(plan.units[0])
    counts = json.loads(next((cache / "catalogue").glob("plan-*.json")).read_text())
    assert counts["pictures"] == 30
