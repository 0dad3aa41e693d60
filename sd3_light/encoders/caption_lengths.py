"""How many captions are longer than the text encoders read: counted from the tokenizers' files, without torch."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from sd3_light.model.pipeline_folder import CLIP_TOKENS, tokenizer_length
from sd3_light.randomness import sample_id

MAX_CAPTIONS = 10_000
"""Captions to count at most, chosen by their samples' ids: enough for a share, and a few seconds."""
_CLIP_WORDS = r"""<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"""
_CLIP, _T5 = "CLIP", "T5"
_SHOWN = 120  # characters of a caption


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
    """Of ``captions`` counted ones, how many each encoder cuts, and the caption that is longest beyond its limit."""

    captions: int
    limits: dict[str, int]
    cut: Counter[str]
    longest: tuple[str, int, str] | None = None

    def sentence(self) -> str:
        """Return one line about the captions that are cut; "" if none is."""
        if self.longest is None:
            return ""
        names = {_CLIP: f"CLIP's {self.limits.get(_CLIP)} tokens", _T5: f"t5_max_length = {self.limits.get(_T5)}"}
        counts = [f"{count:,} exceed {names[name]}" for name, count in sorted(self.cut.items()) if count]
        remedy = "shorten them, or raise t5_max_length" if self.cut[_T5] else "T5 still reads what CLIP does not"
        encoder, length, caption = self.longest
        return (
            f"of {self.captions:,} captions {', '.join(counts)}: the rest of each is cut ({remedy}); the longest has "
            f"{length:,} {encoder} tokens: {caption[:_SHOWN]!r}{'...' if len(caption) > _SHOWN else ''}"
        )


def count_cut_captions(captions: Iterable[str], diffusers_path: Path, t5_max_length: int) -> CutCaptions | None:
    """Count captions that a text encoder cuts; None where no tokenizer file can be read."""
    limits = {_CLIP: tokenizer_length(diffusers_path / "tokenizer") or CLIP_TOKENS, _T5: t5_max_length}
    tokenizers = {_CLIP: _load(diffusers_path / "tokenizer"), _T5: _load(diffusers_path / "tokenizer_3")}
    known = {name: tokenizer for name, tokenizer in tokenizers.items() if tokenizer is not None}
    if not known:
        return None
    texts, cut = list(captions), Counter[str]()
    longest: tuple[str, int, str] | None = None
    most = 0
    for name, tokenizer in known.items():
        for text in texts:
            # one by one: in batches the library starts threads, and warns when a process with them forks
            length = len(tokenizer.encode(text).ids)
            if length > limits[name]:
                cut[name] += 1
                if length - limits[name] > most:
                    most, longest = length - limits[name], (name, length, text)
    return CutCaptions(len(texts), {name: limits[name] for name in known}, cut, longest)


def _load(folder: Path) -> Tokenizer | None:
    """Return a tokenizer without truncation; None if this library cannot read its files (encoding reports damage)."""
    path, older = folder / "tokenizer.json", (folder / "vocab.json", folder / "merges.txt")
    try:
        if path.is_file():
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
