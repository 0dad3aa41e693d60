"""The example that was converted from sd-scripts is a valid config, and sd-scripts' own keys are explained."""

from pathlib import Path
from typing import Any

import pytest

from sd3_light.config import SIZES, ConfigFaults, load_config
from sd3_light.config.unsupported import UNSUPPORTED_KEYS
from sd3_light.model.linears import match_targets

PAGE = "docs/moving/from-sd-scripts.md"


@pytest.fixture
def project(page: Any, tmp_path: Path) -> Path:
    """The two files of the page, side by side."""
    train, dataset = [block.text for block in page(PAGE).blocks if block.language == "toml"]
    (tmp_path / "zorb.toml").write_text(train, encoding="utf-8")
    (tmp_path / "zorb_data.toml").write_text(dataset, encoding="utf-8")
    return tmp_path / "zorb.toml"


def test_the_converted_example_loads_with_all_linear_layers_of_the_blocks(project: Path) -> None:
    loaded = load_config(project)
    train, (zorb, table) = loaded.train, loaded.dataset.directories
    assert (train.adapter.rank, train.adapter.alpha, train.optimizer.type) == (16, 8, "adamw8bit")
    assert (zorb.num_repeats, zorb.keep_tokens, zorb.tag_dropout, table.num_repeats) == (10, 1, 0.1, 1)
    (image,) = train.sampling.images
    assert (image.size, image.guidance, image.negative_prompt) == ((1024, 768), 4.5, "blurred")
    # sd-scripts trains every linear layer of the joint blocks.
    adapter = load_config(project).train.adapter
    assert adapter is not None
    for size in ("sd3_medium", "sd3.5_medium"):
        layers = SIZES[size].linear_layers()
        blocks = [name for name in layers if name.startswith("transformer_blocks.")]
        assert list(match_targets(layers, adapter.target_modules)) == blocks


def test_keys_of_sd_scripts_are_explained(project: Path) -> None:
    text = project.read_text(encoding="utf-8")
    project.write_text(f"network_dim = 16\nlearning_rate = 1e-4\n{text}", encoding="utf-8")
    project.with_name("zorb_data.toml").write_text(
        "[general]\nshuffle_caption = true\n[[datasets]]\nresolution = 512\n"
        '[[datasets.subsets]]\nimage_dir = "data/zorb"\n',
        encoding="utf-8",
    )
    with pytest.raises(ConfigFaults) as report:
        load_config(project)
    for line in (
        "network_dim: not supported: it has this name in sd-scripts; write rank in [adapter]",
        "learning_rate: not supported: it has this name in sd-scripts; write lr in [optimizer]",
        "general: not supported: it has this name in sd-scripts; write its keys at the top of the file",
        "datasets: not supported: it has this name in sd-scripts; write one [[directory]] with a path per subset",
    ):
        assert line in str(report.value)


def test_the_page_names_every_rejected_key(page: Any) -> None:
    prose = "\n".join(page(PAGE).prose)
    keys = [entry.key for entry in UNSUPPORTED_KEYS if "sd-scripts" in entry.reason]
    known = {"general": "[general]", "datasets": "[[datasets]]"}
    assert [key for key in keys if known.get(key, key) not in prose] == []
