"""Reference images with Flux Kontext: from folders to the cache, to batches, and to the stock pipeline's velocity."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from sd3_light.assets import DEMO
from sd3_light.check import verb as check
from sd3_light.config import ConfigFaults, UserError
from sd3_light.core.batch import Batch
from sd3_light.core.columns import Bucket
from sd3_light.core.cost import Compute, Tokens
from sd3_light.core.registry import family_named
from sd3_light.core.sampling import ImageRequest
from sd3_light.data.manifest import REJECTS_FILE, SHARDS, Manifest
from sd3_light.data.reader import ShardReader
from sd3_light.data.shards import read_origins
from sd3_light.encoding.vae import LatentScale, load_vae
from sd3_light.families.stock.inputs import StockInputs
from sd3_light.flow.packing import pack_latents, unpack_latents
from sd3_light.new import verb as new
from sd3_light.randomness import first_words, occurrence_words, uniforms
from sd3_light.sample.generate import generate
from sd3_light.system import Gpu
from sd3_light.world import write_dataset
from tests.checkpoints import tensors
from tests.families import TinyFolder
from tests.made_up_cache import LABEL, write_cache
from tests.project import Project
from tests.stock import open_stock
from tests.stock_project import LORA, write_project
from tests.unit.families import test_stock_cache as caches
from tests.unit.families.test_stock_families import SEED, Tiny
from tests.unit.families.test_stock_training import LAST, require_exact_resume, run

NAME = "flux_kontext"
GPU = (Gpu("a GPU", 24 * 2**30),)


@pytest.fixture
def tiny(tiny_folder: TinyFolder) -> Tiny:
    return Tiny(NAME, tiny_folder(NAME))


# --- the velocity --------------------------------------------------------------------------------


def test_the_velocity_is_that_of_the_stock_pipeline(tiny: Tiny) -> None:
    """One step of the pipeline, from noise at t = 1 to the latents that the velocity leads to."""
    pipe = open_stock(tiny.folder)
    generator = torch.Generator().manual_seed(0)
    noise, reference = (torch.randn(2, 4, 8, 12, generator=generator) for _ in range(2))
    text = {"text": torch.randn(2, 7, 32, generator=generator), "pooled": torch.randn(2, 32, generator=generator)}
    batch = Batch(2, {"noisy": noise, "t": torch.ones(2), **text, "reference.0": reference})
    with torch.no_grad():
        drawn = pipe(
            image=reference,
            prompt_embeds=text["text"],
            pooled_prompt_embeds=text["pooled"],
            latents=pack_latents(noise),
            height=64,
            width=96,
            num_inference_steps=1,
            guidance_scale=2.5,
            output_type="latent",
            max_area=64 * 96,
            _auto_resize=False,
        ).images
        velocity = tiny.family.denoise(pipe.transformer, batch, 2.5)
        without = tiny.family.denoise(pipe.transformer, batch.with_values({}, ["reference.0"]), 2.5)
    torch.testing.assert_close(velocity, noise - unpack_latents(drawn, 8, 12), rtol=1e-5, atol=1e-5)
    assert (velocity - without).abs().max() > 1e-3


def test_images_are_drawn_with_the_reference_as_it_is_cached(tiny: Tiny, tmp_path: Path) -> None:
    pipe = open_stock(tiny.folder)
    pixels = np.random.default_rng(0).integers(0, 256, (80, 160, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "before.png")
    policy = StockInputs(tiny.family, tiny.folder, {"text_max_length": 12})
    request = ImageRequest("add a dog", 3, 96, 64, steps=2, guidance=2.5, references=(tmp_path / "before.png",))
    drawn, without = generate(pipe, [request, replace(request, references=())], policy)
    reference = Image.fromarray(pixels).resize((96, 64), Image.Resampling.LANCZOS, box=(20, 0, 140, 80))
    expected = pipe(
        prompt="add a dog",
        image=reference,
        generator=torch.Generator("cpu").manual_seed(3),
        max_sequence_length=12,
        height=64,
        width=96,
        num_inference_steps=2,
        guidance_scale=2.5,
        max_area=64 * 96,
        _auto_resize=False,
    ).images[0]
    assert np.array_equal(np.asarray(drawn), np.asarray(expected))
    assert not np.array_equal(np.asarray(drawn), np.asarray(without))
    with pytest.raises(UserError, match="2 references: this model sees 1"):
        generate(pipe, [replace(request, references=2 * request.references)], policy)
    with pytest.raises(UserError, match=r"none\.png cannot be read as an image"):
        generate(pipe, [replace(request, references=(tmp_path / "none.png",))], policy)


def test_flux2_sees_several_references_in_their_order(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    """One step of the stock pipeline, which has the frames 10 and 20 for them; the images of a grid are its own."""
    flux2 = Tiny("flux2", tiny_folder("flux2"))
    pipe = open_stock(flux2.folder)
    generator = torch.Generator().manual_seed(0)
    pixels = np.random.default_rng(0).integers(0, 256, (2, 64, 96, 3), dtype=np.uint8)
    files = tuple(tmp_path / f"{number}.png" for number in range(2))
    for file, image in zip(files, pixels, strict=True):
        Image.fromarray(image).save(file)
    scale = LatentScale.of_folder(flux2.folder)
    with flux2.family.encoding.encoders(flux2.config.model, torch.device("cpu"), 1) as encoders:
        moments = encoders.encode_images(pixels, flip=False)["moments"]
        encoders.synchronize()
    seen = scale.draw(moments[:, 0], None)
    noise = torch.randn(1, 16, 4, 6, generator=generator)
    text = torch.randn(1, 7, 48, generator=generator)
    noisy = unpack_latents(noise.flatten(2).transpose(1, 2), 8, 12)
    images = {f"reference.{number}": seen[number : number + 1] for number in range(2)}
    batch = Batch(1, {"noisy": noisy, "t": torch.ones(1), "text": text, **images})
    with torch.no_grad():
        velocity = flux2.family.denoise(pipe.transformer, batch, 1.0)
        turned = batch.with_values({"reference.0": seen[1:], "reference.1": seen[:1]})
        swapped = flux2.family.denoise(pipe.transformer, turned, 1.0)
        drawn = pipe(
            image=[Image.open(file) for file in files],
            prompt_embeds=text,
            latents=noise,
            height=64,
            width=96,
            num_inference_steps=1,
            guidance_scale=1.0,
            output_type="latent",
        ).images
    expected = scale.denormalise(noisy - velocity)
    torch.testing.assert_close(drawn, expected, rtol=1e-3, atol=1e-3)
    assert (velocity - swapped).abs().max() > 1e-4
    policy = StockInputs(flux2.family, flux2.folder, {"text_max_length": 12})
    request = ImageRequest("add a dog", 3, 96, 64, steps=2, guidance=1.0, references=files)
    requests = [
        request,
        replace(request, references=files[::-1]),
        replace(request, seed=4),
        replace(request, references=()),
    ]
    together = generate(pipe, requests, policy)
    for each, image in zip(requests, together, strict=True):
        alone = np.asarray(generate(pipe, [each], policy)[0], int)
        assert np.abs(alone - np.asarray(image, int)).max() <= 1
    assert len({image.tobytes() for image in together}) == 4


def test_the_cost_counts_the_tokens_of_references(tiny: Tiny, tiny_folder: TinyFolder) -> None:
    """FLOPs by torch's own count of a pass with a reference; those of Flux are fewer."""
    model = tiny.config.model
    denoiser = tiny.family.weights.load(tiny.start, SEED)
    cost = tiny.family.cost(tiny.start, model)
    tokens = Tokens(128, 12)
    latents = torch.randn(2, 1, 4, 32, 16)
    text = {column.name: torch.randn(1, *column.shape) for column in tiny.family.text_columns(model, tiny.folder)}
    batch = Batch(1, {"noisy": latents[0], "t": torch.rand(1), **text, "reference.0": latents[1]})
    counter = FlopCounterMode(display=False)
    with counter, sdpa_kernel(SDPBackend.MATH):
        tiny.family.denoise(denoiser, batch, 1.0)
    assert cost.batch_tokens(batch) == {tokens: 1}
    assert cost.forward_flops(tokens) == pytest.approx(counter.get_total_flops(), rel=0.001)
    flux = Tiny("flux", tiny_folder("flux"))
    plain = flux.family.cost(flux.start, flux.config.model)
    assert cost.forward_flops(tokens) > 1.5 * plain.forward_flops(tokens)
    compute = Compute("stock", "float32")
    saved = [sum(block.saved for block in each.sample_bytes(tokens, compute).blocks) for each in (cost, plain)]
    assert saved[0] > 1.5 * saved[1]


