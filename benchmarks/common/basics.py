"""Options, the device, lines of results, and means with their errors."""

import argparse
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """Return an argument parser whose help is a script's docstring."""
    return argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


def best_device() -> torch.device:
    """Return the GPU, or the CPU without one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def device_name() -> str:
    """Return the name of the GPU, or `CPU`."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def child_environment() -> dict[str, str]:
    """Return the environment of commands that import this package and the tests' tiny models."""
    paths = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1", "COLUMNS": "160"}


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Return the records of a file with a line of JSON each; none if it does not exist."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.is_file() else []


def append_line(file: Path, record: Mapping[str, Any]) -> None:
    """Add a record to such a file."""
    with open(file, "a", encoding="utf-8") as out:
        out.write(json.dumps(record, ensure_ascii=False) + "\n")


def write_json(file: Path, content: Any) -> None:
    """Write a JSON file that people read."""
    file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def steps_that_fit(seconds_of: Callable[[int], float], lengths: tuple[int, int], minutes: float) -> int:
    """Return the steps of a run that fit into the minutes, by the seconds of two short runs of these lengths."""
    first, last = (seconds_of(steps) for steps in lengths)
    each = max(1e-3, (last - first) / (lengths[1] - lengths[0]))
    return max(lengths[1], round(60 * minutes / each))


def standard_error(values: Sequence[float]) -> float:
    """Return the standard error of the mean of at least two values."""
    return stdev(values) / math.sqrt(len(values))


def percent(shares: Sequence[float], count: float) -> str:
    """Return a mean share and its standard error: over seeds, or with one seed that of a share among ``count``."""
    share = mean(shares)
    error = standard_error(shares) if len(shares) > 1 else math.sqrt(share * (1 - share) / count)
    return f"{100 * share:.1f} ± {100 * error:.1f}"


def spread(values: Sequence[float], digits: int) -> str:
    """Return a mean, and its standard error if there are several values."""
    error = f" ±{standard_error(values):.{digits}f}" if len(values) > 1 else ""
    return f"{mean(values):.{digits}f}{error}"
