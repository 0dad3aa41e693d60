"""Sample grids: the stock pipeline's images, the same on any number of ranks, without text encoders."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import SD3Transformer2DModel, StableDiffusion3Pipeline
from PIL import Image
from torch import Tensor

from sd3_light.config import SIZES
from sd3_light.core.batch import Batch
from sd3_light.data.store import LocalStore
from sd3_light.data.stream import CachedDataset
from sd3_light.encoding import vae as vae_module
from sd3_light.encoding.vae import VaeDecoder
from sd3_light.engines import Launch
from sd3_light.families.sd3.encoders import FrozenParts
from sd3_light.families.sd3.module import SD3TrainingModule
from sd3_light.families.sd3.random_weights import new_transformer
from sd3_light.flow.scheduler import flow_scheduler
from sd3_light.sample import in_training
from sd3_light.sample.in_training import SampledCache, Sampler, assigned
from tests.cases import combinations
from tests.project import Project

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = ("a large red circle", "two small blue squares on a white background", "a star")
SEEDS = (5, 6)
STEPS = 3
Caches = dict[str, Project]


def overrides(guidance: float = 4.0, **model: str) -> tuple[str, ...]:
    sampling = {"prompts": PROMPTS, "seeds": SEEDS, "every_n_steps": 2, "steps": STEPS, "guidance": guidance}
    tables: dict[str, dict[str, Any]] = {"sampling": sampling, "model": model}
    return tuple(f"{table}.{key}={json.dumps(value)}" for table, keys in tables.items() for key, value in keys.items())


def sampler(project: Project, *keys: str, launch: Launch | None = None, batch_size: int | None = None) -> Sampler:
    data = CachedDataset(LocalStore(project.cache))
    config = project.load(*keys).train
    cache = SampledCache(project.cache, data, data.buckets[0])
    result = Sampler.of_config(config, cache, launch or Launch(), torch.device("cpu"))
    result.batch_size = batch_size or result.batch_size
    return result


def draw(drawing: Sampler, denoise: Callable[..., Tensor]) -> dict[int, np.ndarray]:
    return {index: np.asarray(image).astype(int) for index, image in drawing.draw(denoise)}


def recorder(read: Callable[[Batch], Any]) -> tuple[list[Any], Callable[[Batch], Tensor]]:
    """Return what is read of each batch, and a denoiser that does nothing else."""
    seen: list[Any] = []

    def denoise(batch: Batch) -> Tensor:
        seen.append(read(batch))
        return torch.zeros_like(batch["noisy"])

    return seen, denoise


@pytest.fixture(scope="module")
def transformer() -> SD3Transformer2DModel:
    """A denoiser whose images depend on the text."""
    model = new_transformer(SIZES["tiny2"].transformer_config(), 0)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.08, generator=generator)
    return model.eval()


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory, raw_project: Project) -> dict[str, Project]:
    """Return projects by text_tokens whose caches have the prompts; read only."""
    projects = {}
    for text_tokens in ("padded", "real"):
        projects[text_tokens] = raw_project.copy(tmp_path_factory.mktemp(text_tokens) / "project")
        projects[text_tokens].build_cache(*overrides(text_tokens=text_tokens))
    return projects


@pytest.fixture
def no_encoders(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, *_: object) -> None:
        raise AssertionError(f"{name} was loaded")

    monkeypatch.setattr("sd3_light.families.sd3.encoders.load_text_model", refuse)


def stock_pipeline(project: Project, transformer: SD3Transformer2DModel, **scheduler: Any) -> StableDiffusion3Pipeline:
    pipe = StableDiffusion3Pipeline.from_pretrained(
        project.model, transformer=transformer, dtype=torch.float32, local_files_only=True
    )
    pipe.scheduler = flow_scheduler(scheduler.get("shift"), scheduler.get("flux_shift", False))
    pipe.set_progress_bar_config(disable=True)
    return pipe


Text = tuple[Tensor, Tensor]


def stock_image(pipe: Any, text: Text, negative: Text, seed: int, size: tuple[int, int], **more: Any) -> np.ndarray:
    embeds = {"prompt_embeds": text[0], "pooled_prompt_embeds": text[1]}
    embeds |= {"negative_prompt_embeds": negative[0], "negative_pooled_prompt_embeds": negative[1]}
    generator = torch.Generator("cpu").manual_seed(seed)
    image = pipe(**embeds, generator=generator, width=size[0], height=size[1], **more).images[0]
    return np.asarray(image).astype(int)


@torch.no_grad()
def stock_text(pipe: StableDiffusion3Pipeline, prompt: str) -> Text:
    """Encode as the stock pipeline does, rounded as in the cache."""
    tokens, _, pooled, _ = pipe.encode_prompt(prompt, None, None, max_sequence_length=16)
    return tokens.bfloat16().float(), pooled.bfloat16().float()


@pytest.mark.usefixtures("no_encoders")
@pytest.mark.parametrize(
    ("guidance", "uncond"),
    combinations((4.0, 1.0), ("zero", "empty"), fast=[(4.0, "zero"), (4.0, "empty"), (1.0, "zero")]),
)
def test_an_image_equals_the_stock_pipelines(caches: Caches, transformer: Any, uncond: str, guidance: float) -> None:
    project, keys = caches["padded"], overrides(guidance, uncond_text=uncond)
    module = SD3TrainingModule(transformer, project.load(*keys).train)
    drawn = draw(sampler(project, *keys, batch_size=1), module.denoise)
    pipe = stock_pipeline(project, transformer)
    negative = stock_text(pipe, "") if uncond == "empty" else tuple(map(torch.zeros_like, stock_text(pipe, "")))
    requests = [(prompt, seed) for prompt in PROMPTS for seed in SEEDS]
    assert sorted(drawn) == list(range(len(requests)))
    for index, (prompt, seed) in enumerate(requests):
        settings = {"num_inference_steps": STEPS, "guidance_scale": guidance}
        expected = stock_image(pipe, stock_text(pipe, prompt), negative, seed, (48, 80), **settings)
        assert np.abs(drawn[index] - expected).max() <= 1
    assert np.abs(drawn[0] - drawn[2]).max() > 2, "the prompt matters"
    assert np.abs(drawn[0] - drawn[1]).max() > 2, "the seed matters"


@pytest.mark.parametrize("schedule", [{"shift": 3.0}, {"flux_shift": True}])
def test_the_trained_shift_is_used(caches: Caches, transformer: Any, schedule: dict[str, Any]) -> None:
    keys = (*overrides(1.0), *(f"model.{key}={json.dumps(value)}" for key, value in schedule.items()))
    times, denoise = recorder(lambda batch: float(1000 * batch["t"][0]))
    sampler(caches["padded"], *keys, batch_size=6).draw(denoise)
    pipe = stock_pipeline(caches["padded"], transformer, **schedule)
    pipe(prompt="a", width=48, height=80, num_inference_steps=STEPS, guidance_scale=1.0)
    assert times == pytest.approx(pipe.scheduler.timesteps.tolist())


@pytest.mark.parametrize(
    ("text_tokens", "uncond"),
    combinations(("padded", "real"), ("zero", "empty"), fast=[("padded", "empty"), ("real", "zero")]),
)
def test_batches_change_no_image(caches: Caches, transformer: Any, text_tokens: str, uncond: str) -> None:
    project, keys = caches[text_tokens], overrides(text_tokens=text_tokens, uncond_text=uncond)
    module = SD3TrainingModule(transformer, project.load(*keys).train)
    alone = draw(sampler(project, *keys, batch_size=1), module.denoise)
    together = draw(sampler(project, *keys, batch_size=6), module.denoise)
    assert len(alone) == len(together) == len(PROMPTS) * len(SEEDS)
    assert max(np.abs(alone[index] - together[index]).max() for index in alone) <= 1


def test_real_tokens_are_as_long_as_the_text_and_no_text_is_one_zero(caches: dict[str, Project]) -> None:
    seen, denoise = recorder(lambda batch: batch)
    keys = overrides(text_tokens="real", uncond_text="zero")
    sampler(caches["real"], *keys, batch_size=6).draw(denoise)
    t, tokens, pooled, lengths = (*(seen[0][name] for name in ("t", "prompt", "pooled")), seen[0].host["prompt.length"])
    assert len(seen) == STEPS
    assert t.unique().tolist() == [1.0]
    assert lengths[:6].tolist() == [1] * 6
    assert not tokens[:6].any()
    assert not pooled[:6].any()
    assert lengths[6] == lengths[7] != lengths[8]
    for row, length in zip(tokens, lengths.tolist(), strict=True):
        assert not row[length:].any()
    assert all(row[length - 1].any() for row, length in zip(tokens[6:], lengths[6:].tolist(), strict=True))


def draw_on_ranks(project: Project, module: SD3TrainingModule, world: int, batch_size: int, *keys: str) -> Any:
    """Return the images of all ranks, and how often ranks called the denoiser."""
    calls: Counter[int] = Counter()
    images: dict[int, np.ndarray] = {}
    for rank in range(world):

        def denoise(batch: Batch, rank: int = rank) -> Tensor:
            calls[rank] += 1
            return module.denoise(batch)

        images |= draw(sampler(project, *keys, launch=Launch(rank, rank, world), batch_size=batch_size), denoise)
    return images, set(calls.values())


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.slow), 4, pytest.param(7, marks=pytest.mark.slow)])
def test_ranks_share_and_draw_alike(caches: dict[str, Project], transformer: SD3Transformer2DModel, world: int) -> None:
    """Also with more ranks than images. All ranks call the denoiser equally often, as sharded weights need."""
    project, keys = caches["padded"], overrides()
    module = SD3TrainingModule(transformer, project.load(*keys).train)
    images, calls = draw_on_ranks(project, module, world, 2, *keys)
    alone = draw(sampler(project, *keys), module.denoise)
    assert calls == {STEPS * -(-len(assigned(6, 0, world)) // 2)}
    assert sorted(images) == sorted(alone)
    assert max(np.abs(images[index] - alone[index]).max() for index in alone) <= 1


@pytest.mark.parametrize(("count", "world"), [(1, 1), (1, 8), (6, 4), (7, 3), (8, 8), (16, 5)])
def test_all_requests_are_assigned_evenly(count: int, world: int) -> None:
    shares = [assigned(count, rank, world) for rank in range(world)]
    assert {len(share) for share in shares} == {-(-count // world)}
    assert {index for share in shares for index in share} == set(range(count))


def test_a_denoiser_batch_is_at_most_a_micro_batch(caches: dict[str, Project]) -> None:
    sizes, denoise = recorder(lambda batch: batch.size)
    sampler(caches["padded"], *overrides(), "micro_batch_size_per_gpu=4").draw(denoise)
    assert set(sizes) == {4}
    sizes.clear()
    sampler(caches["padded"], *overrides(1.0), "micro_batch_size_per_gpu=4").draw(denoise)
    assert set(sizes) == {4, 2}
    kinds: set[torch.dtype] = set()

    def denoise(batch: Batch) -> Tensor:
        kinds.add(batch["noisy"].dtype)
        return torch.zeros_like(batch["noisy"], dtype=torch.bfloat16)

    sampler(caches["padded"], *overrides()).draw(denoise)
    assert kinds == {torch.float32}


def test_prompts_missing_from_the_cache_are_encoded_once_at_the_start(
    caches: dict[str, Project],
    cached_project: Project,
    transformer: SD3Transformer2DModel,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As for a cache at a URL: one encoder at a time, the same features as in the cache, and no encoder for a grid."""
    loaded: list[str] = []
    load = FrozenParts.part

    def part(self: Any, name: str) -> Any:
        loaded.append(name)
        return load(self, name)

    close = FrozenParts.close
    monkeypatch.setattr(FrozenParts, "part", part)
    monkeypatch.setattr(FrozenParts, "close", lambda self: loaded.append("closed") or close(self))
    drawing = sampler(cached_project, *overrides())
    one_by_one = ["clip_l", "closed", "clip_g", "closed", "t5", "closed"]
    assert [name for at, name in enumerate(loaded) if loaded[at - 1 : at] != [name]] == one_by_one
    assert "not in the cache, encoding now: 3 prompts" in capsys.readouterr().err
    cached = sampler(caches["padded"], *overrides())
    for prompt in PROMPTS:
        assert torch.equal(drawing.texts[prompt]["prompt"], cached.texts[prompt]["prompt"])
        assert torch.equal(drawing.texts[prompt]["pooled"], cached.texts[prompt]["pooled"])
    loaded.clear()
    module = SD3TrainingModule(transformer, cached_project.load(*overrides()).train)
    drawing.draw(module.denoise)
    assert loaded == []
    assert not (cached_project.cache / "prompts").exists()


