"""How much of a caption or prompt SD3's text encoders read: counted from the tokenizers' files, without torch."""

from functools import partial
from pathlib import Path

from sd3_light.core.caption_lengths import TextLimit
from sd3_light.encoding.token_counts import count_tokens, load_counter
from sd3_light.model.folder import CLIP_TOKENS, tokenizer_length

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
