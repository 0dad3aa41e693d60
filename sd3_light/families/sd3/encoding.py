"""SD3's frozen networks: the VAE, two CLIPs and T5, and how much of a text they read."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sd3_light.config import ModelConfig
from sd3_light.core.caption_lengths import TextLimit
from sd3_light.core.encoding import Encoding
from sd3_light.encoding.token_counts import count_tokens, load_counter
from sd3_light.model.folder import CLIP_TOKENS, TEXT_ENCODER_FOLDERS, TOKENIZER_FOLDERS, tokenizer_length

if TYPE_CHECKING:
    import torch

    from sd3_light.families.sd3.encoders import FrozenParts


class SD3Encoding(Encoding):
    """See `Encoding`."""

    folders = ("vae", *TEXT_ENCODER_FOLDERS, *TOKENIZER_FOLDERS)

    @property
    def text_encoders(self) -> tuple[str, ...]:
        """See `Encoding.text_encoders`."""
        from sd3_light.families.sd3.text import TEXT_ENCODERS

        return tuple(TEXT_ENCODERS)

    def text_settings(self, model: ModelConfig) -> dict[str, Any]:
        """See `Encoding.text_settings`."""
        return {"text_tokens": model.text_tokens, "t5_max_length": model.t5_max_length}

    def text_limits(self, folder: Path, settings: Mapping[str, Any]) -> list[TextLimit]:
        """See `Encoding.text_limits`."""
        length = settings.get("t5_max_length")
        return text_limits(folder, length) if isinstance(length, int) else []

    def encoders(
        self, model: ModelConfig, device: "torch.device", batch_size: int, one_at_a_time: bool | None = None
    ) -> "FrozenParts":
        """See `Encoding.encoders`."""
        from sd3_light.families.sd3.encoders import FrozenParts

        return FrozenParts(model, device, batch_size, one_at_a_time)


_LONGEST_T5 = 512  # the highest value of the config's key


def text_limits(folder: Path, t5_max_length: int) -> list[TextLimit]:
    """Return how many tokens CLIP and T5 read, for those whose tokenizer can be read."""
    clip = load_counter(folder / "tokenizer")
    t5 = load_counter(folder / "tokenizer_3")
    limits = []
    if clip is not None:
        read = tokenizer_length(folder / "tokenizer") or CLIP_TOKENS
        remedies = ("T5 still reads what CLIP does not", "T5 reads it completely")
        limits.append(TextLimit("CLIP", read, f"CLIP's {read} tokens", *remedies, partial(count_tokens, clip)))
    if t5 is not None:
        remedy = _t5_remedy(t5_max_length, tokenizer_length(folder / "tokenizer_3"))
        title = f"t5_max_length = {t5_max_length}"
        limits.append(TextLimit("T5", t5_max_length, title, remedy, "shorten it", partial(count_tokens, t5)))
    return limits


def _t5_remedy(t5_max_length: int, tokenizer_maximum: int | None) -> str:
    maximum = min(_LONGEST_T5, tokenizer_maximum or _LONGEST_T5)
    if t5_max_length < maximum:
        return "shorten them, or raise t5_max_length"
    if maximum == _LONGEST_T5:
        return f"t5_max_length is at most {_LONGEST_T5}: shorten them"
    return f"this tokenizer allows at most {maximum}: shorten them, or use another model"
