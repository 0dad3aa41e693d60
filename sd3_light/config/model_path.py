"""Paths of models and runs that a user names."""

from pathlib import Path

from sd3_light.config.faults import UserError


def require_model_path(path: Path) -> None:
    """Raise a UserError for a path that cannot be a model or a run: it does not exist, or it is a config."""
    if not path.exists():
        raise UserError(f"{path} does not exist; pass a run folder, an export or another diffusers folder")
    if path.suffix == ".toml":
        raise UserError(f"{path} is a config; pass the folder of its run, output_dir in the file")
