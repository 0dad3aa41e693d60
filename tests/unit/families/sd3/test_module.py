"""Batch in, loss out: the stock model's distance from the velocity, the loss's parts and gradients."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import SD3Transformer2DModel
from torch import Tensor

from sd3_light.config import SIZES, TrainConfig
from sd3_light.config.faults import UserError
from sd3_light.core.batch import Batch
from sd3_light.engines import Launch
from sd3_light.engines.torch import TorchEngine
from sd3_light.families.sd3.layers import build_layers, run_layers
from sd3_light.families.sd3.module import SD3TrainingModule
from tests.tiny_sd3 import perturbed
from tests.unit.engines.test_cuda_graphs import Recorder

pytestmark = pytest.mark.usefixtures("one_thread")

Config = Callable[..., TrainConfig]
KINDS = ("real", "padded")


def transformer() -> SD3Transformer2DModel:
    return perturbed(SIZES["tiny3"].transformer_config())


def prepared(masked: bool = False, dtype: torch.dtype = torch.float32) -> Batch:
    generator = torch.Generator().manual_seed(2)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    values = {"noisy": normal(2, 16, 4, 6), "t": torch.tensor([0.3, 0.8])}
    values |= {"prompt": normal(2, 9, 256).to(dtype), "pooled": normal(2, 224).to(dtype)}
    mask = (torch.arange(48).view(2, 4, 6) % 3 == 0).float() if masked else None
    return Batch(2, {**values, "target": normal(2, 16, 4, 6)}).with_values({"mask": mask})


def stock(model: SD3Transformer2DModel, batch: Batch) -> Tensor:
    inputs = {"encoder_hidden_states": batch["prompt"], "pooled_projections": batch["pooled"]}
    output: Tensor = model(batch["noisy"], timestep=1000 * batch["t"], **inputs, return_dict=False)[0]
    return output


@pytest.mark.parametrize("masked", [False, True])
def test_the_loss_is_the_stock_models_error_of_each_sample(config: Config, masked: bool) -> None:
    model, batch = transformer(), prepared(masked)
    losses = SD3TrainingModule(model, config())(batch)
    target, mask = batch["target"], batch.get("mask")
    error = (stock(model, batch) - target) ** 2
    expected = error.mean()
    if mask is not None:
        expected = torch.stack([error[b][:, mask[b] > 0].mean() for b in range(2)]).mean()
    torch.testing.assert_close(losses["loss"], expected, rtol=1e-6, atol=0)
    assert set(losses) == {"loss", "flow", "each"}
    assert torch.equal(losses["flow"], losses["loss"].detach())
    assert not losses["flow"].requires_grad
    module = SD3TrainingModule(model, config(model={"text_recon_gamma": 0.5}))
    losses = module(batch)
    assert losses["each"].shape == (2,)
    assert not losses["each"].requires_grad
    torch.testing.assert_close(losses["each"].mean(), losses["flow"])
    for at in range(2):
        alone = module(batch.split(2)[at])
        torch.testing.assert_close(losses["each"][at], alone["flow"], rtol=1e-5, atol=0)


def test_pseudo_huber_is_used_and_denoise_returns_the_stock_output(config: Config) -> None:
    model, batch = transformer(), prepared()
    loss = SD3TrainingModule(model, config(pseudo_huber_c=0.3))(batch)["loss"]
    error = (stock(model, batch) - batch["target"]) ** 2
    torch.testing.assert_close(loss, (torch.sqrt(error + 0.09) - 0.3).mean(), rtol=1e-5, atol=0)
    module = SD3TrainingModule(model, config())
    with torch.no_grad():
        velocity, loss = module.denoise(batch), module(batch)["loss"]
        assert torch.equal(velocity, stock(model, batch))
    torch.testing.assert_close(((velocity - batch["target"]) ** 2).mean(), loss)
    assert velocity.dtype == torch.float32


@pytest.mark.parametrize("layer", [0, 1])
def test_text_reconstruction_is_added_with_its_weight(config: Config, layer: int) -> None:
    model, batch = transformer(), prepared()
    keys = {"text_recon_gamma": 0.25, "text_recon_target_layer": layer}
    module = SD3TrainingModule(model, config(model=keys))
    losses = module(batch)
    _, text, target = run_layers(build_layers(model, layer), module.inputs(batch))
    expected = ((text - target) ** 2).mean()
    assert float(expected.detach()) > 0
    torch.testing.assert_close(losses["text_recon"], expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(losses["loss"], losses["flow"] + 0.25 * expected, rtol=1e-6, atol=0)
    assert set(losses) == {"loss", "flow", "each", "text_recon"}


def test_no_parameter_is_named_twice_and_all_names_are_stock(config: Config) -> None:
    """Layers share the transformer's modules; if registered too, they would be trained and saved twice."""
    model = transformer()
    module = SD3TrainingModule(model, config())
    assert [name for name, _ in module.named_parameters()] == [f"denoiser.{n}" for n, _ in model.named_parameters()]
    assert list(module.state_dict()) == [f"denoiser.{name}" for name in model.state_dict()]
    model, batch = transformer(), prepared(dtype=torch.bfloat16)
    losses = SD3TrainingModule(model, config(model={"transformer_dtype": "bfloat16"}))(batch)
    assert losses["loss"].dtype == torch.float32
    losses["loss"].backward()
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}

    def gradient(gamma: float) -> Tensor:
        model = transformer()
        SD3TrainingModule(model, config(model={"text_recon_gamma": gamma}))(prepared())["loss"].backward()
        grad = model.transformer_blocks[1].ff_context.net[2].weight.grad
        assert grad is not None
        return grad

    assert not torch.equal(gradient(0.0), gradient(0.5))


