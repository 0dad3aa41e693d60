"""The training module with fast blocks: losses, gradients, steps and samples equal the stock ones in float32."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import SD3Transformer2DModel
from torch import Tensor

from sd3_light.config import SIZES, TrainConfig
from sd3_light.core.batch import Batch
from sd3_light.engines import Launch
from sd3_light.engines.torch import TorchEngine
from sd3_light.families.sd3.module import SD3TrainingModule
from tests.tiny_sd3 import perturbed

pytestmark = pytest.mark.usefixtures("one_thread")

Config = Callable[..., TrainConfig]
RECON: dict[str, Any] = {"text_recon_gamma": 0.25}
BETWEEN: dict[str, Any] = {
    "layer_sync": {"weight": 0.5},
    "routing": {"share": 0.6, "first_block": 2},
    "position_crop_side": 9,
}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "padded": ({}, {}),
    "huber": ({}, {"pseudo_huber_c": 0.3}),
    "recon-embedder": (RECON, {}),
    "recon-block": ({**RECON, "text_recon_target_layer": 1}, {}),
    "real": ({"text_tokens": "real"}, {}),
    "real-recon": ({"text_tokens": "real", **RECON, "text_recon_target_layer": 1}, {}),
    "selective": ({"text_tokens": "real", **RECON}, {"activation_checkpointing": "selective"}),
    "blocks-again": ({**RECON}, {"activation_checkpointing": True}),
    "half-again": ({**RECON}, {"activation_checkpointing": 0.5}),
    "sync": ({"layer_sync": {"weight": 2.0}, **RECON}, {}),
    "route": ({"routing": {"first_block": 1}}, {}),
    "real-all": ({"text_tokens": "real", **RECON, **BETWEEN}, {}),
    "all-selective": (BETWEEN, {"activation_checkpointing": "selective"}),
    "real-all-again": ({"text_tokens": "real", **BETWEEN}, {"activation_checkpointing": True}),
}


def transformer() -> SD3Transformer2DModel:
    return perturbed(SIZES["tiny3"].transformer_config())


def prepared(real: bool, masked: bool = False, seed: int = 2) -> Batch:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    values = {"noisy": normal(3, 16, 4, 6), "t": torch.rand(3, generator=generator)}
    values |= {"prompt": normal(3, 9, 256), "pooled": normal(3, 224), "target": normal(3, 16, 4, 6)}
    mask = (torch.arange(72).view(3, 4, 6) % 3 == 0).float() if masked else None
    return Batch(3, values, {"prompt.length": torch.tensor([4, 9, 1])} if real else {}).with_values({"mask": mask})


def with_draws(batch: Batch, model: dict[str, Any]) -> Batch:
    """Return the batch with what the preparer draws for each image."""
    kept = torch.tensor([[0, 2, 5], [1, 3, 4], [0, 1, 2]]).int() if "routing" in model else None
    corners = torch.tensor([[12, 14], [13, 13], [11, 12]]).int() if "position_crop_side" in model else None
    return batch.with_values({"kept": kept, "corners": corners})


def run(config: TrainConfig, batch: Batch, fast: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    module = SD3TrainingModule(transformer(), config, fast)
    losses = module(batch)
    losses["loss"].backward()
    grads = {name: p.grad for name, p in module.denoiser.named_parameters() if p.grad is not None}
    assert len(grads) == len(list(module.parameters()))
    return losses, grads


@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_equal_the_stock_ones(config: Config, name: str) -> None:
    model, keys = CASES[name]
    batch = with_draws(prepared("text_tokens" in model, masked=name in ("padded", "real")), model)
    (stock, stock_grads), (fast, fast_grads) = (run(config(model=model, **keys), batch, fast) for fast in (False, True))
    assert fast.keys() == stock.keys()
    for key, loss in stock.items():
        torch.testing.assert_close(fast[key], loss, rtol=1e-5, atol=1e-6, msg=key)
        assert fast[key].requires_grad == loss.requires_grad
    for key, gradient in stock_grads.items():
        worst = float((fast_grads[key] - gradient).abs().max() / gradient.abs().max().clamp(min=1e-4))
        assert worst < 5e-5, f"{key}: {worst}"


@pytest.mark.parametrize(("real", "freeze"), [(True, False), (False, True)])
def test_engine_steps_equal_the_stock_ones(config: Config, real: bool, freeze: bool) -> None:
    keys = {"model": {"text_tokens": "real" if real else "padded", **RECON}, "optimizer": {"lr": 1e-3}}
    runs = []
    for fast in (False, True):
        model = transformer()
        model.context_embedder.requires_grad_(not freeze)
        engine = TorchEngine(
            SD3TrainingModule(model, config(**keys), fast), config(**keys), Launch(), torch.device("cpu")
        )
        steps = [engine.train_step([prepared(real, seed=s), prepared(real, seed=s + 9)], 1e-3).read() for s in range(3)]
        evaluated = engine.evaluate(prepared(real, masked=True))
        drawn = engine.denoise(prepared(real))
        runs.append((steps, evaluated, drawn, engine.gather(engine.weights)))
    (steps, evaluated, drawn, weights), (others, evaluated_too, drawn_too, weights_too) = runs
    for stock, other in zip(steps, others, strict=True):
        assert other.losses == pytest.approx(stock.losses, rel=1e-4)
        assert other.grad_norm == pytest.approx(stock.grad_norm, rel=1e-4)
        assert other.bands == pytest.approx(stock.bands, rel=1e-4)
    assert steps[2].losses["loss"] != steps[0].losses["loss"]
    torch.testing.assert_close(evaluated_too, evaluated, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(drawn_too, drawn, rtol=1e-3, atol=1e-4)
    assert weights is not None
    assert weights_too is not None
    start = dict(transformer().named_parameters())
    for name, weight in weights.items():
        moved = float((weight - start[name].detach()).abs().max())
        # Adam's first steps follow the sign of a gradient, which is random where the gradient is only rounding
        assert float((weights_too[name] - weight).abs().mean()) <= 0.01 * moved, name


def test_no_parameter_is_added_and_products_follow_the_config(config: Config) -> None:
    module = SD3TrainingModule(transformer(), config(), fast=True)
    module(prepared(False))
    assert list(module.state_dict()) == [f"denoiser.{name}" for name in module.denoiser.state_dict()]
    batch = prepared(False)
    (plain, gradients), (rounded, others) = (run(config(fp8=fp8), batch, True) for fp8 in (False, True))
    assert float(rounded["flow"]) == pytest.approx(float(plain["flow"]), rel=0.02)
    assert float(rounded["flow"]) != float(plain["flow"])
    assert others.keys() == gradients.keys()
