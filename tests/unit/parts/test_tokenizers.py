"""Learned tokenizers: nothing is cut, texts survive, words and Chinese characters are tokens."""

import re
from pathlib import Path

import pytest
from transformers import CLIPTokenizer, PreTrainedTokenizerBase

from sd3_light.parts.images import Pool
from sd3_light.parts.tokenizers import (
    MAX_TOKENS,
    byte_letters,
    clip_vocabulary,
    learn_clip_merges,
    learn_t5_pieces,
    learn_tokenizers,
    length_for,
    load_tokenizers,
    longest,
    save_tokenizers,
)
from sd3_light.randomness import stream
from sd3_light.world import draw_scene, scene_captions
from sd3_light.world.captions import ZH_WORDS

ODD = ("It's a TEST: café,  3d style!", "熊猫，立体风格 (两只)", "mañana 😀", "")


@pytest.fixture(scope="module")
def captions(pools: list[Pool]) -> list[str]:
    return [*sorted({text for pool in pools for texts in pool.captions for text in texts}), *ODD]


@pytest.fixture(scope="module")
def tokenizers(captions: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, PreTrainedTokenizerBase]:
    folder = tmp_path_factory.mktemp("tokenizers")
    save_tokenizers(learn_tokenizers(captions, 2000), folder)
    return load_tokenizers(folder)


def test_captions_are_not_cut_and_return(tokenizers: dict[str, PreTrainedTokenizerBase], captions: list[str]) -> None:
    for tokenizer in tokenizers.values():
        whole = [len(tokenizer(text).input_ids) for text in captions]
        padded = tokenizer(captions, padding="max_length", truncation=True).input_ids
        assert max(whole) <= tokenizer.model_max_length == len(padded[0])
        assert max(whole) == longest(tokenizer, captions)
    t5 = tokenizers["tokenizer_3"]
    for text in captions:
        assert t5.decode(t5(text).input_ids, skip_special_tokens=True) == " ".join(text.split())
        assert t5.unk_token_id not in t5(text).input_ids
    clip = tokenizers["tokenizer"]
    for text in captions:
        decoded = clip.decode(clip(text).input_ids, skip_special_tokens=True)
        assert re.sub(r"\s", "", decoded) == re.sub(r"\s", "", text.lower())
        assert clip(decoded).input_ids == clip(text).input_ids
    clip, t5 = tokenizers["tokenizer"], tokenizers["tokenizer_3"]
    assert len(clip("a red circle").input_ids) == 3 + 2
    assert len(t5("a red circle").input_ids) == 3 + 1
    # 粉色圆形 may never be in a caption; its characters are
    assert len(clip("粉色圆形").input_ids) == 4 + 2
    assert len(t5("粉色圆形").input_ids) == 1 + 4 + 1
    first, second, third = tokenizers.values()
    assert (first.pad_token_id, second.pad_token_id, third.pad_token_id) == (first.eos_token_id, 0, 0)
    assert first.eos_token_id == len(first) - 1
    assert (third.eos_token_id, third.unk_token_id) == (1, 2)
    assert third.unk_token_id in third("ж").input_ids  # not in any caption


def test_listed_words_are_tokens_and_others_are_split() -> None:
    rng = stream(1, "test-words", 0, 0, 0)
    scenes = [[draw_scene(rng, held_out) for _ in range(300)] for held_out in (False, True)]
    known, new = ([text for scene in drawn for text in scene_captions(scene).values()] for drawn in scenes)
    tokenizers = learn_tokenizers(known, 8192, ZH_WORDS)
    word = re.compile("|".join((*sorted(ZH_WORDS, key=len, reverse=True), "[a-z]+", r"\S")))
    for text in new:
        words = len(word.findall(text))
        assert longest(tokenizers["tokenizer"], [text]) == words + 2, text
        space = not text.isascii()  # T5 has a piece for the space before Chinese
        assert longest(tokenizers["tokenizer_3"], [text]) == words + 1 + space, text
    assert tokenizers["tokenizer"].model_max_length == 16, "as benchmarks/common/world.py expects"
    assert len(tokenizers["tokenizer"]("红圆色").input_ids) == 3 + 2
    assert len(tokenizers["tokenizer_3"]("红圆色").input_ids) == 1 + 3 + 1


def test_learning_is_deterministic_and_limited(captions: list[str]) -> None:
    assert learn_clip_merges(captions, 2000) == learn_clip_merges(captions, 2000)
    assert learn_t5_pieces(captions, 2000) == learn_t5_pieces(captions, 2000)
    for tokenizer in learn_tokenizers(captions, 700).values():
        assert len(tokenizer) <= 700
    size = len(learn_tokenizers(captions, 8192)["tokenizer"])
    for vocabulary in (600, size - 20, size):
        tokenizer = learn_tokenizers(captions, vocabulary, ZH_WORDS)["tokenizer"]
        assert len(tokenizer) <= vocabulary
        assert tokenizer.decode(tokenizer("红色圆形").input_ids, skip_special_tokens=True) == "红色圆形"


