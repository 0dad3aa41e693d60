"""Qwen-Image-Edit: texts that see one reference or several, the stock pipeline's inputs, caches, runs, exports."""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from sd3_light.check import verb as check
from sd3_light.config import ConfigFaults, UserError
from sd3_light.core.batch import Batch
from sd3_light.core.columns import SMALLEST, Bucket
from sd3_light.core.cost import Tokens
from sd3_light.core.registry import family_named
from sd3_light.core.sampling import ImageRequest
from sd3_light.encoding.vae import LatentScale
from sd3_light.export.proof_process import sample_image
from sd3_light.families import qwen_image
from sd3_light.families.qwen_image import QwenImageEdit
from sd3_light.families.stock.inputs import StockInputs
from sd3_light.flow.packing import pack_latents
from sd3_light.new import verb as new
from sd3_light.sample.generate import generate
from sd3_light.sources.decode import read_fitted
from sd3_light.system import Gpu
from sd3_light.world import write_dataset
from tests.families import TinyFolder, with_processor
from tests.project import Project
from tests.stock import open_stock
from tests.stock_project import LORA, write_project
from tests.unit.families import test_stock_cache as caches
from tests.unit.families.test_references import changed, stored, write_edits, write_reference
from tests.unit.families.test_stock_drawing import SAMPLING, draw, grid_image
from tests.unit.families.test_stock_families import Tiny
from tests.unit.families.test_stock_training import require_exact_resume, run
from tests.warm import REAL_PYTHON

EDIT = "qwen_image_edit"
PLUS = "qwen_image_edit_plus"
GPU = (Gpu("a GPU", 24 * 2**30),)
KONTEXT = "flux_kontext"
ROOT = Path(__file__).parents[3]
COUNTS = MappingProxyType({EDIT: 1, PLUS: 2, KONTEXT: 1})
AREAS = {name: getattr(qwen_image, name) for name in ("_AREA", "_SMALL_AREA")}
FEW = {"_AREA": 64 * 64, "_SMALL_AREA": 32 * 32}  # in place of them: a million pixels take half a minute
SIZE = Bucket(96, 64)
INSTRUCTION = "add a dog"


def modules() -> list[Any]:
    return [
        sys.modules[kind.__module__] for kind in (diffusers.QwenImageEditPipeline, diffusers.QwenImageEditPlusPipeline)
    ]


@pytest.fixture(autouse=True)
def without_torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(QwenImageEdit, "packages", ())
    with_processor()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """References with fewer pixels, here and in the stock pipelines."""
    for module in modules():
        monkeypatch.setattr(module, "calculate_dimensions", partial(few_pixels, module.calculate_dimensions))
    for name, area in FEW.items():
        monkeypatch.setattr(qwen_image, name, area)


def few_pixels(scale: Callable[[int, float], Any], area: int, ratio: float) -> Any:
    own = {AREAS[name]: few for name, few in FEW.items()}
    return scale(own.get(area, area), ratio)


@pytest.fixture(params=[EDIT, PLUS])
def tiny(request: pytest.FixtureRequest, small: None, tiny_folder: TinyFolder) -> Tiny:
    tiny = Tiny(request.param, tiny_folder(request.param))
    return with_count(tiny, COUNTS[request.param])


def with_count(tiny: Tiny, count: int) -> Tiny:
    if tiny.name == PLUS:
        model = tiny.config.model.model_copy(update={"references": count})
        tiny.config = tiny.config.model_copy(update={"model": model})
    return tiny


