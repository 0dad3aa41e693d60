"""The true images that a model is measured against, and copies of them in the nearest other style."""

import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor

from sd3_light.config import load_dataset
from sd3_light.config.faults import UserError
from sd3_light.data.decoded import DecodedSample, decode_dataset
from sd3_light.evaluate.distances import cosine_distances
from sd3_light.inputs import is_inner_path, read_json_file
from sd3_light.sources.buckets import Bucket, plan
from sd3_light.sources.preprocess import Pixels, Reject, decode, fit
from sd3_light.sources.records import FileBytes

CELLS = "cells.json"


@dataclass(frozen=True)
class Truth:
    """A true image [H, W, 3], one of its captions, and the file that contains it."""

    caption: str
    pixels: Pixels
    path: Path

    @property
    def size(self) -> tuple[int, int]:
        """Width and height."""
        return self.pixels.shape[1], self.pixels.shape[0]


def load_truths(toml: Path, count: int) -> list[Truth]:
    """Return the ``count`` images of a dataset TOML with the lowest sample ids, each once at its largest size.

    An image with several captions has one of them; which one alternates, so that all languages occur.
    """
    dataset = load_dataset(toml)
    sizes = max(len(directory.resolutions or (0,)) for directory in dataset.directories)
    with TemporaryDirectory(prefix="sd3-light-") as folder:
        decoded = decode_dataset(dataset, Path(folder), sizes * count, min(16, (os.cpu_count() or 2) - 1))
    largest: dict[int, DecodedSample] = {}
    for sample in sorted(decoded, key=lambda sample: sample.pixels.size):
        largest[sample.member.identity] = sample
    samples = [largest[identity] for identity in sorted(largest)][:count]
    return [
        Truth(sample.member.captions[row % len(sample.member.captions)], sample.pixels, sample.path)
        for row, sample in enumerate(samples)
    ]


# --- the nearest style ---------------------------------------------------------------------------


def style_copies(
    truths: Sequence[Truth], features: Tensor, cells: Path, embed: Callable[[Sequence[Pixels]], Tensor]
) -> dict[int, tuple[Pixels, Tensor]]:
    """Return copies of true images by row: the same concept from the nearest other style that is not held out.

    The nearest style is that with the lowest mean distance over the concepts of the same style. ``features`` are those
    of the truths, and ``embed`` returns the features of images. Images without a copy are left out.
    """
    pairs = list(_pairs(truths, read_cells(cells)))
    if not pairs:
        raise UserError(f"--cells: {cells} has no other style of any image; give the list of the set in --against")
    images = [_read(pair.path, truths[pair.row]) for pair in pairs]
    vectors = embed(images)
    distances: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    to_truth = cosine_distances(vectors, features[[pair.row for pair in pairs]])
    for pair, distance in zip(pairs, to_truth.tolist(), strict=True):
        distances[pair.styles].append(distance)
    nearest: dict[int, tuple[float, int]] = {}
    for number, pair in enumerate(pairs):
        candidate = (mean(distances[pair.styles]), number)
        nearest[pair.row] = min(nearest.get(pair.row, candidate), candidate)
    return {row: (images[number], vectors[number]) for row, (_, number) in sorted(nearest.items())}


@dataclass(frozen=True)
class _Pair:
    """A true image by row, and the file of its concept in another style; ``styles`` are its own and the other."""

    row: int
    styles: tuple[str, str]
    path: Path


def read_cells(path: Path) -> dict[Path, Mapping[str, Any]]:
    """Return the rows of a list of cells by image file: `concept`, `style` and `held_out` of each `file`.

    Files are relative to the folder of the list; with `held_out` true or false, to its `held_out` or `train` folder.
    """
    try:
        rows = read_json_file(path)
    except (OSError, ValueError) as error:
        raise UserError(f"--cells: {path} cannot be read: {error}; give a JSON list of cells") from error
    if not isinstance(rows, list) or not all(map(_is_cell, rows)):
        raise UserError(f"--cells: {path} is not a list of objects with concept, style and a file inside its folder")
    root = Path(os.path.abspath(path)).parent
    folders = {True: root / "held_out", False: root / "train", None: root}
    return {folders[row.get("held_out")] / row["file"]: row for row in rows}


def _is_cell(row: Any) -> bool:
    has_texts = isinstance(row, dict) and all(isinstance(row.get(key), str) for key in ("file", "concept", "style"))
    return has_texts and is_inner_path(row["file"]) and row.get("held_out") in (True, False, None)


def _pairs(truths: Sequence[Truth], cells: Mapping[Path, Mapping[str, Any]]) -> Iterator[_Pair]:
    by_concept: defaultdict[str, dict[str, Path]] = defaultdict(dict)
    for path, cell in cells.items():
        if not cell.get("held_out"):
            by_concept[cell["concept"]].setdefault(cell["style"], path)
    for row, truth in enumerate(truths):
        own = cells.get(Path(os.path.abspath(truth.path)), {})
        for style, path in by_concept.get(own.get("concept", ""), {}).items():
            if style != own["style"]:
                yield _Pair(row, (own["style"], style), path)


def _read(path: Path, truth: Truth) -> Pixels:
    try:
        image = decode(FileBytes(str(path)).read())
    except Reject as reject:
        raise UserError(f"--cells: {path} cannot be used ({reject}); build the set again") from reject
    return fit(image, plan(*image.size, Bucket(*truth.size)))