def test_a_cut_prompt_is_named_by_the_run_that_encodes_it(cached_project: Project, capsys: Any) -> None:
    sampler(cached_project, *overrides(), f'sampling.prompts=["a star", "{"a red star " * 12}"]')
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "is cut" in line]
    assert line.startswith("train: warning: the prompt 'a red star a red")


@pytest.mark.usefixtures("no_encoders")
@pytest.mark.parametrize("seeds", [[5], [5, 6]])
def test_captions_name_the_seed_if_there_are_several(caches: Caches, monkeypatch: Any, seeds: list[int]) -> None:
    written: list[str] = []
    monkeypatch.setattr(in_training, "make_grid", lambda images, captions, **_: written.extend(captions))
    drawing = sampler(caches["padded"], *overrides(), f"sampling.seeds={seeds}")
    drawing._grid([], {})
    assert written == [f"{prompt} (seed {seed})" if seeds[1:] else prompt for prompt in PROMPTS for seed in seeds]


@pytest.mark.usefixtures("no_encoders")
def test_the_grid_is_a_png_with_metadata(caches: dict[str, Project], tmp_path: Path) -> None:
    drawing = sampler(caches["padded"], *overrides())
    path = tmp_path / "samples" / "step-00000042.png"
    grid = drawing.sample(lambda batch: torch.zeros_like(batch["noisy"]), path, {"step": 42, "weights": "ema"})
    assert grid is not None
    with Image.open(path) as image:
        assert np.array_equal(np.asarray(image), np.asarray(grid))
        about = image.text  # type: ignore[attr-defined]
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    assert (about["step"], about["weights"], about["uncond_text"]) == ("42", "ema", "empty")
    assert json.loads(about["prompts"]) == list(PROMPTS)
    assert json.loads(about["seeds"]) == list(SEEDS)
    assert (about["guidance"], about["steps"], json.loads(about["size"])) == ("4.0", "3", [48, 80])