@pytest.mark.parametrize("kind", KINDS)
def test_activation_checkpointing_reaches_the_blocks_and_changes_no_gradient(config: Config, kind: str) -> None:
    results = []
    for checkpointing in (False, True):
        model, calls = transformer(), list[int]()
        model.transformer_blocks[0].register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        module = SD3TrainingModule(
            model, config(activation_checkpointing=checkpointing, model={**REAL, "text_tokens": kind})
        )
        module(real_prepared([9, 3]) if kind == "real" else prepared())["loss"].backward()
        assert len(calls) == 1 + checkpointing
        results.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    plain, checked = results
    assert plain.keys() == checked.keys()
    assert all(torch.equal(plain[name], checked[name]) for name in plain)


REAL: dict[str, Any] = {"text_tokens": "real", "text_recon_gamma": 0.25, "text_recon_target_layer": 1}


def real_prepared(lengths: list[int], padding_scale: float = 0.0) -> Batch:
    """Return samples whose text ends at ``lengths``; the padding is ``padding_scale`` times random numbers."""
    batch, counts = prepared(), torch.tensor(lengths)
    padding = (torch.arange(9) >= counts[:, None])[..., None]
    prompt = torch.where(padding, padding_scale * batch["prompt"].flip(1), batch["prompt"])[:, : max(lengths)]
    return Batch(2, {**batch.values, "prompt": prompt}, {"prompt.length": counts})


def single(batch: Batch, at: int) -> Batch:
    return batch.split(2)[at]


