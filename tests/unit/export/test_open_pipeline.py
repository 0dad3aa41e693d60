"""The text policy of a folder: what it states, or stock SD3's within the limits of its tokenizer."""

import json
from pathlib import Path

import pytest
import torch

from sd3_light.assets import DEMO
from sd3_light.core.registry import family_named
from sd3_light.export.open_pipeline import open_pipeline, open_policy, read_text_policy
from sd3_light.model.part_configs import FACTS_FILE
from tests.refusals import refused

SD3 = family_named("sd3")


@pytest.mark.parametrize(("limit", "length"), [(512, 256), (16, 16), (1e30, 256), (None, 256)])
def test_a_folder_without_facts_has_its_tokenizers_limit(tmp_path: Path, limit: float | None, length: int) -> None:
    if limit is not None:
        (tmp_path / "tokenizer_3").mkdir()
        (tmp_path / "tokenizer_3" / "tokenizer_config.json").write_text(json.dumps({"model_max_length": limit}))
    assert read_text_policy(tmp_path, SD3).t5_max_length == length
    (tmp_path / FACTS_FILE).write_text(json.dumps({"text": {"t5_max_length": 77}}))
    assert read_text_policy(tmp_path, SD3).t5_max_length == 77


def test_the_shipped_model_is_drawn_with_the_tokens_that_it_was_trained_on() -> None:
    assert read_text_policy(DEMO, SD3).t5_max_length == 16


def test_a_missing_package_for_captions_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(SD3), "packages", ("no_such_package",))
    reason = "SD3 needs no_such_package for its captions, which is not installed; run `pip install no_such_package`"
    for open_model in (open_policy, lambda folder: open_pipeline(folder, torch.device("cpu"))):
        assert refused("", open_model, DEMO) == f"{DEMO}: {reason}"
