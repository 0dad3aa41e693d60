"""What a card says about a run: its data, losses and scores, and its newest sample images."""

import math
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from statistics import median
from typing import Any

import pyarrow as pa
from PIL import Image

from sd3_light.checkpoint.progress import Progress
from sd3_light.checkpoint.store import step_of
from sd3_light.config import TrainConfig
from sd3_light.config.faults import UserError
from sd3_light.config.hub_ids import repo_or_name
from sd3_light.config.load_dataset import load_directories
from sd3_light.core.registry import starting_weights
from sd3_light.data.manifest import HELD_OUT, SHARDS, Manifest
from sd3_light.data.shards import read_origins
from sd3_light.export.best import METRICS_EVENT
from sd3_light.export.export_spec import SAMPLES_FILE
from sd3_light.inputs import open_regular, read_json_file
from sd3_light.runlog import METRIC_GROUPS, info, measured, read_log

SAMPLES = "samples"
"""The folder of a run's sample images."""
_CARD_SIDE = 2048  # pixels
_UNREADABLE = (UserError, OSError, ValueError, LookupError, TypeError, pa.ArrowException)
_MOST_SHARDS = 4  # whose captions are summarised


def card_facts(config: TrainConfig, run: Path, weights: str, progress: Progress) -> dict[str, Any]:
    """Return what the dataset, its cache and the run folder say about a model with these weights at this point.

    Neither captions nor folders of this machine are part of it.
    """
    cache = config.cache_dir or config.dataset.with_suffix(".cache")
    return {
        "name": run.name,
        "base model": _base_model(config),
        **_dataset_facts(config.dataset),
        **(_cache_facts(cache) if isinstance(cache, Path) else {}),
        "losses": _losses(run / "log.jsonl", weights, progress.step),
        "metrics": _metrics(run / "log.jsonl", weights, progress.step),
        "scores": _scores(run / "score.json"),
    }


def newest_samples(run: Path, step: int) -> dict[str, bytes]:
    """Return the newest grid of samples up to this step, as a JPEG for the card; empty if there is none."""
    grids = [path for path in sorted((run / SAMPLES).glob("step-*.png")) if step_of(path.with_suffix("")) <= step]
    if not grids:
        return {}
    jpeg = BytesIO()
    try:
        with open_regular(grids[-1]) as file, Image.open(file) as grid:
            grid.thumbnail((_CARD_SIDE, _CARD_SIDE))
            grid.convert("RGB").save(jpeg, "JPEG", quality=90)
    except OSError as error:  # a card without samples is better than no export
        info(f"the card has no samples: {grids[-1]} cannot be read: {error}")
        return {}
    return {SAMPLES_FILE: jpeg.getvalue()}


def _base_model(config: TrainConfig) -> str:
    """Return OWNER/NAME of the model on the hub that training started from; "" for others and for random weights."""
    start = starting_weights(config.model)
    if start.source is None:
        return ""
    name = repo_or_name(start.source.parent if start.source.name == "transformer" else start.source)
    return name if "/" in name else ""


def _dataset_facts(dataset: Path) -> dict[str, str]:
    """Return the dataset's name and its image sizes."""
    name = {"data set": dataset.stem}
    if not dataset.is_file():
        return name
    directories, _ = load_directories(dataset)
    sizes = {size for directory in directories for size in (directory.size_buckets or directory.resolutions or ())}
    return {**name, "resolutions": ", ".join(f"{width}x{height}" for width, height in sorted(sizes))}


def _cache_facts(cache: Path) -> dict[str, str]:
    """Return the number of images and a summary of the captions in a local cache; empty where it cannot be read."""
    try:
        manifest = Manifest.load(cache)
        shards = [cache / SHARDS / entry.file for entry in manifest.shards[:_MOST_SHARDS]]
        captions = [origin.captions for shard in shards for origin in read_origins(shard)]
    except _UNREADABLE:  # a card without it is better than no export
        return {}
    total = sum(entry.count for entry in manifest.shards)
    held_out = manifest.counts.get(HELD_OUT, 0)
    images = f"{total:,}" + (f", of which {held_out:,} are held out for validation" if held_out else "")
    return {"images": images, "captions": _caption_summary(captions)}


def _caption_summary(captions: Sequence[Sequence[str]]) -> str:
    """Return the captions per image and their lengths, without any text of them."""
    lengths = sorted(len(caption) for each in captions for caption in each if caption)
    if not lengths:
        return "none"
    counts = {len(each) for each in captions}
    number = str(*counts) if len(counts) == 1 else f"{min(counts)} to {max(counts)}"
    return f"{number} per image, {lengths[0]} to {lengths[-1]} characters, median {median(lengths):g}"


def _losses(log: Path, weights: str, step: int) -> dict[str, float]:
    """Return the last validation loss of each evaluation set up to this step, where it is finite."""
    return _finite({event["set"]: measured(event, "flow") for event in _events(log, "eval", weights, step)})


def _metrics(log: Path, weights: str, step: int) -> dict[str, float]:
    """Return the last measurements against true images up to this step, by metric, where they are finite."""
    last: dict[str, Any] = next(reversed(_events(log, METRICS_EVENT, weights, step)), {})
    return _finite({name: measured(last[name], "value") for name in METRIC_GROUPS if last.get(name)})


def _events(log: Path, kind: str, weights: str, step: int) -> list[dict[str, Any]]:
    """Return the records of a kind for these weights up to this step."""
    events = read_log(log) if log.is_file() else ()
    return [e for e in events if e["event"] == kind and e.get("weights") == weights and e["step"] <= step]


def _finite(values: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in values.items() if math.isfinite(value)}


def _scores(path: Path) -> dict[str, float]:
    """Return the rates that `sd3-light evaluate --out` wrote into the run folder."""
    if not path.is_file():
        return {}
    scores = read_json_file(path)
    return {name: rate for name, rate in scores.items() if isinstance(rate, float)} if isinstance(scores, dict) else {}
