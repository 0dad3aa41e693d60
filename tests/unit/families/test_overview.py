"""`sd3-light families`: facts of the records that hold, without torch, and the tables of the READMEs."""

import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import pytest
from typer.testing import CliRunner

from sd3_light.cli import app
from sd3_light.config import UserError
from sd3_light.config.family_keys import FAMILY_NAMES
from sd3_light.core import overview
from sd3_light.core.registry import family_named
from sd3_light.export.lora_merge import add_adapters
from sd3_light.export.lora_stack import Lora
from sd3_light.families.base import StockFamily
from tests.families import TinyFolder, make_denoiser
from tests.stock import model_table
from tests.warm import REAL_PYTHON

ROOT = Path(__file__).parents[3]
STOCK = [name for name in FAMILY_NAMES if name != "sd3"]


def test_the_verb_lists_every_family() -> None:
    printed = CliRunner().invoke(app, ["families", "--json"]).stdout
    facts = json.loads(printed)
    assert facts == overview.families()
    assert [row["type"] for row in facts] == list(FAMILY_NAMES)
    table = CliRunner().invoke(app, ["families"], env={"COLUMNS": "300"}).stdout
    for row in facts:
        assert all(cell in table for cell in overview.cells(row))
    code = "import sys\nfrom sd3_light.core.overview import families\nfamilies()\nprint('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([REAL_PYTHON, "-P", "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_records_agree_with_the_families_parts(name: str) -> None:
    family = family_named(name)
    assert family.has_single_file == (family.files.single is not None)
    assert family.comfyui == family.files.adapters.comfyui


@pytest.mark.parametrize("name", STOCK)
def test_records_of_texts_agree_with_the_columns(name: str, tiny_folder: TinyFolder) -> None:
    family: Any = family_named(name)
    folder = tiny_folder(name)
    (text,) = (column for column in family.text_columns(model_table(name, folder), folder) if column.name == "text")
    is_real = text.ragged and not family.pads_text
    assert family.text_tokens == (("real",) if is_real else ("padded",))
    assert ("number" in family.guidance) == family.takes_guidance({"guidance_embeds": True})


@pytest.mark.parametrize("page", ["README.md", "README.zh.md"])
def test_the_readme_has_the_table(page: str) -> None:
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("| `model.type` |"))
    if page == "README.md":
        assert lines[start] == f"| {' | '.join(overview.HEADINGS.values())} |"
    rows = [f"| {' | '.join(overview.cells(facts))} |" for facts in overview.families()]
    assert lines[start + 2 : start + 2 + len(rows)] == rows
    assert lines[start + 2 + len(rows)] == ""


def test_the_page_states_classes_and_layers(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "reference" / "families.md").read_text(encoding="utf-8")
    for name in FAMILY_NAMES:
        family = family_named(name)
        (section,) = (part for part in text.split("\n## ") if part.startswith(f"{family.title}\n"))
        assert f"`{family.pipeline}`" in section
        if isinstance(family, StockFamily) and family.loads_adapters:
            assert all(f"`{target}`" in section for target in family.adapter_targets)
            assert str(family.text_length) in section
    for name in FAMILY_NAMES:
        family = family_named(name)
        kind = getattr(diffusers, family.denoiser)
        assert family.loads_adapters == hasattr(kind, "load_lora_adapter"), name
    pipe = SimpleNamespace(transformer=make_denoiser("prx"))
    lora = Lora(tmp_path / "x.safetensors")
    add_adapters(pipe, [])
    with pytest.raises(UserError, match=r"PRX loads no adapter; merge it .*: sd3-light lora merge MODEL OUT .*x\.safe"):
        add_adapters(pipe, [lora])
