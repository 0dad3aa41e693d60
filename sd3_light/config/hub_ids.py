"""Paths of models and datasets that a user names: folders, or ids on the Hugging Face hub."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ValidationInfo

from sd3_light.config.base import Allowed, DataLocation, invalid_value, parse_location, parse_path
from sd3_light.config.faults import UserError

SCHEME = "hf://"
_SHAPE = re.compile(r"(datasets/)?([\w.-]+/[\w.-]+)(?:@([\w.-]+))?(?:/(.+))?")


@dataclass(frozen=True)
class HubId:
    """A repository on the hub, one of its revisions (None: its main branch) and a file or folder in it."""

    repo: str
    kind: Literal["model", "dataset"] = "model"
    revision: str | None = None
    inner: str = ""

    def __str__(self) -> str:
        name = f"{'datasets/' if self.kind == 'dataset' else ''}{self.repo}"
        revision = f"@{self.revision}" if self.revision else ""
        return f"{SCHEME}{name}{revision}{f'/{self.inner}' if self.inner else ''}"


def parse_hub_id(text: str) -> HubId | None:
    """Return the id that `hf://OWNER/NAME` or `hf://datasets/OWNER/NAME` names, or None if it names none.

    `@REVISION` may follow the name, then the path of a file or folder in the repository.
    """
    match = _SHAPE.fullmatch(text.removeprefix(SCHEME).rstrip("/")) if text.startswith(SCHEME) else None
    if match is None or ".." in match[0].split("/"):
        return None
    return HubId(match[2], "dataset" if match[1] else "model", match[3], match[4] or "")


def hub_id_of(path: DataLocation) -> HubId | None:
    """Return the id that a path of a config stands for; None for a path on this machine or another URL."""
    if isinstance(path, str):
        return None
    return parse_hub_id(SCHEME + "/".join(path.parts[1:])) if path.parts[:1] == (SCHEME[:3],) else None


def repo_or_name(path: DataLocation) -> str:
    """Return OWNER/NAME of a repository's folder in the hub's cache (its own name is a commit), or a path's name."""
    if isinstance(path, str):
        return path.rpartition("/")[2]
    kind, _, repo = path.parent.parent.name.partition("--")
    is_snapshot = path.parent.name == "snapshots" and kind in ("models", "datasets")
    return repo.replace("--", "/", 1) if is_snapshot else path.name


def _parse_model(value: Any, info: ValidationInfo) -> Path:
    """Return the absolute path of a folder; or an id with `hf://`, or OWNER/NAME if there is no such folder."""
    if isinstance(value, str) and value.startswith(SCHEME):
        model = parse_hub_id(value)
        if model is None or model.kind != "model" or model.inner:
            raise invalid_value("not a model on the hub: write hf://OWNER/NAME or hf://OWNER/NAME@REVISION")
        return Path(value)
    path = parse_path(value, info)
    is_id = isinstance(value, str) and value.count("/") == 1 and value[0] not in "./~"
    if is_id and parse_hub_id(SCHEME + value) and not path.exists():
        return Path(SCHEME + value)
    return path


def _parse_data(value: Any, info: ValidationInfo) -> DataLocation:
    """Return the absolute path of a folder or file, an id with `hf://datasets/`, or a URL."""
    if not isinstance(value, str) or not value.startswith(SCHEME):
        return parse_location(value, info)
    data = parse_hub_id(value)
    if data is None or data.kind != "dataset":
        raise invalid_value("not a dataset on the hub: write hf://datasets/OWNER/NAME, perhaps with a /FOLDER")
    return Path(value)


ModelFolder = Annotated[
    Path, BeforeValidator(_parse_model), Allowed("a path, or the id of a model on the Hugging Face hub: OWNER/NAME")
]
DataPath = Annotated[
    DataLocation,
    BeforeValidator(_parse_data),
    Allowed("a path, a URL such as s3://bucket/folder, or hf://datasets/OWNER/NAME, perhaps with a /FOLDER"),
]


def require_model_path(path: Path) -> None:
    """Raise a UserError for a path that cannot be a model or a run: it does not exist, or it is a config."""
    if not path.exists():
        raise UserError(f"{path} does not exist; pass a run folder, an export or another diffusers folder")
    if path.suffix == ".toml":
        raise UserError(f"{path} is a config; pass the folder of its run, output_dir in the file")
