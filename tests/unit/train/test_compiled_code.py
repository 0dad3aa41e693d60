"""Notes beside compiled code: when short runs compile because of them."""

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sd3_light.cost.compile_choice import ENOUGH_PASSES, WARM_PASSES
from sd3_light.engines.processes import ProcessGroups
from sd3_light.system import COMPILED_CODE
from sd3_light.train.compiled_code import CompiledCode, left_code


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(COMPILED_CODE, str(tmp_path))
    return tmp_path


def code(**facts: Any) -> CompiledCode:
    return CompiledCode(lambda: facts)


def context(resumed: object | None = None, path: Path = Path(), device: str = "cuda", **keys: Any) -> Any:
    config = SimpleNamespace(compile="auto", gradient_accumulation_steps=1, **keys)
    run = SimpleNamespace(path=path)
    rest = {"device": torch.device(device), "groups": ProcessGroups(), "resumed": resumed, "folder": run}
    return SimpleNamespace(config=config, **rest)


def test_a_note_is_found_by_the_same_facts() -> None:
    assert code(model="a").read(time.time()) is None
    code(model="a").write(64)
    note = code(model="a").read(time.time())
    assert note.text_step == 64
    assert code(model="b").read(time.time()) is None
    assert code(model="a").read(note.time - 1) is None, "left later"
    code(model="a").write(None)
    assert code(model="a").read(time.time()) == note, "the first one stays"


def test_without_a_folder_there_are_no_notes_and_damaged_ones_are_none(monkeypatch: Any, folder: Path) -> None:
    path = code(model="a").path
    for text in ("", "[]", "{", '{"time": "soon", "text_step": 1}', '{"time": 1}'):
        path.write_text(text, encoding="utf-8")
        assert code(model="a").read(time.time()) is None
    path.unlink()
    monkeypatch.setenv(COMPILED_CODE, str(folder / "missing"))
    code(model="a").write(None)
    monkeypatch.delenv(COMPILED_CODE)
    code(model="a").write(None)
    assert code(model="a").read(time.time()) is None
    assert not list(folder.iterdir())


def test_short_runs_compile_where_code_was_left(capsys: pytest.CaptureFixture[str]) -> None:
    assert left_code(context(), code(), WARM_PASSES) is None
    code().write(32)
    assert left_code(context(), code(), WARM_PASSES) is not None
    line = f"blocks: an earlier run left compiled code, which pays from about {WARM_PASSES} micro-batches on\n"
    assert capsys.readouterr().err == line
    assert left_code(context(), code(), WARM_PASSES - 1) is None
    assert left_code(context(), code(), ENOUGH_PASSES) is None, "a long run needs no note"
    assert left_code(context(device="cpu"), code(), WARM_PASSES) is None
    assert capsys.readouterr().err == ""


def test_a_resumed_run_computes_as_before(tmp_path: Path) -> None:
    resumed = context(resumed=object(), path=tmp_path)
    code().write(32)
    assert left_code(resumed, code(), WARM_PASSES) is None, "its start is unknown"
    for seconds, is_left in ((-10, False), (10, True)):
        line = json.dumps({"event": "start", "time": time.time() + seconds})
        (tmp_path / "log.jsonl").write_text(line + "\n", encoding="utf-8")
        assert (left_code(resumed, code(), WARM_PASSES) is not None) == is_left
