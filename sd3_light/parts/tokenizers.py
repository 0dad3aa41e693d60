"""Tokenizers learned from captions: byte-level BPE in CLIP's layout and Unigram in T5's, for any languages.

English words are learned as byte pairs. Every character of Chinese, Japanese or Korean is one token, and so are the
words that the caller lists: a token that spans words, such as "红色圆形", would be missing for a combination that the
captions never show. CLIP's tokenizer knows every byte and therefore every text. T5's knows the characters of the
captions and of ASCII; others become `<unk>`, as in T5.
Nothing here is random.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import CLIPTokenizer, PreTrainedTokenizerBase, T5TokenizerFast

from sd3_light.files import write_atomically
from sd3_light.inputs import read_json_file
from sd3_light.model.part_configs import check_files

BOS = "<|startoftext|>"
EOS = "<|endoftext|>"
CLIP_PADS = {"tokenizer": EOS, "tokenizer_2": "!"}
"""SD3's first CLIP tokenizer pads with the end mark, its second with "!"."""
T5_FOLDER = "tokenizer_3"
MAX_TOKENS = 512
"""Longest caption in tokens; longer ones are cut, and reported."""
_MARKS = ("<pad>", "</s>", "<unk>")
_SPACE = "▁"
_CJK = "\u2e80-\u9fff\uac00-\ud7af\uf900-\ufaff\uff00-\uffef\U00020000-\U0003ffff"
_LONGEST = 24  # letters of a token
# scores: a text is split into as few pieces as possible
_PIECE = -4.0
_LETTER = -8.0
_MULTIPLE = 8

Merge = tuple[str, str]


def byte_letters() -> list[str]:
    """Return the letter of byte-level BPE for each byte: the byte itself if printable, otherwise one above 255."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = iter(range(256, 512))
    return [chr(byte if byte in printable else next(rest)) for byte in range(256)]


def clip_vocabulary(merges: Iterable[Merge]) -> dict[str, int]:
    """Return ids in CLIP's order: bytes, bytes that end a word, merges, begin and end mark."""
    alphabet = sorted(byte_letters())  # as in CLIP, where "!" has id 0
    symbols = [*alphabet, *(letter + "</w>" for letter in alphabet), *(a + b for a, b in merges), BOS, EOS]
    return {symbol: index for index, symbol in enumerate(dict.fromkeys(symbols))}


def learn_clip_merges(captions: Sequence[str], vocabulary: int, words: Sequence[str] = ()) -> list[Merge]:
    """Learn the merges of a vocabulary of at most this many tokens; at most half of it are Chinese.

    ``words`` are words of Chinese that become one token each, wherever their characters follow one another.
    """
    budget = max(0, vocabulary - len(clip_vocabulary(())))
    chinese = [*_character_merges([*captions, *words]), *_word_merges(words)][: budget // 2]
    stock = CLIPTokenizer().backend_tokenizer
    tokenizer = Tokenizer(BPE(end_of_word_suffix="</w>"))
    tokenizer.normalizer = stock.normalizer
    tokenizer.pre_tokenizer = stock.pre_tokenizer
    others = _train_bpe(tokenizer, captions, vocabulary - len(chinese), byte_letters(), end_of_word_suffix="</w>")
    return list(dict.fromkeys([*chinese, *others]))[:budget]


def _character_merges(captions: Iterable[str]) -> Iterator[Merge]:
    """Yield the merges that make one token of each character, within a word and at its end, frequent ones first."""
    letters = byte_letters()
    done = set[Merge]()
    counts = Counter(re.findall(f"[{_CJK}]", "".join(captions)))
    for character, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        first, *middle, last = (letters[byte] for byte in character.encode())
        steps = []
        for letter in middle:
            steps.append((first, letter))
            first += letter
        for merge in (*steps, (first, last), (first, f"{last}</w>")):
            if merge not in done:
                done.add(merge)
                yield merge


def _word_merges(words: Iterable[str]) -> Iterator[Merge]:
    """Yield the merges that join the characters of each word, within a run of Chinese and at its end."""
    letters = byte_letters()
    for word in words:
        first, *middle, last = ("".join(letters[byte] for byte in character.encode()) for character in word)
        for character in middle:
            yield first, character
            first += character
        yield first, last
        yield first, f"{last}</w>"


def _train_bpe(
    tokenizer: Tokenizer, captions: Iterable[str], vocabulary: int, alphabet: list[str], **options: Any
) -> list[Merge]:
    """Learn merges from the captions without their characters of Chinese."""
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, min_frequency=2, show_progress=False, initial_alphabet=alphabet,
        max_token_length=_LONGEST, **options,
    )  # fmt: skip
    tokenizer.train_from_iterator((re.sub(f"[{_CJK}]", " ", caption) for caption in captions), trainer)
    return [(first, second) for first, second in json.loads(tokenizer.to_str())["model"]["merges"]]


