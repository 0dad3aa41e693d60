"""The shipped tokenizers and text encoders of the demo: their hashes, and properties that programs rely on."""

import hashlib
import json
from itertools import permutations, product
from pathlib import Path

import pytest
from diffusers import FlowMatchEulerDiscreteScheduler
from transformers import CLIPTokenizer, PreTrainedTokenizerBase, T5TokenizerFast

import sd3_light
from sd3_light.parts.tokenizers import learn_tokenizers
from sd3_light.randomness import stream
from sd3_light.world import draw_scene, scene_captions
from sd3_light.world.captions import ZH_WORDS
from sd3_light.world.scene import BACKGROUNDS, COLOURS, COUNTS, OBJECT_SIZES, RELATIONS, SHAPES, Item, Scene

DEMO = Path(sd3_light.__file__).parent / "assets" / "demo"
TOKENIZERS = {"tokenizer": CLIPTokenizer, "tokenizer_2": CLIPTokenizer, "tokenizer_3": T5TokenizerFast}
MAX_LENGTH = 16
Tokenizers = dict[str, PreTrainedTokenizerBase]


@pytest.fixture(scope="module")
def tokenizers() -> Tokenizers:
    return {name: kind.from_pretrained(DEMO / name) for name, kind in TOKENIZERS.items()}


@pytest.fixture(scope="module", params=["shipped", "learned"])
def any_tokenizers(request: pytest.FixtureRequest, tokenizers: Tokenizers) -> Tokenizers:
    """The shipped tokenizers, and those that `scripts/demo_parts.py` learns, from fewer captions of training pairs."""
    if request.param == "shipped":
        return tokenizers
    rng = stream(5, "test-demo-text", 0, 0, 0)
    captions = {text for _ in range(400) for text in scene_captions(draw_scene(rng, held_out=False)).values()}
    return learn_tokenizers(sorted(captions), 8192, ZH_WORDS)


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """Captions in both languages of all single and count scenes, and of all pairs with some relation and background."""
    pairs = list(product(SHAPES, COLOURS))
    scenes = [
        Scene("single", (Item(*pair, size),), None, 1, b) for pair, size, b in product(pairs, OBJECT_SIZES, BACKGROUNDS)
    ]
    scenes += [Scene("count", (Item(*pair),), None, n, b) for pair, n, b in product(pairs, COUNTS[1:], BACKGROUNDS)]
    for index, (first, second) in enumerate(permutations(pairs, 2)):
        relation, background = RELATIONS[index % 4], tuple(BACKGROUNDS)[index // 4 % 4]
        scenes.append(Scene("pair", (Item(*first), Item(*second)), relation, 2, background))
    return [text for scene in scenes for text in scene_captions(scene).values()]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_every_caption_fits_and_has_one_token_per_word(name: str, any_tokenizers: Tokenizers, texts: list[str]) -> None:
    tokenizer = any_tokenizers[name]
    assert tokenizer.model_max_length == MAX_LENGTH
    rows = tokenizer(texts).input_ids
    assert max(map(len, rows)) <= MAX_LENGTH - 1  # leaves room for a full stop
    assert all(tokenizer.unk_token_id not in row[:-1] for row in rows)
    for text, row in zip(texts, rows, strict=True):
        if text.isascii():
            assert len(row) == len(text.split()) + (1 if name == "tokenizer_3" else 2), text
    # the token count of a Chinese caption depends only on its kind: no token spans two words, no word is split
    chinese = {len(row) for text, row in zip(texts, rows, strict=True) if not text.isascii() and "，" not in text}
    assert len(chinese) == 2, chinese
    assert len({len(row) for text, row in zip(texts, rows, strict=True) if "，" in text}) == 1


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_word_has_the_same_token_in_every_context(name: str, any_tokenizers: Tokenizers) -> None:
    tokenizer = any_tokenizers[name]
    item = Item("circle", "red", "large")
    first = {language: tokenizer(text).input_ids for language, text in scene_captions(_single(item)).items()}
    for colour, shape in product(COLOURS, SHAPES):
        for language, text in scene_captions(_single(Item(shape, colour, "large"))).items():
            changed = sum(a != b for a, b in zip(first[language], tokenizer(text).input_ids, strict=True))
            assert changed == (colour != item.colour) + (shape != item.shape), text


def _single(item: Item) -> Scene:
    return Scene("single", (item,), None, 1, "white")


@pytest.mark.parametrize("name", TOKENIZERS)
def test_transformers_4_finds_its_files(name: str) -> None:
    """Its CLIPTokenizer reads vocab.json and merges.txt, and it expects a table in `extra_special_tokens`.

    The pipeline names CLIPTokenizerFast: in transformers 4 the other class splits Chinese words if ftfy is missing.
    """
    index = json.loads((DEMO / "model_index.json").read_text(encoding="utf-8"))
    assert index[name][1].endswith("Fast")
    config = json.loads((DEMO / name / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert isinstance(config.get("extra_special_tokens", {}), dict)
    if TOKENIZERS[name] is CLIPTokenizer:
        model = json.loads((DEMO / name / "tokenizer.json").read_text(encoding="utf-8"))["model"]
        assert json.loads((DEMO / name / "vocab.json").read_text(encoding="utf-8")) == model["vocab"]
        version, *merges = (DEMO / name / "merges.txt").read_text(encoding="utf-8").splitlines()
        assert version.startswith("#version")
        assert [line.split(" ") for line in merges] == model["merges"]


def test_files_match_their_hashes() -> None:
    expected = json.loads((DEMO / "hashes.json").read_text(encoding="utf-8"))
    patterns = ("*.safetensors", "tokenizer.json", "vocab.json", "merges.txt")
    files = [path for pattern in patterns for path in DEMO.glob(f"*/{pattern}")]
    hashes = {path.relative_to(DEMO).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    assert {name: expected.get(name) for name in hashes} == hashes, (
        "run scripts/demo_hashes.py if this change is intended"
    )


def test_scheduler_is_unshifted() -> None:
    assert FlowMatchEulerDiscreteScheduler.from_pretrained(DEMO / "scheduler").config.shift == 1.0
