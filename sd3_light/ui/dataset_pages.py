"""The pages of a dataset: its samples, and previews of changes."""

import difflib
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from urllib.parse import urlencode

import numpy as np
from PIL import Image

from sd3_light.config import load_config
from sd3_light.config.faults import UserError
from sd3_light.pages import render_template
from sd3_light.report.inspect.cache_stats import reason_meaning
from sd3_light.sources.preprocess import Reject
from sd3_light.sources.video import open_still
from sd3_light.ui.dataset_jobs import read_length
from sd3_light.ui.datasets import Dataset, Preview
from sd3_light.ui.run_queue import can_resume
from sd3_light.ui.sample_index import SHOWS, SORTS, IndexedSample, Query, Rows

PAGE_SIZE = 24
"""Samples per page."""

_MOST_SHOWN = 50  # captions of a preview
_MOST_COMPARED = 300  # letters or words: the time grows with their cube in the worst case
_LARGEST_SIDE = 384  # pixels of a served image
_WITH_IMAGE = (
    *("no_caption", "empty_caption", "bad_caption", "caption_too_long", "caption_not_utf8"),
    *("too_small", "crop_too_large", "would_be_enlarged"),
)  # reasons that say nothing about the bytes of the image
_FIELDS = ("show", "text", "tag", "where", "reason", "sort", "like")


def query_of(values: Mapping[str, str]) -> Query:
    """Return the query of an address. Raises UserError for unknown values."""
    chosen = {name: values.get(name, "") for name in _FIELDS}
    chosen["show"] = chosen["show"] or "used"
    if chosen["show"] not in SHOWS:
        raise UserError(f"unknown choice {chosen['show']!r:.40}; use one of {', '.join(SHOWS)}")
    return Query(**chosen, descending=values.get("order") == "descending")


def address_of(query: Query, page: int = 1, **changes: str) -> str:
    """Return the part of an address that asks for a query, "?..."; ``changes`` replace fields."""
    values = {name: getattr(query, name) for name in _FIELDS} | changes
    pairs = {name: value for name, value in values.items() if value and (name, value) != ("show", "used")}
    if query.descending and "sort" not in changes:
        pairs["order"] = "descending"
    if page > 1:
        pairs["page"] = str(page)
    return f"?{urlencode(pairs)}" if pairs else "?"