def test_the_vae_is_loaded_once_for_all_grids(caches: dict[str, Project], monkeypatch: pytest.MonkeyPatch) -> None:
    loads: list[torch.dtype] = []

    def load_vae(*arguments: Any) -> Any:
        loads.append(arguments[2])
        return load(*arguments)

    load = vae_module.load_vae
    monkeypatch.setattr(vae_module, "load_vae", load_vae)
    drawing = sampler(caches["padded"], *overrides())
    assert loads == []
    for _ in range(2):
        drawing.draw(lambda batch: torch.zeros_like(batch["noisy"]))
    assert loads == [torch.float32]
    assert isinstance(drawing._decoder, VaeDecoder)
    assert drawing._decoder.vae.use_slicing, "images are decoded one at a time"


def test_sampling_needs_no_gradients_nor_seeds(caches: dict[str, Project], transformer: SD3Transformer2DModel) -> None:
    project = caches["padded"]
    module = SD3TrainingModule(transformer, project.load(*overrides()).train)
    modes: list[bool] = []

    def denoise(batch: Batch) -> Tensor:
        modes.append(torch.is_grad_enabled())
        return module.denoise(batch)

    before = torch.get_rng_state()
    sampler(project, *overrides()).draw(denoise)
    assert set(modes) == {False}
    assert torch.equal(torch.get_rng_state(), before)