def test_older_transformers_find_their_two_files(captions: list[str], tmp_path: Path) -> None:
    learned = learn_tokenizers(captions, 2000)
    save_tokenizers(learned, tmp_path)
    folder = tmp_path / "tokenizer"
    (folder / "tokenizer.json").unlink()
    again = CLIPTokenizer.from_pretrained(folder)
    assert again(captions).input_ids == learned["tokenizer"](captions).input_ids


@pytest.mark.parametrize("captions", [[], [""], ["a"], ["猫"]])
def test_tiny_sets_of_captions(captions: list[str]) -> None:
    assert all(len(tokenizer("a 猫").input_ids) > 1 for tokenizer in learn_tokenizers(captions, 8192).values())


BASE = 2 * 256 + 2
"""Tokens of a CLIP vocabulary without merges: bytes, bytes that end a word, two marks."""


def is_chinese(merge: tuple[str, str]) -> bool:
    """Return whether the first byte of a merge begins a character of three bytes."""
    return byte_letters().index(merge[0][0]) >= 0xE0


def test_letters_ids_and_lengths_are_those_of_clip() -> None:
    letters = byte_letters()
    assert "".join(letters[byte] for byte in b"a~! \n") == "a~!\u0120\u010a"
    assert (letters[0], letters[0xA1], letters[0xAD], letters[0xFF]) == ("\u0100", "\u00a1", "\u0143", "\u00ff")
    assert len(set(letters)) == 256
    vocabulary = clip_vocabulary([("a", "b"), ("ab", "c</w>"), ("a", "b")])
    assert [vocabulary[token] for token in ("!", "!</w>", "ab", "abc</w>")] == [0, 256, 512, 513]
    assert (vocabulary["<|startoftext|>"], vocabulary["<|endoftext|>"], len(vocabulary)) == (514, 515, BASE + 2)
    assert [length_for(tokens) for tokens in (0, 16, 17, 24, 25, 10_000)] == [16, 16, 24, 24, 32, MAX_TOKENS]
    tokenizers = learn_tokenizers(["a b " * 400], 600)
    assert [tokenizer.model_max_length for tokenizer in tokenizers.values()] == [MAX_TOKENS] * 3
    assert all(longest(tokenizer, ["a b " * 400]) > 800 for tokenizer in tokenizers.values())


def test_what_is_learned_from_few_captions() -> None:
    captions = ["".join(map(chr, range(0x4E00, 0x4E40))), *["many different words make several merges"] * 2]
    merges = learn_clip_merges(captions, BASE + 20)
    assert [is_chinese(merge) for merge in merges] == [True] * 10 + [False] * 10
    # 猫 (e7 8c ab) and 猬 (e7 8c ac) take five merges together.
    clip = learn_tokenizers(["猫猫猬"], BASE + 10)["tokenizer"]
    assert [len(clip(text).input_ids) - 2 for text in ("猫", "猬", "猫猬猫")] == [1, 1, 3]
    captions = ["a zyxwv", "a red", "red"]
    assert ("r", "ed</w>") in learn_clip_merges(captions, 2000)
    assert not any("z" in first + second for first, second in learn_clip_merges(captions, 2000))
    pieces = dict(learn_t5_pieces(captions, 2000))
    assert "▁red" in pieces
    assert not any("z" in piece for piece in pieces if len(piece) > 1)
    captions = ["ab" * 30] * 5
    for merges in (learn_clip_merges(captions, 2000), [(piece, "") for piece, _ in learn_t5_pieces(captions, 2000)]):
        lengths = [len((first + second).removesuffix("</w>")) for first, second in merges]
        assert 12 < max(lengths) <= 24
    t5 = learn_tokenizers(["room 1234, room 1234, 1234, 1234"] * 3, 2000)["tokenizer_3"]
    assert t5.convert_ids_to_tokens(t5("room 1234,").input_ids) == ["▁room", "▁", "1", "2", "3", "4", ",", "</s>"]
    # so that a text is split into as few pieces as possible, whatever their lengths.
    pieces = learn_t5_pieces(["a red circle", "a red square", "一只猫"], 2000, ["红色"])
    assert pieces[:3] == [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    for piece, score in pieces[3:]:
        assert score == (-4.0 if len(piece) > 1 else -8.0), piece
    assert {"▁a", "▁red", "红色", "猫", "▁", "~"} <= dict(pieces).keys()


@pytest.mark.parametrize(("often", "seldom"), ["猫狗", "狗猫"])
def test_frequent_characters_are_tokens_first(often: str, seldom: str) -> None:
    """A character of three bytes takes three merges: to two bytes, to the character, to one that ends a word."""
    captions = [often * 3, seldom, often + seldom]
    clip = learn_tokenizers(captions, BASE + 6)["tokenizer"]
    assert [len(clip(text).input_ids) - 2 for text in (often, seldom)] == [1, 3]
