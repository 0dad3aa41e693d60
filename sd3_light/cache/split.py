"""Divide a dataset into a training and a validation side, once for the contents of its catalogue."""

from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import partial
from pathlib import Path

from sd3_light.cache.freshness import undecoded_keys
from sd3_light.cache.manifest_writer import rejected_keys
from sd3_light.cache.rows import CatalogueRows
from sd3_light.cache.shard_in_progress import is_done
from sd3_light.data.cache_plan import CachePlan, digest_of
from sd3_light.data.sides import HeldOut
from sd3_light.data.split import RECORD, ImageSplit, split_images
from sd3_light.inputs import read_json_file
from sd3_light.randomness import sample_id
from sd3_light.runlog import progress
from sd3_light.sources.catalogue import InputRow
from sd3_light.sources.thumbnail_tree import TOLERANCE

_SUFFIX = ".split.json"


def find_split(rows: CatalogueRows) -> ImageSplit:
    """Return the sides of a dataset's images. One process decides; the others wait for it."""
    folder = rows.catalogue.folder
    divided = "".join("01"[listing.source.directory.validation] for listing in rows.listings)
    path = folder / f"{digest_of(rows.digest, divided, str(TOLERANCE))}{_SUFFIX}"

    def decide(_: str) -> None:
        # the rows are read to look up what is known, to compare the new ones, and to compare the others with these
        with progress("dividing the dataset", 3 * rows.count, "rows") as bar:
            split = split_images(partial(_counted, rows, bar.advance), folder / RECORD)
        rows.store(path, asdict(split))

    rows.catalogue.claims.divide([path.stem], lambda _: _stored(path) is not None, decide)
    split = _stored(path)
    assert split is not None
    return split


def _counted(rows: CatalogueRows, advance: Callable[[], None]) -> Iterable[tuple[InputRow, bool]]:
    for row, directory in rows.with_directories():
        advance()
        yield row, directory.validation


def _stored(path: Path) -> ImageSplit | None:
    """Return the stored result; None if it is missing or damaged."""
    try:
        content = read_json_file(path)
        return ImageSplit(content["images"], tuple(content["validation"]), tuple(content["unused"]))
    except (FileNotFoundError, ValueError, LookupError, TypeError):
        return None


def held_out_samples(split: ImageSplit, plan: CachePlan, shards: Path) -> HeldOut:
    """Return the samples of a plan that are not trained on, by shard, without images that cannot be decoded.

    Of shards that are not built yet, these are the ones that an earlier build could not decode.
    """
    sides = dict.fromkeys(split.validation, "validation") | dict.fromkeys(split.unused, "unused")
    earlier: set[int] | None = None
    held: dict[str, dict[str, tuple[int, ...]]] = {"validation": {}, "unused": {}}
    for shard in plan.shards if sides else ():
        ids = [number for number in plan.ids(shard).tolist() if number in sides]
        if not ids:
            continue
        if is_done(shards, shard):
            lost = set(map(sample_id, rejected_keys(shards, shard)))
        else:
            earlier = earlier if earlier is not None else set(map(sample_id, undecoded_keys(shards)))
            lost = earlier
        for side, by_file in held.items():
            chosen = tuple(number for number in ids if sides[number] == side and number not in lost)
            if chosen:
                by_file[shard.file] = chosen
    return HeldOut(**held)
