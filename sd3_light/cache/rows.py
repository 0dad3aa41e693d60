"""The probed rows of a dataset, as its catalogue has them."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sd3_light.config import DirectoryConfig
from sd3_light.data.cache_plan import IGNORED_SETTINGS, digest_of
from sd3_light.files import write_atomically
from sd3_light.sources.catalogue import Catalogue, InputRow, Listing
from sd3_light.sources.leaks import is_used

_MAX_RESULTS = 8  # of different configs that share the catalogue


@dataclass(frozen=True)
class CatalogueRows:
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

    def store(self, path: Path, content: Any) -> None:
        """Write what follows from the rows into their catalogue, and remove the oldest results of the same kind."""
        suffix = path.name.partition(".")[2]
        write_atomically(path, json.dumps(content).encode())
        for old in sorted(path.parent.glob(f"*.{suffix}"), key=lambda each: each.stat().st_mtime)[:-_MAX_RESULTS]:
            old.unlink(missing_ok=True)

    def used(self) -> Iterator[InputRow]:
        """Yield the rows that are samples, part by part."""
        return (row for row, _ in self.with_directories())

    def with_directories(self) -> Iterator[tuple[InputRow, DirectoryConfig]]:
        """Yield them with their directories."""
        for listing in self.listings:
            directory = listing.source.directory
            for part in listing.parts:
                yield from ((row, directory) for row in self.catalogue.rows(part) if is_used(row, directory))
