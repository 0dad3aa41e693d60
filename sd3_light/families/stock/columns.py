"""The widths of text encoders by their configs."""

from pathlib import Path

from sd3_light.config import UserError
from sd3_light.model.part_configs import read_json

_LARGEST = 1 << 16


def encoder_width(folder: Path, part: str) -> int:
    """Return the width of the features of a text encoder. Raises UserError if its config does not say it."""
    path = folder / part / "config.json"
    config = read_json(path)
    tables = (config, config.get("text_config"), config.get("encoder"))
    for table in (table for table in tables if isinstance(table, dict)):
        for width in (table.get("hidden_size"), table.get("d_model")):
            if type(width) is int and 1 <= width <= _LARGEST:
                return width
    raise UserError(f"{path} has no width of 1 to {_LARGEST}; download the folder again")
