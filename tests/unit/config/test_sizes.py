"""Model sizes: arguments that diffusers accepts, and exact parameter counts."""

import inspect
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from diffusers import SD3Transformer2DModel

from sd3_light.config import SIZES, ModelConfig, ModelSize, resolve_size, size_from_transformer_config
from tests.refusals import refused


@pytest.mark.parametrize("qk_norm", [True, False])
@pytest.mark.parametrize("size", SIZES.values(), ids=list(SIZES))
def test_parameter_count_is_exact(size: ModelSize, qk_norm: bool) -> None:
    changed = size.with_overrides(qk_norm=qk_norm)
    with torch.device("meta"):
        model = SD3Transformer2DModel(**changed.transformer_config())
    assert changed.num_parameters() == sum(parameter.numel() for parameter in model.parameters())


def test_transformer_config_names_every_argument_and_gives_its_size() -> None:
    expected = set(inspect.signature(SD3Transformer2DModel.__init__).parameters) - {"self"}
    for size in SIZES.values():
        assert set(size.transformer_config()) == expected
    size = SIZES["tiny3"]
    with torch.device("meta"):
        config = SD3Transformer2DModel(**size.transformer_config()).config
    assert size_from_transformer_config(dict(config), "tiny3") == replace(size, position_step=0.25)


def test_size_of_a_model_table() -> None:
    folder = Path("folder")
    pretrain = ModelConfig(diffusers_path=folder, train_type="sd3_light_pretrain")
    assert resolve_size(pretrain) == SIZES["sd3_light"]
    small = ModelConfig(diffusers_path=folder, size="sd3.5_medium", num_layers=4, qk_norm=False)
    assert (resolve_size(small).num_layers, resolve_size(small).qk_norm) == (4, False)
    assert resolve_size(small).dual_attention_layers == (0, 1, 2, 3)
    refused(r"model\.size", resolve_size, ModelConfig(diffusers_path=folder))
