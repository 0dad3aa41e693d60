"""PNG files with their generation parameters.

`parameters` is the text chunk that AUTOMATIC1111's web UI writes and ComfyUI and others read: the prompt, a line
`Negative prompt: ...`, a line `Steps: 28, Sampler: Euler, CFG scale: 4, Seed: 1, Size: 64x64, ...`.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from sd3_light.files import atomic_unsynced_file, name_new_file, scratch_file
from sd3_light.inputs import open_regular, parse_json

PNG_FACTS = "sd3_light"
"""The chunk with all parameters as JSON. No chunk is named `prompt`: ComfyUI would parse it as a workflow graph."""


def save_png(image: Image.Image, path: Path, metadata: Mapping[str, Any]) -> None:
    """Write a PNG atomically, with the metadata as text chunks: strings as they are, other values as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_unsynced_file(path) as temporary:
        image.save(temporary, format="PNG", pnginfo=_chunks(metadata))


def save_new_png(image: Image.Image, path: Path, metadata: Mapping[str, Any]) -> None:
    """Write a PNG like `save_png`, but never replace a file. Raises FileExistsError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with scratch_file(path) as temporary:
        image.save(temporary, format="PNG", pnginfo=_chunks(metadata))
        name_new_file(temporary, path)


def _chunks(metadata: Mapping[str, Any]) -> PngInfo:
    info = PngInfo()
    for key, value in metadata.items():
        info.add_text(key, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
    return info


def read_png_facts(path: Path) -> dict[str, Any]:
    """Return the parameters in an image written here; empty for other images."""
    facts = parse_json(read_png_text(path))
    return facts if isinstance(facts, dict) else {}


def read_png_text(path: Path) -> str:
    """Return the same as the text that the image contains."""
    with open_regular(path) as file, Image.open(file) as image:
        text: str = getattr(image, "text", {}).get(PNG_FACTS, "{}")
    return text


def parameters(facts: Mapping[str, Any], sampler: str) -> str:
    """Return the `parameters` text for an image; ``sampler`` is the name that other programs use."""
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
    # ComfyUI expects the second line even if it is empty
    return f"{_one_line(facts['prompt'])}\nNegative prompt: {_one_line(facts['negative_prompt'])}\n{line}"


def _quoted(value: str) -> str:
    """Quote a value that contains a separator of the format."""
    return json.dumps(value, ensure_ascii=False) if any(mark in value for mark in ',:\n"') else value


def _one_line(text: str) -> str:
    return " ".join(text.splitlines())