@pytest.mark.parametrize("lengths", [[9, 1], [3, 7], [4, 4]])
@pytest.mark.parametrize("padding_scale", [0.0, 50.0])
def test_a_real_sample_has_its_own_losses_and_grads(config: Config, lengths: list[int], padding_scale: float) -> None:
    batch = real_prepared(lengths, padding_scale)
    model = transformer()
    module = SD3TrainingModule(model, config(model=REAL))

    def run(some: Batch) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        model.zero_grad(set_to_none=True)
        losses = module(some)
        losses["loss"].backward()
        return losses, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    (together, grads), *alone = run(batch), *(run(single(batch, at)) for at in range(2))
    for name in ("loss", "flow", "text_recon"):
        mean = torch.stack([losses[name].detach() for losses, _ in alone]).mean()
        torch.testing.assert_close(together[name].detach(), mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(together["each"], torch.cat([losses["each"] for losses, _ in alone]))
    for name, grad in grads.items():
        expected = torch.stack([gradient[name] for _, gradient in alone]).mean(dim=0)
        torch.testing.assert_close(grad, expected, rtol=1e-5, atol=1e-5, msg=name)


def test_real_text_reconstruction_equals_a_plain_loop(config: Config) -> None:
    model, batch = transformer(), real_prepared([9, 3], padding_scale=50.0)
    module = SD3TrainingModule(model, config(model=REAL))
    losses = module(batch)
    _, text, lengths, target = run_layers(build_layers(model, 1, real_text=True), module.inputs(batch))
    each = [((text[at, :count] - target[at, :count]) ** 2).mean() for at, count in enumerate(lengths.tolist())]
    torch.testing.assert_close(losses["text_recon"], torch.stack(each).mean().detach(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("keys", [{}, {"routing": {"share": 0.5, "first_block": 1, "last_block": 1}}])
@pytest.mark.parametrize("fast", [False, True], ids=["stock", "fast"])
def test_recordable_batches_of_any_lengths_have_one_shape_and_the_same_losses(
    config: Config, fast: bool, keys: dict[str, Any]
) -> None:
    shapes = set()
    for lengths in ([9, 1], [3, 7], [4, 4]):
        batch = real_prepared(lengths, padding_scale=50.0)
        if keys:
            kept = torch.tensor([[0, 3, 5], [1, 2, 4]], dtype=torch.int32)
            batch = batch.with_values({"kept": kept})
        results = []
        for recorded in (False, True):
            model = transformer()
            module = SD3TrainingModule(model, config(model={"text_tokens": "real", **keys}), fast)
            used = module.recordable(batch) if recorded else batch
            losses = module(used)
            losses["loss"].backward()
            results.append((losses, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}))
        assert all(isinstance(value, int) for value in used.host.values())
        shapes.add(used.shapes())
        (losses, grads), (same, same_grads) = results
        torch.testing.assert_close(same["each"], losses["each"], rtol=1e-5, atol=1e-6)
        assert grads.keys() == same_grads.keys()
        for name, grad in grads.items():
            torch.testing.assert_close(same_grads[name], grad, rtol=1e-4, atol=1e-5, msg=name)
    assert len(shapes) == 1


@pytest.mark.parametrize("fast", [False, True], ids=["stock", "fast"])
def test_an_engine_records_one_graph_for_real_text(config: Config, fast: bool) -> None:
    """The batches of a run differ in their lengths; the steps are those without graphs."""
    runs = []
    for graphs in (False, True):
        module = SD3TrainingModule(transformer(), config(model={"text_tokens": "real"}), fast)
        engine = TorchEngine(module, config(model={"text_tokens": "real"}), Launch(), torch.device("cpu"))
        recorder = Recorder(engine)
        if graphs:
            engine.use_graphs(recorder)
        steps = [engine.train_step([real_prepared(lengths)], 1e-3).read() for lengths in ([9, 1], [3, 7], [4, 4])]
        assert len(recorder.recordings) == graphs
        runs.append([(step.losses["loss"], step.grad_norm) for step in steps])
    for plain, recorded in zip(*runs, strict=True):
        assert recorded == pytest.approx(plain, rel=1e-3)


def blocks_of(model: SD3Transformer2DModel, batch: Batch, numbers: tuple[int, ...]) -> list[Tensor]:
    """Return the image tokens after some blocks of the stock model, counted from 1."""
    outputs: dict[int, Tensor] = {}
    for number in numbers:
        block = model.transformer_blocks[number - 1]
        block.register_forward_hook(lambda _, __, output, number=number: outputs.update({number: output[1]}))
    stock(model, batch)
    return [outputs[number] for number in numbers]


def test_layer_sync_is_added_with_its_weight(config: Config) -> None:
    model, batch = transformer(), prepared()
    keys = {"layer_sync": {"weight": 0.5}, "text_recon_gamma": 0.25}
    module = SD3TrainingModule(model, config(model=keys))
    losses = module(batch)
    assert tuple(name for name in losses if name != "each") == module.loss_names
    early, late = blocks_of(transformer(), batch, (1, 2))  # the default pair of three blocks
    expected = 1 - torch.nn.functional.cosine_similarity(early, late, dim=-1).mean()
    torch.testing.assert_close(losses["layer_sync"], expected.detach(), rtol=1e-5, atol=1e-6)
    total = losses["flow"] + 0.25 * losses["text_recon"] + 0.5 * losses["layer_sync"]
    torch.testing.assert_close(losses["loss"], total, rtol=1e-6, atol=0)
    assert not losses["layer_sync"].requires_grad
    batch = prepared()
    reference = transformer()
    early, late = blocks_of(reference, batch, (1, 2))
    first, second = (tokens / tokens.norm(dim=-1, keepdim=True) for tokens in (early, late.detach()))
    sync = 1 - (first * second).sum(-1).mean()
    (((stock(reference, batch) - batch["target"]) ** 2).mean() + 3.0 * sync).backward()
    model = transformer()
    SD3TrainingModule(model, config(model={"layer_sync": {"weight": 3.0}}))(batch)["loss"].backward()
    expected = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert expected[name].grad is not None
        torch.testing.assert_close(parameter.grad, expected[name].grad, rtol=1e-3, atol=1e-5, msg=name)
    batch = prepared()
    sync = {"weight": 0.5}
    spelled = config(model={"layer_sync": sync, "text_recon_gamma": 0.25}, pseudo_huber_c=0.3)
    flow = {"pseudo_huber_c": 0.3}
    table = config(objective={"layer_sync": sync, "text_recon": {"weight": 0.25}, "flow": flow})
    losses = [SD3TrainingModule(transformer(), keys)(batch) for keys in (spelled, table)]
    assert list(losses[0]) == list(losses[1]) == ["loss", "flow", "text_recon", "layer_sync", "each"]
    assert all(torch.equal(losses[0][name], losses[1][name]) for name in losses[0])
    weighted = SD3TrainingModule(transformer(), config(objective={"flow": {"weight": 2.0}}))(batch)
    assert torch.equal(weighted["loss"], 2 * weighted["flow"])


@pytest.mark.parametrize("fast", [False, True])
def test_features_are_the_tokens_after_a_block(config: Config, fast: bool) -> None:
    model, batch = transformer(), prepared()
    module = SD3TrainingModule(model, config(activation_checkpointing=True), fast)
    out = module.predict(batch, (1, 2))
    for feature, expected in zip(out.features.values(), blocks_of(transformer(), batch, (1, 2)), strict=True):
        torch.testing.assert_close(feature, expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(out.velocity, module.predict(batch).velocity)
    assert not module.predict(batch).features
    (out.features[1].square().mean() + out.velocity.square().mean()).backward()
    assert model.transformer_blocks[0].attn.to_q.weight.grad is not None
    with pytest.raises(AssertionError, match="features come from blocks 1 to 2"):
        module.predict(batch, (3,))


ROUTED: dict[str, Any] = {"routing": {"first_block": 1, "last_block": 2}, "position_crop_side": 8}
KEPT, CORNERS = torch.tensor([[0, 2, 5], [1, 3, 4]]).int(), torch.tensor([[4, 6], [7, 5]]).int()


def test_training_batches_are_routed_and_cropped_and_others_are_not(config: Config) -> None:
    batch, model = prepared(), transformer()
    module, plain = SD3TrainingModule(model, config(model=ROUTED)), SD3TrainingModule(model, config())
    whole = module(batch)["each"]
    assert torch.equal(whole, plain(batch)["each"]), "evaluation and sampling use all tokens, at the centre"
    assert torch.equal(module.denoise(batch), plain.denoise(batch))
    trained = module(batch.with_values({"kept": KEPT, "corners": CORNERS}))["each"]
    assert not torch.allclose(trained, whole, rtol=1e-3)
    centre = torch.tensor([[(module.denoiser.config.pos_embed_max_size - side) // 2 for side in (2, 3)]] * 2)
    everything = torch.arange(6).expand(2, 6)
    neutral = batch.with_values({"kept": everything, "corners": centre})
    torch.testing.assert_close(module(neutral)["each"], whole, rtol=1e-5, atol=1e-6)


def test_what_a_batch_or_the_denoiser_lacks_is_reported(config: Config) -> None:
    for keys, text in (
        ({"routing": {"last_block": 3}}, "model.routing: tokens cannot skip blocks 2 to 3 of 3"),
        ({"position_crop_side": 17}, "model.position_crop_side: the position table has 16 tokens per side"),
        ({"layer_sync": {"early_block": 2, "late_block": 2}}, "model.layer_sync: block 2 cannot be aligned with"),
    ):
        with pytest.raises(UserError, match=text):
            SD3TrainingModule(transformer(), config(model=keys))
    module = SD3TrainingModule(transformer(), config(model=ROUTED))
    with pytest.raises(AssertionError, match=r"a batch with \['kept'\] instead of"):
        module(prepared().with_values({"kept": KEPT}))
    real, padded = (SD3TrainingModule(transformer(), config(model={"text_tokens": kind})) for kind in KINDS)
    with pytest.raises(AssertionError, match="exactly real text has lengths"):
        real(prepared())
    with pytest.raises(AssertionError, match="exactly real text has lengths"):
        padded(real_prepared([9, 3]))
    batch = prepared()
    assert SD3TrainingModule(transformer(), config()).recordable(batch) is batch
