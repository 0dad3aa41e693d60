"""The demo's three tokenizers, built from the words of the demo world's captions.

Every word of either language is one token, and no token spans two words: a token for "红色圆形" would not exist for a
combination of colour and shape that training never shows. `demo_text.py` writes them; nothing here is random.
"""

import json
import re
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from transformers import CLIPTokenizer, PreTrainedTokenizerBase, T5TokenizerFast

MAX_LENGTH = 16  # tokens of the longest caption, with begin and end marks
BOS, EOS = "<|startoftext|>", "<|endoftext|>"
SPACE = "▁"

# Content words of both languages by meaning.
MEANINGS: dict[str, tuple[str, ...]] = {
    "circle": ("circle", "circles", "圆形"),
    "square": ("square", "squares", "正方形"),
    "triangle": ("triangle", "triangles", "三角形"),
    "star": ("star", "stars", "星形"),
    "cross": ("cross", "crosses", "十字形"),
    "ring": ("ring", "rings", "圆环"),
    "diamond": ("diamond", "diamonds", "菱形"),
    "red": ("red", "红色"),
    "green": ("green", "绿色"),
    "blue": ("blue", "蓝色"),
    "yellow": ("yellow", "黄色"),
    "purple": ("purple", "紫色"),
    "orange": ("orange", "橙色"),
    "cyan": ("cyan", "青色"),
    "white": ("white", "白色"),
    "black": ("black", "黑色"),
    "grey": ("grey", "灰色"),
    "pink": ("pink", "粉色"),
    "small": ("small", "小的"),
    "large": ("large", "大的"),
    "two": ("two", "两个"),
    "three": ("three", "三个"),
    "four": ("four", "四个"),
    "left": ("left", "左边"),
    "right": ("right", "右边"),
    "above": ("above", "上方"),
    "below": ("below", "下方"),
}
FUNCTION_WORDS = ("a", "an", "of", "on", "background", "背景", "上", "有", "一个", "在", "的")
WORDS: tuple[str, ...] = tuple(word for words in MEANINGS.values() for word in words) + FUNCTION_WORDS
HARD_WORDS = (
    *("striped", "dotted", "five", "six", "front", "in", "behind", "and"),
    *("条纹", "圆点", "五个", "六个", "前面", "后面", "和"),
)
HARD_MAX_LENGTH = 24
"""Tokens of the longest caption of a harder scene, with begin and end marks."""


@dataclass(frozen=True)
class Vocabulary:
    """The words of the captions, the punctuation between them, and the number of tokens per caption."""

    words: tuple[str, ...] = WORDS
    marks: str = "，。"
    max_length: int = MAX_LENGTH

    @property
    def english(self) -> tuple[str, ...]:
        """The English words."""
        return tuple(word for word in self.words if word.isascii())

    @property
    def chinese(self) -> tuple[str, ...]:
        """The Chinese words."""
        return tuple(word for word in self.words if not word.isascii())


DEMO_VOCABULARY = Vocabulary()
HARD_VOCABULARY = Vocabulary((*WORDS, *HARD_WORDS), "，。、", HARD_MAX_LENGTH)

Symbols = tuple[str, ...]
Merge = tuple[str, str]


def split_words(caption: str, vocabulary: Vocabulary = DEMO_VOCABULARY) -> list[str]:
    """Split a caption into words and punctuation; longer Chinese words take precedence."""
    longest_first = sorted(vocabulary.chinese, key=len, reverse=True)
    return re.findall("|".join((*longest_first, "[a-z]+", r"\S")), caption.lower())


