"""PNG files that say how they were made.

`parameters` is the text that AUTOMATIC1111's web UI writes and that ComfyUI and others read: the prompt, a line
`Negative prompt: ...`, a line `Steps: 28, Sampler: Euler, CFG scale: 4, Seed: 1, Size: 64x64, ...`.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from sd3_light.files import atomic_unsynced_file

PNG_FACTS = "sd3_light"
"""The chunk with every parameter as JSON. None is called `prompt`: ComfyUI takes that for a graph in JSON."""


def save_png(image: Image.Image, path: Path, metadata: Mapping[str, Any]) -> None:
    """Write a PNG whose text chunks hold the metadata: texts as they are, anything else as JSON.

    `PIL.Image.open(path).text` reads them back. The file appears whole or not at all.
    """
    info = PngInfo()
    for key, value in metadata.items():
        info.add_text(key, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_unsynced_file(path) as temporary:
        image.save(temporary, format="PNG", pnginfo=info)


def read_png_facts(path: Path) -> dict[str, Any]:
    """What a picture of ours says of itself; empty for a picture of others."""
    with Image.open(path) as image:
        text = getattr(image, "text", {}).get(PNG_FACTS, "{}")
    facts = json.loads(text)
    return facts if isinstance(facts, dict) else {}


def parameters(facts: Mapping[str, Any], sampler: str) -> str:
    """The `parameters` text of a picture with these facts, drawn by the sampler that others know by this name."""
    pairs = {
        "Steps": facts["steps"],
        "Sampler": sampler,
        "CFG scale": f"{facts['guidance']:g}",
        "Seed": facts["seed"],
        "Size": f"{facts['width']}x{facts['height']}",
        "Model": facts["model"],
    }
    if facts["loras"]:
        pairs["LoRA"] = ", ".join(f"{lora['file']}:{lora['strength']:g}" for lora in facts["loras"])
    line = ", ".join(f"{key}: {_quoted(str(value))}" for key, value in pairs.items())
    # ComfyUI looks for the second line even where it is empty
    return f"{_one_line(facts['prompt'])}\nNegative prompt: {_one_line(facts['negative_prompt'])}\n{line}"


def _quoted(value: str) -> str:
    """In quotes where the value would end early, as that format has it."""
    return json.dumps(value, ensure_ascii=False) if any(mark in value for mark in ',:\n"') else value


def _one_line(text: str) -> str:
    return " ".join(text.splitlines())
