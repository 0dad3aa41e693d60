"""The shape of a caption's text features."""

from dataclasses import dataclass


@dataclass(frozen=True)
class TextShape:
    """Rows and widths of one caption's features from the three text encoders.

    With ``real`` a caption has as many rows as tokens, and the rows given here are the maximum.
    """

    clip_tokens: int
    t5_tokens: int
    clip_l_width: int
    clip_g_width: int
    t5_width: int
    pooled_width: int
    real: bool = False

    @property
    def at_most(self) -> str:
        """The prefix of formulas that hold for the longest caption."""
        return "at most " if self.real else ""

    @property
    def tokens(self) -> int:
        """Text tokens that the denoiser sees: CLIP's, then T5's."""
        return self.clip_tokens + self.t5_tokens

    @property
    def clip_width(self) -> int:
        """Width of both CLIP encoders' features side by side."""
        return self.clip_l_width + self.clip_g_width

    @property
    def numbers(self) -> int:
        """Numbers that a cache stores per caption; CLIP is not padded to T5's width there."""
        return self.clip_tokens * self.clip_width + self.t5_tokens * self.t5_width + self.pooled_width
