"""Models of real text tokens: the folder's own pipeline file, for those who do not have this package."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sd3_light.export import real_pipeline
from sd3_light.model.start import read_json

FILE = "pipeline.py"
"""Where diffusers looks for a folder's own pipeline (``custom_pipeline="pipeline"``)."""


def add_pipeline(folder: Path, text: Mapping[str, Any]) -> None:
    """Make a written folder say by which pipeline it is used, by its text policy.

    With real tokens it gets `pipeline.py`, and `model_index.json` that file's two settings; a base's own are taken out
    with padded ones. The file is a copy of `real_pipeline`; this package never runs the one in a folder.
    """
    path = folder / "model_index.json"
    index = read_json(path)
    settings = ("t5_max_length", "uncond_text")
    kept = {key: value for key, value in index.items() if key not in settings}
    if text.get("text_tokens") == "real":
        (folder / FILE).write_bytes(Path(real_pipeline.__file__).read_bytes())
        kept |= {key: text[key] for key in settings}
    # stock diffusers refuses to open a folder that names a class of its own
    kept["_class_name"] = "StableDiffusion3Pipeline"
    path.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
