"""Reference images with SD3: the velocity of training, of `pipeline.py` and of `sample`; cache, training and export."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from PIL import Image
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from sd3_light.assets import DEMO
from sd3_light.check import verb as check
from sd3_light.checkpoint.store import checkpoint_name
from sd3_light.config import SIZES, ConfigFaults, TrainConfig, UserError
from sd3_light.config.schema_tables import MetricsConfig
from sd3_light.core.batch import Batch
from sd3_light.core.cost import Compute, Tokens
from sd3_light.core.registry import family_named, starting_weights
from sd3_light.core.sampling import ImageRequest
from sd3_light.data.store import LocalStore
from sd3_light.data.stream import CachedDataset
from sd3_light.encoding.vae import LatentScale, load_vae
from sd3_light.engines import Launch
from sd3_light.evaluate.truths import load_truths
from sd3_light.export.open_pipeline import open_pipeline
from sd3_light.families.sd3.fast.choice import why_stock_by_config
from sd3_light.families.sd3.module import SD3TrainingModule
from sd3_light.families.sd3.real_pipeline import RealTextPipeline, seeing
from sd3_light.families.sd3.sample_texts import TextPolicy
from sd3_light.sample.generate import generate
from sd3_light.sample.in_training import SampledCache, Sampler
from sd3_light.train.measurement import caption_requests
from sd3_light.train.verb import Resume
from sd3_light.world.edits import AFTER, BEFORE, draw_edits, write_edits
from tests.checkpoints import same, tensors
from tests.project import Project
from tests.stock_project import LORA
from tests.unit.families.sd3.test_module import prepared, transformer

CPU = torch.device("cpu")
EDITS = 16
DATA = f"""
size_buckets = [[64, 64]]

[[directory]]
path = "pairs/{AFTER}"
references = ["pairs/{BEFORE}"]
"""


@pytest.fixture
def project(fresh_project: Project) -> Project:
    write_edits(fresh_project.folder / "pairs", draw_edits(EDITS, 1, held_out=False), 64)
    fresh_project.data(DATA)
    text = fresh_project.train_toml.read_text(encoding="utf-8")
    fresh_project.train_toml.write_text(text.replace("[model]", "[model]\nreferences = 1"), encoding="utf-8")
    return fresh_project


def seen(batch: Batch, count: int) -> Batch:
    """Return the batch with references."""
    generator = torch.Generator().manual_seed(5)
    images = {f"reference.{at}": torch.randn(batch["noisy"].shape, generator=generator) for at in range(count)}
    return batch.with_values(images)


def pipeline(denoiser: Any, parts: Path, **settings: Any) -> Any:
    """Return an export's pipeline without text encoders."""
    frozen = dict.fromkeys(f"{name}{number}" for name in ("text_encoder", "tokenizer") for number in ("", "_2", "_3"))
    vae = load_vae(parts, CPU, torch.float32)
    pipe = RealTextPipeline(denoiser, FlowMatchEulerDiscreteScheduler(), vae, **frozen, **settings)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("tokens", ["padded", "real"])
def test_the_velocity_is_that_of_the_exports_pipeline(
    config: Callable[..., TrainConfig], demo_parts: Path, tokens: Any, count: int
) -> None:
    """One step of the pipeline, from noise at t = 1 to the latents that the velocity leads to."""
    denoiser = transformer()
    batch = seen(prepared(), count).with_values({"t": torch.ones(2)})
    host = {"prompt.length": torch.tensor([4, 9])} if tokens == "real" else {}
    batch = replace(batch, host=host)
    module = SD3TrainingModule(denoiser, config(model={"text_tokens": tokens, "references": count}))
    with torch.no_grad():
        velocity = module.denoise(batch)
        without = module.denoise(batch.with_values({}, [f"reference.{at}" for at in range(count)]))
    pipe = pipeline(denoiser, demo_parts, text_tokens=tokens, references=count)
    attention = {"joint_attention_kwargs": {"text_lengths": host["prompt.length"]}} if host else {}
    drawn = pipe(
        image=[batch[f"reference.{at}"] for at in range(count)],
        prompt_embeds=batch["prompt"],
        pooled_prompt_embeds=batch["pooled"],
        latents=batch["noisy"],
        width=48,
        height=32,
        num_inference_steps=1,
        guidance_scale=1.0,
        output_type="latent",
        **attention,
    ).images
    torch.testing.assert_close(velocity, batch["noisy"] - drawn, rtol=1e-5, atol=1e-5)
    assert (velocity - without).abs().max() > 1e-3


