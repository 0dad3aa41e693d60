"""The training module with fast blocks: losses, gradients, steps and samples as with the stock ones, in float32."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import SD3Transformer2DModel
from torch import Tensor

from sd3_light.config import SIZES, TrainConfig
from sd3_light.engines import Launch
from sd3_light.engines.protocol import MicroBatch
from sd3_light.engines.torch import TorchEngine
from sd3_light.model.random_weights import new_transformer
from sd3_light.training.module import SD3TrainingModule

Config = Callable[..., TrainConfig]
RECON: dict[str, Any] = {"text_recon_gamma": 0.25}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "padded": ({}, {}),
    "huber": ({}, {"pseudo_huber_c": 0.3}),
    "recon-embedder": (RECON, {}),
    "recon-block": ({**RECON, "text_recon_target_layer": 1}, {}),
    "real": ({"text_tokens": "real"}, {}),
    "real-recon": ({"text_tokens": "real", **RECON, "text_recon_target_layer": 1}, {}),
    "selective": ({"text_tokens": "real", **RECON}, {"activation_checkpointing": "selective"}),
    "blocks-again": ({**RECON}, {"activation_checkpointing": True}),
}


def transformer() -> SD3Transformer2DModel:
    made = new_transformer(SIZES["tiny3"].transformer_config(), 0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return made


def prepared(real: bool, masked: bool = False, seed: int = 2) -> MicroBatch:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    features = [normal(3, 16, 4, 6), 1000 * torch.rand(3, generator=generator), normal(3, 9, 256), normal(3, 224)]
    features += [torch.tensor([4, 9, 1])] if real else []
    mask = (torch.arange(72).view(3, 4, 6) % 3 == 0).float() if masked else None
    return tuple(features), (normal(3, 16, 4, 6), mask)


def outcome(config: TrainConfig, given: MicroBatch, fast: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    module = SD3TrainingModule(transformer(), config, fast)
    losses = module(*given)
    losses["loss"].backward()
    grads = {name: p.grad for name, p in module.transformer.named_parameters() if p.grad is not None}
    assert len(grads) == len(list(module.parameters()))
    return losses, grads


@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_are_the_stock_ones(config: Config, name: str) -> None:
    model, keys = CASES[name]
    made = config(model=model, **keys)
    given = prepared("text_tokens" in model, masked=name in ("padded", "real"))
    (wanted, gradients), (found, others) = (outcome(made, given, fast) for fast in (False, True))
    assert found.keys() == wanted.keys()
    for key, loss in wanted.items():
        torch.testing.assert_close(found[key], loss, rtol=1e-5, atol=1e-6, msg=key)
        assert found[key].requires_grad == loss.requires_grad
    for key, gradient in gradients.items():
        worst = float((others[key] - gradient).abs().max() / gradient.abs().max().clamp(min=1e-4))
        assert worst < 5e-5, f"{key}: {worst}"


@pytest.mark.parametrize(("real", "freeze"), [(True, False), (False, True)])
def test_steps_of_the_engine_are_the_stock_ones(config: Config, real: bool, freeze: bool) -> None:
    keys = {"model": {"text_tokens": "real" if real else "padded", **RECON}, "optimizer": {"lr": 1e-3}}
    runs = []
    for fast in (False, True):
        made = transformer()
        made.context_embedder.requires_grad_(not freeze)
        engine = TorchEngine(
            SD3TrainingModule(made, config(**keys), fast), config(**keys), Launch(), torch.device("cpu")
        )
        steps = [engine.train_step([prepared(real, seed=s), prepared(real, seed=s + 9)], 1e-3).read() for s in range(3)]
        evaluated = engine.evaluate(prepared(real, masked=True))
        drawn = engine.denoise(prepared(real)[0])
        runs.append((steps, evaluated, drawn, engine.gather(engine.weights)))
    (steps, evaluated, drawn, weights), (others, evaluated_too, drawn_too, weights_too) = runs
    for one, other in zip(steps, others, strict=True):
        assert other.losses == pytest.approx(one.losses, rel=1e-4)
        assert other.grad_norm == pytest.approx(one.grad_norm, rel=1e-4)
        assert other.bands == pytest.approx(one.bands, rel=1e-4)
    assert steps[2].losses["loss"] != steps[0].losses["loss"]
    torch.testing.assert_close(evaluated_too, evaluated, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(drawn_too, drawn, rtol=1e-3, atol=1e-4)
    assert weights is not None
    assert weights_too is not None
    start = dict(transformer().named_parameters())
    for name, weight in weights.items():
        moved = float((weight - start[name].detach()).abs().max())
        # Adam's first steps follow the sign of a gradient: where that is nothing but rounding, it may be either
        assert float((weights_too[name] - weight).abs().mean()) <= 0.01 * moved, name


def test_weights_that_were_changed_are_seen(config: Config) -> None:
    """A sampler puts averages in the weights' place, in memory, without a word."""
    module = SD3TrainingModule(transformer(), config(), fast=True)
    features = prepared(False)[0]
    with torch.no_grad():
        before = module.denoise(features)
        for parameter in module.parameters():
            parameter.data.mul_(0.5)
        after = module.denoise(features)
        stock = SD3TrainingModule(module.transformer, config()).denoise(features)
    torch.testing.assert_close(after, stock, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(before, after, rtol=1e-2)


def test_no_parameter_is_added(config: Config) -> None:
    module = SD3TrainingModule(transformer(), config(), fast=True)
    module(*prepared(False))
    assert list(module.state_dict()) == [f"transformer.{name}" for name in module.transformer.state_dict()]


def test_products_in_fp8_are_a_key_of_the_config(config: Config) -> None:
    given = prepared(False)
    (plain, gradients), (rounded, others) = (outcome(config(fp8=fp8), given, True) for fp8 in (False, True))
    assert float(rounded["flow"]) == pytest.approx(float(plain["flow"]), rel=0.02)
    assert float(rounded["flow"]) != float(plain["flow"])
    assert others.keys() == gradients.keys()
