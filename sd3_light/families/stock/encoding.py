"""The frozen networks of a stock pipeline: its VAE, its text encoders and their tokenizers."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sd3_light.config import ModelConfig
from sd3_light.core.caption_lengths import TextLimit
from sd3_light.core.encoding import Encoding
from sd3_light.model.folder import tokenizer_length

if TYPE_CHECKING:
    import torch

    from sd3_light.families.base import StockFamily
    from sd3_light.families.stock.encoders import StockEncoders

TEXT = "text"
"""The text encoders of a stock pipeline, which are loaded together: all but one of them are small."""


class StockEncoding(Encoding):
    """See `Encoding`."""

    text_encoders = (TEXT,)

    def __init__(self, family: "StockFamily") -> None:
        self._family = family

    @property
    def folders(self) -> tuple[str, ...]:
        """See `Encoding.folders`."""
        return ("vae", *(folder for folders in self._family.text_parts.values() for folder in folders))

    def text_settings(self, model: ModelConfig) -> dict[str, Any]:
        """See `Encoding.text_settings`."""
        return self._family.text_settings(model)

    def text_limits(self, folder: Path, settings: Mapping[str, Any]) -> list[TextLimit]:
        """See `Encoding.text_limits`. The last encoder is the one that reads the most."""
        from sd3_light.encoding.token_counts import count_tokens, load_counter

        length = settings.get("text_max_length")
        if not isinstance(length, int):
            return []
        limits = []
        *_, last = self._family.text_parts
        for name, (_, tokenizer, *_others) in self._family.text_parts.items():
            counter = load_counter(folder / tokenizer)
            if counter is None:
                continue
            longest = tokenizer_length(folder / tokenizer) or length
            read = min(length, longest) if name == last else longest
            remedies = (f"{last} still reads what {name} does not", f"{last} reads it completely")
            if name == last:
                remedies = ("shorten them, or raise text_max_length", "shorten it")
            limits.append(TextLimit(name, read, f"{name}'s {read} tokens", *remedies, partial(count_tokens, counter)))
        return limits

    def encoders(
        self, model: ModelConfig, device: "torch.device", batch_size: int, one_at_a_time: bool | None = None
    ) -> "StockEncoders":
        """See `Encoding.encoders`."""
        from sd3_light.families.stock.encoders import StockEncoders

        return StockEncoders(self._family, model, device, batch_size, one_at_a_time)
