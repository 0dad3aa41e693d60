"""The counted cost of a stock denoiser against SD3's formulas. Other families: test_stock_families.py."""

import diffusers
import pytest
from torch import Tensor

from sd3_light.config import SIZES, AdapterConfig, ModelSize
from sd3_light.core.cost import Compute, TextTokens, Tokens
from sd3_light.cost.gpu_memory import gpu_memory
from sd3_light.cost.training_flops import training_flops
from sd3_light.cost.training_setup import TrainingSetup
from sd3_light.families.sd3 import adapter_cost
from sd3_light.families.sd3.cost import SD3Cost
from sd3_light.model.adapter_layers import add_adapter
from tests.unit.cost.test_gpu_memory import SavedTensors


class CountedSD3(adapter_cost.CountedSD3):
    """SD3 as a stock denoiser; an image token covers 16 x 16 pixels."""

    text = TextTokens(96, True, "96, padded")

    def __init__(self, size: ModelSize, title: str = "SD3") -> None:
        super().__init__(size)
        self._title = title

    def image_tokens(self, width: int, height: int) -> int:
        return (width // 16) * (height // 16)


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


ADAPTERS = {
    "attention": AdapterConfig(rank=4),
    "every layer": AdapterConfig(rank=4, target_modules=["transformer_blocks.*"]),
    "second blocks": AdapterConfig(rank=4, target_modules=["transformer_blocks.[23].attn.to_q"]),
    "dora": AdapterConfig(rank=4, use_dora=True),
    "loha": AdapterConfig(type="loha", rank=4),
}


@pytest.mark.parametrize("adapter", ADAPTERS.values(), ids=ADAPTERS)
def test_below_an_adapter_bytes_are_those_that_a_pass_saves(adapter: AdapterConfig) -> None:
    """By the tensors that autograd keeps on the CPU; the inputs of the first block need no gradient."""
    cost = CountedSD3(DUAL)
    denoiser = diffusers.SD3Transformer2DModel(**DUAL.transformer_config()).train().requires_grad_(False)
    add_adapter(denoiser, adapter, seed=0)
    saved = []
    for block in denoiser.transformer_blocks:
        block.register_forward_pre_hook(lambda *_: saved.append(SavedTensors(denoiser).__enter__()), prepend=True)
        block.register_forward_hook(lambda *_: saved[-1].__exit__(None, None, None))
    cost.denoise(denoiser, cost.batch(16, 16, 96).map_tensors(Tensor.float))
    estimate = cost.sample_bytes(Tokens(256, 96), Compute("stock", "float32", adapter))
    counted = [block.saved + block.fixed for block in estimate.blocks]
    assert counted[1:] == pytest.approx([block.total for block in saved[1:]], rel=0.03)
    trained = cost.sample_bytes(Tokens(256, 96), Compute("stock", "float32"))
    assert sum(counted) < sum(block.saved for block in trained.blocks)
