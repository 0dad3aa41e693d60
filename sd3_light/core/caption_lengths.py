"""Captions and prompts that are longer than text encoders read."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from sd3_light.randomness import sample_id

MAX_CAPTIONS = 10_000
"""Captions to count at most, chosen by their samples' ids: enough for a share, and a few seconds."""
_SHOWN = 120  # characters of a caption
_SHOWN_PROMPTS = 5
_WORDS = re.compile(r"[\u3400-\u9fff]{1,2}|[^\W\u3400-\u9fff]+")  # two Chinese characters count as a word
_FEW_WORDS = 20
_DETAILED_SIDE = 256  # pixels of images that show more than a few words say


@dataclass
class CaptionSample:
    """Captions of at most ``limit`` samples out of any number, chosen by sample id and not by order."""

    limit: int = MAX_CAPTIONS
    samples: dict[int, tuple[str, ...]] = field(default_factory=dict)
    total: int = 0
    _stride: int = 1

    def add(self, key: str, captions: Sequence[str]) -> None:
        """Add a sample."""
        self.total += 1
        identity = sample_id(key)
        if identity % self._stride:
            return
        self.samples[identity] = tuple(captions)
        while len(self.samples) > self.limit:
            self._stride *= 2
            self.samples = {number: texts for number, texts in self.samples.items() if number % self._stride == 0}

    def captions(self) -> list[str]:
        """Return the chosen captions."""
        return [caption for texts in self.samples.values() for caption in texts]


@dataclass(frozen=True)
class TextLimit:
    """How many ``tokens`` of a text an encoder reads; ``count`` returns the tokens that a text has for it.

    ``title`` is the limit in a message, such as "CLIP's 77 tokens". If no later encoder of a family cuts a text,
    ``remedy`` says what to do about captions that this one cuts, and ``prompt_remedy`` about a prompt.
    """

    encoder: str
    tokens: int
    title: str
    remedy: str
    prompt_remedy: str
    count: Callable[[str], int]


@dataclass(frozen=True)
class CutCaptions:
    """Of ``captions`` counted ones, how many each encoder cuts, and the caption that is longest beyond its limit.

    ``titles`` are the encoders' limits, as in `TextLimit`.
    """

    captions: int
    titles: dict[str, str]
    cut: Counter[str]
    longest: tuple[str, int, str] | None = None
    remedy: str = ""

    def sentence(self) -> str:
        """Return one line about the captions that are cut; "" if none is."""
        if self.longest is None:
            return ""
        counts = [f"{self.cut[name]:,} exceed {title}" for name, title in self.titles.items() if self.cut[name]]
        encoder, length, caption = self.longest
        return (
            f"of {self.captions:,} captions {', '.join(counts)}: the rest of each is cut ({self.remedy}); the longest "
            f"has {length:,} {encoder} tokens: {_shown(caption)}"
        )


def short_captions(captions: Sequence[str], side: int) -> str:
    """Return one line if captions are too short to learn from images of this side from scratch; "" if not."""
    lengths = sorted(len(_WORDS.findall(caption)) for caption in captions)
    median = lengths[len(lengths) // 2] if lengths else _FEW_WORDS
    if median >= _FEW_WORDS or side < _DETAILED_SIDE:
        return ""
    return (
        f"half of the captions have at most {median} words: random weights learn less from short ones (PRX: FID 36.8 "
        "with short captions, 18.2 with long ones); `sd3-light caption` writes longer ones"
    )


def count_cut_captions(captions: Iterable[str], limits: Sequence[TextLimit]) -> CutCaptions | None:
    """Count captions that a text encoder cuts; None without limits, as where no tokenizer can be read."""
    if not limits:
        return None
    texts = list(captions)
    cut = Counter[str]()
    longest: tuple[str, int, str] | None = None
    most = 0
    remedy = ""
    for limit in limits:
        for text in texts:
            length = limit.count(text)
            if length > limit.tokens:
                cut[limit.encoder] += 1
                remedy = limit.remedy
                if length - limit.tokens > most:
                    most = length - limit.tokens
                    longest = (limit.encoder, length, text)
    return CutCaptions(len(texts), {limit.encoder: limit.title for limit in limits}, cut, longest, remedy)


def cut_prompts(prompts: Iterable[str], limits: Sequence[TextLimit]) -> list[str]:
    """Return one line per different prompt that a text encoder cuts; the last line counts those beyond a few."""
    lines = [line for text in dict.fromkeys(prompts) if (line := _cut_prompt(text, limits))]
    if len(lines) <= _SHOWN_PROMPTS:
        return lines
    return [*lines[:_SHOWN_PROMPTS], f"{len(lines) - _SHOWN_PROMPTS:,} more prompts are cut"]


def _cut_prompt(text: str, limits: Sequence[TextLimit]) -> str:
    """Return one line with a prompt and the tokens that are lost; "" if none are."""
    lost = []
    remedy = ""
    for limit in limits:
        length = limit.count(text)
        if length > limit.tokens:
            beyond = length - limit.tokens
            lost.append(f"{limit.encoder} reads {limit.tokens:,} of its {length:,} tokens (loses {beyond:,})")
            remedy = limit.prompt_remedy
    return f"the prompt {_shown(text)} is cut: {', '.join(lost)}; {remedy}" if lost else ""


def _shown(text: str) -> str:
    return f"{text[:_SHOWN]!r}{'...' if len(text) > _SHOWN else ''}"
