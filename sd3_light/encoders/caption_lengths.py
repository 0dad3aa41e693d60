"""Captions and prompts that are longer than the text encoders read: counted from the tokenizers' files, without
torch."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from sd3_light.inputs import TEXT_BYTES, require_regular
from sd3_light.model.pipeline_folder import CLIP_TOKENS, tokenizer_length
from sd3_light.randomness import sample_id

MAX_CAPTIONS = 10_000
"""Captions to count at most, chosen by their samples' ids: enough for a share, and a few seconds."""
_CLIP_WORDS = r"""<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"""
_CLIP, _T5 = "CLIP", "T5"
_LONGEST_T5 = 512  # the highest value of the config's key
_SHOWN = 120  # characters of a caption
_SHOWN_PROMPTS = 5


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
class CutCaptions:
    """Of ``captions`` counted ones, how many each encoder cuts, and the caption that is longest beyond its limit.

    ``t5_maximum`` is the highest `t5_max_length` that the tokenizer allows.
    """

    captions: int
    limits: dict[str, int]
    cut: Counter[str]
    longest: tuple[str, int, str] | None = None
    t5_maximum: int = _LONGEST_T5

    def sentence(self) -> str:
        """Return one line about the captions that are cut; "" if none is."""
        if self.longest is None:
            return ""
        names = {_CLIP: f"CLIP's {self.limits.get(_CLIP)} tokens", _T5: f"t5_max_length = {self.limits.get(_T5)}"}
        counts = [f"{count:,} exceed {names[name]}" for name, count in sorted(self.cut.items()) if count]
        encoder, length, caption = self.longest
        return (
            f"of {self.captions:,} captions {', '.join(counts)}: the rest of each is cut ({self._remedy}); the longest "
            f"has {length:,} {encoder} tokens: {_shown(caption)}"
        )

    @property
    def _remedy(self) -> str:
        if not self.cut[_T5]:
            return "T5 still reads what CLIP does not"
        if self.limits[_T5] < self.t5_maximum:
            return "shorten them, or raise t5_max_length"
        if self.t5_maximum == _LONGEST_T5:
            return f"t5_max_length is at most {_LONGEST_T5}: shorten them"
        return f"this tokenizer allows at most {self.t5_maximum}: shorten them, or use another model"


@dataclass(frozen=True)
class CutText:
    """A text that encoders cut: its tokens by encoder, and how many of them each encoder reads."""

    text: str
    lengths: dict[str, int]
    limits: dict[str, int]

    def sentence(self) -> str:
        """Return one line with the text and the tokens that are lost."""
        lost = [
            f"{name} reads {self.limits[name]:,} of its {length:,} tokens (loses {length - self.limits[name]:,})"
            for name, length in self.lengths.items()
        ]
        remedy = "shorten it" if _T5 in self.lengths else "T5 reads it completely"
        return f"the prompt {_shown(self.text)} is cut: {', '.join(lost)}; {remedy}"


def count_cut_captions(captions: Iterable[str], diffusers_path: Path, t5_max_length: int) -> CutCaptions | None:
    """Count captions that a text encoder cuts; None where no tokenizer file can be read."""
    tokenizers = _load_tokenizers(diffusers_path, t5_max_length)
    if not tokenizers:
        return None
    texts, cut = list(captions), Counter[str]()
    longest: tuple[str, int, str] | None = None
    most = 0
    for name, (tokenizer, limit) in tokenizers.items():
        for text in texts:
            length = _length(tokenizer, text)
            if length > limit:
                cut[name] += 1
                if length - limit > most:
                    most, longest = length - limit, (name, length, text)
    limits = {name: limit for name, (_, limit) in tokenizers.items()}
    maximum = min(_LONGEST_T5, tokenizer_length(diffusers_path / "tokenizer_3") or _LONGEST_T5)
    return CutCaptions(len(texts), limits, cut, longest, maximum)


def cut_prompts(prompts: Iterable[str], diffusers_path: Path, t5_max_length: int) -> list[str]:
    """Return one line per different prompt that a text encoder cuts; the last line counts those beyond a few."""
    tokenizers, cut = _load_tokenizers(diffusers_path, t5_max_length), list[CutText]()
    limits = {name: limit for name, (_, limit) in tokenizers.items()}
    for text in dict.fromkeys(prompts):
        lengths = {name: _length(tokenizer, text) for name, (tokenizer, _) in tokenizers.items()}
        if beyond := {name: length for name, length in lengths.items() if length > limits[name]}:
            cut.append(CutText(text, beyond, limits))
    lines = [each.sentence() for each in cut[:_SHOWN_PROMPTS]]
    return lines if len(cut) <= _SHOWN_PROMPTS else [*lines, f"{len(cut) - _SHOWN_PROMPTS:,} more prompts are cut"]


def _shown(text: str) -> str:
    return f"{text[:_SHOWN]!r}{'...' if len(text) > _SHOWN else ''}"


def _length(tokenizer: Tokenizer, text: str) -> int:
    # one by one: in batches the library starts threads, and warns when a process with them forks
    return len(tokenizer.encode(text).ids)


def _load_tokenizers(folder: Path, t5_max_length: int) -> dict[str, tuple[Tokenizer, int]]:
    """Return the tokenizers that can be read, each with the number of tokens that its encoder reads."""
    limits = {_CLIP: tokenizer_length(folder / "tokenizer") or CLIP_TOKENS, _T5: t5_max_length}
    tokenizers = {_CLIP: _load(folder / "tokenizer"), _T5: _load(folder / "tokenizer_3")}
    return {name: (tokenizer, limits[name]) for name, tokenizer in tokenizers.items() if tokenizer is not None}


def _load(folder: Path) -> Tokenizer | None:
    """Return a tokenizer without truncation; None if this library cannot read its files (encoding reports damage)."""
    path, older = folder / "tokenizer.json", (folder / "vocab.json", folder / "merges.txt")
    try:
        if path.is_file():
            require_regular(path, TEXT_BYTES)
            tokenizer = Tokenizer.from_file(str(path))
        elif all(file.is_file() for file in older):
            tokenizer = _clip_tokenizer(*older)
        else:
            return None
    except Exception:  # the library raises no other class
        return None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _clip_tokenizer(vocab: Path, merges: Path) -> Tokenizer:
    """Return CLIP's tokenizer from its two older files, as transformers builds it."""
    require_regular(vocab, TEXT_BYTES)
    require_regular(merges, TEXT_BYTES)
    start, end = "<|startoftext|>", "<|endoftext|>"
    tokenizer = Tokenizer(BPE.from_file(str(vocab), str(merges), unk_token=end, end_of_word_suffix="</w>"))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()]
    )
    split = pre_tokenizers.Split(Regex(_CLIP_WORDS), behavior="removed", invert=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    specials = [(token, tokenizer.token_to_id(token)) for token in (start, end)]
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{start} $A {end}", special_tokens=specials)
    return tokenizer
