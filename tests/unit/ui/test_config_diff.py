"""What differs between the configs of runs."""

from pathlib import Path

import pytest

from sd3_light.ui.config_diff import differing_keys


def write(folder: Path, **texts: str) -> dict[str, Path]:
    for name, text in texts.items():
        (folder / name).write_text(text)
    return {name: folder / name for name in texts}


def test_only_keys_whose_values_differ_are_listed(tmp_path: Path) -> None:
    configs = write(tmp_path, a="x = 1\ny = [1, 2]\n[t]\nz = 'a'\n", b="x = 1\ny = [1, 3]\n[t]\nz = 'a'\nw = true\n")
    notes: list[str] = []
    assert differing_keys(configs, notes) == [("t.w", ["", "true"]), ("y", ["[1, 2]", "[1, 3]"])]
    assert notes == []
    configs = write(tmp_path, a=f"x = '{'a' * 500}b'\n", b=f"x = '{'a' * 500}c'\n")
    ((key, values),) = differing_keys(configs, [])
    assert (key, [len(value) for value in values]) == ("x", [120, 120])


@pytest.mark.parametrize("text", ["x = ", "\udcff", "[" * 2000, "x = 1e9999999"])
def test_a_config_that_cannot_be_read_is_noted(tmp_path: Path, text: str) -> None:
    configs = write(tmp_path, a="x = 1\n")
    (tmp_path / "b").write_bytes(text.encode("utf-8", "surrogateescape"))
    notes: list[str] = []
    rows = differing_keys({**configs, "b": tmp_path / "b", "c": tmp_path / "c"}, notes)
    assert rows[0][0] == "x"
    assert "c has no config.toml; its keys are not compared." in notes