def learn_t5_pieces(captions: Sequence[str], vocabulary: int, words: Sequence[str] = ()) -> list[tuple[str, float]]:
    """Learn T5's pieces and scores for a vocabulary of about this many tokens: marks, words, single characters."""
    alphabet = {*map(chr, range(33, 127)), *"".join([*captions, *words])}
    letters = sorted(letter for letter in alphabet if not letter.isspace())
    tokenizer = Tokenizer(BPE())
    alone = pre_tokenizers.Split(Regex(r"[^\p{L}\p{M}▁]"), "isolated")  # digits and punctuation are not merged
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(_SPACE, "always"), alone]
    )
    merges = _train_bpe(tokenizer, captions, vocabulary - len(_MARKS), [_SPACE, *letters])
    learned = (first + second for first, second in merges)
    pieces = {**dict.fromkeys((_SPACE, *letters), _LETTER), **dict.fromkeys((*learned, *words), _PIECE)}
    return [*((mark, 0.0) for mark in _MARKS), *pieces.items()]


def learn_tokenizers(
    captions: Sequence[str], vocabulary: int, words: Sequence[str] = ()
) -> dict[str, PreTrainedTokenizerBase]:
    """Return the three tokenizers by folder name, with maximum lengths that cut no caption up to `MAX_TOKENS`."""
    words = [word for word in words if len(word) > 1]
    merges = learn_clip_merges(captions, vocabulary, words)
    vocab = clip_vocabulary(merges)
    tokenizers: dict[str, PreTrainedTokenizerBase] = {
        name: CLIPTokenizer(vocab=vocab, merges=merges, pad_token=pad) for name, pad in CLIP_PADS.items()
    }
    tokenizers[T5_FOLDER] = T5TokenizerFast(vocab=learn_t5_pieces(captions, vocabulary, words), extra_ids=0)
    for tokenizer in tokenizers.values():
        tokenizer.model_max_length = length_for(longest(tokenizer, captions))
    return tokenizers


def longest(tokenizer: PreTrainedTokenizerBase, captions: Sequence[str]) -> int:
    """Return the number of tokens of the longest caption, with begin and end marks."""
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    # one by one: in batches the library starts threads, and warns when a process with them forks
    return max((len(backend.encode(caption).ids) for caption in captions), default=0)


def length_for(tokens: int) -> int:
    """Return the maximum length for captions of up to this many tokens: a multiple of 8 from 16 to `MAX_TOKENS`."""
    return min(MAX_TOKENS, max(16, -(-tokens // _MULTIPLE) * _MULTIPLE))


def save_tokenizers(tokenizers: Mapping[str, PreTrainedTokenizerBase], out: Path) -> None:
    """Write each tokenizer to its folder of ``out``, in a form that transformers 4 reads too."""
    for name, tokenizer in tokenizers.items():
        tokenizer.save_pretrained(out / name)
        path = out / name / "tokenizer_config.json"
        config = read_json_file(path)
        if config.get("extra_special_tokens") == []:  # transformers 4 expects a table
            del config["extra_special_tokens"]
        write_atomically(path, (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode())
        if isinstance(tokenizer, CLIPTokenizer):
            _save_clip_files(tokenizer, out / name)


def _save_clip_files(tokenizer: CLIPTokenizer, folder: Path) -> None:
    """Write the two files that CLIPTokenizer of transformers 4 reads."""
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    lines = ["#version: 0.2", *(f"{first} {second}" for first, second in model["merges"])]
    write_atomically(folder / "vocab.json", json.dumps(model["vocab"], ensure_ascii=False).encode())
    write_atomically(folder / "merges.txt", ("\n".join(lines) + "\n").encode())


def load_tokenizers(folder: Path) -> dict[str, PreTrainedTokenizerBase]:
    """Load the three tokenizers of a diffusers folder."""
    check_files(*(folder / name for name in (*CLIP_PADS, T5_FOLDER)))
    classes = {**dict.fromkeys(CLIP_PADS, CLIPTokenizer), T5_FOLDER: T5TokenizerFast}
    return {name: kind.from_pretrained(folder / name, local_files_only=True) for name, kind in classes.items()}
