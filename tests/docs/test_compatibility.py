"""The matrix of client programs names the versions that are tested, and the pages say how clients differ."""

import re
from pathlib import Path

from sd3_light.families.sd3.single_notes import _COMFY_T5_LENGTH, _T5_LENGTH

ROOT = Path(__file__).parents[2]
PAGE = "docs/formats/compatibility.md"
CLIENTS = ("diffusers", "transformers", "peft", "safetensors", "huggingface_hub", "tensorboard")


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def test_the_matrix_names_tested_versions_tests_and_differences() -> None:
    """The installed ones, and the older ones of the documented command."""
    page = read(PAGE)
    pinned = dict(re.findall(r"^(\S+)==(\S+)$", read("constraints.txt"), re.MULTILINE))
    (command,) = re.findall(r"pip install --no-deps --target OLD (.*)", read("docs/reference/development.md"))
    older = dict(pin.split("==") for pin in command.split())
    assert [client for client in CLIENTS if pinned[client] not in page] == []
    assert [client for client, version in older.items() if version not in page] == []
    files = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    named = set(re.findall(r"test_\w+\.py", read(PAGE)))
    assert named
    assert named <= files
    # comfyUI's scheduler and T5 length; the dual attention of sd-scripts.
    (section,) = re.findall(r"^## In ComfyUI\n(.*?)^## ", read("docs/formats/single-file.md"), re.MULTILINE | re.DOTALL)
    lines = section.splitlines()
    assert any("`normal`" in line and "diffusers" in line for line in lines)
    assert any(f"T5 to at least {_COMFY_T5_LENGTH} tokens" in line and str(_T5_LENGTH) in line for line in lines)
    assert any("sd-scripts" in line and "dual attention" in line for line in lines)
