"""The description of an export, made before it is written."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from sd3_light.config import AdapterConfig
from sd3_light.config.hub_ids import repo_or_name
from sd3_light.core.family import Family
from sd3_light.core.files import Padding
from sd3_light.flow.scheduler import flow_scheduler, folder_scheduler
from sd3_light.model.part_configs import FACTS_FILE

_EXPORTS = "exports"
LORA_FILE = "pytorch_lora_weights.safetensors"
"""The file name that diffusers looks for in a LoRA folder."""
LYCORIS_FILE = "adapter.safetensors"
DYNAMIC = "dynamic"
"""In place of a constant shift: it grows with the resolution."""
SAMPLES_FILE = "samples.jpg"
"""The sample images that a card shows."""


class ExportError(Exception):
    """The weights do not match the config; the message names the keys."""


@dataclass(frozen=True)
class ExportSpec:
    """What an exported folder contains. ``base`` is the folder of the same ``family`` that the frozen parts come from.

    ``scheduler`` is a scheduler's config that is kept as it is; otherwise ``shift`` and ``flux_shift`` make one. For a
    family that writes none they change the base's: to a constant ``shift``, if it is not None. ``last_time`` is that of
    the last call of sampling.
    ``facts`` are written to `sd3_light.json`, ``about`` only to the model card; ``files`` are more text files by name,
    ``images`` the content of image files.
    """

    base: Path
    transformer_config: Mapping[str, Any]
    save_dtype: torch.dtype = torch.bfloat16
    shift: float | None = None
    flux_shift: bool = False
    scheduler: Mapping[str, Any] | None = None
    last_time: float | None = None
    text: Mapping[str, Any] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    images: Mapping[str, bytes] = field(default_factory=dict)
    max_shard_size: str = "10GB"
    family: Family = field(kw_only=True)

    def make_scheduler(self) -> Any:
        """Return the export's scheduler."""
        if not self.family.files.writes_scheduler:
            return folder_scheduler(self.base, None if self.flux_shift else self.shift)
        return flow_scheduler(self.shift, self.flux_shift, self.scheduler, self.last_time)


@dataclass(frozen=True, kw_only=True)
class AdapterSpec(ExportSpec):
    """What an adapter folder contains. ``base`` is the denoiser (folder or single file) that it was trained on.

    ``encoders`` is the folder of the encoders, if it is not that of the denoiser. ``shift`` and ``flux_shift`` are set
    only where the adapter was trained with another shift than that of its base.
    """

    adapter: AdapterConfig
    encoders: Path | None = None

    @property
    def file(self) -> str:
        """The name of the adapter file in the folder."""
        return LORA_FILE if self.adapter.type == "lora" else LYCORIS_FILE

    @property
    def own_shift(self) -> float | str | None:
        """The shift that images need if it is not that of the base: a number, or `DYNAMIC`."""
        return DYNAMIC if self.flux_shift else self.shift

    @property
    def padding(self) -> Padding | None:
        """The padding of the model's single file, for which LoKr and LoHa are numbered: only its readers use them."""
        single = self.family.files.single
        return None if single is None else single.needed_padding(self.transformer_config)

    @property
    def base_folder(self) -> Path:
        """The folder or file of the base model."""
        return self.base.parent if self.base.name == "transformer" else self.base

    @property
    def base_repo(self) -> str | None:
        """OWNER/NAME of a base model from the Hugging Face hub."""
        name = repo_or_name(self.base_folder)
        return name if "/" in name else None

    @property
    def base_name(self) -> str:
        """The base model without folders of this machine: its repository, the run and step of an export, its name."""
        folder = self.base_folder.resolve() if self.base_folder.is_symlink() else self.base_folder
        is_export = folder.parent.name == _EXPORTS
        return self.base_repo or (f"{folder.parent.parent.name}, {folder.name}" if is_export else folder.name)


def write_texts(folder: Path, spec: ExportSpec, facts: Mapping[str, Any], texts: Mapping[str, str]) -> None:
    """Write the files beside the weights: facts, files and images of the spec, and ``texts`` (card and licence)."""
    write_json(folder / FACTS_FILE, facts)
    for name, data in spec.images.items():
        (folder / name).write_bytes(data)
    for name, content in {**spec.files, **texts}.items():
        (folder / name).write_text(content, encoding="utf-8")


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write a readable JSON file."""
    path.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def first_few(items: Sequence[str], limit: int = 3, separator: str = ", ") -> str:
    """Join the first items for a message: "a, b, c and 2 more"."""
    more = f" and {len(items) - limit} more" if len(items) > limit else ""
    return separator.join(items[:limit]) + more
