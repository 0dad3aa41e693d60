"""The demo's three tokenizers, built from the words of the demo world's captions.

Every word of either language is one token, and no token spans two words: a token for "红色圆形" would not exist for a
combination of colour and shape that training never shows. `demo_text.py` writes them; nothing here is random. Those
of any other captions are learned by `sd3_light.parts.tokenizers`.
"""

import re
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

from transformers import CLIPTokenizer, PreTrainedTokenizerBase, T5TokenizerFast

from sd3_light.parts.tokenizers import CLIP_PADS, T5_FOLDER, Merge, byte_letters, clip_vocabulary

MAX_LENGTH = 16  # tokens of the longest caption, with begin and end marks
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


def split_words(caption: str, vocabulary: Vocabulary = DEMO_VOCABULARY) -> list[str]:
    """Split a caption into words and punctuation; longer Chinese words take precedence."""
    longest_first = sorted(vocabulary.chinese, key=len, reverse=True)
    return re.findall("|".join((*longest_first, "[a-z]+", r"\S")), caption.lower())


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


def clip_merges(vocabulary: Vocabulary = DEMO_VOCABULARY) -> list[Merge]:
    """Return the merges of CLIP's tokenizer.

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
    return [merge for stage in stages for merge in learn_merges(stage)]


def clip_tokenizer(pad: str, vocabulary: Vocabulary = DEMO_VOCABULARY) -> CLIPTokenizer:
    """Build a CLIP tokenizer; SD3's first pads with the end mark, its second with "!"."""
    merges = clip_merges(vocabulary)
    vocab = clip_vocabulary(merges)
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
    clips = {name: clip_tokenizer(pad, vocabulary) for name, pad in CLIP_PADS.items()}
    return {**clips, T5_FOLDER: t5_tokenizer(vocabulary)}