def dataset_page(dataset: Dataset, dataset_id: str, query: Query, page: int = 1, with_tags: bool = False) -> str:
    """Return a page of the samples that match a query; ``with_tags``: with the tags of all of them."""
    notes = list(dataset.notes)
    if dataset.job is not None and dataset.job.error:
        notes.append(dataset.job.error)
    index = dataset.index
    rows: Rows | None = None
    tags: dict[str, int] = {}
    if index is not None:
        try:
            rows = _find(dataset, query)
            if with_tags:
                tags, is_complete = index.tags(rows)
                notes += [] if is_complete else ["Tags were counted in the first samples alone."]
        except UserError as error:
            notes.append(str(error))
    shown: list[IndexedSample] = []
    if index is not None and rows is not None:
        shown = index.samples(rows[(page - 1) * PAGE_SIZE : page * PAGE_SIZE])
    pages = 0 if rows is None else -(-len(rows) // PAGE_SIZE)
    problem = dataset.files.problem(dataset.path)
    return render_template(
        "dataset.html",
        folder=dataset.path,
        path=f"/datasets/{dataset_id}",
        dataset=dataset,
        index=index,
        query=query,
        sorts=[*SORTS, *(name for name, values in _measured(dataset).items() if values)],
        shows=SHOWS,
        counts=_counts(dataset),
        reasons=[] if index is None else [(name, count, reason_meaning(name)) for name, count in index.reasons.items()],
        samples=shown,
        with_image=_WITH_IMAGE,
        read_length=read_length,
        groups=_groups(dataset, shown) if query.show == "duplicates" else [],
        total=0 if rows is None else len(rows),
        tags=tags,
        with_tags=with_tags,
        address=lambda **changes: f"/datasets/{dataset_id}{address_of(query, **changes)}",
        query_text=address_of(query).removeprefix("?"),
        number=page,
        pages=pages,
        problem=problem,
        commands=_commands(dataset),
        notes=notes,
        served="/data",
        live=bool((dataset.job and dataset.job.is_running) or (dataset.plan and dataset.plan.is_running)),
    )


def chosen_rows(dataset: Dataset, query: Query, keys: Sequence[str] | None) -> Rows:
    """Return the rows of keys; without them all rows of the query."""
    return _find(dataset, query) if keys is None else dataset.require_index().rows_of(keys)


def _find(dataset: Dataset, query: Query) -> Rows:
    index = dataset.require_index()
    values = _measured(dataset).get(query.sort)
    if values is None:
        return index.find(query)
    rows = index.find(replace(query, sort=""))
    rows = rows[np.isin(rows, index.rows_of(list(values)))]
    ranked = np.array([values[key] for key in index.keys(rows)])
    return rows[np.argsort(-ranked if query.descending else ranked, kind="stable")]


def _measured(dataset: Dataset) -> dict[str, Mapping[str, float]]:
    """Return what was measured of some samples, by key; such a sort shows only these."""
    return {"tokens cut": dataset.lost, "PSNR": dataset.psnr}


def preview_page(dataset: Dataset, dataset_id: str, preview: Preview, back: str) -> str:
    """Return the page that shows a change of captions before it is made."""
    edits = [(edit.key, list(_difference(edit.old, edit.new))) for edit in preview.edits[:_MOST_SHOWN]]
    return render_template(
        "preview.html",
        folder=dataset.path,
        path=f"/datasets/{dataset_id}",
        preview=preview,
        num_files=len({edit.place.path for edit in preview.edits}),
        edits=edits,
        problems=preview.problems[:_MOST_SHOWN],
        back=f"/datasets/{dataset_id}?{back}",
        query_text=back,
        served="/data",
    )


def sample_image(dataset: Dataset, key: str) -> bytes:
    """Return a sample's image as a small WebP. Raises UserError where it cannot be opened."""
    sample = dataset.sample(key)
    try:
        image = open_still(sample.location)
    except Reject as reject:
        raise UserError(f"{key:.200}: {reject.detail or reject.reason}") from reject
    image.thumbnail((_LARGEST_SIDE, _LARGEST_SIDE), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    image.save(buffer, "WEBP", quality=85)
    return buffer.getvalue()


def _groups(dataset: Dataset, shown: Sequence[IndexedSample]) -> list[list[IndexedSample]]:
    """Return the samples of a page by their group of duplicates."""
    index = dataset.require_index()
    groups: dict[int, list[IndexedSample]] = {}
    for sample in shown:
        groups.setdefault(int(index.duplicate_groups[index.row_of(sample.key)]), []).append(sample)
    return list(groups.values())


def _counts(dataset: Dataset) -> dict[str, int]:
    """Return how many samples each choice shows, without filters."""
    index = dataset.index
    if index is None:
        return {}
    excluded = int(index.is_excluded.sum())
    rejected = int((index.is_rejected & ~index.is_excluded).sum())
    used = len(index) - excluded - rejected
    hidden = len(index.excluded) if not dataset.is_listed_here else excluded
    return {"used": used, "all": len(index), "excluded": hidden, "rejected": rejected, "edited": len(index.edited)}


def _commands(dataset: Dataset) -> list[tuple[str, str, bool]]:
    """Return path and name of each train TOML, and whether its run has a checkpoint to continue from."""
    commands = []
    for config in dataset.configs:
        try:
            output = load_config(config).train.output_dir
        except UserError:
            continue
        commands.append((str(config), config.name, can_resume(output)))
    return commands


def _difference(old: str, new: str) -> Iterator[tuple[str, str]]:
    """Yield pieces of text, each "same", "removed" or "added": of letters, of words in longer texts, or as a whole."""
    before: Sequence[str] = old
    after: Sequence[str] = new
    if len(before) + len(after) > _MOST_COMPARED:
        before = re.findall(r"\w+|\W+", old)
        after = re.findall(r"\w+|\W+", new)
    if len(before) + len(after) > _MOST_COMPARED:
        yield "removed", old
        yield "added", new
        return
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    for kind, start, end, new_start, new_end in matcher.get_opcodes():
        if kind == "equal":
            yield "same", "".join(before[start:end])
            continue
        if start < end:
            yield "removed", "".join(before[start:end])
        if new_start < new_end:
            yield "added", "".join(after[new_start:new_end])
