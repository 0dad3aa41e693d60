"""The model card: metadata for the hub, text for people, and code that runs."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard

from sd3_light.config import SIZES
from sd3_light.core.registry import family_named
from sd3_light.export.card import model_card
from sd3_light.export.card_facts import _cache_facts, _caption_summary, _metrics
from sd3_light.export.export_spec import ExportSpec
from sd3_light.export.licence import licence_file
from tests.project import Project

CONFIG = SIZES["tiny2"].transformer_config()
TEXT = {"text_tokens": "padded", "uncond_text": "empty", "t5_max_length": 16}


def card(base: Path, about: dict[str, Any] | None = None, **text: str) -> str:
    spec = ExportSpec(base, CONFIG, torch.float16, 3.0, text={**TEXT, **text}, family=family_named("sd3"))
    return model_card(spec, {"weights": "ema", "step": 5000, "samples": 1280000}, about or {})


def read(text: str, folder: Path) -> dict[str, Any]:
    """Return the metadata as the hub's library reads it."""
    (folder / "card.md").write_text(text)
    metadata: dict[str, Any] = ModelCard.load(folder / "card.md").data.to_dict()
    return metadata


def test_the_hub_reads_the_metadata(tmp_path: Path) -> None:
    about = {"name": "my-run", "losses": {"held_out": 0.25}, "scores": {"whole": 0.5}, "base model": "owner/sd3"}
    text = card(tmp_path, {**about, "data set": "a|b\nc"})
    assert "| data set | a\\|b c |" in text.splitlines(), "a name cannot break the table"
    data = read(text, tmp_path)
    assert (data["library_name"], data["pipeline_tag"]) == ("diffusers", "text-to-image")
    assert data["base_model"] == "owner/sd3"
    assert "base_model" not in read(card(tmp_path, {"base model": ""}), tmp_path)
    assert "sd3-light" in data["tags"]
    (entry,) = data["model-index"]
    assert entry["name"] == "my-run"
    values = {(result["dataset"]["name"], result["metrics"][0]["value"]) for result in entry["results"]}
    assert values == {("held_out", 0.25), ("composition prompts", 0.5)}


def test_the_licence_is_that_of_the_base_or_must_be_filled_in(tmp_path: Path) -> None:
    text = card(tmp_path)
    data = read(text, tmp_path)
    assert (data["license"], data["license_name"], data["license_link"]) == ("other", "not-stated", "LICENSE")
    assert "fill in `license`" in text
    assert "not stated" in licence_file(tmp_path)["LICENSE"]
    (tmp_path / "README.md").write_text(text)
    assert "fill in `license`" in card(tmp_path), "an unstated licence is not copied"
    licence = "license: other\nlicense_name: stabilityai-ai-community\nlicense_link: LICENSE.md"
    (tmp_path / "README.md").write_text(f"---\n{licence}\n---\n# SD3\n")
    (tmp_path / "LICENSE.md").write_text("the community licence")
    data = read(card(tmp_path), tmp_path)
    assert (data["license"], data["license_name"]) == ("other", "stabilityai-ai-community")
    assert data["license_link"] == "LICENSE.md"
    assert licence_file(tmp_path) == {"LICENSE.md": "the community licence"}
    os.truncate(tmp_path / "README.md", 1 << 40)
    assert read(card(tmp_path), tmp_path)["license_name"] == "not-stated", "a huge card is not read"


@pytest.mark.parametrize(
    ("link", "shown"), [("LICENSE.md", None), ("../secret", None), ("https://example.com/x", "https://example.com/x")]
)
def test_a_link_to_a_licence_that_the_base_lacks_is_left_out(tmp_path: Path, link: str, shown: str | None) -> None:
    base = tmp_path / "base"
    base.mkdir()
    (tmp_path / "secret").write_text("not part of the model")
    (base / "README.md").write_text(f"---\nlicense: other\nlicense_name: x\nlicense_link: {link}\n---\n# SD3\n")
    assert read(card(base), tmp_path).get("license_link") == shown
    assert licence_file(base) == {}


def test_the_table_shows_data_steps_sizes_and_scores(tmp_path: Path) -> None:
    about = {"parameters": 1150784, "save_dtype": "float16", "data set": "cc12m", "resolutions": "256x256"}
    text = card(tmp_path, {**about, "losses": {"held_out": 0.25}})
    for row in (
        "| denoiser | 2 joint blocks, 2 heads of 64 |",
        "| parameters | 1,150,784, saved in float16 |",
        "| weights | ema |",
        "| data set | cc12m |",
        "| resolutions | 256x256 |",
        "| optimizer steps | 5,000 |",
        "| samples seen | 1,280,000 |",
        "| text | padded tokens, T5 length 16, unconditional input: empty |",
        "| schedule | shift 3 |",
        "| flow matching loss, held_out | 0.25 |",
    ):
        assert row in text.splitlines()


@pytest.mark.parametrize(("uncond", "named"), [("empty", "the empty prompt"), ("zero", "zeros")])
def test_the_unconditional_input_is_named(tmp_path: Path, uncond: str, named: str) -> None:
    text = " ".join(card(tmp_path, text_tokens="real", uncond_text=uncond).split())
    assert f"unconditional input of guidance was {named}. " in text
    note = "unconditional input of training was zeros, not the empty prompt"
    assert (note in " ".join(card(tmp_path, uncond_text=uncond).split())) == (uncond == "zero")


def test_a_card_has_the_size_of_the_data_and_not_its_captions(cached_project: Project) -> None:
    facts = _cache_facts(cached_project.cache)
    assert facts["images"] == "40"
    assert re.fullmatch(r"\d( to \d)? per image, \d+ to \d+ characters, median [\d.]+", facts["captions"])
    text = card(cached_project.model, {"data set": "data", **facts})
    assert "| images | 40 |" in text.splitlines()
    assert f"| captions | {facts['captions']} |" in text.splitlines()


def test_a_cache_that_cannot_be_read_leaves_the_card_without_it(tmp_path: Path) -> None:
    assert _cache_facts(tmp_path) == {}
    (tmp_path / "manifest.json").write_text("{")
    assert _cache_facts(tmp_path) == {}
    assert _caption_summary([("",), ()]) == "none"
    assert _caption_summary([("ab", "abcd"), ("abc",)]) == "1 to 2 per image, 2 to 4 characters, median 3"


def test_a_card_has_the_last_metrics_of_its_weights_up_to_its_step(tmp_path: Path) -> None:
    events = [
        {"event": "metrics", "step": step, "weights": weights, "kid": {"value": value, "low": 0, "high": 1}}
        for step, weights, value in ((1, "ema", 0.3), (2, "ema", 0.2), (2, "raw", 0.9), (3, "ema", 0.1))
    ]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    assert _metrics(tmp_path / "log.jsonl", "ema", 2) == {"kid": 0.2}
    data = read(card(tmp_path, {"metrics": {"kid": 0.2}}), tmp_path)
    (entry,) = data["model-index"]
    assert entry["results"][0]["metrics"][0]["value"] == 0.2
