"""A Wan LoRA from a folder of short clips, end to end; one step against the arithmetic of the stock pipelines."""

import json
import runpy
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from diffusers import (
    AutoencoderKLWan,
    FlowMatchEulerDiscreteScheduler,
    WanPipeline,
    WanTransformer3DModel,
    WanVideoToVideoPipeline,
)
from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers
from diffusers.pipelines.wan import pipeline_wan_video2video
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, UMT5Config, UMT5EncoderModel

from sd3_light import tasks
from sd3_light.assets import DEMO
from sd3_light.config import ModelConfig
from sd3_light.core.registry import family_named
from sd3_light.encoding.vae import LatentScale
from sd3_light.families.stock.prepare import StockPreparer
from sd3_light.flow.objective import flow_loss, interpolate, velocity
from sd3_light.randomness import fill_normals, stream
from sd3_light.runlog import read_log
from sd3_light.sources.video import has_av, probe_video
from sd3_light.tasks.prepare import rows_of
from tests.unit.data.videos import encode, encode_gif, numbered

ROOT = Path(__file__).parents[2]
FRAMES, SIDE, STEPS = 5, 32, 6
SUFFIX = ".mp4" if has_av() else ".gif"


def bit_for_bit() -> AbstractContextManager[None]:
    """Return a context without oneDNN, whose 3D convolutions may round the first call differently from later ones."""
    context: AbstractContextManager[None] = torch.backends.mkldnn.flags(enabled=False)
    return context


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    """The example script as a module."""
    sys.path.insert(0, str(ROOT / "examples"))
    import wan_task

    yield wan_task
    sys.path.remove(str(ROOT / "examples"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny Wan pipeline of random weights."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "tokenizer_3")
    text = UMT5Config(vocab_size=len(tokenizer), d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    heads = {"num_attention_heads": 2, "attention_head_dim": 12, "num_layers": 2, "rope_max_seq_len": 32}
    widths = {"in_channels": 4, "out_channels": 4, "text_dim": 32, "freq_dim": 32, "ffn_dim": 48}
    statistics = {"latents_mean": [-0.5, 0.1, 0.2, 0.9], "latents_std": [2.0, 1.5, 0.8, 1.2]}
    pipe = WanPipeline(
        tokenizer=tokenizer,
        text_encoder=UMT5EncoderModel(text),
        vae=AutoencoderKLWan(base_dim=8, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1, **statistics),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=5.0),
        transformer=WanTransformer3DModel(**heads, **widths),
    )
    folder = tmp_path_factory.mktemp("wan") / "model"
    pipe.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six clips of two shapes, one of them too short and one broken."""
    folder = tmp_path_factory.mktemp("clips")
    for number in range(6):
        frames = numbered(2 if number == 4 else 12, (64, 32) if number % 2 else (32, 64))
        is_mp4 = SUFFIX == ".mp4" and number % 3 == 0
        data = encode(frames) if is_mp4 else encode_gif(frames)
        (folder / f"{number}{'.mp4' if is_mp4 else '.gif'}").write_bytes(data[:200] if number == 5 else data)
        (folder / f"{number}.txt").write_text(f"a moving stripe, number {number}", encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def dataset(clips: Path) -> tasks.VideoDataset:
    keys = {"resolutions": [SIDE], "enable_ar_bucket": True, "ar_buckets": [0.5, 2.0], "num_workers": 0}
    return tasks.VideoDataset(clips, FRAMES, 16, **keys)


@pytest.fixture(scope="module")
def processed(example: Any, model: Path, dataset: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    logger = tasks.ModelLogger(tmp_path_factory.mktemp("wan") / "processed")
    with bit_for_bit():
        return tasks.launch_data_process_task(Accelerator(), dataset, example.Wan(model), logger, num_workers=0)


def train(module: Any, data: Any, out: Path, converter: Any = None, **settings: Any) -> Any:
    """Train with batches of two clips of one shape."""
    defaults = {"num_epochs": 10, "max_steps": STEPS, "batch_size": 2, "num_workers": 0, "save_steps": STEPS}
    logger = tasks.ModelLogger(out, state_dict_converter=converter)
    with bit_for_bit():
        tasks.launch_training_task(Accelerator(), data, module, logger, 1e-2, **(defaults | settings))
    return module


@pytest.fixture(scope="module")
def trained(example: Any, model: Path, processed: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """The module after an uninterrupted training on processed clips, and its folder."""
    out = tmp_path_factory.mktemp("wan") / "out"
    return train(example.Wan(model), tasks.ProcessedDataset(processed), out), out


def losses(out: Path) -> list[float]:
    return [event["loss"] for event in read_log(out / "log.jsonl") if event["event"] == "step"]


def sample(pipe: Any) -> Any:
    """Return the frames that a pipeline draws."""
    options: dict[str, Any] = {"height": SIDE, "width": SIDE, "num_frames": FRAMES, "num_inference_steps": 2}
    options |= {"guidance_scale": 3.0, "max_sequence_length": 32}
    return pipe("a stripe", **options, generator=torch.Generator().manual_seed(0)).frames[0]


def stock(model: Path) -> Any:
    dtype = {"text_encoder": torch.bfloat16, "default": torch.float32}
    return WanPipeline.from_pretrained(model, dtype=dtype)


# --- arithmetic ----------------------------------------------------------------------------------


def test_one_step_is_the_arithmetic_of_the_stock_pipeline(
    example: Any, model: Path, dataset: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Latents, noise, time and text that the denoiser sees, loss and gradients, against `WanVideoToVideoPipeline`."""
    module = example.Wan(model)
    for name, parameter in module.named_trainable():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)  # zeros would hide the gradients of lora_A
    seen: list[Any] = []
    module.transformer.register_forward_pre_hook(lambda _, args: seen.append(args))
    item = dataset[0]
    loss = module({"data": item, "data_id": 7, "epoch": 2, "repeat": 0})
    loss.backward()
    gradients = [parameter.grad.clone() for parameter in module.trainable_modules()]
    noisy, timestep, text = seen[0]

    parts = {name: part for name, part in module.pipe.components.items() if name != "transformer_2"}
    pipe = WanVideoToVideoPipeline(**{**parts, "scheduler": FlowMatchEulerDiscreteScheduler()})
    noise = torch.empty(noisy.shape)
    fill_normals(stream(0, "noise", 2, 0, 7), noise.numpy())
    monkeypatch.setattr(pipeline_wan_video2video, "randn_tensor", lambda *_, **__: noise)
    sigma = float(timestep) / 1000
    pipe.scheduler.set_timesteps(sigmas=[sigma])
    height, width = item["video"].shape[1:3]
    video = pipe.video_processor.preprocess_video([Image.fromarray(frame) for frame in item["video"]], height, width)
    options = {"num_channels_latents": 4, "height": height, "width": width, "dtype": torch.float32, "device": "cpu"}
    with torch.no_grad():
        stock_noisy = pipe.prepare_latents(video, 1, timestep=pipe.scheduler.timesteps, **options)
        options = {"do_classifier_free_guidance": False, "max_sequence_length": 512}
        stock_text = stock(model).encode_prompt(item["prompt"], **options)[0]
    torch.testing.assert_close(noisy, stock_noisy, rtol=0, atol=1e-5)
    torch.testing.assert_close(timestep, pipe.scheduler.timesteps, rtol=0, atol=1e-3)
    assert torch.equal(text, stock_text.float())

    module.zero_grad()
    predicted = module.transformer(stock_noisy, pipe.scheduler.timesteps, stock_text.float(), return_dict=False)[0]
    # the scheduler steps along the prediction to sigma 0: the step is right if it ends at the clean latents
    end = pipe.scheduler.step(predicted, pipe.scheduler.timesteps[0], stock_noisy, return_dict=False)[0]
    clean = (stock_noisy - sigma * noise) / (1 - sigma)
    stock_loss = ((end - clean) / sigma).square().mean()
    stock_loss.backward()
    torch.testing.assert_close(loss, stock_loss, rtol=1e-4, atol=0)
    for parameter, gradient in zip(module.trainable_modules(), gradients, strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-3, atol=1e-5)


def test_the_family_has_the_loss_of_the_example(example: Any, model: Path, dataset: Any) -> None:
    """At the same draws: `[model] type = "wan"` and the script train alike."""
    item = dataset[0]
    family = family_named("wan")
    keys = {"diffusers_path": str(model), "shift": 5.0, "timestep_sample_method": "uniform", "text_max_length": 512}
    table = ModelConfig.model_validate({"type": "wan", **keys}, context={"base": model})
    with family.encoding.encoders(table, torch.device("cpu"), 8) as encoders:
        values = encoders.encode_images(item["video"][None], flip=False) | encoders.encode_captions([item["prompt"]])
        encoders.synchronize()
    preparer = StockPreparer(0, table, LatentScale.of_folder(model), ragged={"text": 512})
    length = torch.tensor([len(values["text.tokens"])])
    rows = {"moments": values["moments"][:, 0], "text": values["text.tokens"][None], "text.length": length}
    rows |= {"epoch": torch.tensor([2]), "repeat": torch.tensor([0]), "sample_id": torch.tensor([7])}
    clean = preparer.prepare_clean(rows)
    noise = torch.empty(1, *preparer.scale.latent_shape(clean["moments"].shape))
    fill_normals(stream(0, "noise", 2, 0, 7), noise.numpy()[0])
    latents = preparer.scale.draw(clean["moments"], None)  # of the posterior's mean, as in the script
    batch = clean.with_values({"noisy": interpolate(latents, noise, clean["t"])})
    module = example.Wan(model)
    with torch.no_grad():
        expected = module({"data": item, "data_id": 7, "epoch": 2, "repeat": 0})
        predicted = family.denoise(module.transformer, batch, 1.0)
    # moments are stored in float16 and text in bfloat16
    torch.testing.assert_close(flow_loss(predicted, velocity(latents, noise))[0], expected, rtol=2e-3, atol=0)


def test_latents_decode_to_the_clip(example: Any, model: Path, dataset: Any) -> None:
    """The stock pipeline's decoding undoes our normalisation."""
    module, item = example.Wan(model), dataset[0]
    with torch.no_grad():
        latents = module.inputs(module.preparer().prepare_inputs(rows_of(item)))["latents"]
        pixels = torch.from_numpy(item["video"]).permute(3, 0, 1, 2)[None] / 127.5 - 1
        raw = module.vae.encode(pixels).latent_dist.mode()
        expected = module.vae.decode(raw).sample
        config = module.vae.config
        mean, std = (torch.tensor(values).view(1, 4, 1, 1, 1) for values in (config.latents_mean, config.latents_std))
        decoded = module.vae.decode(latents * std + mean).sample
    torch.testing.assert_close(decoded, expected, rtol=0, atol=1e-4)


# --- end to end ----------------------------------------------------------------------------------


def test_unusable_clips_are_left_out(dataset: Any, processed: Path) -> None:
    reasons = {reject.key.split("/")[1][0]: reject.reason for reject in dataset.rejects}
    assert reasons == {"4": "too_short", "5": "broken_video"}
    lines = (processed / "rejects.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["reason"] for line in lines] == ["too_short", "broken_video"]
    assert len(tasks.ProcessedDataset(processed)) == len(dataset) == 4
    buckets = {tasks.ProcessedDataset(processed).bucket_of(index) for index in range(4)}
    assert buckets == {"(5, 48, 32)", "(5, 32, 48)"}, "batches of one shape, without an argument"


def test_two_stages_equal_one(example: Any, model: Path, dataset: Any, trained: Any, tmp_path: Path) -> None:
    train(example.Wan(model), dataset, tmp_path, max_steps=2)
    assert losses(tmp_path) == losses(trained[1])[:2]


def test_resume_is_exact(example: Any, model: Path, processed: Path, trained: Any, tmp_path: Path) -> None:
    data = tasks.ProcessedDataset(processed)
    train(example.Wan(model), data, tmp_path, max_steps=3)
    train(example.Wan(model), data, tmp_path, resume=True)
    assert losses(tmp_path) == losses(trained[1])
    name = f"step-{STEPS}.safetensors"
    assert (tmp_path / name).read_bytes() == (trained[1] / name).read_bytes()


def test_the_stock_pipeline_draws_the_same_video(model: Path, trained: Any, tmp_path: Path) -> None:
    module, out = trained
    pipe = stock(model)
    plain = sample(pipe)
    pipe.load_lora_weights(out, weight_name=f"step-{STEPS}.safetensors")
    tuned = sample(pipe)
    np.testing.assert_allclose(tuned, sample(module.pipe), atol=1e-5)
    assert abs(tuned - plain).max() > 1e-3, "the LoRA changes the video"
    path = tasks.write_video(tmp_path / f"sample{SUFFIX}", (255 * tuned).round().astype(np.uint8), 16)
    with path.open("rb") as file:
        assert probe_video(file, (FRAMES,), 16).frames == FRAMES


def test_all_weights(example: Any, model: Path, processed: Path, tmp_path: Path) -> None:
    data = tasks.ProcessedDataset(processed)
    module = train(example.Wan(model, full=True), data, tmp_path, max_steps=2, save_steps=2)
    transformer = WanTransformer3DModel.from_config(module.transformer.config)
    transformer.load_state_dict(load_file(tmp_path / "step-2.safetensors"))
    pipe = stock(model)
    plain = sample(pipe)
    pipe.transformer = transformer
    np.testing.assert_allclose(sample(pipe), sample(module.pipe), atol=1e-5)
    assert abs(sample(pipe) - plain).max() > 1e-3


# --- ComfyUI -------------------------------------------------------------------------------------


def test_a_lora_under_comfyui_names(model: Path, trained: Any, tmp_path: Path) -> None:
    """ComfyUI reads ``diffusion_model.<name in its model>.lora_A.weight``; diffusers reads the same file."""
    tensors = load_file(trained[1] / f"step-{STEPS}.safetensors")
    converted = tasks.wan_to_comfyui(tensors)
    layers = {name.rpartition(".lora_")[0] for name in converted}
    parts = [f"{kind}.{part}" for kind in ("self_attn", "cross_attn") for part in "qkvo"] + ["ffn.0", "ffn.2"]
    assert layers == {f"diffusion_model.blocks.{block}.{part}" for block in range(2) for part in parts}
    save_file(converted, tmp_path / "comfyui.safetensors")
    one, other = stock(model), stock(model)
    one.load_lora_weights(trained[1], weight_name=f"step-{STEPS}.safetensors")
    other.load_lora_weights(tmp_path, weight_name="comfyui.safetensors")
    np.testing.assert_array_equal(sample(one), sample(other))


def test_all_weights_under_comfyui_names() -> None:
    """diffusers' conversion of original checkpoints, whose names ComfyUI keeps, gives back every name."""
    image = {"image_dim": 16, "added_kv_proj_dim": 24}
    sizes = {"num_attention_heads": 2, "attention_head_dim": 12, "num_layers": 2, "text_dim": 32, "ffn_dim": 48}
    state = WanTransformer3DModel(**sizes, **image).state_dict()
    converted = tasks.wan_to_comfyui(state)
    assert {"head.modulation", "blocks.1.modulation", "time_projection.1.weight"} <= converted.keys()
    back = convert_wan_transformer_to_diffusers(dict(converted))
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], state[name]) for name in state)


# --- the script ----------------------------------------------------------------------------------


def test_the_script_runs_as_it_is(model: Path, clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ("--frames", FRAMES, "--side", SIDE, "--epochs", 1)
    for stage in ("process", "train"):
        arguments = map(str, ("wan_task.py", model, clips, tmp_path, "--stage", stage, *options))
        monkeypatch.setattr(sys, "argv", list(arguments))
        runpy.run_path(str(ROOT / "examples" / "wan_task.py"), run_name="__main__")
    assert len(losses(tmp_path)) == 4
    assert (tmp_path / "epoch-0.safetensors").is_file()


def test_the_script_stays_short() -> None:
    assert len((ROOT / "examples" / "wan_task.py").read_text(encoding="utf-8").splitlines()) <= 60
