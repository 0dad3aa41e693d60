"""In exact mode an image's bytes depend only on its request, not on batch, cores, threads or other images."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from sd3_light.families.sd3.sample_texts import TextPolicy
from sd3_light.flow.scheduler import SAMPLERS, use_sampler
from sd3_light.sample import generate as module
from sd3_light.sample.generate import ImageRequest, generate, stream_images
from tests.cases import combinations
from tests.waiting import HANG_SECONDS

REQUESTS = [
    ImageRequest("a small red circle", 1, 48, 32),
    ImageRequest("two blue squares", 2, 32, 32, steps=2),
    ImageRequest("a large green star", 3, 48, 32, guidance=1.0),
    ImageRequest("a red star left of a blue circle", 4, 32, 32),
    ImageRequest("a red star left of a blue circle", 5, 32, 32),
    ImageRequest("a small red circle", 6, 48, 32),
]
STEPS = 3
DRAWING = (STEPS, 4.0)


def pixels(images: Any) -> list[bytes]:
    return [np.asarray(image).tobytes() for image in images]


@pytest.fixture(autouse=True)
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_cores", lambda: 4)


@pytest.mark.parametrize(
    ("sampler", "uncond", "text_tokens"),
    combinations(
        SAMPLERS,
        ("zero", "empty"),
        ("padded", "real"),
        fast=[("euler", "empty", "padded"), ("heun", "zero", "real"), ("dpm++", "empty", "real")],
    ),
)
def test_batch_and_split_do_not_change_images(pipe: Any, text_tokens: Any, uncond: Any, sampler: str) -> None:
    policy, before = TextPolicy(12, uncond, text_tokens), pipe.scheduler
    use_sampler(pipe, sampler)
    try:
        alone = [pixels(generate(pipe, [request], policy, DRAWING, exact=True))[0] for request in REQUESTS]
        together = generate(pipe, REQUESTS, policy, DRAWING, batch_size=4, exact=True)
        halves = [generate(pipe, REQUESTS[start::2], policy, DRAWING, batch_size=1, exact=True) for start in (0, 1)]
    finally:
        pipe.scheduler = before
    assert pixels(together) == alone
    assert [*map(pixels, halves)] == [alone[0::2], alone[1::2]]
    assert len(set(alone)) == len(alone)


def test_an_exact_image_equals_a_batch_of_one(pipe: Any) -> None:
    """Which test_generate compares with the stock call."""
    policy = TextPolicy(12, "empty", "padded")
    exact, alone = (generate(pipe, REQUESTS, policy, DRAWING, **keys) for keys in ({"exact": True}, {"batch_size": 1}))
    assert pixels(exact) == pixels(alone)
    own_pipe = module._copy_pipeline(pipe)
    assert own_pipe.transformer is pipe.transformer
    assert own_pipe.vae is not pipe.vae, "a VAE of videos keeps frames while it decodes"
    weights = [[weight.data_ptr() for weight in vae.parameters()] for vae in (own_pipe.vae, pipe.vae)]
    assert weights[0] == weights[1]
    assert own_pipe.scheduler is not pipe.scheduler
    assert own_pipe.scheduler.config is not pipe.scheduler.config
    assert own_pipe.scheduler.config == pipe.scheduler.config


def test_torch_threads_are_set_and_restored(pipe: Any) -> None:
    policy = TextPolicy(12, "empty", "padded")
    seen = []
    step = module.run_pipeline

    def spy(*args: Any) -> Any:
        seen.append((torch.get_num_threads(), threading.current_thread().name))
        return step(*args)

    before = torch.get_num_threads()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "run_pipeline", spy)
            torch.set_num_threads(3)
            assert pixels(generate(pipe, REQUESTS[:4], policy, DRAWING, exact=True))
            assert torch.get_num_threads() == 3
            assert {threads for threads, _ in seen} == {1}
            assert threading.current_thread().name not in {name for _, name in seen}
            seen.clear()
            request = replace(REQUESTS[0], steps=STEPS, guidance=4.0)
            list(stream_images(pipe, [request], policy, exact=True, threads=2))
            assert {threads for threads, _ in seen} == {2}
    finally:
        torch.set_num_threads(before)


def test_an_error_stops_the_work(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []
    shut_down = threading.Event()

    class Pool(ThreadPoolExecutor):
        def shutdown(self, wait: bool = True, **keys: bool) -> None:
            super().shutdown(wait=False, **keys)
            shut_down.set()
            super().shutdown()

    def broken(pipe: Any, batch: Any, *rest: Any) -> Any:
        started.append(batch[0].seed)
        assert len(started) == 1 or shut_down.wait(HANG_SECONDS)
        raise RuntimeError("no memory")

    monkeypatch.setattr(module, "ThreadPoolExecutor", Pool)
    monkeypatch.setattr(module, "run_pipeline", broken)
    many = [ImageRequest("a", seed, 32, 32) for seed in range(20)]
    with pytest.raises(RuntimeError, match="no memory"):
        generate(pipe, many, TextPolicy(12, "zero", "padded"), DRAWING, batch_size=1, exact=True)
    assert len(started) <= 2, "the remaining requests were cancelled"


def test_a_text_is_encoded_once_and_the_oldest_are_dropped(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CACHED_TEXTS", 2)
    encoded: list[str] = []
    encode = TextPolicy.encode

    def spy(policy: Any, pipe: Any, texts: Any) -> Any:
        encoded.extend(texts)
        return encode(policy, pipe, texts)

    monkeypatch.setattr(TextPolicy, "encode", spy)
    requests = [ImageRequest(prompt, 0, 32, 32) for prompt in ("a", "a", "two", "red", "a")]
    generate(pipe, requests, TextPolicy(12, "zero", "padded"), (1, 4.0), batch_size=1, exact=True)
    assert encoded == ["a", "two", "red", "a"]