def test_the_order_of_references_matters_and_other_threads_do_not_see_them(
    config: Callable[..., TrainConfig], demo_parts: Path
) -> None:
    from concurrent.futures import ThreadPoolExecutor

    denoiser = transformer()
    module = SD3TrainingModule(denoiser, config(model={"references": 2}))
    batch = seen(prepared(), 2)
    turned = batch.with_values({"reference.0": batch["reference.1"], "reference.1": batch["reference.0"]})
    assert (module.denoise(batch) - module.denoise(turned)).abs().max() > 1e-3
    inputs = {"encoder_hidden_states": batch["prompt"], "pooled_projections": batch["pooled"]}

    def velocity() -> Tensor:
        with torch.no_grad():
            output: Tensor = denoiser(batch["noisy"], timestep=1000 * batch["t"], **inputs, return_dict=False)[0]
        return output

    plain = velocity()
    expected = module.denoise(batch)
    with seeing(denoiser, [batch["reference.0"], batch["reference.1"]]), ThreadPoolExecutor(1) as pool:
        assert torch.equal(pool.submit(velocity).result(), plain)
        torch.testing.assert_close(velocity(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(velocity(), plain)
    pipe = pipeline(transformer(), demo_parts, references=1)
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (32, 48, 3), dtype=np.uint8))
    pixels = torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1)[None].float() / 127.5 - 1
    with torch.no_grad():
        (latents,) = pipe.encode_references(image, 48, 32)
        moments = pipe.vae.encode(pixels).latent_dist.parameters
    torch.testing.assert_close(latents, LatentScale.of_folder(demo_parts).draw(moments, None))
    with pytest.raises(ValueError, match=r"sees 1 reference image\(s\), not 2"):
        pipe.encode_references([image, image], 48, 32)


def test_the_cost_counts_the_tokens_of_references(project: Project) -> None:
    """FLOPs by torch's own count of a pass with a reference."""
    loaded = project.load()
    model = loaded.train.model
    sd3 = family_named("sd3")
    start = starting_weights(model)
    module = sd3.training.model(sd3.weights.load(start, 0), loaded.train, fast=False)
    cost = sd3.cost(start, model)
    tokens = Tokens(16, 32)
    values = {"prompt": torch.randn(1, 32, 256), "pooled": torch.randn(1, 224), "t": torch.rand(1)}
    latents = torch.randn(2, 1, 16, 8, 8)
    batch = Batch(1, {"noisy": latents[0], **values, "reference.0": latents[1]})
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        module.denoise(batch)
    assert cost.batch_tokens(batch) == {tokens: 1}
    assert cost.forward_flops(tokens) == counter.get_total_flops()
    plain = sd3.cost(start, model.model_copy(update={"references": 0}))
    saved = [
        sum(block.saved for block in each.sample_bytes(tokens, Compute("stock", "float32")).blocks)
        for each in (cost, plain)
    ]
    assert saved[0] > 1.2 * saved[1]


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("model.references=0", "SD3 sees no image beside the text; got 1; write model.references, or remove it"),
        ("model.references=2", r"SD3 sees 2 image\(s\) beside the text, and this names 1"),
        ("model.references=9", "9"),
        ("model.routing={share=0.5, first_block=2, last_block=2}", "references would skip the routed blocks"),
    ],
)
def test_faults_of_the_config(project: Project, key: str, message: str) -> None:
    with pytest.raises(ConfigFaults, match=message):
        check.load(project.train_toml, [key])


def test_an_image_needs_all_references_or_none(project: Project) -> None:
    policy = TextPolicy(16, "empty", "padded", references=2)
    assert [policy.references_fault(count) is None for count in range(4)] == [True, False, True, False]
    assert policy.references_fault(1) == "1 references: this model sees 2"
    assert "sees no image" in str(TextPolicy(16, "empty", "padded").references_fault(1))
    train = project.load("fast=true").train
    assert why_stock_by_config(train, SIZES["tiny2"]) == "the fast blocks see no references"
    truths = load_truths(project.data_toml, 5)
    before = project.folder / "pairs" / BEFORE
    assert [truth.references for truth in truths] == [(before / truth.path.name,) for truth in truths]
    table = MetricsConfig.model_construct(steps=3, guidance=1.0)
    assert [request.references for request in caption_requests(table, truths)] == [each.references for each in truths]


def run(project: Project, name: str, *keys: str, resume: Resume | None = None) -> dict[str, Tensor]:
    """Train, and return all tensors of the last checkpoint."""
    project.train(f'output_dir="{name}"', *keys, resume=resume)
    last = max((project.folder / name / "checkpoints").glob("step-*"))
    return tensors(last)


@pytest.mark.parametrize("tables", ["", LORA], ids=["full", "lora"])
def test_a_run_resumes_exactly_from_shards_and_from_memory(project: Project, unproven: None, tables: str) -> None:
    if tables:
        continued(project)
    project.train_toml.write_text(project.train_toml.read_text(encoding="utf-8") + tables, encoding="utf-8")
    keys = ("model.reference_dropout_prob=0.3",)
    whole = run(project, "whole", *keys)
    run(project, "parts", "max_steps=2", *keys)
    resumed = run(project, "parts", 'cache_residence="host"', *keys, resume=Resume())
    assert same(whole, resumed)
    if tables:
        card = max((project.folder / "whole" / "exports").glob("step-*")) / "README.md"
        assert "sd3-light sample --reference" in card.read_text(encoding="utf-8")
    others = run(project, "kept")
    assert any(not torch.equal(tensor, others[name]) for name, tensor in whole.items())


