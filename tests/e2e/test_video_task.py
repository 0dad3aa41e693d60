"""A task on a folder of short clips, end to end: a LoRA of a video model, which its stock pipeline loads."""

import json
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel
from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers
from transformers import AutoTokenizer, UMT5Config, UMT5EncoderModel

from sd3_light import tasks
from sd3_light.assets import DEMO
from sd3_light.config import ModelConfig
from sd3_light.core.registry import family_named
from sd3_light.encoding.vae import LatentScale
from sd3_light.families.base import StockFamily
from sd3_light.families.stock.prepare import StockPreparer
from sd3_light.flow.objective import flow_loss, interpolate, velocity
from sd3_light.randomness import fill_normals, stream
from sd3_light.runlog import read_log
from sd3_light.sources.video import has_av, probe_video
from tests.unit.sources.videos import encode, encode_gif, numbered

ROOT = Path(__file__).parents[2]
FRAMES, SIDE, STEPS = 5, 32, 6
SUFFIX = ".mp4" if has_av() else ".gif"


def bit_for_bit() -> AbstractContextManager[None]:
    """Return a context without oneDNN, whose 3D convolutions may round the first call differently from later ones."""
    context: AbstractContextManager[None] = torch.backends.mkldnn.flags(enabled=False)
    return context


@tasks.unit("text", uses="text_encoder")
def encode_text(module: Any, prompt: str) -> Any:
    options = {"do_classifier_free_guidance": False, "max_sequence_length": 512}
    return module.pipe.encode_prompt(prompt, **options)[0][0]


class Wan(tasks.DiffusionTrainingModule):
    """A task's module over the stock pipeline."""

    def __init__(self, folder: Path) -> None:
        pipe: Any = stock(folder)
        units = [tasks.EncodeVideo(sample=False), encode_text, tasks.DrawLatent()]
        loss = tasks.FlowMatchSFTLoss(timestep_sample_method="uniform", shift=5.0)
        super().__init__(pipe.transformer, units, loss, reads=("text",))
        self.pipe, self.vae, self.text_encoder = pipe, pipe.vae, pipe.text_encoder
        self.transformer.enable_gradient_checkpointing()
        self.train_adapter(rank=16, target_modules=["attn1.to_*", "attn2.to_*", "ffn.net.*"])

    def denoise(self, noisy: Any, t: Any, inputs: Any) -> Any:
        return self.transformer(noisy, 1000 * t, inputs["text"].to(noisy.dtype), return_dict=False)[0]


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
def processed(model: Path, dataset: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    logger = tasks.ModelLogger(tmp_path_factory.mktemp("wan") / "processed")
    with bit_for_bit():
        return tasks.launch_data_process_task(Accelerator(), dataset, Wan(model), logger, num_workers=0)


def train(module: Any, data: Any, out: Path, converter: Any = None, **settings: Any) -> Any:
    """Train with batches of two clips of one shape."""
    defaults = {"num_epochs": 10, "max_steps": STEPS, "batch_size": 2, "num_workers": 0, "save_steps": STEPS}
    logger = tasks.ModelLogger(out, state_dict_converter=converter)
    with bit_for_bit():
        tasks.launch_training_task(Accelerator(), data, module, logger, 1e-2, **(defaults | settings))
    return module


@pytest.fixture(scope="module")
def trained(model: Path, processed: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """The module after an uninterrupted training on processed clips, and its folder."""
    out = tmp_path_factory.mktemp("wan") / "out"
    return train(Wan(model), tasks.ProcessedDataset(processed), out), out


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


def test_unusable_clips_are_left_out(dataset: Any, processed: Path) -> None:
    reasons = {reject.key.split("/")[1][0]: reject.reason for reject in dataset.rejects}
    assert reasons == {"4": "too_short", "5": "broken_video"}
    lines = (processed / "rejects.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["reason"] for line in lines] == ["too_short", "broken_video"]
    assert len(tasks.ProcessedDataset(processed)) == len(dataset) == 4
    buckets = {tasks.ProcessedDataset(processed).bucket_of(index) for index in range(4)}
    assert buckets == {"(5, 48, 32)", "(5, 32, 48)"}, "batches of one shape, without an argument"


def test_two_stages_equal_one(model: Path, dataset: Any, trained: Any, tmp_path: Path) -> None:
    train(Wan(model), dataset, tmp_path, max_steps=2)
    assert losses(tmp_path) == losses(trained[1])[:2]


def test_resume_is_exact(model: Path, processed: Path, trained: Any, tmp_path: Path) -> None:
    data = tasks.ProcessedDataset(processed)
    train(Wan(model), data, tmp_path, max_steps=3)
    train(Wan(model), data, tmp_path, resume=True)
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


def test_the_family_has_the_loss_of_the_task(model: Path, dataset: Any) -> None:
    """At the same draws: `[model] type = "wan"` and a task train alike."""
    item = dataset[0]
    family = family_named("wan")
    assert isinstance(family, StockFamily)
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
    latents = preparer.scale.draw(clean["moments"], None)  # of the posterior's mean, as in the task
    batch = clean.with_values({"noisy": interpolate(latents, noise, clean["t"])})
    module = Wan(model)
    with torch.no_grad():
        expected = module({"data": item, "data_id": 7, "epoch": 2, "repeat": 0})
        predicted = family.denoise(module.transformer, batch, 1.0)
    # moments are stored in float16 and text in bfloat16
    torch.testing.assert_close(flow_loss(predicted, velocity(latents, noise))[0], expected, rtol=2e-3, atol=0)


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