def test_a_grid_that_cannot_be_written_is_reported(caches: dict[str, Project], tmp_path: Path, capfd: Any) -> None:
    drawing = sampler(caches["padded"], *overrides())
    path = tmp_path / "grid.png"
    assert drawing.sample(lambda batch: torch.full_like(batch["noisy"], float("nan")), path, {"step": 1}) is None
    assert not list(tmp_path.iterdir())
    assert f"the grid {path} was not written: the denoiser returned NaN or infinity" in capfd.readouterr().err
    assert drawing.sample(lambda batch: torch.zeros_like(batch["noisy"]), path, {"step": 1})
    below = path / "one.png"
    assert drawing.sample(lambda batch: torch.zeros_like(batch["noisy"]), below, {}) is None
    assert f"{below} was not written: " in capfd.readouterr().err


MIXED = """
[sampling]
prompts = ["a star"]
seeds = [5, 6]
every_n_steps = 2
steps = 2
negative_prompt = "red"

[[sampling.image]]
prompt = "a large red circle"
negative_prompt = "two small blue squares on a white background"
size = [64, 48]
steps = 3

[[sampling.image]]
prompt = "two stars"
negative_prompt = ""
guidance = 1.0
"""


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory, raw_project: Project) -> Project:
    """A project whose prompts have settings of different kinds."""
    project = raw_project.copy(tmp_path_factory.mktemp("mixed") / "project")
    project.train_toml.write_text(project.train_toml.read_text(encoding="utf-8") + MIXED, encoding="utf-8")
    project.build_cache()
    return project