def references(folder: Path, count: int) -> tuple[Path, ...]:
    """Write images of several sizes."""
    files = tuple(folder / f"before{number}.png" for number in range(count))
    for number, file in enumerate(files):
        pixels = np.random.default_rng(number).integers(0, 256, (80 - 20 * number, 160, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(file)
    return files


def shown(images: list[Image.Image]) -> Any:
    """Return references as a user of diffusers passes them."""
    return images[0] if len(images) == 1 else images


# --- the stock pipeline --------------------------------------------------------------------------


def test_references_have_the_sizes_of_the_pipelines(monkeypatch: pytest.MonkeyPatch) -> None:
    edit, plus = modules()
    assert (qwen_image._AREA, qwen_image._SMALL_AREA) == (plus.VAE_IMAGE_SIZE, plus.CONDITION_IMAGE_SIZE)
    family = family_named(EDIT)
    for width in range(64, 2048, 48):
        for height in range(64, 2048, 48):
            ratio = width / height
            expected = edit.calculate_dimensions(qwen_image._AREA, ratio)[:2]
            scaled = qwen_image.scaled(Bucket(width, height), qwen_image._AREA)
            assert (scaled.width, scaled.height) == expected
            size = family.reference_bucket(Bucket(width, height))
            again = plus.calculate_dimensions(plus.VAE_IMAGE_SIZE, size.width / size.height)
            assert again == (size.width, size.height), "the pipeline does not scale it"
    areas: list[int] = []
    original = edit.calculate_dimensions
    monkeypatch.setattr(edit, "calculate_dimensions", lambda area, ratio: areas.append(area) or original(32, ratio))
    with pytest.raises(AttributeError):
        diffusers.QwenImageEditPipeline.__call__(None, image=Image.new("RGB", (8, 8)))
    assert areas == [qwen_image._AREA]


def test_texts_latents_and_prediction_are_those_of_the_stock_pipeline(tiny: Tiny, tmp_path: Path) -> None:
    """The first call of the denoiser, with references, texts and guidance as the pipeline makes them itself."""
    pipe = open_stock(tiny.folder)
    files = references(tmp_path, COUNTS[tiny.name])
    images = [read_fitted(file, tiny.family.reference_bucket(SIZE)) for file in files]
    noise = torch.randn(1, 4, 8, 12, generator=torch.Generator().manual_seed(0))
    calls: list[tuple[dict[str, Any], Tensor]] = []
    hook = pipe.transformer.register_forward_hook(
        lambda module, args, kwargs, output: calls.append((kwargs, output[0])), with_kwargs=True
    )
    with torch.no_grad():
        pipe(
            image=shown(images),
            prompt=INSTRUCTION,
            negative_prompt="",
            latents=pack_latents(noise),
            height=64,
            width=96,
            num_inference_steps=2,
            output_type="latent",
        )
    hook.remove()
    stock = {"text": calls[0], "": calls[1]}
    scale = LatentScale.of_folder(tiny.folder)
    with tiny.family.encoding.encoders(tiny.config.model, torch.device("cpu"), 1) as encoders:
        pixels = [np.array(image) for image in images]
        moments = [encoders.encode_images(each[None], flip=False)["moments"] for each in pixels]
        encoded = encoders.encode_pairs([INSTRUCTION, ""], [pixels, pixels])  # type: ignore[attr-defined]
        alone = encoders.encode_pairs([""], [pixels])  # type: ignore[attr-defined]
        others = encoders.encode_pairs([INSTRUCTION], [[255 - each for each in pixels]])  # type: ignore[attr-defined]
        encoders.synchronize()
    start = int(encoded["text.start"][1])
    rows = {"text": encoded["text.tokens"][:start], "": encoded["text.tokens"][start:]}
    assert torch.equal(rows[""], alone["text.tokens"])
    assert not torch.allclose(rows["text"], others["text.tokens"], atol=0.1)
    seen = {f"reference.{at}": scale.draw(each[:, 0], None) for at, each in enumerate(moments)}
    for name, (kwargs, output) in stock.items():
        text = rows[name]
        assert torch.equal(text, kwargs["encoder_hidden_states"][0].bfloat16())
        exact = kwargs["encoder_hidden_states"]
        batch = Batch(1, {"noisy": noise, "t": kwargs["timestep"], "text": exact, **seen})
        ours: list[tuple[dict[str, Any], Tensor]] = []
        hook = pipe.transformer.register_forward_hook(
            lambda module, args, given, result, ours=ours: ours.append((given, result[0])), with_kwargs=True
        )
        with torch.no_grad():
            velocity = tiny.family.denoise(pipe.transformer, batch, 4.0)
        hook.remove()
        ((given, result),) = ours
        assert given["img_shapes"] == kwargs["img_shapes"]
        assert len(given["img_shapes"][0]) == 1 + len(files)
        assert torch.equal(given["timestep"], kwargs["timestep"])
        torch.testing.assert_close(given["hidden_states"], kwargs["hidden_states"], rtol=2e-3, atol=2e-3)
        torch.testing.assert_close(result, output, rtol=2e-3, atol=2e-3)
        torch.testing.assert_close(pack_latents(velocity), output[:, : 4 * 6], rtol=2e-3, atol=2e-3)


def test_images_are_drawn_with_references_as_they_are_cached(tiny: Tiny, tmp_path: Path) -> None:
    pipe = open_stock(tiny.folder)
    count = COUNTS[tiny.name]
    files = references(tmp_path, count)
    policy = StockInputs(tiny.family, tiny.folder, {"text_max_length": 12})
    request = ImageRequest(INSTRUCTION, 3, 96, 64, steps=2, guidance=2.5, references=files)
    negative = replace(request, negative_prompt="a cat")
    drawn, other = generate(pipe, [request, negative], policy)
    images = [read_fitted(file, tiny.family.reference_bucket(SIZE)) for file in files]
    for result, text in ((drawn, ""), (other, "a cat")):
        expected = pipe(
            prompt=INSTRUCTION,
            negative_prompt=text,
            image=shown(images),
            generator=torch.Generator("cpu").manual_seed(3),
            height=64,
            width=96,
            num_inference_steps=2,
            true_cfg_scale=2.5,
        ).images[0]
        assert np.array_equal(np.asarray(result), np.asarray(expected))
    assert not np.array_equal(np.asarray(drawn), np.asarray(other))
    with pytest.raises(UserError, match="draws from an image; pass one with --reference"):
        generate(pipe, [replace(request, references=())], policy)
    if tiny.name == EDIT:
        with pytest.raises(UserError, match="2 references: this model sees 1"):
            generate(pipe, [replace(request, references=2 * files)], policy)
    exact = generate(pipe, [request, negative], policy, exact=True)
    assert [image.tobytes() for image in exact] == [drawn.tobytes(), other.tobytes()]


@pytest.mark.parametrize("kind", [EDIT, PLUS])
def test_a_proof_draws_from_a_small_reference(kind: str, tiny_folder: TinyFolder) -> None:
    tiny = Tiny(kind, tiny_folder(kind))
    pipe = open_stock(tiny.folder)
    inputs = tiny.family.files.pipeline_inputs(tiny.folder, dict(pipe.transformer.config), {"text_max_length": 12})
    image = sample_image(pipe, inputs)
    name = "image"
    changed = torch.zeros_like(inputs[name] if tiny.name == EDIT else inputs[name][0])
    other = sample_image(pipe, {**inputs, name: changed if tiny.name == EDIT else [changed]})
    assert image.shape[0] == 3
    assert not torch.equal(image, other)
    shapes = tiny.family.files.denoiser_inputs(dict(pipe.transformer.config), tiny.folder)["img_shapes"]
    assert [len(each) for each in shapes] == [2, 2]


def test_the_cost_counts_the_tokens_of_references(monkeypatch: pytest.MonkeyPatch, tiny_folder: TinyFolder) -> None:
    """FLOPs by torch's own count of a pass with a reference of 576 tokens, more than the image has."""
    monkeypatch.setattr(qwen_image, "_AREA", 384 * 384)
    tiny = Tiny(EDIT, tiny_folder(EDIT))
    model = tiny.config.model
    cost = tiny.family.cost(tiny.start, model)
    tokens = Tokens(128, 40)
    denoiser = tiny.family.weights.load(tiny.start, 0)
    text = torch.randn(1, 40, 32)
    batch = Batch(1, {"noisy": torch.randn(1, 4, 32, 16), "t": torch.rand(1), "text": text})
    batch = batch.with_values({"reference.0": torch.randn(1, 4, 48, 48)})
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        tiny.family.denoise(denoiser, batch, 1.0)
    assert cost.forward_flops(tokens) == pytest.approx(counter.get_total_flops(), rel=0.001)
    large = cost.reduced(None).count(cost.denoise, cost.batch(64, 64, 512), "float32")
    counted = cost.counts(Tokens(4096, 512), "float32")
    assert counted.blocks == large.blocks
    assert large.tensor <= counted.tensor < 1.2 * large.tensor
    (moments,) = (c for c in tiny.family.columns(model, tiny.folder, SMALLEST) if c.name == "moments.reference.0")
    assert moments.shape == (8, 48, 48)


# --- the cache -----------------------------------------------------------------------------------


@pytest.fixture
def project(tmp_path: Path, small: None) -> Project:
    return write_edits(tmp_path / "project", EDIT)


def test_a_changed_reference_encodes_its_text_again(project: Project, tmp_path: Path) -> None:
    (project.images / "4.txt").write_text("caption 3")  # equal captions, seen with other images
    assert caches.counted(caches.build(project)) == (2 * caches.COUNT, caches.COUNT)
    columns = ("moments", "moments.reference.0", "text")
    before = {column: stored(project, column) for column in columns}
    assert before["moments.reference.0"]["3"].shape == (1, 8, 8, 8)
    assert not torch.equal(before["text"]["3"], before["text"]["4"])
    write_reference(project, 3, 100)
    several = project.copy(tmp_path / "several")
    report = caches.build(project)
    assert caches.counted(report) == (1, 1)
    assert report.values.copied_captions == caches.COUNT - report.reused - 1
    assert changed(project, before) == {("moments.reference.0", "3"), ("text", "3")}
    assert caches.counted(caches.build(project)) == (0, 0)
    caches.in_two_processes(several)
    assert caches.shards(several) == caches.shards(project)
    (project.images / "5.txt").write_text("another instruction")
    assert caches.counted(caches.build(project)) == (0, 1)
    Image.new("RGB", (64, 64), (1, 2, 3)).save(project.images / "6.png")
    assert caches.counted(caches.build(project)) == (1, 0)


def test_cached_texts_are_those_of_the_encoder(project: Project) -> None:
    caches.build(project)
    model = check.load(project.train_toml).train.model
    seen = family_named(EDIT).reference_bucket(Bucket(64, 64))
    pixels = np.array(read_fitted(project.folder / "before" / "5.png", seen))
    with family_named(EDIT).encoding.encoders(model, torch.device("cpu"), 1) as encoders:
        expected = encoders.encode_pairs(["caption 5"], [[pixels]])["text.tokens"]  # type: ignore[attr-defined]
    assert torch.equal(stored(project, "text")["5"], expected)


@pytest.mark.parametrize(
    ("name", "data", "keys", "message"),
    [
        (EDIT, "", "", r"references: Qwen-Image-Edit sees 1 image\(s\) beside the text, and this names 0"),
        (EDIT, 'references = ["images", "images"]', "", "this names 2"),
        (KONTEXT, 'references = ["nowhere"]', "", "nowhere"),
        (PLUS, "", "", "model.references: Qwen-Image-Edit Plus edits images, and must know how many it sees"),
        (PLUS, 'references = ["images"]', "references = 2\n", "sees 2 .* and this names 1"),
        ("qwen_image", 'references = ["images"]', "", "Qwen-Image sees no image beside the text"),
        (EDIT, 'references = ["images"]\nflip = true', "", r"directory\[0\].flip: Qwen-Image-Edit encodes texts"),
        (EDIT, 'references = ["images"]', "enable_uncond_text_dropout = true\n", "encodes every text with references"),
        (EDIT, 'references = ["images"]', "reference_dropout_prob = 0.1\n", "does not know this key"),
        (
            EDIT,
            'references = ["images"]',
            '[sampling]\nprompts = ["a"]\n',
            "sampling.prompts: Qwen-Image-Edit draws from",
        ),
    ],
)
def test_faults_name_the_key(tmp_path: Path, name: str, data: str, keys: str, message: str) -> None:
    project = caches.write_project(tmp_path, name, extra=data)
    text = project.train_toml.read_text()
    text = text + keys if keys.startswith("[") else text.replace("[model]\n", f"[model]\n{keys}")
    project.train_toml.write_text(text)
    with pytest.raises(ConfigFaults, match=message):
        check.load(project.train_toml)


def test_a_denoiser_that_edits_is_refused_as_a_plain_one(tmp_path: Path, tiny_folder: TinyFolder) -> None:
    config = tmp_path / "transformer" / "config.json"
    config.parent.mkdir()
    config.write_text(json.dumps({"zero_cond_t": True}))
    assert "QwenImageEditPlusPipeline" in str(family_named("qwen_image").refusal(tmp_path))
    assert family_named(PLUS).refusal(tmp_path) is None
    config.write_text(json.dumps({"use_layer3d_rope": True}))
    assert "draws layers" in str(family_named(PLUS).refusal(tmp_path))


# --- training ------------------------------------------------------------------------------------


def training(folder: Path, model: Path, count: int, more: str = "") -> Project:
    names = [f"before{number}" for number in range(count)]
    for name in names:
        (folder / name).mkdir(parents=True)
    own = f"references = {count}\n" if count > 1 else ""
    project = write_project(folder, model, f"references = {json.dumps(names)}\n", own, dropout=False)
    project.train_toml.write_text(project.train_toml.read_text() + more)
    return project


@pytest.mark.parametrize(("name", "tables"), [(EDIT, ""), (PLUS, LORA)])
def test_a_run_resumes_exactly_from_shards_and_from_memory(
    tmp_path: Path, tiny_folder: TinyFolder, small: None, unproven: None, name: str, tables: str
) -> None:
    project = training(tmp_path, tiny_folder(name), COUNTS[name], tables)
    require_exact_resume(project, later=['cache_residence="host"'])


def test_a_run_draws_as_the_pipeline_does(tmp_path: Path, tiny_folder: TinyFolder, small: None, unproven: None) -> None:
    (file,) = references(tmp_path, 1)
    prompts = SAMPLING.replace('prompts = ["a red fox"]\n', "")
    image = f'\n[[sampling.image]]\nprompt = "a red fox"\nreferences = ["{file}"]\n'
    project = training(tmp_path / "project", tiny_folder(EDIT), 1, prompts + image)
    run(project, "run", "sampling.size=[64, 64]")
    drawn, facts = draw(project.run, tmp_path / "own", references=(file,))
    assert facts["guidance"] == 4.0
    assert np.abs(drawn - grid_image(project.run)).max() <= 1


@pytest.mark.timeout(600)
@pytest.mark.slow
@pytest.mark.parametrize(("name", "tables"), [(EDIT, ""), (PLUS, LORA), (KONTEXT, "")])
def test_an_export_is_proven_with_a_reference_and_draws_with_one(
    tmp_path: Path, tiny_folder: TinyFolder, small: None, monkeypatch: pytest.MonkeyPatch, name: str, tables: str
) -> None:
    if find_spec("torchvision") is None:  # the clean process needs the same as `with_processor`
        path = f"{ROOT}{os.pathsep}{tmp_path / 'packages'}"
        (tmp_path / "packages").mkdir()
        code = "from tests.families import with_processor\n\nwith_processor()\n"
        (tmp_path / "packages" / "sitecustomize.py").write_text(code)
        monkeypatch.setenv("PYTHONPATH", path)
        monkeypatch.setattr(sys, "executable", REAL_PYTHON)
    project = training(tmp_path / "project", tiny_folder(name), COUNTS[name], tables)
    run(project, "run", "save_every_n_steps=4")
    (export,) = (project.run / "exports").iterdir()
    assert json.loads((export / "sd3_light.json").read_text())
    if not tables:
        assert json.loads((export / "model_index.json").read_text())["_class_name"] == family_named(name).pipeline
    files = references(tmp_path, COUNTS[name])
    drawn, facts = draw(project.run, tmp_path / "with", references=files)
    assert facts["references"] == [file.name for file in files]
    others = files[::-1] if name == PLUS else (next(project.images.glob("*.png")),)
    other, _ = draw(project.run, tmp_path / "other", references=others)
    assert not np.array_equal(drawn, other)
    if name == KONTEXT:
        assert not np.array_equal(draw(project.run, tmp_path / "without")[0], drawn)
        return
    with pytest.raises(UserError, match="draws from an image"):
        draw(project.run, tmp_path / "without")


def test_new_writes_a_project_of_edits(tmp_path: Path, small: None, tiny_folder: TinyFolder) -> None:
    for folder in ("images", "images-before"):
        write_dataset(tmp_path / folder, 8, seed=1)
    for name in (EDIT, PLUS):
        written = new.run("edit", str(tmp_path / "images"), str(tiny_folder(name)), tmp_path / name, 64, GPU)
        loaded = check.load(written.train_toml)
        assert [directory.references for directory in loaded.dataset.directories] == [(tmp_path / "images-before",)]
        assert not loaded.train.model.enable_uncond_text_dropout
        assert loaded.train.adapter.target_modules == family_named("qwen_image").adapter_targets
        assert loaded.train.model.references == (name == PLUS)
