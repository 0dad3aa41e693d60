"""Keys of earlier programs are refused with a reason and a replacement."""

from typing import Any

import pytest

from sd3_light.config.base import choices, tables
from sd3_light.config.unsupported import RETIRED, Retired
from sd3_light.config.validation import KINDS, check_table

NAMES = [f"{entry.kind}:{entry.where}{'=' + entry.value if entry.value else ''}" for entry in RETIRED]


@pytest.mark.parametrize("entry", RETIRED, ids=NAMES)
def test_refused_once_with_reason_and_replacement(files: Any, entry: Retired) -> None:
    line = f'{entry.key} = "{entry.value or "x"}"'
    if entry.kind == "dataset":
        dataset = f'{line}\nresolutions = [256]\n[[directory]]\npath = "a"\n{line}'
        first, second = files.faults(dataset=dataset)
        assert (first.key, second.key) == (entry.key, f"directory[0].{entry.key}")
    elif entry.table in ("", "model"):
        (first,) = files.faults(**{"model" if entry.table else "top": line})
    else:
        (first,) = files.faults(tables=f"[{entry.table}]\n{line}")
    assert first.key == entry.where
    assert entry.reason in first.problem
    assert first.hint == entry.instead


def test_required_refusals_are_there() -> None:
    keys = {entry.where for entry in RETIRED if entry.value is None}
    assert keys >= {
        "blocks_to_swap",
        "reentrant_activation_checkpointing",
        "disable_block_swap_for_eval",
        "video_clip_mode",
        "frame_buckets",
        "monitoring.wandb_host",
        "model.ckpt_path",
        "model.transformer_path",
        "model.vae_path",
        "model.llm_path",
        "model.first_frame_conditioning_p",
    }
    values = {entry.value for entry in RETIRED if entry.where == "optimizer.type"}
    assert values >= {"adamw_optimi", "automagic", "genericoptim"}


@pytest.mark.parametrize("entry", RETIRED, ids=NAMES)
def test_no_key_is_both_refused_and_known(entry: Retired) -> None:
    table = dict(tables(KINDS[entry.kind]))[entry.table]
    if entry.value is None:
        assert entry.key not in table.model_fields
    else:
        annotation = table.model_fields[entry.key].annotation
        assert entry.value not in choices(annotation)


def test_checking_a_table_leaves_the_given_one_alone(tmp_path: Any) -> None:
    raw = {"seed": "x", "model": {"sizee": 1}}
    checked = check_table(KINDS["train"], raw, kind="train", file="f", base=tmp_path)
    assert raw == {"seed": "x", "model": {"sizee": 1}}
    assert checked.raw == {"model": {}}
