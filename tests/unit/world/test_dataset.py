"""Datasets and prompts of the demo world."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sd3_light.world import draw_prompts, judge, scene_captions, write_dataset
from sd3_light.world.captions import parse_caption
from sd3_light.world.scene import SCENE_KINDS, canonical_scene, is_held_out
from tests.refusals import refused


def _bytes(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_a_dataset_is_a_function_of_its_seed(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    folder = write_dataset(tmp_path / "a", 12, seed=1, on_progress=lambda done, total: calls.append((done, total)))
    assert calls == [(done, 12) for done in range(1, 13)]
    assert _bytes(folder) == _bytes(write_dataset(tmp_path / "b", 12, seed=1))
    longer, other = write_dataset(tmp_path / "c", 16, seed=1), write_dataset(tmp_path / "d", 12, seed=2)
    assert _bytes(longer)["000011.png"] == _bytes(folder)["000011.png"]
    assert _bytes(other)["captions.json"] != _bytes(folder)["captions.json"]
    refused("give 1 to 1000000", write_dataset, tmp_path, 0, seed=1)


@pytest.mark.parametrize("held_out", [False, True])
def test_images_match_their_captions_and_the_held_out_rule(tmp_path: Path, held_out: bool) -> None:
    folder = write_dataset(tmp_path, 200, seed=3, held_out=held_out)
    texts = json.loads((folder / "captions.json").read_text(encoding="utf-8"))
    assert sorted(texts) == [f"{index:06d}.png" for index in range(200)]
    correct = []
    sizes: Counter[tuple[int, int]] = Counter()
    for name, (english, chinese) in texts.items():
        scene = parse_caption(english)
        assert parse_caption(chinese) == scene
        assert is_held_out(scene) == held_out
        image = Image.open(folder / name)
        sizes[image.size] += 1
        correct.append(judge(image, scene).all)
    assert np.mean(correct) >= 0.99
    assert sizes == {(64, 64): 100, (80, 48): 50, (48, 80): 50}


def test_prompts_are_balanced_and_of_known_kinds() -> None:
    drawn = draw_prompts(120, seed=4, held_out=True, language="mixed")
    assert drawn == draw_prompts(120, seed=4, held_out=True, language="mixed")
    assert Counter(prompt.scene.kind for prompt in drawn) == dict.fromkeys(SCENE_KINDS, 40)
    assert len({canonical_scene(prompt.scene) for prompt in drawn}) == 120
    assert all(parse_caption(prompt.text) == prompt.scene and is_held_out(prompt.scene) for prompt in drawn)
    chinese = Counter(prompt.scene.kind for prompt in drawn if not prompt.text.isascii())
    assert chinese == dict.fromkeys(SCENE_KINDS, 20)
    for language in ("en", "zh"):
        drawn = draw_prompts(9, seed=0, held_out=False, kinds=["pair"], language=language)
        assert all(p.scene.kind == "pair" and p.text == scene_captions(p.scene)[language] for p in drawn)
    refused("single, count, pair", draw_prompts, 1, seed=0, held_out=False, kinds=["triple"])
    refused("en, zh, mixed", draw_prompts, 1, seed=0, held_out=False, language="fr")
