"""Helpers that write images and build their catalogue and plan as a newly started process does."""

import itertools
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from PIL import Image

from sd3_light.cache.manifest_writer import sort_shards
from sd3_light.config import DirectoryConfig
from sd3_light.data.cache_plan import CachePlan, PlannedShard, make_cache_plan
from sd3_light.sources.catalogue import Catalogue, InputRow, Listing, make_sources
from sd3_light.sources.claims import Claims
from sd3_light.sources.decode import SampleLocation
from sd3_light.sources.records import FileBytes

IDENTITY = {"t5_max_length": 16, "vae": "abc"}
COUNT = 30
FORK = multiprocessing.get_context("fork")
_times = itertools.count(10**18, 10**9)


def start(work: Callable[..., object], *args: object) -> BaseProcess:
    process = FORK.Process(target=work, args=args)
    process.start()
    return process


def write_image(path: Path, colour: int = 0, size: tuple[int, int] = (64, 64), caption: str | None = "a, b, c") -> None:
    """Write a captioned image with a modification time that is never repeated."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (colour, 0, 0)).save(path)
    if caption is not None:
        path.with_suffix(".txt").write_text(caption, encoding="utf-8")
    for file in (path, path.with_suffix(".txt")):
        if file.exists():
            os.utime(file, ns=(time := next(_times), time))


def write_images(folder: Path) -> Path:
    for number in range(COUNT):
        write_image(folder / f"{number:02}.png", number)
    return folder


def directory(path: Path, **keys: Any) -> DirectoryConfig:
    return DirectoryConfig(path=path, **({} if "size_buckets" in keys else {"resolutions": [64]}) | keys)


def age(paths: Sequence[Path], seconds: float) -> None:
    for path in paths:
        os.utime(path, (path.stat().st_mtime - seconds,) * 2)


def ignore(_: int) -> None:
    pass


@contextmanager
def open_catalogue(cache: Path, *directories: DirectoryConfig) -> Iterator[tuple[Catalogue, list[Listing]]]:
    """Yield a catalogue with its directories listed, as in a process that started after all earlier writes."""
    age(list((cache / "catalogue").rglob("*.*")), 60)
    with Claims(cache / "claims") as claims:
        catalogue = Catalogue(cache, claims)
        yield catalogue, catalogue.refresh(make_sources(directories), ignore)


def list_and_probe(cache: Path, *directories: DirectoryConfig, workers: int = 0) -> dict[str, InputRow]:
    """List and probe the directories; return the rows by file name."""
    with open_catalogue(cache, *directories) as (catalogue, listings):
        catalogue.probe_images(listings, workers, ignore)
        assert catalogue.count_unprobed(listings) == 0
        rows = [row for listing in listings for part in listing.parts for row in catalogue.rows(part)]
        assert sum(listing.rows for listing in listings) == len(rows)
        return {row.key.rsplit("/", 1)[1]: row for row in rows}


def name_of(location: SampleLocation) -> str:
    assert isinstance(location.image, FileBytes)
    return Path(location.image.path).name


def parts_of(cache: Path) -> set[str]:
    return {path.name for path in (cache / "catalogue" / "parts").iterdir()}


def plan_for(
    cache: Path,
    directories: Sequence[DirectoryConfig] | Path,
    identity: dict[str, Any] = IDENTITY,
    size: int = 8,
    workers: int = 0,
) -> CachePlan:
    if isinstance(directories, Path):
        directories = [directory(directories)]
    with open_catalogue(cache, *directories) as (catalogue, listings):
        catalogue.probe_images(listings, workers, ignore)
        return make_cache_plan(catalogue, listings, identity, size)


def shard_files(plan: CachePlan) -> list[str]:
    return [shard.file for shard in sort_shards(plan.shards)]


def names_in(plan: CachePlan, shard: PlannedShard) -> list[str]:
    return [member.row.key.rsplit("/", 1)[1] for member in plan.members(shard)]


def shard_of(plan: CachePlan, name: str) -> str:
    (file,) = (shard.file for shard in plan.shards if name in names_in(plan, shard))
    return file