def continued(project: Project) -> None:
    """Let the project continue the demo's base."""
    text = project.train_toml.read_text(encoding="utf-8").replace(str(project.model), str(DEMO))
    own = ("train_type", "init", "size")
    lines = [line for line in text.splitlines() if line.partition(" =")[0] not in own]
    project.train_toml.write_text("\n".join(lines) + "\n", encoding="utf-8")


@pytest.mark.parametrize("tokens", ["padded", "real"])
def test_an_export_is_proven_with_a_reference_and_draws_with_one(project: Project, tokens: str) -> None:
    project.train("save_every_n_steps=4", f'model.text_tokens="{tokens}"')
    export = project.run / "exports" / checkpoint_name(4)
    index = json.loads((export / "model_index.json").read_text(encoding="utf-8"))
    assert (index["_class_name"], index["references"], index["text_tokens"]) == ("StableDiffusion3Pipeline", 1, tokens)
    proof = json.loads((export / "sd3_light.json").read_text(encoding="utf-8"))
    assert proof["text"]["references"] == 1
    assert "pipeline.py" in (export / "README.md").read_text(encoding="utf-8")
    pipe, policy = open_pipeline(export, CPU)
    before = project.folder / "pairs" / BEFORE
    paths = [before / f"{number:06d}.png" for number in range(3)]
    requests = [ImageRequest("make red circle blue", 3, 64, 64, steps=2, references=(path,)) for path in paths[:2]]
    together = generate(pipe, requests, policy, (28, 2.0))
    alone = generate(pipe, requests, policy, (28, 2.0), exact=True, batch_size=2)
    plain = generate(pipe, [replace(requests[0], references=())], policy, (28, 2.0))
    for first, second in zip(together, alone, strict=True):
        assert np.abs(np.asarray(first, int) - np.asarray(second, int)).max() <= 1
    assert len({image.tobytes() for image in (*alone, *plain)}) == 3
    with pytest.raises(UserError, match="2 references: this model sees 1"):
        generate(pipe, [replace(requests[0], references=tuple(paths[:2]))], policy)


def test_held_out_pairs_are_evaluated_with_their_references(project: Project, unproven: None) -> None:
    project.data(DATA.replace("[[directory]]", "validation = true\n\n[[directory]]"))
    project.train("eval_every_n_steps=2")
    evaluated = project.events("eval")
    assert {event["step"] for event in evaluated} == {2, 4}
    assert all(np.isfinite(event["flow"]) for event in evaluated)


def test_sample_grids_see_the_reference_of_each_image(project: Project, unproven: None) -> None:
    """The images of a run's weights are those of its export, also two sizes beside one without a reference."""
    before = project.folder / "pairs" / BEFORE
    images = [
        {"references": [str(before / "000000.png")]},
        {"references": [str(before / "000001.png")]},
        {"references": [str(before / "000001.png")], "size": [96, 64]},
        {},
    ]
    text = project.train_toml.read_text(encoding="utf-8") + "[sampling]\nevery_n_steps = 4\nsteps = 2\nguidance = 2.0\n"
    for image in images:
        lines = "".join(f"{key} = {json.dumps(value)}\n" for key, value in image.items())
        text += f'[[sampling.image]]\nprompt = "make red circle blue"\n{lines}'
    project.train_toml.write_text(text, encoding="utf-8")
    project.train("optimizer.lr=0.05")
    config = project.load().train
    data = CachedDataset(LocalStore(project.cache))
    sampler = Sampler.of_config(config, SampledCache(project.cache, data, data.buckets[0]), Launch(), CPU)
    export = project.run / "exports" / checkpoint_name(4)
    pipe, policy = open_pipeline(export, CPU)
    module = SD3TrainingModule(pipe.transformer, config)
    drawn = {number: np.asarray(image, int) for number, image in sampler.draw(module.denoise)}
    expected = [np.asarray(image, int) for image in generate(pipe, sampler.requests, policy)]
    without = [replace(request, references=()) for request in sampler.requests]
    plain = [np.asarray(image, int) for image in generate(pipe, without, policy)]
    for number in range(4):
        # text is rounded to bfloat16 in the cache
        distance = np.abs(drawn[number] - expected[number]).mean()
        assert distance < 0.5
        if number < 3:
            assert np.abs(drawn[number] - plain[number]).mean() > 5 * distance


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ('["nowhere.png"]', r"sampling.image\[0\].references: no such file"),
        ('["pairs/before/000000.png", "pairs/before/000001.png"]', r"SD3 sees 1 image\(s\) beside the text; got 2"),
    ],
)
def test_faults_of_sample_images(project: Project, values: str, message: str) -> None:
    text = project.train_toml.read_text(encoding="utf-8") + "[sampling]\nevery_n_steps = 4\n"
    text += f'[[sampling.image]]\nprompt = "x"\nreferences = {values}\n'
    project.train_toml.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigFaults, match=message):
        check.load(project.train_toml)
