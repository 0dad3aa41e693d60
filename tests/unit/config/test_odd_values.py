"""Any content of the files gives a config or a report, never another exception."""

import tomllib
from pathlib import Path

import pytest
import tomli_w

from sd3_light.config import ConfigFaults, load_config
from sd3_light.config.base import walk_tables
from sd3_light.config.validation import SCHEMAS

ODD = """
values = [true, -1, 0, 3, 1e400, nan, 0.5, "", "x", [], [1], [[]], [["a", 1]], [[1, 2, 3]], [{}], {}, {a = 1},
    {name = 3}, 1979-05-27, [256, "x", [1]]]
"""
VALUES = tomllib.loads(ODD)["values"]
TABLES = [(kind, *table) for kind in SCHEMAS for table in walk_tables(SCHEMAS[kind])]
KEYS = [(kind, name, key) for kind, name, table in TABLES for key in table.model_fields]
TRAIN = {"output_dir": "out", "dataset": "data.toml", "max_steps": 1, "save_every_n_steps": 1}


def _files_with_value(kind: str, name: str, key: str, value: object) -> dict[str, dict[str, object]]:
    files: dict[str, dict[str, object]] = {
        "train": {**TRAIN, "model": {"diffusers_path": "folder"}},
        "dataset": {"resolutions": [256], "directory": [{"path": "a"}]},
    }
    table = files[kind]
    for part in name.split(".") if name else []:
        inner = table.setdefault(part, {})
        table = inner[0] if isinstance(inner, list) else inner  # type: ignore[assignment]
    table[key] = value
    return files


def _report(path: Path) -> list[str]:
    try:
        load_config(path)
    except ConfigFaults as report:
        return str(report).splitlines()
    return []


@pytest.mark.parametrize(("kind", "name", "key"), KEYS, ids=[":".join(path) for path in KEYS])
def test_odd_values_give_a_config_or_a_report(tmp_path: Path, kind: str, name: str, key: str) -> None:
    for value in VALUES:
        files = _files_with_value(kind, name, key, value)
        (tmp_path / "train.toml").write_text(tomli_w.dumps(files["train"]))
        (tmp_path / "data.toml").write_text(tomli_w.dumps(files["dataset"]))
        lines = _report(tmp_path / "train.toml")
        assert lines == [] or lines[0].startswith(f"{len(lines) - 1} problem")
