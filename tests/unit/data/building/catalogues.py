"""Pictures on disk, their catalogue and their plan, as a process that has just begun would make them."""

import itertools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image

from sd3_light.config import DirectoryConfig
from sd3_light.data.building.cache_plan import CachePlan, Unit, make_cache_plan
from sd3_light.data.building.catalogue import Catalogue, InputRow, Listing, make_sources
from sd3_light.data.building.claims import Claims
from sd3_light.stages.cache.manifest_writer import in_order

RECIPE = {"t5_max_length": 16, "vae": "abc"}
COUNT = 30
_times = itertools.count(10**18, 10**9)


def picture(path: Path, colour: int = 0, size: tuple[int, int] = (64, 64), caption: str | None = "a, b, c") -> None:
    """A captioned picture; no two writings have the same time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (colour, 0, 0)).save(path)
    if caption is not None:
        path.with_suffix(".txt").write_text(caption, encoding="utf-8")
    for file in (path, path.with_suffix(".txt")):
        if file.exists():
            os.utime(file, ns=(time := next(_times), time))


def pictures_in(folder: Path) -> Path:
    """Thirty of them."""
    for number in range(COUNT):
        picture(folder / f"{number:02}.png", number)
    return folder


def directory(path: Path, **keys: Any) -> DirectoryConfig:
    return DirectoryConfig(path=path, **({} if "size_buckets" in keys else {"resolutions": [64]}) | keys)


def age(paths: Sequence[Path], seconds: float) -> None:
    for path in paths:
        os.utime(path, (path.stat().st_mtime - seconds,) * 2)


def nothing(_: int) -> None:
    pass


@contextmanager
def opened(cache: Path, *directories: DirectoryConfig) -> Iterator[tuple[Catalogue, list[Listing]]]:
    """A catalogue that has listed its directories, by a process that began after everything before."""
    age(list((cache / "catalogue").rglob("*.*")), 60)
    with Claims(cache / "claims") as claims:
        found = Catalogue(cache, claims)
        yield found, found.refresh(make_sources(directories), nothing)


def looked(cache: Path, *directories: DirectoryConfig, workers: int = 0) -> dict[str, InputRow]:
    """List, look, and return every row by the last of its key."""
    with opened(cache, *directories) as (found, listings):
        found.probe_images(listings, workers, nothing)
        assert found.count_unprobed(listings) == 0
        rows = [row for listing in listings for part in listing.parts for row in found.rows(part)]
        assert sum(listing.rows for listing in listings) == len(rows)
        return {row.key.rsplit("/", 1)[1]: row for row in rows}


def parts_of(cache: Path) -> set[str]:
    return {path.name for path in (cache / "catalogue" / "parts").iterdir()}


def planned(
    cache: Path, directories: Sequence[DirectoryConfig] | Path, recipe: dict[str, Any] = RECIPE, size: int = 8
) -> CachePlan:
    """List, look and plan."""
    if isinstance(directories, Path):
        directories = [directory(directories)]
    with opened(cache, *directories) as (catalogue, listings):
        catalogue.probe_images(listings, 0, nothing)
        return make_cache_plan(catalogue, listings, recipe, size)


def files(plan: CachePlan) -> list[str]:
    return [unit.file for unit in in_order(plan.units)]


def names(plan: CachePlan, unit: Unit) -> list[str]:
    return [member.row.key.rsplit("/", 1)[1] for member in plan.members(unit)]


def unit_of(plan: CachePlan, name: str) -> str:
    (found,) = (unit.file for unit in plan.units if name in names(plan, unit))
    return found
