"""Images equal those of the stock call, for any batch size; in half precision they are close."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from sd3_light.config.faults import UserError
from sd3_light.families.sd3.sample_texts import TextPolicy
from sd3_light.sample.generate import Cancelled, ImageRequest, generate, save_png, stream_images
from sd3_light.sample.precision import compute_in
from sd3_light.sample.watch import Watch

POLICY = TextPolicy(t5_max_length=12, uncond_text="empty", text_tokens="padded")
ZERO = TextPolicy(t5_max_length=12, uncond_text="zero", text_tokens="padded")
REAL = TextPolicy(t5_max_length=12, uncond_text="empty", text_tokens="real")
STEPS = 3
NAMES = {"vae": "VAE", "transformer": "denoiser", "text_encoder_3": "text encoder"}
DRAWING = (STEPS, 4.0)
REQUESTS = [
    ImageRequest("a small red circle", 1, 48, 32),
    ImageRequest("two blue squares", 2, 32, 32),
    ImageRequest("a large green star", 3, 48, 32),
    ImageRequest("a red star left of a blue circle", 4, 32, 32, negative_prompt="black"),
    ImageRequest("a red star left of a blue circle", 5, 32, 32),
]
PAIR = [ImageRequest("a red star", 3, 48, 32), ImageRequest("two blue squares", 4, 48, 32)]


def pixels(image: Image.Image) -> np.ndarray:
    return np.asarray(image).astype(int)


def stock(pipe: Any, request: ImageRequest, guidance: float = 4.0, **texts: Any) -> Image.Image:
    texts = texts or {"prompt": request.prompt, "negative_prompt": request.negative_prompt or None}
    settings = {"num_inference_steps": STEPS, "guidance_scale": guidance, "max_sequence_length": POLICY.t5_max_length}
    generator = torch.Generator("cpu").manual_seed(request.seed)
    return pipe(generator=generator, width=request.width, height=request.height, **settings, **texts).images[0]


@pytest.mark.parametrize("guidance", [4.0, 1.0, 0.0])
def test_a_single_image_equals_the_stock_call(pipe: Any, guidance: float) -> None:
    images = generate(pipe, REQUESTS, POLICY, (STEPS, guidance), batch_size=1)
    for image, request in zip(images, REQUESTS, strict=True):
        assert image.size == (request.width, request.height)
        assert np.array_equal(pixels(image), pixels(stock(pipe, request, guidance)))


@pytest.mark.parametrize("policy", [POLICY, ZERO])
def test_an_image_does_not_depend_on_its_batch(pipe: Any, policy: TextPolicy) -> None:
    alone = generate(pipe, REQUESTS, policy, DRAWING, batch_size=1)
    together = generate(pipe, REQUESTS, policy, DRAWING, batch_size=16)
    for first, second in zip(alone, together, strict=True):
        assert np.abs(pixels(first) - pixels(second)).max() <= 1


def test_zero_means_zeros_for_tokens_and_pooled(pipe: Any) -> None:
    request = REQUESTS[0]
    with torch.no_grad():  # with gradients, attention uses another kernel that rounds differently
        tokens, _, pooled, _ = pipe.encode_prompt(request.prompt, None, None, max_sequence_length=12)
    texts = {"prompt_embeds": tokens, "pooled_prompt_embeds": pooled}
    zeros = {f"negative_{name}": torch.zeros_like(text) for name, text in texts.items()}
    expected = stock(pipe, request, **texts, **zeros)
    (image,) = generate(pipe, [request], ZERO, DRAWING)
    assert np.array_equal(pixels(image), pixels(expected))


def test_progress_is_counted_and_stock_attention_restored(pipe: Any, capfd: pytest.CaptureFixture[str]) -> None:
    pipe.set_progress_bar_config(desc="mine")
    calls: list[tuple[int, int]] = []
    generate(pipe, REQUESTS, POLICY, DRAWING, batch_size=2, on_progress=lambda done, total: calls.append((done, total)))
    assert calls == [(2, 5), (4, 5), (5, 5)]
    assert capfd.readouterr() == ("", "")
    assert pipe._progress_bar_config == {"desc": "mine"}
    pipe.set_progress_bar_config()
    assert generate(pipe, [], POLICY) == []
    before = pipe.transformer.attn_processors
    generate(pipe, REQUESTS[:1], REAL, DRAWING)
    assert pipe.transformer.attn_processors == before


@pytest.mark.parametrize("side", [30, 0, 200])
def test_unsupported_image_sizes_are_refused(pipe: Any, side: int) -> None:
    with pytest.raises(UserError, match="multiples of 8 from 8 to 192"):
        generate(pipe, [ImageRequest("a", 0, side, 32)], POLICY, DRAWING)


@pytest.mark.parametrize("uncond", ["zero", "empty"])
@pytest.mark.parametrize("guidance", [4.0, 1.0])
def test_an_image_does_not_depend_on_its_batch_with_real_tokens(pipe: Any, uncond: str, guidance: float) -> None:
    """Prompts and negative prompts of different lengths share a batch, each with its own mask."""
    policy = TextPolicy(12, uncond, "real")  # type: ignore[arg-type]
    alone = generate(pipe, REQUESTS, policy, (STEPS, guidance), batch_size=1)
    together = generate(pipe, REQUESTS, policy, (STEPS, guidance), batch_size=16)
    for first, second in zip(alone, together, strict=True):
        assert np.abs(pixels(first) - pixels(second)).max() <= 1
    padded = generate(pipe, REQUESTS, TextPolicy(12, uncond, "padded"), (STEPS, guidance))  # type: ignore[arg-type]
    assert all(np.abs(pixels(first) - pixels(second)).max() > 2 for first, second in zip(alone, padded, strict=True))


def test_without_guidance_a_single_real_text_needs_no_mask(pipe: Any) -> None:
    """Nothing is padded: the stock call with these tokens gives the same image."""
    request = REQUESTS[1]
    with torch.no_grad():
        (text,) = REAL.encode(pipe, [request.prompt])
    expected = stock(pipe, request, 1.0, prompt_embeds=text["prompt"][None], pooled_prompt_embeds=text["pooled"][None])
    (image,) = generate(pipe, [request], REAL, (STEPS, 1.0))
    assert np.abs(pixels(image) - pixels(expected)).max() <= 1


def test_a_png_contains_its_parameters(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "one.png"
    save_png(Image.new("RGB", (4, 4)), path, {"prompt": "白色背景上有一个大的红色圆形", "seed": 3, "sizes": [1, 2]})
    with Image.open(path) as image:
        text = image.text
    assert text["prompt"].startswith("白色")
    assert text["seed"] == "3"
    assert json.loads(text["sizes"]) == [1, 2]
    assert [file.name for file in path.parent.iterdir()] == ["one.png"]


@pytest.mark.parametrize("part", NAMES)
@pytest.mark.parametrize("exact", [False, True])
def test_values_that_are_not_finite_give_an_error_and_no_image(pipe: Any, part: str, exact: bool) -> None:
    weight = list(getattr(pipe, part).parameters())[-1].data
    value = weight.clone()
    weight.fill_(float("nan"))
    try:
        with pytest.raises(UserError, match=f"'a small red circle': the {NAMES[part]} returned NaN or infinity"):
            generate(pipe, REQUESTS[:1], POLICY, DRAWING, exact=exact)
    finally:
        weight.copy_(value)


@pytest.fixture
def calls(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    calls: list[int] = []
    forward = pipe.transformer.forward
    monkeypatch.setattr(pipe.transformer, "forward", lambda *args, **keys: calls.append(1) or forward(*args, **keys))
    return calls


@pytest.mark.parametrize("exact", [True, False])
def test_images_are_cancelled_between_two_steps(pipe: Any, calls: list[int], exact: bool) -> None:
    requests = [ImageRequest("a", seed, 32, 32, steps=500, guidance=1.0) for seed in range(6)]
    drawn = stream_images(pipe, requests, POLICY, 2, exact, watch=Watch(lambda: len(calls) >= 5))
    with pytest.raises(Cancelled):
        list(drawn)
    assert 5 <= len(calls) < 10
    assert len(generate(pipe, [replace(requests[0], steps=1)], POLICY, exact=exact)) == 1, "the pipeline still works"


def test_images_in_other_threads_end_when_the_caller_stops(pipe: Any, calls: list[int], monkeypatch: Any) -> None:
    monkeypatch.setattr("sd3_light.sample.generate._cores", lambda: 2)
    requests = [ImageRequest("a", seed, 32, 32, steps=steps, guidance=1.0) for seed, steps in enumerate((1, 1000))]
    drawn = stream_images(pipe, requests, POLICY, batch_size=2, exact=True)
    assert [index for index, _ in next(drawn)] == [0]
    drawn.close()
    assert len(calls) < 900


def halved(pipe: Any) -> Any:
    half_pipe = copy.copy(pipe)
    for name in ("transformer", "text_encoder", "text_encoder_2", "text_encoder_3"):
        setattr(half_pipe, name, copy.deepcopy(getattr(pipe, name)))
    compute_in(half_pipe, torch.bfloat16)
    return half_pipe


@pytest.mark.parametrize("text_tokens", ["padded", "real"])
def test_half_precision_is_close(pipe: Any, text_tokens: Any) -> None:
    policy, half_pipe, seen = TextPolicy(12, "empty", text_tokens), halved(pipe), []
    half_pipe.transformer.pos_embed.register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    full = np.asarray(generate(pipe, PAIR, policy, (3, 1.0)), dtype=int)
    with pytest.MonkeyPatch.context() as patch:
        decode = half_pipe.vae.decode

        def spy(latents: Any, **rest: Any) -> Any:
            assert latents.dtype == torch.float32
            return decode(latents, **rest)

        patch.setattr(half_pipe.vae, "decode", spy)
        half = np.asarray(generate(half_pipe, PAIR, policy, (3, 1.0)), dtype=int)
    assert set(seen) == {torch.bfloat16}
    assert 0 < np.abs(full - half).mean() < 3
    assert half_pipe.vae.dtype == torch.float32


def test_float32_changes_nothing(pipe: Any) -> None:
    compute_in(pipe, torch.float32)
    assert not pipe.transformer._forward_hooks
    assert not pipe.transformer._forward_pre_hooks
