"""The best, the worst and random images of an evaluation, each beside the true image of its caption."""

import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from sd3_light.config.faults import UserError
from sd3_light.inputs import is_inner_path, read_json_file
from sd3_light.pages import render_template
from sd3_light.sources.captions import is_utf8
from sd3_light.ui.folders import EVALUATION, Folders

PAGE_SIZE = 24
"""Captions on a page."""
ORDERS = ("best", "worst", "random")

_PREFERRED = ("distance", "psnr", "edges", "retrieval")
_LOWER_IS_BETTER = ("distance",)
_LARGEST = 1e300  # of a score; whole numbers of JSON have no limit
_ROWS = "rows"  # in the scores of a row: the captions that have an image


@dataclass(frozen=True)
class View:
    """Which images of an evaluation are shown: of a row of its table, by a score; ``seed`` is of a random order."""

    row: str = ""
    score: str = ""
    order: str = "best"
    seed: int = 0


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation kept: captions, the folder of each row, and the scores of its single images by caption."""

    folder: Path
    captions: Sequence[str]
    rows: Mapping[str, str]
    true: str
    scores: Mapping[str, Mapping[str, Mapping[int, float]]]

    def image(self, row: str, caption: int | None) -> Path | None:
        """Return the path of an image; None if there is none, or a link."""
        if row not in self.rows or caption is None or not 0 <= caption < len(self.captions):
            return None
        place = os.path.join(self.rows[row], f"{caption}.png")
        path = self.folder / place
        is_plain = os.path.realpath(path) == os.path.join(os.path.realpath(self.folder), place)
        return path if is_plain and path.is_file() else None

    def drawn(self) -> list[str]:
        """Return the rows with images other than the true ones, those of models last."""
        return [row for row in self.rows if row != self.true]

    def ordered(self, view: View) -> list[int]:
        """Return the captions with an image of the row, in the order of the view."""
        scores = self.scores.get(view.row, {}).get(view.score, {})
        if view.order == "random" or not scores:
            captions = [number for number in range(len(self.captions)) if self.image(view.row, number)]
            random.Random(view.seed).shuffle(captions)
            return captions
        is_descending = (view.order == "best") != (view.score in _LOWER_IS_BETTER)
        return sorted(scores, key=lambda caption: (-scores[caption] if is_descending else scores[caption], caption))


def evaluations_page(folders: Folders) -> str:
    """Return the list of evaluations whose images were kept."""
    listed = folders.evaluations()
    return render_template("evaluations.html", listed=listed, roots=folders.roots, served="/evaluations")


def evaluation_page(folders: Folders, evaluation_id: str, view: View, number: int = 1) -> str:
    """Return page ``number`` of the images of an evaluation. What the view does not name is chosen."""
    label, folder = folders.evaluation(evaluation_id)
    evaluation = read_evaluation(folder)
    rows = evaluation.drawn()
    row = view.row if view.row in rows else next(reversed(rows), "")
    scores = evaluation.scores.get(row, {})
    score = view.score if view.score in scores else next((name for name in _PREFERRED if name in scores), "")
    order = view.order if view.order in ORDERS else "best"
    view = replace(view, row=row, score=score, order=order if score else "random")
    ordered = evaluation.ordered(view)
    first = (number - 1) * PAGE_SIZE
    notes = [] if scores else ["This evaluation kept no scores of single images; evaluate again to order them."]
    return render_template(
        "evaluation_images.html",
        heading=label,
        folder=folder,
        path=f"/evaluations/{evaluation_id}",
        view=view,
        rows=rows,
        scores=scores,
        orders=ORDERS,
        evaluation=evaluation,
        shown=ordered[first : first + PAGE_SIZE],
        total=len(ordered),
        number=number,
        pages=max(1, -(-len(ordered) // PAGE_SIZE)),
        address=lambda **changes: f"/evaluations/{evaluation_id}?{urlencode({**vars(view), **changes})}",
        notes=notes,
        served="/evaluations",
    )


def evaluated_image(folders: Folders, evaluation_id: str, row: str, caption: int | None) -> Path:
    """Return the path of an image of an evaluation. Raises UserError where there is none."""
    label, folder = folders.evaluation(evaluation_id)
    path = read_evaluation(folder).image(row, caption)
    if path is None:
        raise UserError(f"{label} has no image of caption {caption} in {row[:80]!r}")
    return path


def read_evaluation(folder: Path) -> Evaluation:
    """Read the list of an evaluation's images. What is not valid in it is left out; another file is a UserError."""
    try:
        values = read_json_file(folder / EVALUATION)
    except (OSError, ValueError) as error:
        raise UserError(f"{folder / EVALUATION} cannot be read: {error}; evaluate again") from error
    captions, rows = (values.get(name) for name in ("captions", "rows")) if isinstance(values, dict) else (None, None)
    if not isinstance(captions, list) or not isinstance(rows, dict):
        raise UserError(f"{folder / EVALUATION} is not the list of an evaluation; evaluate again")
    inner = {name: place for name, place in rows.items() if is_utf8(name) and is_inner_path(place)}
    each = values.get("each")
    scores = {name: _scores(table, len(captions)) for name, table in each.items()} if isinstance(each, dict) else {}
    return Evaluation(folder, list(map(str, captions)), inner, str(values.get("true", "true images")), scores)


def _scores(table: Any, captions: int) -> dict[str, dict[int, float]]:
    """Return the finite scores of a row's images by metric and caption."""
    rows = table.get(_ROWS) if isinstance(table, dict) else None
    if not isinstance(rows, list):
        return {}
    columns = {
        name: values for name, values in table.items() if name != _ROWS and is_utf8(name) and isinstance(values, list)
    }
    return {
        name: {
            row: value
            for row, value in zip(rows, values, strict=False)
            if type(row) is int and 0 <= row < captions and _is_finite(value)
        }
        for name, values in columns.items()
    }


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _LARGEST
