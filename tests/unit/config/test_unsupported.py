"""Unsupported keys of other trainers are rejected with a reason and a replacement."""

from typing import Any

import pytest

from sd3_light.config.base import field_types, known_values, walk_tables
from sd3_light.config.unsupported import UNSUPPORTED_KEYS, UnsupportedKey
from sd3_light.config.validation import SCHEMAS, check_table, format_value

VALUES = [f"={entry.value}" if entry.value else "" for entry in UNSUPPORTED_KEYS]
NAMES = [f"{e.file_kind}:{e.dotted_key}{value}" for e, value in zip(UNSUPPORTED_KEYS, VALUES, strict=True)]


@pytest.mark.parametrize("entry", UNSUPPORTED_KEYS, ids=NAMES)
def test_rejected_once_with_reason_and_replacement(files: Any, entry: UnsupportedKey) -> None:
    line = f"{entry.key} = {format_value(entry.value or 'x')}"
    if entry.file_kind == "dataset":
        dataset = f'{line}\nresolutions = [256]\n[[directory]]\npath = "a"\n{line}'
        first, second = files.faults(dataset=dataset)
        assert (first.key, second.key) == (entry.key, f"directory[0].{entry.key}")
    elif entry.table in ("", "model"):
        (first,) = files.faults(**{"model" if entry.table else "top": line})
    else:
        (first,) = files.faults(tables=f"[{entry.table}]\n{line}")
    assert first.key == entry.dotted_key
    assert entry.reason in first.problem
    assert first.hint == entry.instead


@pytest.mark.parametrize("entry", UNSUPPORTED_KEYS, ids=NAMES)
def test_no_key_is_both_unsupported_and_known(entry: UnsupportedKey) -> None:
    table = dict(walk_tables(SCHEMAS[entry.file_kind]))[entry.table]
    if entry.value is None:
        assert entry.key not in table.model_fields
    else:
        assert entry.value not in known_values(field_types(table)[entry.key])


def test_checking_a_table_does_not_change_it(tmp_path: Any) -> None:
    raw = {"seed": "x", "model": {"sizee": 1}}
    checked = check_table(SCHEMAS["train"], raw, file_kind="train", file="f", base=tmp_path)
    assert raw == {"seed": "x", "model": {"sizee": 1}}
    assert checked.raw == {"model": {}}


@pytest.mark.parametrize("key", ["ckpt_path", "transformer_path", "unet_path", "diffusion_model", "single_file_path"])
def test_only_sd3_takes_a_single_file(files: Any, key: str) -> None:
    hints = {}
    for name in ("sd3", "SD3", "auto", "wan", "Z_Image"):
        (fault,) = files.faults(model=f"type = '{name}'\n{key} = 'model.safetensors'")
        hints[name] = fault.hint
    assert all("model.init" in hints[name] for name in ("sd3", "SD3", "auto"))
    assert hints["wan"] == hints["Z_Image"] == "give the complete diffusers folder as model.diffusers_path"