@pytest.mark.usefixtures("no_encoders")
def test_each_image_has_its_own_settings(mixed: Project, transformer: SD3Transformer2DModel) -> None:
    """The images of the stock pipeline with these settings, without loading an encoder."""
    drawing = sampler(mixed, batch_size=1)
    drawn = draw(drawing, SD3TrainingModule(transformer, mixed.load().train).denoise)
    pipe = stock_pipeline(mixed, transformer)
    expected = [
        ("a star", "red", 2, 4.0, (48, 80)),
        ("a large red circle", PROMPTS[1], 3, 4.0, (64, 48)),
        ("two stars", "", 2, 1.0, (48, 80)),
    ]
    for index, (prompt, negative, steps, guidance, size) in enumerate(expected):
        settings = {"num_inference_steps": steps, "guidance_scale": guidance}
        image = stock_image(pipe, stock_text(pipe, prompt), stock_text(pipe, negative), 5, size, **settings)
        assert np.abs(drawn[2 * index] - image).max() <= 1, prompt


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_ranks_call_the_denoiser_equally_often_for_other_kinds(mixed: Project, transformer: Any, world: int) -> None:
    module = SD3TrainingModule(transformer, mixed.load().train)
    alone = draw(sampler(mixed, batch_size=1), module.denoise)
    together, calls = draw_on_ranks(mixed, module, world, 1)
    assert calls == {sum(steps * -(-2 // world) for steps in (2, 3, 2))}
    assert sorted(together) == sorted(alone)
    assert max(np.abs(alone[index] - together[index]).max() for index in alone) <= 1


def test_a_size_of_one_sampling_table_applies_to_all(mixed: Project) -> None:
    drawing = sampler(mixed, "sampling.size=[80, 48]")
    assert [(request.width, request.height) for request in drawing.requests[::2]] == [(80, 48), (64, 48), (80, 48)]
