"""What an export must be, said before it is made."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

FACTS_FILE = "sd3_light.json"
FROZEN = ("vae", "text_encoder", "text_encoder_2", "text_encoder_3", "tokenizer", "tokenizer_2", "tokenizer_3")
MAX_SHARD = "10GB"


class ExportError(Exception):
    """The weights are not the model that the config promises; the text names the keys."""


@dataclass(frozen=True)
class ExportSpec:
    """What the folder must be: where frozen parts come from, the denoiser's config, type, shift and text policy.

    ``facts`` go into `sd3_light.json`, ``about`` into the model card only; ``files`` are more texts by
    their names.
    """

    base: Path
    transformer_config: Mapping[str, Any]
    save_dtype: torch.dtype = torch.bfloat16
    shift: float = 1.0
    flux_shift: bool = False
    text: Mapping[str, Any] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    max_shard_size: str = MAX_SHARD

    @property
    def real_text(self) -> bool:
        """Whether the model was trained on real text tokens."""
        return bool(self.text.get("text_tokens") == "real")
