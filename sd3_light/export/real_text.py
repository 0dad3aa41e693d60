"""The pipeline file of folders whose model was trained on real text tokens, for users without this package."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sd3_light.export import real_pipeline
from sd3_light.export.export_spec import write_json
from sd3_light.model.start import read_json

PIPELINE_FILE = "pipeline.py"
"""Where diffusers looks for a folder's own pipeline (``custom_pipeline="pipeline"``)."""


def add_pipeline(folder: Path, text: Mapping[str, Any]) -> None:
    """Add or remove a folder's own pipeline according to its text policy.

    With real tokens, the folder gets `pipeline.py` and `model_index.json` gets its two settings; with padded tokens,
    the base's settings are removed. The file is a copy of `real_pipeline`; this package never runs a folder's copy.
    """
    path = folder / "model_index.json"
    settings = ("t5_max_length", "uncond_text")
    index = {key: value for key, value in read_json(path).items() if key not in settings}
    if text.get("text_tokens") == "real":
        (folder / PIPELINE_FILE).write_bytes(Path(real_pipeline.__file__).read_bytes())
        index |= {key: text[key] for key in settings}
    # stock diffusers refuses to open a folder that names a custom class
    index["_class_name"] = "StableDiffusion3Pipeline"
    write_json(path, index)