def byte_letters() -> list[str]:
    """Return the letter of byte-level BPE for each byte: the byte itself if printable, otherwise one above 255."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = iter(range(256, 512))
    return [chr(byte if byte in printable else next(rest)) for byte in range(256)]


def learn_merges(sequences: list[Symbols]) -> list[Merge]:
    """Learn byte-pair merges, most frequent pair first, until every sequence is one symbol."""
    merges: list[Merge] = []
    while counts := Counter(pair for sequence in sequences for pair in pairwise(sequence)):
        best = min(counts, key=lambda pair: (-counts[pair], pair))
        merges.append(best)
        sequences = [apply_merge(sequence, best) for sequence in sequences]
    return merges


def apply_merge(sequence: Symbols, merge: Merge) -> Symbols:
    """Join every occurrence of the pair in a sequence, from left to right."""
    merged: list[str] = []
    joined = False  # whether the last symbol is a new merge, which cannot merge again
    for symbol in sequence:
        if merged and not joined and (merged[-1], symbol) == merge:
            merged[-1], joined = merged[-1] + symbol, True
        else:
            merged.append(symbol)
            joined = False
    return tuple(merged)


def clip_vocabulary(vocabulary: Vocabulary = DEMO_VOCABULARY) -> tuple[dict[str, int], list[Merge]]:
    """Return ids and merges in CLIP's order: bytes, bytes that end a word, merges, begin and end mark.

    CLIP treats a run of Chinese as one word, so only the last word of a run has `</w>`. Characters are merged before
    words, so that only pairs within a character or within a word can merge.
    """
    letters, english, chinese = byte_letters(), vocabulary.english, vocabulary.chinese

    def spell(text: str) -> Symbols:
        return tuple(letters[byte] for byte in text.encode())

    def with_end_mark(symbols: Symbols) -> Symbols:
        return (*symbols[:-1], symbols[-1] + "</w>")

    characters = sorted({character for word in chinese for character in word})
    words = [tuple("".join(spell(character)) for character in word) for word in chinese]
    stages = (
        [with_end_mark(spell(word)) for word in english],
        [form(spell(character)) for character in characters for form in (tuple, with_end_mark)],
        [form(word) for word in words for form in (tuple, with_end_mark)],
        [with_end_mark(spell(mark)) for mark in vocabulary.marks],
    )
    merges = [merge for stage in stages for merge in learn_merges(stage)]
    alphabet = sorted(letters)  # as in CLIP, where "!" has id 0
    symbols = [*alphabet, *(letter + "</w>" for letter in alphabet), *(a + b for a, b in merges), BOS, EOS]
    return {symbol: index for index, symbol in enumerate(dict.fromkeys(symbols))}, merges


def clip_tokenizer(pad: str, vocabulary: Vocabulary = DEMO_VOCABULARY) -> CLIPTokenizer:
    """Build a CLIP tokenizer; SD3's first pads with the end mark, its second with "!"."""
    vocab, merges = clip_vocabulary(vocabulary)
    return CLIPTokenizer(vocab=vocab, merges=merges, pad_token=pad, model_max_length=vocabulary.max_length)


def t5_pieces(vocabulary: Vocabulary = DEMO_VOCABULARY) -> list[tuple[str, float]]:
    """Return pieces and scores: the marks, the words, then letters for unknown words.

    A Chinese word has one piece at every position, so a Chinese caption begins with a piece for the leading space.
    """
    english = [SPACE + form for word in vocabulary.english for form in (word, word.capitalize())]
    letters, chinese = [chr(code) for code in range(33, 127)] + list(vocabulary.marks), vocabulary.chinese
    letters += sorted({character for word in chinese if len(word) > 1 for character in word} - set(chinese))
    words = [(piece, -4.0) for piece in (SPACE, *english, *chinese)]
    return [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *words, *((letter, -8.0) for letter in letters)]


def t5_tokenizer(vocabulary: Vocabulary = DEMO_VOCABULARY) -> T5TokenizerFast:
    """Build the T5 tokenizer; unknown characters become <unk>, as in T5."""
    return T5TokenizerFast(vocab=t5_pieces(vocabulary), extra_ids=0, model_max_length=vocabulary.max_length)


def make_tokenizers(vocabulary: Vocabulary = DEMO_VOCABULARY) -> dict[str, PreTrainedTokenizerBase]:
    """Return the three tokenizers by folder name."""
    clips = {"tokenizer": clip_tokenizer(EOS, vocabulary), "tokenizer_2": clip_tokenizer("!", vocabulary)}
    return {**clips, "tokenizer_3": t5_tokenizer(vocabulary)}


def save_tokenizers(out: Path, vocabulary: Vocabulary = DEMO_VOCABULARY) -> None:
    """Write the three tokenizers as folders of ``out``, in a form that transformers 4 reads too."""
    for name, tokenizer in make_tokenizers(vocabulary).items():
        tokenizer.save_pretrained(out / name)
        path = out / name / "tokenizer_config.json"
        config = json.loads(path.read_text(encoding="utf-8"))
        if config.get("extra_special_tokens") == []:  # transformers 4 expects a table
            del config["extra_special_tokens"]
        path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        if isinstance(tokenizer, CLIPTokenizer):  # these two are all that CLIPTokenizer of transformers 4 reads
            vocab, merges = clip_vocabulary(vocabulary)
            lines = ["#version: 0.2", *(f"{first} {second}" for first, second in merges)]
            (out / name / "vocab.json").write_text(json.dumps(vocab, ensure_ascii=False), encoding="utf-8")
            (out / name / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
