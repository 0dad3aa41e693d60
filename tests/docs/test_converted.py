"""The examples that were converted from other trainers are valid configs, and train the layers that those train."""

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FluxTransformer2DModel

from sd3_light.config import SIZES, ConfigFaults, load_config
from sd3_light.config.unsupported import UNSUPPORTED_KEYS
from sd3_light.model.linears import match_targets

SD_SCRIPTS = "docs/moving/from-sd-scripts.md"


def converted(page: Any, name: str, folder: Path) -> Path:
    """Write the two files of a page, side by side, and return the train TOML."""
    train, dataset = [block.text for block in page(name).blocks if block.language == "toml"]
    data = next(line for line in train.splitlines() if line.startswith("dataset")).split('"')[1]
    (folder / "train.toml").write_text(train, encoding="utf-8")
    (folder / data).write_text(dataset, encoding="utf-8")
    return folder / "train.toml"


def test_the_example_of_sd_scripts_loads_with_all_linear_layers_of_the_blocks(page: Any, tmp_path: Path) -> None:
    loaded = load_config(converted(page, SD_SCRIPTS, tmp_path))
    train, (zorb, table) = loaded.train, loaded.dataset.directories
    assert (train.adapter.rank, train.adapter.alpha, train.optimizer.type) == (16, 8, "adamw8bit")
    assert (zorb.num_repeats, zorb.keep_tokens, zorb.tag_dropout, table.num_repeats) == (10, 1, 0.1, 1)
    (image,) = train.sampling.images
    assert (image.size, image.guidance, image.negative_prompt) == ((1024, 768), 4.5, "blurred")
    for size in ("sd3_medium", "sd3.5_medium"):
        layers = SIZES[size].linear_layers()
        blocks = [name for name in layers if name.startswith("transformer_blocks.")]
        assert list(match_targets(layers, train.adapter.target_modules)) == blocks


def test_the_example_of_ai_toolkit_loads_with_all_linear_layers_of_the_blocks(page: Any, tmp_path: Path) -> None:
    loaded = load_config(converted(page, "docs/moving/from-ai-toolkit.md", tmp_path))
    train = loaded.train
    assert (train.adapter.rank, train.adapter.base_bits, train.optimizer.type) == (16, 8, "adamw8bit")
    assert (train.model.shift, train.model.uncond_text_dropout_prob) == (1.0, 0.05)
    (directory,) = loaded.dataset.directories
    assert [side for side, _ in directory.resolutions] == [512, 768, 1024]
    with torch.device("meta"):
        denoiser = FluxTransformer2DModel(num_layers=1, num_single_layers=1, num_attention_heads=2)
    linears = [name for name, module in denoiser.named_modules() if isinstance(module, torch.nn.Linear)]
    blocks = [name for name in linears if "transformer_blocks." in name]
    assert blocks != linears
    assert list(match_targets(linears, train.adapter.target_modules)) == blocks


def test_keys_of_sd_scripts_are_explained(page: Any, tmp_path: Path) -> None:
    path = converted(page, SD_SCRIPTS, tmp_path)
    text = path.read_text(encoding="utf-8")
    path.write_text(f"network_dim = 16\nlearning_rate = 1e-4\n{text}", encoding="utf-8")
    subsets = '[[datasets.subsets]]\nimage_dir = "data/zorb"\n'
    dataset = f"[general]\nshuffle_caption = true\n[[datasets]]\nresolution = 512\n{subsets}"
    (tmp_path / "zorb_data.toml").write_text(dataset, encoding="utf-8")
    with pytest.raises(ConfigFaults) as report:
        load_config(path)
    for key, remedy in (
        ("network_dim", "write rank in [adapter]"),
        ("learning_rate", "write lr in [optimizer]"),
        ("general", "write its keys at the top of the file"),
        ("datasets", "write one [[directory]] with a path per subset"),
    ):
        assert f"{key}: not supported: it has this name in sd-scripts; {remedy}" in str(report.value)


def test_the_page_names_every_rejected_key_of_sd_scripts(page: Any) -> None:
    prose = "\n".join(page(SD_SCRIPTS).prose)
    keys = [entry.key for entry in UNSUPPORTED_KEYS if "sd-scripts" in entry.reason]
    known = {"general": "[general]", "datasets": "[[datasets]]"}
    assert [key for key in keys if known.get(key, key) not in prose] == []
