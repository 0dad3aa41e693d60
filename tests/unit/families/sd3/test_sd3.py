"""A sample's inputs are its own: the same alone and in any batch, in any order, at any time."""

import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import SD3Transformer2DModel
from torch import Tensor

from sd3_light.config import SIZES, ModelConfig
from sd3_light.core.batch import Batch
from sd3_light.core.registry import family_named, starting_weights
from sd3_light.encoding.vae import LatentScale
from sd3_light.families.sd3.draws import draw_corners, draw_drops, draw_kept
from sd3_light.families.sd3.prepare import InputPreparer, LightSD3Pipeline
from sd3_light.families.sd3.random_weights import new_transformer
from sd3_light.flow.timesteps import quantile_to_time, resolution_shift, shift_time
from sd3_light.randomness import occurrence_words

pytestmark = pytest.mark.usefixtures("one_thread")

Model = Callable[..., ModelConfig]
MakeBatch = Callable[..., dict[str, Any]]
SCALE = LatentScale(1.5, 0.06)
EMPTY_SHAPES = {"clip_l": (7, 96), "clip_g": (7, 128), "t5": (5, 256), "clip_l.pooled": (96,), "clip_g.pooled": (128,)}
ENCODERS, POOLED = ("clip_l", "clip_g", "t5"), ("clip_l.pooled", "clip_g.pooled")
NEVER_ZERO = {name: torch.full(shape, 9.0) for name, shape in EMPTY_SHAPES.items()}

SHORT_EMPTY = {name: tokens[:2] if name in ENCODERS else tokens for name, tokens in NEVER_ZERO.items()}


def preparer(model: Model, seed: int = 0, empty: dict[str, Tensor] | None = None, **keys: Any) -> InputPreparer:
    return InputPreparer(seed, model(**keys), SCALE, empty)


def row(prepared: Batch, at: int) -> list[Tensor]:
    return [tensor[at] for tensor in (*prepared.tensors(), *prepared.host.values())]


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    return len(first) == len(second) and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def undo(prepared: Batch) -> tuple[Tensor, Tensor]:
    """Return (x0, noise), recovered from the model's inputs and target."""
    noisy, target, t = prepared["noisy"], prepared["target"], prepared["t"].view(-1, 1, 1, 1)
    return noisy - t * target, noisy + (1 - t) * target


def text_of(prepared: Batch) -> tuple[Tensor, Tensor]:
    return prepared["prompt"], prepared["pooled"]


@pytest.mark.parametrize("quantile", [None, 0.3])
def test_a_sample_is_the_same_alone_and_in_any_batch(model: Model, batch: MakeBatch, quantile: float | None) -> None:
    prepare = preparer(model, enable_uncond_text_dropout=True, empty=NEVER_ZERO).prepare_inputs
    ids = [11, 5, 2**62 + 3, 8, 1, 40]
    whole = prepare(batch(ids, epoch=2, repeats=range(6)), quantile)
    for at, sample in enumerate(ids):
        alone = prepare(batch([sample], epoch=2, repeats=[at]), quantile)
        assert same(row(alone, 0), row(whole, at))
    backwards = prepare(batch(ids[::-1], epoch=2, repeats=range(5, -1, -1)), quantile)
    assert all(same(row(backwards, 5 - at), row(whole, at)) for at in range(6))


