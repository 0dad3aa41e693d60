"""On a GPU: the same seed gives the same image for any batch, within the tolerance in docs/reference/sampling.md, and
an export of weights on the GPU is proven. `-s` shows the measurements."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from sd3_light.assets import DEMO
from sd3_light.core.registry import family_named
from sd3_light.encoding.vae import VaeDecoder
from sd3_light.export.diffusers_folder import read_facts, write_folder
from sd3_light.export.export_spec import ExportSpec
from sd3_light.export.open_pipeline import open_pipeline
from sd3_light.model.part_configs import read_json
from sd3_light.sample.generate import ImageRequest, generate
from sd3_light.sample.precision import compute_in

CUDA = torch.device("cuda")
COLOURS, SHAPES = ("red", "blue", "green", "yellow"), ("circle", "square", "star")
PROMPTS = [f"a {colour} {shape} on a white background" for colour in COLOURS for shape in SHAPES]
BATCHES = (1, 3, 8)
STEPS, GUIDANCE = 20, 4.0


def images_of(folder: Path, dtype: torch.dtype, batch: int, device: torch.device = CUDA) -> np.ndarray:
    """Return [N, H, W, 3] in steps of 255: each prompt with its own seed, alone or in a batch."""
    pipe, policy = open_pipeline(folder, torch.device("cpu"))
    compute_in(pipe, dtype)
    side = pipe.transformer.config.sample_size * pipe.vae_scale_factor
    requests = [ImageRequest(prompt, seed, side, side) for seed, prompt in enumerate(PROMPTS)]
    images = generate(pipe.to(device), requests, policy, (STEPS, GUIDANCE), batch)
    return np.stack([np.asarray(image, dtype=np.int16) for image in images])


def differences(first: np.ndarray, second: np.ndarray) -> tuple[int, float]:
    """Return the largest and the mean difference of a channel."""
    difference = np.abs(first - second)
    return int(difference.max()), float(difference.mean())


@pytest.fixture(scope="module")
def exact() -> np.ndarray:
    """The images in float32, one at a time."""
    assert not torch.backends.cuda.matmul.allow_tf32, "the tolerance is that of float32"
    return images_of(DEMO, torch.float32, 1)


def test_float32_gives_the_same_image_in_any_batch(exact: np.ndarray) -> None:
    for batch in BATCHES[1:]:
        largest, mean = differences(images_of(DEMO, torch.float32, batch), exact)
        print(f"float32, batches of 1 and {batch}: largest {largest}, mean {mean:.6f} of 255")
        assert largest <= 2
        assert mean <= 0.01


def test_bfloat16_gives_nearly_the_same_image_in_any_batch(exact: np.ndarray) -> None:
    rough = {batch: images_of(DEMO, torch.bfloat16, batch) for batch in BATCHES}
    for first, second in pairwise(BATCHES):
        largest, mean = differences(rough[first], rough[second])
        print(f"bfloat16, batches of {first} and {second}: largest {largest}, mean {mean:.4f} of 255")
        assert mean <= 1
    largest, mean = differences(rough[1], exact)
    print(f"bfloat16 and float32: largest {largest}, mean {mean:.4f} of 255")
    assert mean <= 2, "a different image, not a rounding error"


def test_a_gpu_gives_the_image_of_a_cpu(exact: np.ndarray) -> None:
    largest, mean = differences(images_of(DEMO, torch.float32, 1, torch.device("cpu")), exact)
    print(f"float32, GPU and CPU: largest {largest}, mean {mean:.6f} of 255")
    assert mean <= 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_on_the_gpu_are_exported_and_proven(tmp_path: Path, exact: np.ndarray, dtype: torch.dtype) -> None:
    pipe, _ = open_pipeline(DEMO, CUDA)
    live = pipe.transformer.state_dict()
    before = {name: tensor.clone() for name, tensor in live.items()}
    config = {key: value for key, value in pipe.transformer.config.items() if not key.startswith("_")}
    scheduler = read_json(DEMO / "scheduler" / "scheduler_config.json")
    spec = ExportSpec(
        DEMO, config, dtype, scheduler["shift"], text=read_facts(DEMO).get("text", {}), family=family_named("sd3")
    )
    out = write_folder(tmp_path / "out", live, spec)
    proof = read_json(out / "proof.json")
    print({"proof in": dtype} | {key: proof[key] for key in ("max_difference", "picture_max_difference", "seconds")})
    assert proof["max_difference"] <= 1e-5
    assert proof["picture_max_difference"] <= 1 / 255
    assert all(tensor.is_cuda and torch.equal(tensor, before[name]) for name, tensor in live.items()), "only read"
    largest, mean = differences(images_of(out, torch.float32, 1), exact)
    print(f"the export in {dtype}, sampled on the GPU: largest {largest}, mean {mean:.6f} of 255")
    assert mean <= (0.001 if dtype == torch.float32 else 2)


def test_the_vae_is_on_the_device_only_while_it_decodes() -> None:
    latents = torch.randn(2, 16, 8, 8, generator=torch.Generator().manual_seed(0))
    on_host = VaeDecoder(DEMO, torch.device("cpu"))
    decoder = VaeDecoder(DEMO, CUDA)
    before = [weight.data_ptr() for weight in decoder.vae.parameters()]
    for _ in range(2):
        with decoder:
            assert all(weight.is_cuda for weight in decoder.vae.parameters())
            pixels = decoder.decode(latents.to(CUDA))
        assert [weight.data_ptr() for weight in decoder.vae.parameters()] == before, "nothing is copied back"
        assert pixels.is_cuda
        torch.testing.assert_close(pixels.cpu(), on_host.decode(latents), rtol=0, atol=5e-3)
