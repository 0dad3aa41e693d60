"""The counted cost of a stock denoiser against SD3's formulas. Other families: test_stock_families.py."""

from collections.abc import Mapping

import diffusers
import pytest
import torch
from torch import Tensor, nn

from sd3_light.config import SIZES, AdapterConfig, ModelSize
from sd3_light.core.batch import Batch
from sd3_light.core.cost import Compute, TextTokens, Tokens
from sd3_light.cost.gpu_memory import gpu_memory
from sd3_light.cost.training_flops import training_flops
from sd3_light.cost.training_setup import TrainingSetup
from sd3_light.families.sd3.cost import SD3Cost
from sd3_light.families.stock.cost import CountedCost


class CountedSD3(CountedCost):
    """SD3 as a stock denoiser; an image token covers 16 x 16 pixels."""

    text = TextTokens(96, True, "96, padded")

    def __init__(self, size: ModelSize, name: str = "SD3") -> None:
        self.size = size
        with torch.device("meta"):
            super().__init__(diffusers.SD3Transformer2DModel(**size.transformer_config()), name)

    def image_tokens(self, width: int, height: int) -> int:
        return (width // 16) * (height // 16)

    def batch_tokens(self, batch: Batch) -> Mapping[Tokens, int]:
        raise NotImplementedError

    def batch(self, rows: int, columns: int, text: int) -> Batch:
        values = {
            "hidden_states": torch.zeros(1, 16, 2 * rows, 2 * columns),
            "timestep": torch.zeros(1),
            "encoder_hidden_states": torch.zeros(1, text, self.size.text_width, dtype=torch.bfloat16),
            "pooled_projections": torch.zeros(1, self.size.pooled_width, dtype=torch.bfloat16),
        }
        return Batch(1, values)

    def denoise(self, denoiser: nn.Module, batch: Batch) -> Tensor:
        velocity: Tensor = denoiser(**batch.values, return_dict=False)[0]
        return velocity


DUAL = ModelSize("dual", 4, 2, 64, 128, 64, 32, 32, 0.5, True, (0, 1))


@pytest.fixture(scope="module", params=[SIZES["demo"], DUAL], ids=lambda size: size.name)
def costs(request: pytest.FixtureRequest) -> tuple[CountedSD3, SD3Cost]:
    return CountedSD3(request.param), SD3Cost(request.param)


def test_weights_are_those_of_the_formulas(costs: tuple[CountedSD3, SD3Cost]) -> None:
    counted, formula = costs
    assert counted.parameters == formula.parameters
    assert counted.layer_parameters[1:-1] == formula.layer_parameters[1:-1]
    assert (counted.block_matrices, counted.width) == (formula.block_matrices, formula.width)
    adapter = AdapterConfig(type="lora", rank=4, target_modules=["attn.to_*", "proj_out"])
    of_layers = counted.adapter_parameters(adapter)
    assert of_layers[1:-1] == formula.adapter_parameters(adapter)[1:-1]
    assert sum(of_layers) == sum(formula.adapter_parameters(adapter))


@pytest.mark.parametrize("tokens", [Tokens(256, 333), Tokens(4095, 51)])
def test_flops_are_those_of_the_formulas(costs: tuple[CountedSD3, SD3Cost], tokens: Tokens) -> None:
    counted, formula = costs
    assert counted.forward_flops(tokens) == pytest.approx(formula.forward_flops(tokens), rel=0.001)
    actual, expected = (training_flops(cost, tokens).value for cost in costs)
    assert actual == pytest.approx(expected, rel=0.001)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tokens", [Tokens(256, 333), Tokens(4096, 51)])
def test_saved_bytes_are_those_of_the_formulas(costs: tuple[CountedSD3, SD3Cost], tokens: Tokens, dtype: str) -> None:
    """Which were compared with what a GPU allocates."""
    counted, formula = (cost.sample_bytes(tokens, Compute("stock", dtype)) for cost in costs)
    for name, tolerance in {"saved": 0.03, "selective": 0.01, "inputs": 0.01}.items():
        actual, expected = (sum(getattr(block, name) for block in cost.blocks) for cost in (counted, formula))
        assert actual == pytest.approx(expected, rel=tolerance), name
    assert counted.largest.saved == pytest.approx(formula.largest.saved, rel=0.04)
    assert counted.stream == pytest.approx(formula.stream, rel=0.01)
    assert counted.work == pytest.approx(formula.work, rel=0.25)
    assert (counted.features, counted.target) == (pytest.approx(formula.features, rel=0.02), formula.target)
    actual, expected = (gpu_memory(TrainingSetup(cost, tokens, 16, compute_dtype=dtype)).total for cost in costs)
    assert actual == pytest.approx(expected, rel=0.04)
