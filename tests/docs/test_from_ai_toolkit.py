"""The example that was converted from ai-toolkit is a valid config, and trains the layers that ai-toolkit trains."""

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FluxTransformer2DModel

from sd3_light.config import load_config
from sd3_light.model.linears import match_targets

PAGE = "docs/moving/from-ai-toolkit.md"


@pytest.fixture
def project(page: Any, tmp_path: Path) -> Path:
    """The two files of the page, side by side."""
    train, dataset = [block.text for block in page(PAGE).blocks if block.language == "toml"]
    (tmp_path / "person.toml").write_text(train, encoding="utf-8")
    (tmp_path / "person_data.toml").write_text(dataset, encoding="utf-8")
    return tmp_path / "person.toml"


def test_the_converted_example_loads_with_all_linear_layers_of_the_blocks(project: Path) -> None:
    loaded = load_config(project)
    train = loaded.train
    assert (train.adapter.rank, train.adapter.base_bits, train.optimizer.type) == (16, 8, "adamw8bit")
    assert (train.model.shift, train.model.uncond_text_dropout_prob) == (1.0, 0.05)
    (directory,) = loaded.dataset.directories
    assert [side for side, _ in directory.resolutions] == [512, 768, 1024]
    # ai-toolkit trains every linear layer whose name contains transformer_blocks.
    adapter = load_config(project).train.adapter
    assert adapter is not None
    with torch.device("meta"):
        denoiser = FluxTransformer2DModel(num_layers=1, num_single_layers=1, num_attention_heads=2)
    linears = [name for name, module in denoiser.named_modules() if isinstance(module, torch.nn.Linear)]
    blocks = [name for name in linears if "transformer_blocks." in name]
    assert blocks != linears
    assert list(match_targets(linears, adapter.target_modules)) == blocks
