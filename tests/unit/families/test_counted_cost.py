"""The counted cost of stock denoisers: against SD3's formulas, and against torch's count of whole passes."""

from collections.abc import Mapping
from typing import Any

import diffusers
import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.flop_counter import FlopCounterMode

from sd3_light.config import SIZES, AdapterConfig, ModelSize
from sd3_light.core.batch import Batch
from sd3_light.core.columns import Bucket
from sd3_light.core.cost import Compute, TextTokens, Tokens
from sd3_light.cost.gpu_memory import gpu_memory
from sd3_light.cost.training_flops import training_flops
from sd3_light.cost.training_setup import TrainingSetup
from sd3_light.families.sd3.cost import SD3Cost
from sd3_light.families.stock.cost import CountedCost
from tests.families import make_denoiser


class Counted(CountedCost):
    """A family's cost; an image token covers 16 x 16 pixels."""

    text = TextTokens(96, True, "96, padded")

    def image_tokens(self, width: int, height: int) -> int:
        return (width // 16) * (height // 16)

    def batch_tokens(self, batch: Batch) -> Mapping[Tokens, int]:
        height, width = batch["noisy"].shape[-2:]
        return {Tokens(self.image_tokens(8 * width, 8 * height), batch["text"].shape[1]): batch.size}


class CountedSD3(Counted):
    def __init__(self, size: ModelSize) -> None:
        self.size = size
        with torch.device("meta"):
            super().__init__(diffusers.SD3Transformer2DModel(**size.transformer_config()), "SD3")

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


class CountedTiny(Counted):
    """A tiny denoiser of another family."""

    def __init__(self, family: str) -> None:
        self.family = family
        with torch.device("meta"):
            super().__init__(make_denoiser(family), family.title())

    def batch(self, rows: int, columns: int, text: int) -> Batch:
        self.leaves, self.spec = tree_flatten(arguments(self.family, rows, columns, text))
        return Batch(1, {str(at): leaf for at, leaf in enumerate(self.leaves) if isinstance(leaf, Tensor)})

    def denoise(self, denoiser: nn.Module, batch: Batch) -> Tensor:
        leaves = [batch.values.get(str(at), leaf) for at, leaf in enumerate(self.leaves)]
        velocity: Tensor = tree_leaves(denoiser(**tree_unflatten(leaves, self.spec)))[0]
        return velocity


def arguments(family: str, rows: int, columns: int, text: int) -> dict[str, Any]:
    tokens, caption, time = torch.zeros(1, rows * columns, 16), torch.zeros(1, text, 32), torch.zeros(1)
    match family:
        case "flux":
            values: dict[str, Any] = {"hidden_states": tokens, "encoder_hidden_states": caption, "timestep": time}
            values |= {"pooled_projections": torch.zeros(1, 32), "guidance": torch.zeros(1)}
            values |= {"img_ids": torch.zeros(rows * columns, 3), "txt_ids": torch.zeros(text, 3)}
        case "qwen_image":
            values = {"hidden_states": tokens, "encoder_hidden_states": caption, "timestep": time}
            values |= {"img_shapes": [[(1, rows, columns)]], "encoder_hidden_states_mask": None}
        case "z_image":
            values = {"x": [torch.zeros(4, 1, 2 * rows, 2 * columns)], "t": time, "cap_feats": [caption[0]]}
        case "sana":
            values = {"hidden_states": torch.zeros(1, 4, rows, columns), "timestep": time}
            values |= {"encoder_hidden_states": caption}
        case "wan":
            values = {"hidden_states": torch.zeros(1, 4, 1, 2 * rows, 2 * columns), "timestep": time}
            values |= {"encoder_hidden_states": caption}
    return {**values, "return_dict": False}


def counted_by_torch(denoiser: nn.Module, values: Mapping[str, Any]) -> tuple[int, int]:
    """FLOPs of a forward and of a backward pass, attention as matrix products."""
    with sdpa_kernel(SDPBackend.MATH):
        with FlopCounterMode(display=False) as forward:
            result = tree_leaves(denoiser(**values))[0]
        with FlopCounterMode(display=False) as backward:
            result.sum().backward()
    return forward.get_total_flops(), backward.get_total_flops()


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


@pytest.mark.parametrize("family", ["flux", "qwen_image", "z_image", "sana", "wan"])
def test_other_families_cost_what_torch_counts(family: str) -> None:
    """At a shape that was not counted: three of six shapes are smaller, and none is as large."""
    denoiser = make_denoiser(family)
    forward, backward = counted_by_torch(denoiser, arguments(family, 16, 14, 160))
    cost, tokens = CountedTiny(family), Tokens(224, 160)
    assert cost.forward_flops(tokens) == pytest.approx(forward, rel=0.001)
    if family == "sana":  # torch counts the gradients of a grouped convolution as if it had one group
        assert training_flops(cost, tokens).value == pytest.approx(3 * forward, rel=0.02)
    else:
        assert training_flops(cost, tokens).value == pytest.approx(forward + backward, rel=0.001)
    assert cost.parameters == sum(weight.numel() for weight in denoiser.parameters())


def test_the_memory_of_another_family_follows_the_setup() -> None:
    cost = CountedTiny("flux")
    setup = TrainingSetup(cost, cost.tokens(Bucket(1024, 1024)), 4)
    assert (cost.num_blocks, cost.width) == (4, 32)
    assert cost.description == "Flux: 4 blocks, width 32"
    plain, selective, small = (
        gpu_memory(TrainingSetup(cost, setup.tokens, 4, checkpointing=level)).step.value
        for level in (False, "selective", True)
    )
    assert plain > selective > small > 0
    assert cost.sample_bytes(setup.tokens, Compute("stock", "float32")).largest.saved > setup.sample.largest.saved


def test_a_prepared_batch_names_its_tokens() -> None:
    batch = Batch(3, {"noisy": torch.zeros(3, 16, 32, 16), "text": torch.zeros(3, 96, 8)})
    assert CountedTiny("flux").batch_tokens(batch) == {Tokens(128, 96): 3}
