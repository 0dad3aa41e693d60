"""Training of the parts on a GPU: compiled, in bf16, resumable."""

from pathlib import Path

import numpy as np
import pytest
import torch

from sd3_light.config.faults import Stopped
from sd3_light.encoding.vae import SD3_LATENTS
from sd3_light.parts.contrastive import TextOptions, TextTask, Towers, captioned_images
from sd3_light.parts.fit import Fit, FitOptions
from sd3_light.parts.images import Pool, on_device
from sd3_light.parts.sizes import TEXT_SIZES, VAE_SIZES
from sd3_light.parts.tokenizers import learn_tokenizers
from sd3_light.parts.vae import VaeOptions, VaeTask, build_vae, channel_statistics

GPU = torch.device("cuda", 0)
WORDS = ("red", "green", "blue", "grey")


@pytest.fixture(scope="module")
def pool() -> Pool:
    """Images of 64 px with a bright square of one colour each."""
    rng, count = np.random.default_rng(0), 256
    pixels = rng.integers(0, 60, (count, 64, 64, 3), dtype=np.uint8)
    captions = []
    for row in range(count):
        top, left, colour = *rng.integers(4, 40, 2), row % 4
        pixels[row, top : top + 16, left : left + 16, [colour] if colour < 3 else [0, 1, 2]] = 230
        captions.append((f"a {WORDS[colour]} square at {top} {left}",))
    return Pool(torch.from_numpy(pixels), tuple(range(count)), tuple(captions), 32, "test")


@pytest.mark.parametrize("compiled", [False, True])
def test_a_vae_learns_and_resumes(pool: Pool, tmp_path: Path, compiled: bool) -> None:
    pools = on_device([pool], GPU)
    assert pools[0].pixels.is_cuda

    def start() -> tuple[VaeTask, Fit]:
        task = VaeTask(build_vae(VAE_SIZES["tiny"], 16, 0), pools, GPU, VaeOptions(32, compile=compiled))
        return task, Fit("vae", task, FitOptions(steps=60, evaluate_every=30, ema=0.9), tmp_path, {})

    task, run = start()
    before = task.evaluate()["psnr"]
    with pytest.raises(Stopped):
        run.run(lambda: "half" if run.progress.step == 30 else None)
    task, run = start()
    assert run.progress.step == 30
    run.run(lambda: None)
    run.use_averages()
    assert task.evaluate()["psnr"] > before + 5
    mean, std = channel_statistics(task.finished(), pools, GPU)
    assert (mean - SD3_LATENTS.shift).abs().max() < 1e-2
    assert (std * SD3_LATENTS.scale - 1).abs().max() < 1e-2


def test_text_encoders_learn(pool: Pool, tmp_path: Path) -> None:
    tokenizers = learn_tokenizers([text for texts in pool.captions for text in texts], 1000)
    images = captioned_images([pool], tokenizers, GPU)
    task = TextTask(Towers(TEXT_SIZES["tiny"], tokenizers, 64, 0), images, GPU, TextOptions(64))
    before = task.evaluate()["retrieval"]
    Fit("text", task, FitOptions(steps=100, evaluate_every=100, lr=1e-3), tmp_path, {}).run(lambda: None)
    assert task.evaluate()["retrieval"] > before + 0.1
    assert next(task.judge().parameters()).device.type == "cpu"
