"""Compare the catalogues of an evaluation set and of the training set, once for their contents."""

from dataclasses import asdict
from pathlib import Path

from sd3_light.cache.rows import CatalogueRows
from sd3_light.data.cache_plan import digest_of
from sd3_light.inputs import read_json_file
from sd3_light.runlog import progress
from sd3_light.sources.leaks import Leak, open_evaluation_images
from sd3_light.sources.thumbnail_tree import TOLERANCE

_SUFFIX = ".leaks.json"


def find_leaks(name: str, held: CatalogueRows, training: CatalogueRows) -> list[Leak]:
    """Return the images of the evaluation set ``name`` that the training set has too.

    One process compares, and stores the result in the catalogue of the evaluation set; the others wait for it.
    """
    path = held.catalogue.folder / f"{digest_of(name, held.digest, training.digest, str(TOLERANCE))}{_SUFFIX}"

    def compare(_: str) -> None:
        leaks = _compare(name, held, training)
        held.store(path, [asdict(leak) for leak in leaks])

    held.catalogue.claims.divide([path.stem], lambda _: _stored(path) is not None, compare)
    return _stored(path) or []


def _stored(path: Path) -> list[Leak] | None:
    """Return the stored result; None if it is missing or damaged."""
    try:
        return [Leak(**{**leak, "pairs": tuple(map(tuple, leak["pairs"]))}) for leak in read_json_file(path)]
    except (FileNotFoundError, ValueError, LookupError, TypeError):
        return None


def _compare(name: str, held: CatalogueRows, training: CatalogueRows) -> list[Leak]:
    total = held.count + training.count
    with open_evaluation_images() as images, progress(f"comparing {name} with training", total, "images") as bar:
        for row in held.used():
            images.add(name, row)
            bar.advance()
        for row in training.used():
            images.compare(row)
            bar.advance()
        return images.leaks()
