"""The resolved train config as TOML: defaults filled in, paths absolute, secrets removed."""

from pathlib import Path
from typing import Any

import tomli_w

from sd3_light.config.load import LoadedConfig
from sd3_light.config.validation import is_secret_key


def resolved_toml(loaded: LoadedConfig) -> str:
    """Return TOML text that `load_config` reads back as an equal config, apart from its own path."""
    return tomli_w.dumps(_plain_table(loaded.train.model_dump()))


def _plain_table(table: dict[str, Any]) -> dict[str, Any]:
    """Drop absent and secret keys. Scalars come first, as TOML requires: keys after a table belong to that table."""
    plain = {key: _plain(value) for key, value in table.items() if value is not None and not is_secret_key(key)}
    return dict(sorted(plain.items(), key=lambda item: isinstance(item[1], dict)))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return _plain_table(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value
