"""Facts of a run for the model card: dataset, resolutions, losses, scores."""

import json
from pathlib import Path
from typing import Any

from sd3_light.checkpoint.progress import Progress
from sd3_light.config.load_dataset import load_directories
from sd3_light.runlog import read_log


def card_facts(dataset: Path, run: Path, weights: str, progress: Progress) -> dict[str, Any]:
    """Return what the dataset TOML and the run folder say about the model with these weights at this point."""
    return {
        "name": run.name,
        **_dataset_facts(dataset),
        "losses": _losses(run / "log.jsonl", weights, progress.step),
        "scores": _scores(run / "score.json"),
    }


def _dataset_facts(dataset: Path) -> dict[str, str]:
    """Return the dataset's name and its image sizes."""
    name = {"data set": dataset.stem}
    if not dataset.is_file():
        return name
    directories, _ = load_directories(dataset)
    sizes = {size for directory in directories for size in (directory.size_buckets or directory.resolutions or ())}
    return {**name, "resolutions": ", ".join(f"{width}x{height}" for width, height in sorted(sizes))}


def _losses(log: Path, weights: str, step: int) -> dict[str, float]:
    """Return the last validation loss of each evaluation set up to this step."""
    if not log.is_file():
        return {}
    events = (event for event in read_log(log) if event["event"] == "eval")
    return {event["set"]: event["flow"] for event in events if event["weights"] == weights and event["step"] <= step}


def _scores(path: Path) -> dict[str, float]:
    """Return the rates that `sd3-light evaluate --out` wrote into the run folder."""
    if not path.is_file():
        return {}
    scores = json.loads(path.read_text(encoding="utf-8"))
    return {name: rate for name, rate in scores.items() if isinstance(rate, float)} if isinstance(scores, dict) else {}