# --- the cache -----------------------------------------------------------------------------------


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return write_edits(tmp_path / "project", NAME)


def write_edits(folder: Path, family: str) -> Project:
    """Write a project of images with references."""
    project = caches.write_project(folder, family, extra='references = ["before"]\n')
    (project.folder / "before").mkdir()
    for number in range(caches.COUNT):
        write_reference(project, number, number)
    return project


def write_reference(project: Project, number: int, seed: int) -> None:
    pixels = np.random.default_rng(seed).integers(0, 256, (64, 80, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(project.folder / "before" / f"{number}.png")


def stored(project: Project, column: str) -> dict[str, Tensor]:
    values = {}
    for entry in Manifest.load(project.cache).shards:
        reader = ShardReader(project.cache / SHARDS / entry.file, entry)
        for row, origin in enumerate(read_origins(reader.path.with_suffix(".arrow"))):
            values[Path(origin.key).stem] = reader.value(column, row)
    return values


def changed(project: Project, before: dict[str, dict[str, Tensor]]) -> set[tuple[str, str]]:
    """Return the columns and names of values that were others before."""
    return {
        (column, name)
        for column, values in before.items()
        for name, value in stored(project, column).items()
        if not torch.equal(value, values[name])
    }


def test_references_are_encoded_in_the_bucket_of_images_and_alone(project: Project, tmp_path: Path) -> None:
    assert caches.counted(caches.build(project)) == (2 * caches.COUNT, caches.COUNT)
    vae = load_vae(project.model, torch.device("cpu"), torch.float32)
    values = stored(project, "moments.reference.0")
    for name in ("0", "5"):
        pixels = np.asarray(Image.open(project.folder / "before" / f"{name}.png"))[:, 8:72]
        image = torch.from_numpy(pixels.copy()).permute(2, 0, 1)[None].float() / 127.5 - 1
        with torch.no_grad():
            expected = vae.encode(image).latent_dist.parameters[0]
        torch.testing.assert_close(values[name][0].float(), expected, rtol=1e-2, atol=1e-2)
    before = {column: stored(project, column) for column in ("moments", "moments.reference.0")}
    write_reference(project, 3, 100)
    several = project.copy(tmp_path / "several")
    report = caches.build(project)
    assert caches.counted(report) == (1, 0)
    assert report.values.copied_images == 2 * (caches.COUNT - report.reused) - 1
    assert changed(project, before) == {("moments.reference.0", "3")}
    assert caches.counted(caches.build(project)) == (0, 0)
    caches.in_two_processes(several)
    assert caches.shards(several) == caches.shards(project)
    (project.images / "4.txt").write_text("another instruction")
    assert caches.counted(caches.build(project)) == (0, 1)


def test_a_cache_of_flux_gets_references_alone(tmp_path: Path) -> None:
    project = caches.write_project(tmp_path / "project", "flux")
    assert caches.counted(caches.build(project)) == (caches.COUNT, caches.COUNT)
    index = project.model / "model_index.json"
    index.write_text(index.read_text().replace('"FluxPipeline"', '"FluxKontextPipeline"'))
    project.data(project.data_toml.read_text() + 'references = ["before"]\n')
    (project.folder / "before").mkdir()
    for number in range(caches.COUNT):
        write_reference(project, number, number)
    report = caches.build(project)
    assert caches.counted(report) == (caches.COUNT, 0)
    assert report.values.copied_images == caches.COUNT


def test_an_image_without_a_reference_is_a_reject(project: Project) -> None:
    (project.folder / "before" / "2.png").unlink()
    (project.folder / "before" / "7.png").write_text("not an image")
    caches.build(project)
    lines = map(json.loads, (project.cache / REJECTS_FILE).read_text().splitlines())
    reasons = {Path(line["key"]).name: line["reason"] for line in lines}
    assert reasons == {"2.png": "no_reference", "7.png": "not_an_image"}
    assert set(stored(project, "moments")) == {str(number) for number in range(caches.COUNT)} - {"2", "7"}


# --- batches and training ------------------------------------------------------------------------


def test_batches_have_the_reference_without_noise_and_drop_it_apart_from_the_text(tiny: Tiny, tmp_path: Path) -> None:
    write_cache(tmp_path / "cache", tiny.family, tiny.config.model, {Bucket(96, 64): 8})
    data = tiny.opened(tmp_path / "cache")
    rows = data.read(data.order(SEED, {LABEL: 1.0}, lambda resolution: 8).picks(0), SEED)
    vae: Any = load_vae(tiny.folder, torch.device("cpu"), torch.float32)
    mean = rows["moments.reference.0"].float().chunk(2, dim=1)[0]
    expected = (mean - vae.config.shift_factor) * vae.config.scaling_factor
    preparer = tiny.family.training.preparer(tiny.config, tiny.start, data.empty_text())
    torch.testing.assert_close(preparer.prepare_inputs(rows)["reference.0"], expected)
    model = tiny.config.model.model_copy(update={"reference_dropout_prob": 0.5, "enable_uncond_text_dropout": True})
    config = tiny.config.model_copy(update={"model": model})
    dropping = tiny.family.training.preparer(config, tiny.start, data.empty_text())
    words = np.array([occurrence_words(0, 0, [int(number)])[0] for number in rows["sample_id"]])
    kept = uniforms(first_words(SEED, "reference-dropout", words)[0]) >= 0.5
    assert {True, False} == set(kept.tolist())
    batch = dropping.prepare_inputs(rows)
    torch.testing.assert_close(batch["reference.0"], expected * torch.tensor(kept).view(-1, 1, 1, 1))
    torch.testing.assert_close(dropping.prepare_inputs(rows, 0.5)["reference.0"], expected)
    assert "references.kept" not in batch.values


@pytest.mark.parametrize(
    ("family", "tables"), [(NAME, ""), (NAME, LORA), ("flux2", LORA)], ids=["full", "lora", "several"]
)
def test_a_run_resumes_exactly_from_shards_and_from_memory(
    tmp_path: Path, tiny_folder: TinyFolder, unproven: None, family: str, tables: str
) -> None:
    folders = ["before"] if family == NAME else ["before", "style"]
    for folder in folders:
        (tmp_path / folder).mkdir()
    own = "" if family == NAME else f"references = {len(folders)}\n"
    project = write_project(tmp_path, tiny_folder(family), f"references = {json.dumps(folders)}\n", own)
    project.train_toml.write_text(project.train_toml.read_text() + tables)
    whole = require_exact_resume(project, "model.reference_dropout_prob=0.3", later=['cache_residence="host"'])
    others = tensors(run(project, "kept") / LAST)
    assert any(not torch.equal(tensor, others[name]) for name, tensor in whole.items())


def test_new_writes_a_project_of_edits(tmp_path: Path, tiny_folder: TinyFolder) -> None:
    for folder in ("images", "images-before"):
        write_dataset(tmp_path / folder, 8, seed=1)
    written = new.run("edit", str(tmp_path / "images"), str(tiny_folder(NAME)), tmp_path, 64, GPU)
    loaded = check.load(written.train_toml)
    assert [directory.references for directory in loaded.dataset.directories] == [(tmp_path / "images-before",)]
    assert loaded.train.adapter.target_modules == family_named("flux").adapter_targets
    for name, model in (("sd3", DEMO), ("flux2", tiny_folder("flux2"))):
        other = new.run("edit", str(tmp_path / "images"), str(model), tmp_path / name, 64, GPU)
        assert check.load(other.train_toml).train.model.references == 1
    shutil.rmtree(tmp_path / "images-before")
    with pytest.raises(ConfigFaults, match=r"references: no such file or folder"):
        new.run("edit", str(tmp_path / "images"), str(tiny_folder(NAME)), tmp_path / "other", resolution=64)