@pytest.mark.parametrize("text", ["padded", "real"])
def test_a_prompt_in_used_memory_is_the_same(model: Model, batch: MakeBatch, real_batch: MakeBatch, text: str) -> None:
    keys: dict[str, Any] = {"text_tokens": text, "enable_uncond_text_dropout": True}
    prepare, buffers = preparer(model, empty=SHORT_EMPTY if text == "real" else NEVER_ZERO, **keys), []

    def allocate(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        buffers.append(torch.full(shape, float("nan"), dtype=dtype))
        return buffers[-1]

    cached = (real_batch if text == "real" else batch)(range(40), epoch=1)
    plain, in_place = prepare.prepare_inputs(cached), prepare.prepare_into(cached, allocate)
    assert in_place["prompt"] is buffers[0]
    assert all(same(row(plain, at), row(in_place, at)) for at in range(40))


@pytest.mark.parametrize("other", ["seed", "epoch", "repeat", "sample"])
def test_seed_epoch_repeat_and_sample_change_the_draws(model: Model, batch: MakeBatch, other: str) -> None:
    first = preparer(model).prepare_inputs(batch([1]))
    second = preparer(model, seed=int(other == "seed")).prepare_inputs(
        batch([2 if other == "sample" else 1], epoch=int(other == "epoch"), repeats=[int(other == "repeat")])
    )
    (x0, noise), (other_x0, other_noise) = undo(first), undo(second)
    assert not torch.equal(first["t"], second["t"]), "the time"
    assert float((noise - other_noise).abs().mean()) > 0.5, "the noise"
    assert float((x0 - other_x0).abs().mean()) > 0.1, "the posterior's draw"


@pytest.mark.parametrize("text", ["padded", "real"])
@pytest.mark.parametrize("masked", [False, True])
def test_noise_added_later_gives_the_same_inputs(
    model: Model, batch: MakeBatch, real_batch: MakeBatch, text: str, masked: bool
) -> None:
    keys: dict[str, Any] = {"text_tokens": text, "enable_uncond_text_dropout": True}
    prepare = preparer(model, seed=5, empty=SHORT_EMPTY if text == "real" else NEVER_ZERO, **keys)
    cached = (real_batch if text == "real" else batch)([3, 2**62 + 3, 8, 1], epoch=2, repeats=[0, 1, 2, 3])
    if masked:
        cached["mask"] = torch.arange(4 * 4 * 6, dtype=torch.uint8).view(4, 4, 6)
    clean = prepare.prepare_clean(cached)
    assert clean["moments"].dtype == torch.float16, "raw moments are sent"
    assert clean["words"].dtype == torch.int32
    expected, late = prepare.prepare_inputs(cached), prepare.noise_adder(torch.device("cpu"))(clean)
    assert all(same(row(late, at), row(expected, at)) for at in range(4))


def test_noisy_latents_and_target_follow_the_flow(model: Model, batch: MakeBatch) -> None:
    """noisy = (1-t) x0 + t noise and target = noise - x0, with x0 the normalised latent."""
    cached = batch([1, 2, 3])
    clean, noise = undo(preparer(model).prepare_inputs(cached))
    # evaluation draws no posterior, so its x0 is known exactly
    prepared = preparer(model).prepare_inputs(cached, 0.25)
    known = (cached["moments"].float().chunk(2, dim=1)[0] - 0.06) * 1.5
    torch.testing.assert_close(undo(prepared)[0], known, atol=1e-5, rtol=0)
    assert not torch.allclose(clean, known, atol=0.1)
    noisy, target, t = prepared["noisy"], prepared["target"], prepared["t"].view(-1, 1, 1, 1)
    torch.testing.assert_close(noisy, (1 - t) * known + t * (target + known), atol=1e-5, rtol=0)
    assert prepared.get("mask") is None
    assert {tensor.dtype for tensor in (noisy, t, target)} == {torch.float32}
    assert noise.shape == (3, 16, 4, 6)
    cached = batch([3], size=(16, 16))
    clean, noise = undo(preparer(model).prepare_inputs(cached))
    mean, logvar = cached["moments"].float().chunk(2, dim=1)
    posterior = (clean / SCALE.scale + SCALE.shift - mean) / torch.exp(0.5 * logvar)
    for drawn in (noise, posterior):
        assert abs(float(drawn.mean())) < 0.06
        assert float(drawn.std()) == pytest.approx(1, abs=0.05)
    assert abs(float(torch.corrcoef(torch.stack([noise.flatten(), posterior.flatten()]))[0, 1])) < 0.06


@pytest.mark.parametrize(
    ("keys", "shift"),
    [
        ({}, None),
        ({"shift": 3.0}, 3.0),
        ({"flux_shift": True}, resolution_shift(2 * 3)),
        ({"sigmoid_scale": 0.5}, None),
    ],
)
def test_model_keys_shape_the_times(model: Model, batch: MakeBatch, keys: dict[str, Any], shift: float | None) -> None:
    times = preparer(model, **keys).prepare_inputs(batch([1, 2]), 0.7)["t"]
    t = quantile_to_time(0.7, "logit_normal", keys.get("sigmoid_scale", 1.0))
    expected = t if shift is None else shift_time(t, shift)
    torch.testing.assert_close(times, torch.full((2,), expected))


def test_masks_become_fractions_and_times_may_be_uniform(model: Model, batch: MakeBatch) -> None:
    cached = {**batch([1, 2]), "mask": torch.tensor([[[0, 51], [255, 255]]] * 2, dtype=torch.uint8)}
    mask = preparer(model).prepare_inputs(cached).get("mask")
    assert mask is not None
    torch.testing.assert_close(mask, torch.tensor([[[0.0, 0.2], [1.0, 1.0]]] * 2))
    prepared = preparer(model, timestep_sample_method="uniform").prepare_inputs(batch([1]), 0.7)
    assert prepared["t"].tolist() == pytest.approx([0.7])
    original = preparer(model, empty=NEVER_ZERO, enable_uncond_text_dropout=True)
    copy: InputPreparer = pickle.loads(pickle.dumps(original))
    assert same(row(original.prepare_inputs(batch([4])), 0), row(copy.prepare_inputs(batch([4])), 0))


def test_text_is_joined_as_in_sd3_and_dropped_only_if_enabled(model: Model, batch: MakeBatch) -> None:
    cached = batch([1, 2])
    prompt, pooled = text_of(preparer(model).prepare_inputs(cached))
    assert prompt.shape == (2, 7 + 5, 256)
    assert torch.equal(prompt[:, :7, :96], cached["clip_l"])
    assert torch.equal(prompt[:, :7, 96:224], cached["clip_g"])
    assert not prompt[:, :7, 224:].any()
    assert torch.equal(prompt[:, 7:], cached["t5"])
    assert torch.equal(pooled, torch.cat([cached["clip_l.pooled"], cached["clip_g.pooled"]], dim=-1))
    cached = batch(range(30))
    prompt = preparer(model, uncond_text_dropout_prob=1.0).prepare_inputs(cached)["prompt"]
    assert torch.equal(prompt[:, 7:], cached["t5"])
    prepare = preparer(model, enable_uncond_text_dropout=True, uncond_text_dropout_prob=1.0).prepare_inputs
    assert not prepare(cached)["prompt"].any()
    assert torch.equal(prepare(cached, 0.5)["prompt"][:, 7:], cached["t5"])


@pytest.mark.parametrize("uncond", [None, NEVER_ZERO])
@pytest.mark.parametrize(("kind", "chance", "patterns"), [("per_encoder", 0.464, 8), ("joint", 0.1, 2)])
def test_dropout_follows_each_samples_draw(
    model: Model, batch: MakeBatch, uncond: dict[str, Tensor] | None, kind: str, chance: float, patterns: int
) -> None:
    ids = list(range(60))
    drops = draw_drops(3, occurrence_words(1, 0, ids), chance, joint=kind == "joint")
    assert len(set(drops)) == patterns, "all patterns occur"
    cached = batch(ids, epoch=1)
    keys: dict[str, Any] = {"enable_uncond_text_dropout": True, "uncond_text_dropout": kind}
    prompt, pooled = text_of(preparer(model, seed=3, empty=uncond, **keys).prepare_inputs(cached))
    parts = (prompt[:, :7, :96], prompt[:, :7, 96:224], prompt[:, 7:], pooled[:, :96], pooled[:, 96:])
    for at, drop in enumerate(drops):
        for part, name in zip(parts, (*ENCODERS, *POOLED), strict=True):
            lost = drop[ENCODERS.index(name.removesuffix(".pooled"))]
            expected = torch.zeros_like(cached[name][at]) if lost else cached[name][at]
            if all(drop) and uncond is not None:
                expected = uncond[name].bfloat16()
            assert torch.equal(part[at], expected), (drop, name)


def real_row(prepared: Batch, at: int) -> list[Tensor]:
    """Return a sample's inputs without the padding after its text, which must be zeros."""
    length = int(prepared.host["prompt.length"][at])
    prompt = prepared["prompt"][at]
    assert not prompt[length:].any()
    others = prepared.with_values({}, without=["prompt"])
    return [*row(others, at), prompt[:length]]


@pytest.mark.parametrize("quantile", [None, 0.3])
@pytest.mark.parametrize("uncond", [None, SHORT_EMPTY])
def test_a_real_sample_is_the_same_alone_and_in_any_batch(
    model: Model, real_batch: MakeBatch, quantile: float | None, uncond: dict[str, Tensor] | None
) -> None:
    keys: dict[str, Any] = {"text_tokens": "real", "enable_uncond_text_dropout": True}
    prepare = preparer(model, empty=uncond, **keys).prepare_inputs
    ids = list(range(40))
    whole = prepare(real_batch(ids, epoch=2), quantile)
    assert whole["prompt"].shape[1] == int(whole.host["prompt.length"].max()), "as long as the longest sample"
    for at, sample in enumerate(ids):
        alone = prepare(real_batch([sample], epoch=2), quantile)
        assert alone["prompt"].shape[1] == int(alone.host["prompt.length"])
        assert same(real_row(alone, 0), real_row(whole, at))


@pytest.mark.parametrize("uncond", [None, SHORT_EMPTY])
def test_real_tokens_are_dropped_by_draw(model: Model, real_batch: MakeBatch, uncond: dict[str, Tensor] | None) -> None:
    ids = list(range(60))
    drops = draw_drops(3, occurrence_words(1, 0, ids), 0.464)
    assert len(set(drops)) == 8, "all patterns occur"
    cached = real_batch(ids, epoch=1)
    keys: dict[str, Any] = {"text_tokens": "real", "enable_uncond_text_dropout": True}
    prepared = preparer(model, seed=3, empty=uncond, **keys).prepare_inputs(cached)
    for at, drop in enumerate(drops):
        own = {name: cached[name][at, : int(cached[f"{name}.length"][at])] for name in ENCODERS}
        own |= {name: cached[name][at] for name in POOLED}
        expected = join_manually(own, drop, uncond)
        assert torch.equal(real_row(prepared, at)[-1], expected[0]), drop
        assert torch.equal(prepared["pooled"][at], expected[1]), drop


def join_manually(
    own: dict[str, Tensor], drop: tuple[bool, ...], uncond: dict[str, Tensor] | None
) -> tuple[Tensor, Tensor]:
    """Return (prompt, pooled) of one sample as the design describes them."""
    if all(drop) and uncond is None:
        return torch.zeros(1, 256).bfloat16(), torch.zeros(224).bfloat16()
    if all(drop) and uncond is not None:
        own, drop = {name: values.bfloat16() for name, values in uncond.items()}, (False,) * 3
    num_clip = max(len(own["clip_l"]), len(own["clip_g"]))
    prompt = torch.zeros(num_clip + (0 if drop[2] else len(own["t5"])), 256).bfloat16()
    pooled = torch.zeros(224).bfloat16()
    for name, lost, columns in (("clip_l", drop[0], slice(0, 96)), ("clip_g", drop[1], slice(96, 224))):
        if not lost:
            prompt[: len(own[name]), columns] = own[name]
            pooled[columns] = own[f"{name}.pooled"]
    if not drop[2]:
        prompt[num_clip:] = own["t5"]
    return prompt, pooled


def test_evaluation_is_the_same_in_every_epoch(model: Model, batch: MakeBatch) -> None:
    prepare = preparer(model, enable_uncond_text_dropout=True).prepare_inputs
    first, later = prepare(batch([1, 2]), 0.4), prepare(batch([1, 2], epoch=7, repeats=[3, 4]), 0.4)
    assert all(same(row(first, at), row(later, at)) for at in range(2))
    prepare = preparer(model).prepare_inputs
    low, high = undo(prepare(batch([1]), 0.1))[1], undo(prepare(batch([1]), 0.9))[1]
    torch.testing.assert_close(low, high, atol=1e-5, rtol=0)
    assert not torch.allclose(low, undo(prepare(batch([1])))[1], atol=0.1)
    times = prepare(batch([1, 2, 3]), 0.9)["t"]
    assert len(set(times.tolist())) == 1
    prepared = preparer(model, **DRAWS).prepare_inputs(batch([1, 2]), 0.3)
    assert set(prepared.values) == {"noisy", "t", "prompt", "pooled", "target"}


@pytest.mark.parametrize("text", ["padded", "real"])
def test_the_pipeline_has_features_and_label(model: Model, batch: MakeBatch, real_batch: MakeBatch, text: str) -> None:
    cached = (real_batch if text == "real" else batch)([1, 2, 3])
    pipeline = LightSD3Pipeline(model(text_tokens=text, **DRAWS), 0, None)
    prepared = pipeline.preparer.prepare_inputs(cached)
    (noisy, times, prompt, pooled, *rest), (target, mask) = pipeline.prepare_inputs(cached)
    lengths = [prepared.host["prompt.length"]] if text == "real" else []
    expected = [prepared[name] for name in ("noisy", "prompt", "pooled", "target")]
    assert same([noisy, prompt, pooled, target], expected)
    assert torch.equal(times, 1000 * prepared["t"])
    assert same(rest, [*lengths, prepared["kept"], prepared["corners"]])
    assert mask is None


def test_pretraining_starts_from_the_seed(model: Model, folder: Any) -> None:
    transformer = family_named("sd3").weights.load(starting_weights(model()), 4)
    expected = new_transformer(SIZES["tiny2"].transformer_config(), 4)
    assert all(torch.equal(a, b) for a, b in zip(transformer.parameters(), expected.parameters(), strict=True))
    saved = SD3Transformer2DModel(**SIZES["tiny2"].transformer_config()).to(torch.bfloat16)
    saved.save_pretrained(folder / "transformer")
    transformer = family_named("sd3").weights.load(starting_weights(model(train_type=None, size=None)), 0)
    assert {p.dtype for p in transformer.parameters()} == {torch.float32}
    assert all(torch.equal(a, b.float()) for a, b in zip(transformer.parameters(), saved.parameters(), strict=True))


@pytest.mark.parametrize(("policy", "has_text"), [("empty", True), ("zero", False)])
def test_the_pipeline_reads_scale_and_text_policy(model: Model, batch: MakeBatch, policy: str, has_text: bool) -> None:
    keys = {"uncond_text": policy, "enable_uncond_text_dropout": True, "uncond_text_dropout_prob": 1.0}
    pipeline = LightSD3Pipeline(model(**keys), 0, NEVER_ZERO)
    assert pipeline.preparer.scale == SCALE
    prompt = pipeline.prepare_inputs(batch([1, 2]))[0][2]
    assert bool((prompt[:, 7:] == 9).all()) == has_text
    assert bool(prompt.any()) == has_text


DRAWS: dict[str, Any] = {"routing": {"share": 0.5}, "position_crop_side": 8}


@pytest.mark.parametrize("text", ["padded", "real"])
def test_training_batches_have_their_draws(model: Model, batch: MakeBatch, real_batch: MakeBatch, text: str) -> None:
    make = real_batch if text == "real" else batch
    prepare = replace(preparer(model, 5, text_tokens=text, **DRAWS), num_positions=32)
    ids = [11, 5, 2**62 + 3]
    prepared = prepare.prepare_inputs(make(ids, epoch=2, repeats=range(3)))
    kept, corners = prepared["kept"], prepared["corners"]
    assert (kept.dtype, corners.dtype) == (torch.int32, torch.int32), "they go to the device"
    occurrences = occurrence_words(2, np.arange(3), ids)
    assert kept.tolist() == draw_kept(5, occurrences, 6, 0.5).tolist()
    assert corners.tolist() == draw_corners(5, occurrences, (2, 3), 8, 32).tolist()
    plain = preparer(model, 5, text_tokens=text).prepare_inputs(make(ids, epoch=2, repeats=range(3)))
    others = prepared.with_values({}, without=["kept", "corners"])
    assert same(plain.tensors(), others.tensors()), "nothing else changes"
    for at, sample in enumerate(ids):
        alone = prepare.prepare_inputs(make([sample], epoch=2, repeats=[at]))
        assert same([kept[at], corners[at]], [alone["kept"][0], alone["corners"][0]])
