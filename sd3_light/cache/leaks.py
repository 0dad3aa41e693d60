"""Compare the catalogues of an evaluation set and of the training set, once for their contents."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from sd3_light.data.cache_plan import IGNORED_SETTINGS, ShowProgress, digest_of
from sd3_light.files import write_atomically
from sd3_light.inputs import read_json_file
from sd3_light.sources.catalogue import Catalogue, InputRow, Listing
from sd3_light.sources.leaks import Leak, is_used, open_evaluation_images
from sd3_light.sources.thumbnail_tree import TOLERANCE


@dataclass(frozen=True)
class Rows:
    """The probed rows of a dataset."""

    catalogue: Catalogue
    listings: Sequence[Listing]

    @property
    def count(self) -> int:
        """The number of rows."""
        return sum(listing.rows for listing in self.listings)

    @property
    def digest(self) -> str:
        """A hash of the rows and of what decides which are used."""
        return digest_of(
            *(part for listing in self.listings for part in listing.parts),
            *(listing.source.directory.model_dump_json(exclude=IGNORED_SETTINGS) for listing in self.listings),
        )

    def used(self) -> Iterator[InputRow]:
        """Yield the rows that are samples, part by part."""
        for listing in self.listings:
            for part in listing.parts:
                yield from (row for row in self.catalogue.rows(part) if is_used(row, listing.source.directory))


def find_leaks(name: str, held: Rows, training: Rows, show_progress: ShowProgress) -> list[Leak]:
    """Return the images of the evaluation set ``name`` that the training set has too.

    One process compares, and stores the result in the catalogue of the evaluation set; the others wait for it.
    """
    folder = held.catalogue.folder
    path = folder / f"leaks-{digest_of(name, held.digest, training.digest, str(TOLERANCE))}.json"

    def compare(_: str) -> None:
        leaks = _compare(name, held, training, show_progress)
        for old in folder.glob("leaks-*.json"):
            old.unlink(missing_ok=True)
        write_atomically(path, json.dumps([asdict(leak) for leak in leaks]).encode())

    held.catalogue.claims.divide([path.stem], lambda _: _stored(path) is not None, compare)
    return _stored(path) or []


def _stored(path: Path) -> list[Leak] | None:
    """Return the stored result; None if it is missing or damaged."""
    try:
        return [Leak(**{**leak, "pairs": tuple(map(tuple, leak["pairs"]))}) for leak in read_json_file(path)]
    except (FileNotFoundError, ValueError, LookupError, TypeError):
        return None


def _compare(name: str, held: Rows, training: Rows, show_progress: ShowProgress) -> list[Leak]:
    total = held.count + training.count
    with open_evaluation_images() as images, show_progress(f"comparing {name} with training", total, "images") as bar:
        for row in held.used():
            images.add(name, row)
            bar.advance()
        for row in training.used():
            images.compare(row)
            bar.advance()
        return images.leaks()
