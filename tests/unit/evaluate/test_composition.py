"""Rates cover the prompts with a demand; renderings of the scenes themselves are all correct."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sd3_light.evaluate import composition
from sd3_light.evaluate.composition import DEMANDS, ScoreOptions, judge_images, score
from sd3_light.families.sd3.sample_texts import TextPolicy
from sd3_light.sample.generate import ImageRequest
from sd3_light.world import draw_prompts, render_scene
from sd3_light.world.dataset import IMAGE_SIZES

POLICY = TextPolicy(t5_max_length=12, uncond_text="zero", text_tokens="padded")
PROMPTS = draw_prompts(12, seed=3, held_out=True)


def drawn(size: tuple[int, int] = (64, 64)) -> list[Image.Image]:
    return [render_scene(prompt.scene, *size, np.random.default_rng(i)) for i, prompt in enumerate(PROMPTS)]


def test_true_images_score_1_and_rates_cover_their_prompts() -> None:
    result = judge_images(PROMPTS, drawn())
    assert result.num_prompts == 12
    assert all(result.rates[demand] == 1 for demand in DEMANDS)
    images = drawn()
    for index, prompt in enumerate(PROMPTS):
        if prompt.scene.kind == "pair":
            images[index] = Image.new("RGB", (64, 64), (255, 255, 255))
    result = judge_images(PROMPTS, images)
    assert result.rates["all"] == pytest.approx(2 / 3)
    assert result.rates["relation"] == 0
    assert result.rates["size"] == 1
    assert set(result.by_kind) == {"single", "count", "pair"}
    assert result.by_kind["pair"]["all"] == 0
    assert result.by_kind["single"]["all"] == 1
    assert result.by_kind["count"]["size"] is None
    assert result.by_kind["count"]["relation"] is None
    counts = [prompt for prompt in PROMPTS if prompt.scene.kind == "count"]
    images = [render_scene(prompt.scene, 64, 64, np.random.default_rng(0)) for prompt in counts]
    result = judge_images(counts, images)
    assert result.rates["relation"] is result.rates["size"] is None
    assert result.rates["count"] == 1
    assert json.loads(json.dumps(result.as_dict()))["by_kind"]["count"]["size"] is None


@pytest.mark.parametrize("sizes", [None, IMAGE_SIZES])
def test_each_prompt_is_generated_once_with_its_own_seed_and_size(monkeypatch: pytest.MonkeyPatch, sizes: Any) -> None:
    generated: list[ImageRequest] = []

    def fake(pipe: Any, requests: Sequence[ImageRequest], *rest: Any) -> list[Image.Image]:
        generated.extend(requests)
        assert (pipe, rest) == ("pipe", (POLICY, (5, 3.0), 4, None))
        return [
            render_scene(prompt.scene, request.width, request.height, np.random.default_rng(request.seed))
            for prompt, request in zip(PROMPTS, requests, strict=True)
        ]

    monkeypatch.setattr(composition, "generate", fake)
    extra = {} if sizes is None else {"sizes": sizes}
    result = score("pipe", PROMPTS, POLICY, ScoreOptions(steps=5, guidance=3.0, seed=100, batch=4, **extra))
    cycle = sizes or ((64, 64),)
    assert generated == [ImageRequest(p.text, 100 + i, *cycle[i % len(cycle)]) for i, p in enumerate(PROMPTS)]
    assert result.rates["all"] == 1
    sheet = result.as_grid(columns=4, title="held-out")
    assert sheet.width == 8 + 4 * (2 * max(width for width, _ in cycle) + 8)
