"""Captions that the tokenizers cut are counted, with the tokenizers' own lengths."""

import json
import shutil
from pathlib import Path

import pytest

from sd3_light.assets import DEMO
from sd3_light.core.caption_lengths import CaptionSample, count_cut_captions, cut_prompts
from sd3_light.families.sd3.encoding import text_limits
from sd3_light.families.sd3.text import load_tokenizer

CAPTIONS = ["", "a red star", "Don't  stop:\n12 green stars, 3 é!", "白色背景上有一个大的红色圆形", "a red star " * 30]


def lengths(folder: Path, captions: list[str]) -> list[tuple[int, int]]:
    """Return the CLIP and T5 lengths as limits that a caption just exceeds."""
    found = []
    for caption in captions:
        clip, t5 = (load_tokenizer(name, folder, 512).tokenizer for name in ("clip_l", "t5"))
        found.append((len(clip(caption)["input_ids"]), len(t5(caption)["input_ids"])))
    return found


@pytest.fixture(params=["tokenizer.json", "vocab.json and merges.txt"])
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """The demo's tokenizers; CLIP's in each of the layouts of SD3 folders."""
    for name in ("tokenizer", "tokenizer_2", "tokenizer_3"):
        shutil.copytree(DEMO / name, tmp_path / name)
    if request.param != "tokenizer.json":
        (tmp_path / "tokenizer" / "tokenizer.json").unlink()
    return tmp_path


def test_lengths_are_those_of_the_encoders_tokenizers(folder: Path) -> None:
    """A caption is cut exactly if it is longer than the limit."""
    for caption, (clip, t5) in zip(CAPTIONS, lengths(DEMO, CAPTIONS), strict=True):
        for limit, is_cut in ((t5 - 1, True), (t5, False)):
            result = count_cut_captions([caption], text_limits(folder, limit))
            assert result.cut["T5"] == is_cut
        assert result.cut["CLIP"] == (clip > 16)
        if clip > 16:
            assert f"has {clip} CLIP tokens" in result.sentence()


def test_cut_captions_and_prompts_are_counted_and_named(folder: Path) -> None:
    result = count_cut_captions(CAPTIONS, text_limits(folder, 512))
    text, num_cut = result.sentence(), sum(clip > 16 for clip, _ in lengths(DEMO, CAPTIONS))
    assert text.startswith(f"of 5 captions {num_cut} exceed CLIP's 16 tokens: the rest of each is cut (T5 still reads")
    assert text.endswith("...")
    assert len(text) < 350
    assert count_cut_captions(CAPTIONS[:2], text_limits(folder, 512)).sentence() == ""  # type: ignore[union-attr]
    prompt = "a red star " * 8
    ((clip, t5),) = lengths(DEMO, [prompt])
    (line,) = cut_prompts(["a red star", prompt, prompt], text_limits(folder, t5 - 3))
    assert line == (
        f"the prompt {prompt!r} is cut: CLIP reads 16 of its {clip} tokens (loses {clip - 16}), "
        f"T5 reads {t5 - 3} of its {t5} tokens (loses 3); shorten it"
    )
    (line,) = cut_prompts([prompt], text_limits(folder, t5))
    assert line.endswith(f"CLIP reads 16 of its {clip} tokens (loses {clip - 16}); T5 reads it completely")
    assert cut_prompts(["", "a red star"], text_limits(folder, t5)) == []
    assert cut_prompts([prompt], text_limits(folder / "elsewhere", t5)) == []
    lines = cut_prompts([f"{'a red star ' * 30}{number}" for number in range(8)], text_limits(folder, 512))
    assert len(lines) == 6
    assert lines[-1] == "3 more prompts are cut"


def test_tokenizers_that_cannot_be_read_are_not_counted(folder: Path, tmp_path: Path) -> None:
    """Encoding reports them."""
    assert count_cut_captions(CAPTIONS, text_limits(tmp_path / "elsewhere", 12)) is None
    (folder / "tokenizer" / "tokenizer.json").write_text('{"model": 3}')
    result = count_cut_captions(CAPTIONS, text_limits(folder, 12))
    assert result.titles == {"T5": "t5_max_length = 12"}


def test_a_sample_of_captions_is_bounded_and_independent_of_the_order() -> None:
    forward, backward = CaptionSample(limit=100), CaptionSample(limit=100)
    for number in range(5000):
        forward.add(f"key {number}", [f"caption {number}"])
        backward.add(f"key {4999 - number}", [f"caption {4999 - number}"])
    assert forward.total == 5000
    assert 30 < len(forward.captions()) <= 100
    assert sorted(forward.captions()) == sorted(backward.captions())


@pytest.mark.parametrize(
    ("maximum", "limit", "remedy"),
    [
        (16, 12, "shorten them, or raise t5_max_length"),
        (16, 16, "this tokenizer allows at most 16: shorten them, or use another model"),
        (1024, 512, "t5_max_length is at most 512: shorten them"),
        (None, 512, "t5_max_length is at most 512: shorten them"),
        (None, 16, "shorten them, or raise t5_max_length"),
    ],
)
def test_a_length_is_not_raised_above_its_limit(tmp_path: Path, maximum: int | None, limit: int, remedy: str) -> None:
    shutil.copytree(DEMO / "tokenizer_3", tmp_path / "tokenizer_3")
    path = tmp_path / "tokenizer_3" / "tokenizer_config.json"
    config = {**json.loads(path.read_text()), "model_max_length": maximum}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    result = count_cut_captions(["a red star " * 300], text_limits(tmp_path, limit))
    assert f": the rest of each is cut ({remedy}); the longest has " in result.sentence()
