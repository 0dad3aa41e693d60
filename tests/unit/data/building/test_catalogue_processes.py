"""A catalogue filled by several processes: each does what no other does, and takes over what a dead one left."""

import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from sd3_light.config import DirectoryConfig
from sd3_light.data.building import catalogue as module
from sd3_light.data.building import decode
from sd3_light.data.building.catalogue import Catalogue, make_sources, rotate_to_share
from sd3_light.data.building.claims import Claims
from sd3_light.data.building.decode import Probe, SampleLocation
from sd3_light.data.sources.records import FileBytes
from tests.unit.data.building.catalogues import COUNT, directory, looked, nothing, opened

FORK = multiprocessing.get_context("fork")


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thirty rows fill a few parts."""
    monkeypatch.setattr(module, "PART_ROWS", 8)
    monkeypatch.setattr(module, "_POLL_SECONDS", 0.01)


def name_of(place: SampleLocation) -> str:
    assert isinstance(place.image, FileBytes)
    return Path(place.image.path).name


def start(work: Callable[..., object], *given: object) -> BaseProcess:
    process = FORK.Process(target=work, args=given)
    process.start()
    return process


def test_every_process_begins_elsewhere() -> None:
    names = list("abcdefg")
    assert [rotate_to_share(names, (rank, 3))[0] for rank in range(3)] == ["a", "c", "e"]
    assert all(sorted(rotate_to_share(names, (rank, 3))) == names for rank in range(3))
    assert rotate_to_share([], (1, 2)) == []


def share_work(cache: Path, where: DirectoryConfig, rank: int, barrier: Any) -> None:
    """Look at what the other does not; no process ends its first batch before the other has one."""
    first = True

    def probe_images(places: Sequence[SampleLocation]) -> list[Probe]:
        nonlocal first
        if first:
            barrier.wait(60)
            first = False
        with open(cache / f"log{rank}", "a") as log:
            log.write("".join(f"{name_of(place)}\n" for place in places))
        return decode.probe_images(places)

    module.probe_images = probe_images
    with Claims(cache / "claims") as claims:
        found = Catalogue(cache, claims, (rank, 2))
        listings = found.refresh(make_sources([where]), nothing)
        found.probe_images(listings, 0, nothing)
        assert all(found.rows(part) for part in listings[0].parts), "what the other did is there too"


def test_two_processes_share_the_work(pictures: Path, cache: Path) -> None:
    cache.mkdir()
    barrier = FORK.Barrier(2)
    processes = [start(share_work, cache, directory(pictures), rank, barrier) for rank in range(2)]
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    logs = [(cache / f"log{rank}").read_text().split() for rank in range(2)]
    assert all(logs)
    assert Counter(logs[0] + logs[1]) == Counter(f"{number:02}.png" for number in range(COUNT))


def hang(cache: Path, where: DirectoryConfig, name: str, ready: Any) -> None:
    """Begin to list or to look, say so, and go no further."""

    def stop(*_: object) -> Any:
        ready.send(name)
        time.sleep(600)

    if name == "scan":
        real = module.scan

        def scan(*given: Any) -> Iterator[Any]:
            for number, found in enumerate(real(*given)):
                yield found if number < 20 else stop()

        module.scan = scan
    else:
        module.probe_images = stop
    with Claims(cache / "claims") as claims:
        found = Catalogue(cache, claims)
        found.probe_images(found.refresh(make_sources([where]), nothing), 0, nothing)


@pytest.mark.parametrize("name", ["scan", "probe_images"])
def test_a_killed_process_has_its_work_taken_over(pictures: Path, cache: Path, name: str) -> None:
    ours, theirs = FORK.Pipe()
    process = start(hang, cache, directory(pictures), name, theirs)
    assert ours.poll(60)
    process.kill()
    process.join()
    assert list((cache / "claims").glob("*.claim")), "it had something in hand"
    assert len(looked(cache, directory(pictures))) == COUNT


def test_a_living_process_is_waited_for(pictures: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second has nothing to do, and returns when the first has done it."""
    with opened(cache, directory(pictures)) as (first, listings):
        (part, *rest) = listings[0].parts
        assert first.claims.take(part)
        with Claims(cache / "claims") as others:
            second = Catalogue(cache, others)
            again = second.refresh(make_sources([directory(pictures)]), nothing)
            waits: list[float] = []

            def sleep(seconds: float) -> None:
                waits.append(seconds)
                assert all(second._part(one).is_file() for one in rest), "all that is free comes first"
                if len(waits) == 2:
                    first.claims.release(part)

            monkeypatch.setattr(module.time, "sleep", sleep)
            second.probe_images(again, 0, nothing)
        assert len(waits) == 2
        assert first.count_unprobed(listings) == 0


def test_rows_that_another_looks_at_meanwhile_are_not_missed(
    pictures: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file of rows goes between the moment a part is found unseen and the moment its rows are counted."""
    with opened(cache, directory(pictures)) as (found, listings):
        real = found._is_looked

        def is_looked(part: str) -> bool:
            seen = real(part)
            found._rows_file(part).unlink(missing_ok=True)
            return seen

        monkeypatch.setattr(found, "_is_looked", is_looked)
        assert found.count_unprobed(listings) == 0


def test_a_picture_that_crashes_its_reader_is_named(
    pictures: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = decode._look
    # the worker is forked, and looks as we do
    monkeypatch.setattr(decode, "_look", lambda place: os._exit(1) if name_of(place) == "07.png" else real(place))
    rows = looked(cache, directory(pictures), workers=1)
    assert {name: row.reason for name, row in rows.items() if row.reason} == {"07.png": "decoder_crashed"}
    assert rows["07.png"].detail
    assert rows["08.png"].width == 64
