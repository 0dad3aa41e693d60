"""A stock denoiser of another family in training: losses, features of blocks, activation checkpointing."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from sd3_light.config import TrainConfig
from sd3_light.config.base import recomputed_blocks
from sd3_light.config.schema_blocks import LayerSyncConfig
from sd3_light.core.batch import Batch
from sd3_light.core.model import denoiser_blocks
from sd3_light.core.objective import Objective, Objectives, Prediction
from sd3_light.core.registry import family_named
from sd3_light.families.stock.model import StockModel
from sd3_light.flow.objectives import FlowMatching, configured_term
from tests.families import make_denoiser, make_pipeline

pytestmark = pytest.mark.usefixtures("one_thread")

SIDE = 8
FLUX: Any = family_named("flux")


def config(**keys: Any) -> TrainConfig:
    model = {"diffusers_path": "m", "dtype": "float32"}
    table = {"output_dir": "out", "dataset": "data.toml", "max_steps": 1, "model": model, **keys}
    return TrainConfig.model_validate(table, context={"base": Path()})


def flux_batch(size: int = 3) -> Batch:
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    values = {"noisy": draw(size, 4, SIDE, SIDE), "t": torch.rand(size, generator=generator)}
    values |= {"text": draw(size, 6, 32), "pooled": draw(size, 32), "target": draw(size, 4, SIDE, SIDE)}
    return Batch(size, values)


class Energy(Objective):
    """The mean square of the tokens after the second block."""

    taps = (2,)

    def __init__(self) -> None:
        self.weights = {"energy": 0.5}

    def losses(self, out: Prediction, batch: Batch) -> dict[str, Tensor]:
        return {"energy": out.features[2].square().flatten(1).mean(1)}


@pytest.fixture
def make() -> Callable[..., StockModel]:
    def model(*objectives: Objective, **keys: Any) -> StockModel:
        torch.manual_seed(0)
        return StockModel(make_denoiser("flux"), config(**keys), FLUX, Objectives(objectives))

    return model


def test_weights_have_stock_names_and_blocks_are_those_of_both_lists(make: Callable[..., StockModel]) -> None:
    model = make(FlowMatching())
    assert list(model.trainable()) == [name for name, _ in model.denoiser.named_parameters()]
    stock: Any = model.denoiser
    assert model.blocks() == [*stock.transformer_blocks, *stock.single_transformer_blocks]
    term = configured_term(LayerSyncConfig(early_block=1, late_block=2), TrainConfig.model_construct(), 4)
    model, batch = make(FlowMatching(), term), flux_batch()
    early, late = model.predict(batch, (1, 2)).features.values()
    expected = 1 - torch.nn.functional.cosine_similarity(early, late, dim=-1).mean()
    torch.testing.assert_close(model(batch)["layer_sync"], expected.detach())
    assert term.weights == {"layer_sync": 0.2}


def test_objectives_share_one_prediction_and_read_features(make: Callable[..., StockModel]) -> None:
    model, batch = make(FlowMatching(), Energy()), flux_batch()
    losses = model(batch)
    stock: Any = model.denoiser
    seen: list[Any] = []
    handle = stock.transformer_blocks[1].register_forward_hook(lambda block, inputs, output: seen.append(output))
    out = model.predict(batch, (2,))
    handle.remove()
    assert torch.equal(out.features[2], seen[0][1]), "the image tokens of the second block"
    assert out.features[2].shape == (3, (SIDE // 2) ** 2, 32)
    energy = out.features[2].square().flatten(1).mean(1).mean()
    torch.testing.assert_close(losses["loss"], losses["flow"] + 0.5 * energy, rtol=1e-6, atol=0)
    assert model.loss_names == ("loss", "flow", "energy")
    assert not model.predict(batch).features


@pytest.mark.parametrize(("name", "expected"), [("qwen_image", False), ("flux", True), ("z_image", True)])
def test_cudnn_attends_only_where_its_backward_pass_is_known_to_work(name: str, expected: bool) -> None:
    before = torch.backends.cuda.cudnn_sdp_enabled()
    family: Any = family_named(name)
    try:
        torch.backends.cuda.enable_cudnn_sdp(True)
        family.training.model(make_denoiser(name), config(), fast=False)
        assert torch.backends.cuda.cudnn_sdp_enabled() == expected
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def test_attention_of_single_blocks_of_flux_gets_contiguous_gradients() -> None:
    """PyTorch keeps cuDNN's plan of the backward pass without the strides of the gradient."""
    results = []
    for speeds_up in (False, True):
        torch.manual_seed(0)
        denoiser: Any = make_pipeline("flux").transformer
        contiguous: list[bool] = []

        def record(module: Any, inputs: Any, output: Tensor, seen: list[bool] = contiguous) -> None:
            output.register_hook(lambda gradient: seen.append(gradient.is_contiguous()))

        for block in denoiser.single_transformer_blocks:
            block.attn.register_forward_hook(record)
        if speeds_up:
            FLUX.speed_up(denoiser)
        generator = torch.Generator().manual_seed(0)
        width = denoiser.config.joint_attention_dim
        output = denoiser(
            hidden_states=torch.randn(1, 16, denoiser.config.in_channels, generator=generator),
            encoder_hidden_states=torch.randn(1, 8, width, generator=generator),
            pooled_projections=torch.randn(1, denoiser.config.pooled_projection_dim, generator=generator),
            timestep=torch.tensor([0.5]),
            guidance=torch.tensor([1.0]),
            img_ids=torch.zeros(16, 3),
            txt_ids=torch.zeros(8, 3),
            return_dict=False,
        )[0]
        output.square().mean().backward()
        assert set(contiguous) == {speeds_up}
        results.append({name: weight.grad for name, weight in denoiser.named_parameters() if weight.grad is not None})
    stock, fast = results
    assert all(torch.equal(fast[name], gradient) for name, gradient in stock.items())


# --- recomputed activations ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("level", "blocks", "expected"), [(False, 24, 0), (True, 24, 24), ("host", 24, 24), (0.5, 5, 3), (0.01, 24, 1)]
)
def test_the_number_of_recomputed_blocks(level: Any, blocks: int, expected: int) -> None:
    assert recomputed_blocks(level, blocks) == expected


@pytest.mark.parametrize("level", [0.0, 1.0, 1.5, -0.5, 2, "half", float("nan")])
def test_other_levels_are_refused(level: Any) -> None:
    with pytest.raises(ValidationError, match="activation_checkpointing"):
        config(activation_checkpointing=level)


@pytest.mark.parametrize("level", [False, 0.5, True])
def test_the_first_blocks_are_computed_twice(level: Any) -> None:
    denoiser = make_denoiser("flux")
    runs: list[int] = []
    blocks = denoiser_blocks(denoiser)
    for number, block in enumerate(blocks):
        block.register_forward_pre_hook(lambda *_, number=number: runs.append(number))
    module = FLUX.training.model(denoiser, config(activation_checkpointing=level), fast=False)
    module(flux_batch())["loss"].backward()
    again = recomputed_blocks(level, len(blocks))
    assert len(blocks) > 2
    assert runs == [*range(len(blocks)), *reversed(range(again))]
