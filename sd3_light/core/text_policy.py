"""How a model's text is encoded, in training and in sampling."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class TextPolicy:
    """How text was encoded in training, and must be in sampling.

    `uncond_text` is the unconditional input of guidance: zeros, or the encoded negative prompt (as in stock SD3).
    """

    t5_max_length: int
    uncond_text: Literal["zero", "empty"]
    text_tokens: Literal["padded", "real"]
