"""What a run can tell about its model, for the model card: data, resolutions, losses, scores."""

import json
from pathlib import Path
from typing import Any

from sd3_light.checkpoint.progress import Progress
from sd3_light.config import TrainConfig
from sd3_light.config.load_dataset import load_directories
from sd3_light.runlog import read_log


def card_facts(config: TrainConfig, run: Path, weights: str, progress: Progress) -> dict[str, Any]:
    """What is known of the model with these weights at this point of the run; what is not there is left out."""
    return {
        "name": run.name,
        **_data(config),
        "losses": _losses(run / "log.jsonl", weights, progress.step),
        "scores": _scores(run / "score.json"),
    }


def _data(config: TrainConfig) -> dict[str, str]:
    """The dataset's name and its sizes of picture."""
    name = {"data set": config.dataset.stem}
    if not config.dataset.is_file():
        return name
    directories, _ = load_directories(config.dataset)
    sizes = {size for one in directories for size in (one.size_buckets or one.resolutions or ())}
    return {**name, "resolutions": ", ".join(f"{width}x{height}" for width, height in sorted(sizes))}


def _losses(log: Path, weights: str, step: int) -> dict[str, float]:
    """The last validation loss of each evaluation set at this step or before it."""
    if not log.is_file():
        return {}
    events = (event for event in read_log(log) if event["event"] == "eval")
    return {event["set"]: event["flow"] for event in events if event["weights"] == weights and event["step"] <= step}


def _scores(path: Path) -> dict[str, float]:
    """The rates of a score that `sd3-light evaluate --out` wrote into the run."""
    if not path.is_file():
        return {}
    found = json.loads(path.read_text(encoding="utf-8"))
    rates = found if isinstance(found, dict) else {}
    return {name: rate for name, rate in rates.items() if isinstance(rate, float)}
