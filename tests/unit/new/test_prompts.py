"""Prompts of a new project: none is a training caption."""

import pytest

from sd3_light.new.prompts import find_concept, sample_prompts
from sd3_light.world import draw_prompts

DOGS = ["a photo of sks dog on a beach", "sks dog running in the park", "a portrait of sks dog", "two sks dogs, grey"]


@pytest.mark.parametrize(
    ("captions", "concept"),
    [
        (DOGS, "sks dog"),
        ([*DOGS, "an empty beach"], "sks dog"),
        ([*DOGS[:2], "a cat", "a car"], ""),
        (["a castle, zorb style", "zorb style river in winter", "a cat in Zorb style"], "zorb style"),
        (["一只小红狗在沙滩上", "小红狗在公园", "雪地里的小红狗"], "小红狗"),
        (["小狗zorb在沙滩上", "公园里的小狗zorb", "雪地里的小狗zorb"], "小狗zorb"),
        (["a photo of a cat", "a photo of a dog", "a photo of a tree"], ""),
        (["zorb"], ""),
        (["one zorb", "two zorbs"], "zorb"),
        ([], ""),
    ],
)
def test_the_concept_is_what_most_captions_share(captions: list[str], concept: str) -> None:
    assert find_concept(captions) == concept


def test_two_prompts_have_the_concept_in_a_new_context_and_one_lacks_it() -> None:
    first, second, other = sample_prompts(DOGS, has_concept=True)
    assert "sks dog" in first
    assert "sks dog" in second
    assert "sks" not in other
    assert not {first, second, other} & set(DOGS)
    on_the_moon = [f"sks dog on the moon, {number}" for number in range(4)]
    prompts = sample_prompts([*on_the_moon, "sks dog at a table with fruit"], has_concept=True)
    assert not any("moon" in prompt or "fruit" in prompt for prompt in prompts)
    style = sample_prompts(["a castle, zorb style", "a river, zorb style"], has_concept=True)
    assert style[0] == "a lighthouse on a cliff, zorb style"


def test_other_prompts_combine_captions_that_are_spread_over_the_set() -> None:
    captions = [prompt.text for prompt in draw_prompts(80, 0, False, language="mixed")]
    prompts = sample_prompts(captions, has_concept=False)
    assert len(set(prompts)) == 4
    assert not set(prompts) & set(captions)
    names = [f"animal {number:03d} in place {number:03d}" for number in range(100)]
    heads = [int(prompt.split()[1]) for prompt in sample_prompts(names, has_concept=False)]
    tails = [int(prompt.split()[-1]) for prompt in sample_prompts(names, has_concept=False)]
    assert heads == [0, 25, 50, 75]
    assert tails == [50, 75, 0, 25]


@pytest.mark.parametrize(
    ("captions", "prompts"),
    [
        ([], ()),
        (["", "  "], ()),
        (["boot"], ("boot, seen from above",)),
        (["靴子"], ("靴子，俯视",)),
        (["boot", "boot", "car"], ("boot and car", "car and boot")),
    ],
)
def test_few_captions(captions: list[str], prompts: tuple[str, ...]) -> None:
    assert sample_prompts(captions, has_concept=True) == prompts
