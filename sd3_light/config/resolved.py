"""The resolved train config as TOML: all defaults filled in, paths absolute, secrets left out."""

from pathlib import Path
from typing import Any

import tomli_w

from sd3_light.config.load import LoadedConfig
from sd3_light.config.validation import looks_secret


def resolved_toml(loaded: LoadedConfig) -> str:
    """A TOML text that `load_config` accepts again and that gives an equal config, apart from its own path."""
    return tomli_w.dumps(_plain_table(loaded.train.model_dump()))


def _plain_table(table: dict[str, Any]) -> dict[str, Any]:
    """Scalars first, so that tomli_w's output keeps them out of the tables; what is absent or secret is dropped."""
    plain = {key: _plain(value) for key, value in table.items() if value is not None and not looks_secret(key)}
    return dict(sorted(plain.items(), key=lambda item: isinstance(item[1], dict)))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return _plain_table(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value
