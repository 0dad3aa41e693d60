"""Learned tokenizers: nothing is cut, texts survive, words and Chinese characters are tokens."""

import re
from pathlib import Path

import pytest
from transformers import CLIPTokenizer, PreTrainedTokenizerBase

from sd3_light.parts.images import Pool
from sd3_light.parts.tokenizers import (
    MAX_TOKENS,
    learn_clip_merges,
    learn_t5_pieces,
    learn_tokenizers,
    length_for,
    load_tokenizers,
    longest,
    save_tokenizers,
)
from sd3_light.randomness import stream
from sd3_light.world.hard.captions import ZH_HARD_WORDS, hard_captions
from sd3_light.world.hard.scene import draw_hard_scene

ODD = ("It's a TEST: café,  3d style!", "熊猫，立体风格 (两只)", "mañana 😀", "")


@pytest.fixture(scope="module")
def captions(pools: list[Pool]) -> list[str]:
    return [*sorted({text for pool in pools for texts in pool.captions for text in texts}), *ODD]


@pytest.fixture(scope="module")
def tokenizers(captions: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, PreTrainedTokenizerBase]:
    folder = tmp_path_factory.mktemp("tokenizers")
    save_tokenizers(learn_tokenizers(captions, 2000), folder)
    return load_tokenizers(folder)


def test_no_caption_is_cut(tokenizers: dict[str, PreTrainedTokenizerBase], captions: list[str]) -> None:
    for tokenizer in tokenizers.values():
        whole = [len(tokenizer(text).input_ids) for text in captions]
        padded = tokenizer(captions, padding="max_length", truncation=True).input_ids
        assert max(whole) <= tokenizer.model_max_length == len(padded[0])
        assert max(whole) == longest(tokenizer, captions)


def test_t5_returns_the_text(tokenizers: dict[str, PreTrainedTokenizerBase], captions: list[str]) -> None:
    t5 = tokenizers["tokenizer_3"]
    for text in captions:
        assert t5.decode(t5(text).input_ids, skip_special_tokens=True) == " ".join(text.split())
        assert t5.unk_token_id not in t5(text).input_ids


def test_clip_returns_the_text_in_lower_case(
    tokenizers: dict[str, PreTrainedTokenizerBase], captions: list[str]
) -> None:
    clip = tokenizers["tokenizer"]
    for text in captions:
        decoded = clip.decode(clip(text).input_ids, skip_special_tokens=True)
        assert re.sub(r"\s", "", decoded) == re.sub(r"\s", "", text.lower())
        assert clip(decoded).input_ids == clip(text).input_ids


def test_words_and_chinese_characters_are_tokens(tokenizers: dict[str, PreTrainedTokenizerBase]) -> None:
    clip, t5 = tokenizers["tokenizer"], tokenizers["tokenizer_3"]
    assert len(clip("a red circle").input_ids) == 3 + 2
    assert len(t5("a red circle").input_ids) == 3 + 1
    # 粉色圆形 may never be in a caption; its characters are
    assert len(clip("粉色圆形").input_ids) == 4 + 2
    assert len(t5("粉色圆形").input_ids) == 1 + 4 + 1


def test_listed_words_are_tokens_and_others_are_split() -> None:
    rng = stream(1, "test-words", 0, 0, 0)
    known, new = (
        [text for _ in range(300) for text in hard_captions(draw_hard_scene(rng, held_out)).values()]
        for held_out in (False, True)
    )
    tokenizers = learn_tokenizers(known, 8192, ZH_HARD_WORDS)
    word = re.compile("|".join((*sorted(ZH_HARD_WORDS, key=len, reverse=True), "[a-z]+", r"\S")))
    for text in new:
        words = len(word.findall(text))
        assert longest(tokenizers["tokenizer"], [text]) == words + 2, text
        space = not text.isascii()  # T5 has a piece for the space before Chinese
        assert longest(tokenizers["tokenizer_3"], [text]) == words + 1 + space, text
    assert tokenizers["tokenizer"].model_max_length == 24, "as benchmarks/world_runs.py expects"
    assert len(tokenizers["tokenizer"]("红条色").input_ids) == 3 + 2
    assert len(tokenizers["tokenizer_3"]("红条色").input_ids) == 1 + 3 + 1


def test_a_vocabulary_too_small_for_the_words_keeps_characters(captions: list[str]) -> None:
    size = len(learn_tokenizers(captions, 8192)["tokenizer"])
    for vocabulary in (600, size - 20, size):
        tokenizer = learn_tokenizers(captions, vocabulary, ZH_HARD_WORDS)["tokenizer"]
        assert len(tokenizer) <= vocabulary
        assert tokenizer.decode(tokenizer("红色圆形").input_ids, skip_special_tokens=True) == "红色圆形"


def test_marks_are_where_sd3_expects_them(tokenizers: dict[str, PreTrainedTokenizerBase]) -> None:
    first, second, third = tokenizers.values()
    assert (first.pad_token_id, second.pad_token_id, third.pad_token_id) == (first.eos_token_id, 0, 0)
    assert first.eos_token_id == len(first) - 1
    assert (third.eos_token_id, third.unk_token_id) == (1, 2)
    assert third.unk_token_id in third("ж").input_ids  # not in any caption


def test_learning_is_deterministic(captions: list[str]) -> None:
    assert learn_clip_merges(captions, 2000) == learn_clip_merges(captions, 2000)
    assert learn_t5_pieces(captions, 2000) == learn_t5_pieces(captions, 2000)


def test_vocabulary_is_limited(captions: list[str]) -> None:
    for tokenizer in learn_tokenizers(captions, 700).values():
        assert len(tokenizer) <= 700


def test_older_transformers_find_their_two_files(captions: list[str], tmp_path: Path) -> None:
    learned = learn_tokenizers(captions, 2000)
    save_tokenizers(learned, tmp_path)
    folder = tmp_path / "tokenizer"
    (folder / "tokenizer.json").unlink()
    again = CLIPTokenizer.from_pretrained(folder)
    assert again(captions).input_ids == learned["tokenizer"](captions).input_ids


def test_lengths_are_multiples_within_limits() -> None:
    assert [length_for(tokens) for tokens in (0, 16, 17, 24, 25, 10_000)] == [16, 16, 24, 24, 32, MAX_TOKENS]


@pytest.mark.parametrize("captions", [[], [""], ["a"], ["猫"]])
def test_tiny_sets_of_captions(captions: list[str]) -> None:
    assert all(len(tokenizer("a 猫").input_ids) > 1 for tokenizer in learn_tokenizers(captions, 8192).values())
