"""A catalogue filled by several processes: they divide the work and take over that of dead processes."""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sd3_light.config import DirectoryConfig
from sd3_light.sources import catalogue as module
from sd3_light.sources import decode
from sd3_light.sources.catalogue import Catalogue, make_sources, rotate_to_share
from sd3_light.sources.claims import Claims
from sd3_light.sources.decode import Probe, SampleLocation
from tests.unit.sources.catalogues import COUNT, FORK, directory, ignore, list_and_probe, name_of, open_catalogue, start
from tests.waiting import HANG_SECONDS

pytestmark = pytest.mark.usefixtures("small_parts")


def test_every_process_starts_at_a_different_item() -> None:
    names = list("abcdefg")
    assert [rotate_to_share(names, (rank, 3))[0] for rank in range(3)] == ["a", "c", "e"]
    assert all(sorted(rotate_to_share(names, (rank, 3))) == names for rank in range(3))
    assert rotate_to_share([], (1, 2)) == []


def share_work(cache: Path, config: DirectoryConfig, rank: int, barrier: Any) -> None:
    """Probe what the other process does not; neither finishes its first batch before the other has one."""
    first = True

    def probe_images(locations: Sequence[SampleLocation]) -> list[Probe]:
        nonlocal first
        if first:
            barrier.wait(HANG_SECONDS)
            first = False
        with open(cache / f"log{rank}", "a") as log:
            log.write("".join(f"{name_of(location)}\n" for location in locations))
        return decode.probe_images(locations)

    module.probe_images = probe_images
    with Claims(cache / "claims") as claims:
        catalogue = Catalogue(cache, claims, (rank, 2))
        listings = catalogue.refresh(make_sources([config]), ignore)
        catalogue.probe_images(listings, 0, ignore)
        assert all(catalogue.rows(part) for part in listings[0].parts), "the other's results are available too"


def test_two_processes_divide_the_work(images: Path, cache: Path) -> None:
    cache.mkdir()
    barrier = FORK.Barrier(2)
    processes = [start(share_work, cache, directory(images), rank, barrier) for rank in range(2)]
    for process in processes:
        process.join(HANG_SECONDS)
        assert process.exitcode == 0
    logs = [(cache / f"log{rank}").read_text().split() for rank in range(2)]
    assert all(logs)
    assert Counter(logs[0] + logs[1]) == Counter(f"{number:02}.png" for number in range(COUNT))


def hang(cache: Path, config: DirectoryConfig, name: str, ready: Any) -> None:
    """Start listing or probing, report it, and hang."""

    def stop(*_: object) -> Any:
        ready.send(name)
        time.sleep(600)

    if name == "scan":
        real = module.scan

        def scan(*args: Any, **keys: Any) -> Iterator[Any]:
            for number, entry in enumerate(real(*args, **keys)):
                yield entry if number < 20 else stop()

        module.scan = scan
    else:
        module.probe_images = stop
    with Claims(cache / "claims") as claims:
        catalogue = Catalogue(cache, claims)
        catalogue.probe_images(catalogue.refresh(make_sources([config]), ignore), 0, ignore)


@pytest.mark.parametrize("name", ["scan", "probe_images"])
def test_the_work_of_a_killed_process_is_taken_over(images: Path, cache: Path, name: str) -> None:
    ours, theirs = FORK.Pipe()
    process = start(hang, cache, directory(images), name, theirs)
    assert ours.poll(HANG_SECONDS)
    process.kill()
    process.join()
    assert list((cache / "claims").glob("*.claim")), "it had claimed an item"
    assert len(list_and_probe(cache, directory(images))) == COUNT


def test_a_living_process_is_waited_for(images: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second process has nothing to do and returns when the first is done."""
    with open_catalogue(cache, directory(images)) as (first, listings):
        (part, *rest) = listings[0].parts
        assert first.claims.take(part)
        with Claims(cache / "claims") as others:
            second = Catalogue(cache, others)
            again = second.refresh(make_sources([directory(images)]), ignore)
            waits: list[float] = []

            def sleep(seconds: float) -> None:
                waits.append(seconds)
                assert all(second._part(other).is_file() for other in rest), "unclaimed parts are done before waiting"
                if len(waits) == 2:
                    first.claims.release(part)

            monkeypatch.setattr(time, "sleep", sleep)
            second.probe_images(again, 0, ignore)
        assert len(waits) == 2
        assert first.count_unprobed(listings) == 0


def test_progress_counts_parts_of_other_processes(images: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One part is probed before this process starts to probe, another one while it waits."""
    with open_catalogue(cache, directory(images)) as (first, listings), Claims(cache / "claims") as others:
        second = Catalogue(cache, others)
        assert second.count_unprobed(second.refresh(make_sources([directory(images)]), ignore)) == COUNT
        before, meanwhile, *_ = (replace(listings[0], parts=(part,)) for part in listings[0].parts)
        first.probe_images([before], 0, ignore)
        assert first.claims.take(meanwhile.parts[0])

        def sleep(_: float) -> None:
            first.claims.release(meanwhile.parts[0])
            first.probe_images([meanwhile], 0, ignore)

        monkeypatch.setattr(time, "sleep", sleep)
        probed: list[int] = []
        second.probe_images(listings, 0, probed.append)
        assert sum(probed) == COUNT


def test_rows_of_other_processes_are_not_counted(images: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file of rows is deleted after the part is seen as unprobed and before its rows are counted."""
    with open_catalogue(cache, directory(images)) as (catalogue, listings):
        real = catalogue._is_probed

        def is_probed(part: str) -> bool:
            probed = real(part)
            catalogue._rows_file(part).unlink(missing_ok=True)
            return probed

        monkeypatch.setattr(catalogue, "_is_probed", is_probed)
        assert catalogue.count_unprobed(listings) == 0
