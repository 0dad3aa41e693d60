"""What works for each family, from the families' own records; torch is not imported."""

from collections.abc import Mapping
from typing import Any

from sd3_light.config.family_keys import FAMILY_NAMES
from sd3_light.core.registry import family_named

HEADINGS = {
    "type": "`model.type`",
    "pipeline": "pipeline",
    "draws": "draws",
    "trains": "trains",
    "starts": "starts from",
    "text": "text tokens",
    "guidance": "guidance",
    "parallel": "pipeline stages",
    "fast": "fast blocks, fp8",
    "comfyui": "LoRA in ComfyUI",
    "needs": "needs",
}
"""Fact of a family -> heading of its column."""


def families() -> list[dict[str, Any]]:
    """Return the facts of every family, as `sd3-light families --json` prints them."""
    return [_facts(name) for name in FAMILY_NAMES]


def _facts(name: str) -> dict[str, Any]:
    family = family_named(name)
    starts = {"folder": True, "single file": family.has_single_file, "random": family.starts_random}
    return {
        "type": family.name,
        "title": family.title,
        "pipeline": family.pipeline,
        "draws": family.media,
        "trains": ["full", *(["lora"] if family.loads_adapters else [])],
        "starts": [start for start, has in starts.items() if has],
        "text": list(family.text_tokens),
        "guidance": list(family.guidance),
        "parallel": family.has_stages,
        "fast": family.fast_blocks is not None,
        "comfyui": family.comfyui,
        "needs": list(family.packages),
    }


def cells(facts: Mapping[str, Any]) -> list[str]:
    """Return a row of the table of families, in the order of `HEADINGS`."""
    return [_cell(facts[key]) for key in HEADINGS]


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "-"
    return value if isinstance(value, str) else ", ".join(value) or "-"
