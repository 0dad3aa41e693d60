"""Wan: clips and images of our loop against the stock pipeline, bit for bit; losses; names; refusals."""

import json
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from torch import nn

from sd3_light.config import ModelConfig, UserError
from sd3_light.core.batch import Batch
from sd3_light.core.columns import Bucket
from sd3_light.core.registry import family_named, family_of_folder
from sd3_light.core.sampling import ImageRequest
from sd3_light.export.wan_names import wan_to_comfyui
from sd3_light.families.base import StockFamily
from sd3_light.families.stock.inputs import StockInputs
from sd3_light.sample.generate import frames_of, generate
from sd3_light.sample.loop import starting_noise
from tests.families import TinyFolder
from tests.stock import model_table, open_stock, save_stock
from tests.unit.families.test_stock_images import CPU, PROMPTS, SEEDS, STEPS, drawn

LENGTH = 80
SETTINGS = {"text_max_length": LENGTH}


@pytest.fixture
def folder(stock_folder: TinyFolder) -> Path:
    return stock_folder("wan")


@pytest.fixture
def family() -> StockFamily:
    found = family_named("wan")
    assert isinstance(found, StockFamily)
    return found


@pytest.fixture
def model(folder: Path) -> ModelConfig:
    return model_table("wan", folder, **SETTINGS)


@pytest.mark.parametrize("frames", [1, 5])
@pytest.mark.parametrize("guidance", [1.0, 5.0])
def test_clips_are_those_of_the_stock_pipeline(
    family: StockFamily, folder: Path, model: ModelConfig, frames: int, guidance: float
) -> None:
    pipe = open_stock(folder)
    pipe.vae.enable_slicing()
    expected = pipe(
        PROMPTS,
        width=48,
        height=32,
        num_frames=frames,
        num_inference_steps=STEPS,
        guidance_scale=guidance,
        max_sequence_length=LENGTH,
        generator=[torch.Generator("cpu").manual_seed(seed) for seed in SEEDS],
        output_type="pt",
    ).frames
    assert expected.shape == (2, frames, 3, 32, 48)
    assert expected.std() > 1e-3
    size = (48, 32) if frames == 1 else (48, 32, frames)
    noise = starting_noise(SEEDS, family.sampling.latent_shape(model, size), CPU)
    own = drawn(family, pipe, folder, guidance, noise)
    assert torch.equal(own.transpose(1, 2) if frames > 1 else own.unsqueeze(1), expected)
    images = [
        ImageRequest(prompt, seed, 48, 32, "", STEPS, guidance, frames)
        for prompt, seed in zip(PROMPTS, SEEDS, strict=True)
    ]
    by_verb = generate(pipe, images, StockInputs(family, folder, SETTINGS), batch_size=2)
    assert [len(frames_of(image)) for image in by_verb] == [frames, frames]
    bytes_of = [torch.tensor(list(frame.tobytes())) for image in by_verb for frame in frames_of(image)]
    stock = (expected * 255).round().to(torch.uint8).permute(0, 1, 3, 4, 2).reshape(2 * frames, -1)
    assert torch.equal(torch.stack(bytes_of), stock.long())


def test_texts_losses_and_frames_are_those_of_stock(family: StockFamily, folder: Path, model: ModelConfig) -> None:
    pipe = open_stock(folder)
    texts = StockInputs(family, folder, SETTINGS).encode(pipe, [*PROMPTS, ""])
    assert len({len(text["text"]) for text in texts}) > 1
    padded = family.sampling.batch(texts, model, 1.0)["text"]
    options = {"do_classifier_free_guidance": False, "max_sequence_length": LENGTH}
    assert torch.equal(padded, pipe.encode_prompt([*PROMPTS, ""], **options)[0])
    denoiser = open_stock(folder).transformer
    noisy, text, t = torch.randn(2, 4, 2, 4, 6), torch.randn(2, LENGTH, 32), torch.tensor([0.25, 0.5])
    with torch.no_grad():
        own = family.denoise(denoiser, Batch(2, {"noisy": noisy, "t": t, "text": text}), 1.0)
        stock = denoiser(noisy, 1000 * t, text).sample
    assert torch.equal(own, stock)
    inputs = StockInputs(family, folder, SETTINGS)
    assert inputs.frames_fault(5) is None
    assert inputs.frames_fault(1) is None
    assert "such as 77 or 81" in str(inputs.frames_fault(80))
    with pytest.raises(UserError, match="such as 5 or 9"):
        generate(open_stock(folder), [ImageRequest("a", 0, 48, 32, frames=7)], inputs, (1, 4.0))


def test_latents_have_frames(family: StockFamily, folder: Path, model: ModelConfig) -> None:
    assert family.frame_step(folder) == 4
    shapes = {
        bucket: family.columns(model, folder, bucket)[0].shape
        for bucket in (Bucket(48, 32), Bucket(48, 32, 5), Bucket(48, 32, 81))
    }
    assert shapes == {Bucket(48, 32): (8, 1, 4, 6), Bucket(48, 32, 5): (8, 2, 4, 6), Bucket(48, 32, 81): (8, 21, 4, 6)}
    cost = family.cost(family.weights.start(model), model)
    assert cost.tokens(Bucket(48, 32, 5)).image == 2 * cost.tokens(Bucket(48, 32)).image == 12
    with torch.device("meta"):
        denoiser = diffusers.WanTransformer3DModel(num_layers=2, num_attention_heads=2, attention_head_dim=12)
    names = family.files.adapters
    for name, layer in denoiser.named_modules():
        if isinstance(layer, nn.Linear) and "." in name:
            (key,) = wan_to_comfyui({f"transformer.{name}.lora_A.weight": torch.zeros(1)})
            assert key.startswith("diffusion_model.")
            other = key.removeprefix("diffusion_model.").removesuffix(".lora_A.weight")
            for spelled in (name, other):
                layers = names.find_layers(spelled)
                assert layers.names == (name,)


@pytest.mark.parametrize(
    ("part", "change", "reason"),
    [
        ("model_index.json", {"transformer_2": ["diffusers", "WanTransformer3DModel"]}, "two denoisers"),
        ("model_index.json", {"expand_timesteps": True}, "a time per token"),
        ("transformer/config.json", {"image_dim": 1280}, "takes an image beside the noise"),
        ("transformer/config.json", {"in_channels": 36}, "takes an image beside the noise"),
    ],
)
def test_other_models_of_the_class_are_refused(tmp_path: Path, part: str, change: dict[str, Any], reason: str) -> None:
    folder = save_stock("wan", tmp_path / "model")
    path = folder / part
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    family = family_of_folder(folder)
    model = model_table("wan", folder)
    faults = [fault for fault in family.checks.folder_faults(model) if reason in fault.problem]
    assert len(faults) == 1
    assert not list(family.checks.encoder_faults(model, family.weights.start(model)))
