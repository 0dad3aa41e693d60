"""A model in phases: one kind of part in memory at a time, and the images of a model with all parts loaded."""

import gc
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from weakref import WeakSet

import numpy as np
import pytest
import torch
from diffusers import ModelMixin
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel

from sd3_light.assets import DEMO
from sd3_light.cost.drawing_memory import drawing_bytes
from sd3_light.encoding.vae import VaeDecoder
from sd3_light.engines import Launch
from sd3_light.evaluate import verb as evaluate
from sd3_light.evaluate.composition import ScoreOptions
from sd3_light.export.chosen import choose_model
from sd3_light.export.lora_stack import Lora
from sd3_light.export.open_pipeline import open_pipeline
from sd3_light.model.folder import count_weights
from sd3_light.sample import generate as generate_module
from sd3_light.sample import phases as module
from sd3_light.sample import verb as sample
from sd3_light.sample.generate import Cancelled, generate, stream_images
from sd3_light.sample.image_requests import PromptRow
from sd3_light.sample.phases import Phases
from sd3_light.sample.verb import OpenModel, SampleOptions, open_model
from sd3_light.sample.watch import Watch
from tests.stock import save_stock
from tests.unit.sample.test_sample import lokr_file

ENOUGH = 1 << 50
FEW = 1000
Folders = Callable[[str], Path]
pytestmark = pytest.mark.usefixtures("prx_without_ftfy")
SLOW = ("flux2", "qwen_image", "z_image", "sana", "krea2", "prx")
OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in SLOW]
ROWS = [
    PromptRow("a red circle", negative_prompt="blue"),
    PromptRow("two blue squares", steps=3),
    PromptRow("a star"),
    PromptRow("a star", guidance=1.0),
]
OPTIONS = SampleOptions(steps=2, width=64, height=64, batch=2)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that writes a family's pipeline once; SD3's is the demo's."""

    @cache
    def folder(family: str) -> Path:
        if family == "sd3":
            return DEMO
        return save_stock(family, tmp_path_factory.mktemp("tiny") / family)

    return folder


@pytest.fixture(autouse=True)
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate_module, "_cores", lambda: 4)


def opened(folder: Path, options: SampleOptions, monkeypatch: pytest.MonkeyPatch, free: int) -> OpenModel:
    monkeypatch.setattr(module, "free_memory", lambda _: free)
    model = open_model(folder, options, Launch())
    assert isinstance(model.pipe, Phases) == (free == FEW)
    return model


def draw(model: OpenModel, rows: list[PromptRow], exact: bool) -> list[bytes]:
    options = model.options
    requests = [model.request(row, seed) for seed, row in enumerate(rows)]
    images = generate(model.pipe, requests, model.policy, batch_size=options.batch, exact=exact)
    return [np.asarray(image).tobytes() for image in images]


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "batches"])
@pytest.mark.parametrize("family", ["sd3", "flux", "wan", *OTHERS])
def test_images_in_phases_equal_loaded_ones(folder_of: Folders, monkeypatch: Any, family: str, exact: bool) -> None:
    options = replace(OPTIONS, frames=5 if family == "wan" else 0)
    loaded = opened(folder_of(family), options, monkeypatch, ENOUGH)
    phased = opened(folder_of(family), options, monkeypatch, FEW)
    monkeypatch.setattr(generate_module, "PER_ROUND", 3)
    rows = [replace(row, negative_prompt=None) for row in ROWS] if loaded.policy.negative_fault() else ROWS
    expected = draw(loaded, rows, exact)
    assert draw(phased, rows, exact) == expected
    assert len(set(expected)) == len(expected)
    if exact:
        one_by_one = replace(loaded, options=replace(options, batch=1))
        assert draw(one_by_one, rows, exact) == expected, "images that are drawn at the same time change each other"


class Alive:
    """Counts the bytes of the weights of networks that exist, by kind."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._modules: WeakSet[nn.Module] = WeakSet()
        for kind in (PreTrainedModel, ModelMixin):
            construct = kind.__init__

            def remember(own: Any, *args: Any, construct: Any = construct, **options: Any) -> None:
                construct(own, *args, **options)
                self._modules.add(own)

            monkeypatch.setattr(kind, "__init__", remember)

    def parts(self) -> set[str]:
        """Return which of text, denoiser and VAE have weights in memory."""
        gc.collect()
        kinds = set()
        for network in self._modules:
            if not next(network.parameters()).is_meta:
                name = type(network).__name__
                is_text = isinstance(network, PreTrainedModel)
                kinds.add("text" if is_text else "vae" if name.startswith("Autoencoder") else "denoiser")
        return kinds


@pytest.mark.parametrize("family", ["sd3", "flux", "wan"])
def test_one_kind_of_part_is_in_memory_at_a_time(folder_of: Folders, monkeypatch: Any, family: str) -> None:
    alive = Alive(monkeypatch)
    seen: list[tuple[str, set[str]]] = []

    def watch(kind: type, name: str) -> None:
        original = getattr(kind, name)

        def watched(*args: Any) -> Any:
            result = original(*args)
            seen.append((name, alive.parts()))
            return result

        monkeypatch.setattr(kind, name, watched)

    watch(Phases, "text_encoders")
    watch(Phases, "denoiser")
    watch(VaeDecoder, "__enter__")
    model = opened(folder_of(family), OPTIONS, monkeypatch, FEW)
    assert alive.parts() == set()
    monkeypatch.setattr(generate_module, "PER_ROUND", 2)
    draw(model, [PromptRow("a star")] * 3, exact=True)
    phase = [("text_encoders", {"text"}), ("denoiser", {"denoiser", "vae"}), ("__enter__", {"vae"})]
    assert seen == [phase[0], phase[1], phase[2], ("text_encoders", {"text", "vae"}), phase[1], phase[2]]
    assert alive.parts() == set(), "the model stays open without weights"


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_the_command_writes_the_same_files(tmp_path: Path, monkeypatch: Any, capfd: Any, dtype: str) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for part in ("transformer", "text_encoder"):
        layers = _networks()[part].named_modules()
        name, layer = next((name, layer) for name, layer in layers if name.endswith(("attn.to_q", "attn.q_proj")))
        width = layer.weight.shape[0]
        tensors[f"{part}.{name}.lora_A.weight"] = torch.randn(2, width, generator=generator)
        tensors[f"{part}.{name}.lora_B.weight"] = torch.randn(width, 2, generator=generator)
    save_file(tensors, tmp_path / "lora.safetensors")
    plain = SampleOptions(steps=2, dtype=dtype, width=32, height=32)
    lokr, _ = lokr_file(tmp_path / "lokr.safetensors", "transformer_blocks.1.attn.to_v", 2)
    options = replace(plain, loras=(Lora(tmp_path / "lora.safetensors", 0.5), Lora(lokr, 0.5)))
    written = {}
    for free in (ENOUGH, FEW):
        monkeypatch.setattr(module, "free_memory", lambda _, free=free: free)
        for name, chosen in (("plain", plain), ("lora", options)):
            out = tmp_path / f"{free}-{name}"
            sample.run(DEMO, [PromptRow("a red circle"), PromptRow("a star")], [0], out, chosen)
            written[free, name] = {path.name: path.read_bytes() for path in out.iterdir()}
        assert ("do not fit in memory together" in capfd.readouterr().err) == (free == FEW)
    assert written[FEW, "plain"] == written[ENOUGH, "plain"]
    assert written[FEW, "lora"] == written[ENOUGH, "lora"]
    assert written[FEW, "lora"] != written[FEW, "plain"]


def test_evaluation_works_in_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = []
    for free in (ENOUGH, FEW):
        monkeypatch.setattr(module, "free_memory", lambda _, free=free: free)
        scores.append(evaluate.run(DEMO, 2, options=ScoreOptions(steps=1, batch=1)))
    pixels = [[np.asarray(image).tobytes() for image in score.images] for score in scores]
    assert pixels[0] == pixels[1]


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "batches"])
def test_a_drawing_in_phases_is_cancelled_in_every_phase(monkeypatch: pytest.MonkeyPatch, exact: bool) -> None:
    model = opened(DEMO, OPTIONS, monkeypatch, FEW)
    requests = [model.request(PromptRow("a star"), seed) for seed in range(2)]
    calls: list[None] = []

    def is_cancelled() -> bool:
        calls.append(None)
        return len(calls) > last

    last = sys.maxsize
    list(stream_images(model.pipe, requests, model.policy, exact=exact, watch=Watch(is_cancelled)))
    all_calls = len(calls)
    for last in (0, all_calls // 4, all_calls // 2, all_calls - 20):
        calls.clear()
        images = stream_images(model.pipe, requests, model.policy, exact=exact, watch=Watch(is_cancelled))
        with closing(images), pytest.raises(Cancelled):
            list(images)
        assert last < len(calls) <= last + 3, "it stops soon"


def test_all_parts_stay_loaded_where_they_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = choose_model(DEMO)
    cpu = torch.device("cpu")
    counts = count_weights(DEMO)
    needed = drawing_bytes(counts, 4, on_gpu=False)
    weights = {part: sum(weight.nbytes for weight in network.parameters()) for part, network in _networks().items()}
    assert needed >= sum(weights.values())
    assert needed - sum(weights.values()) <= 1 << 20, "position tables"
    for free, fits in ((needed, True), (needed - 1, False), (None, True)):
        monkeypatch.setattr(module, "free_memory", lambda _, free=free: free)
        assert (Phases.of_model(chosen, (), cpu) is None) == fits
    assert drawing_bytes(counts, 4) - drawing_bytes(counts, 2) == 2 * (sum(counts.values()) - counts["vae"])
    assert drawing_bytes(counts, 4) - needed > 4 << 30, "activations of a large image"


@pytest.mark.parametrize("family", ["wan", pytest.param("krea2", marks=pytest.mark.slow)])
def test_weights_that_stay_in_float32_are_counted(folder_of: Folders, monkeypatch: Any, family: str) -> None:
    folder = folder_of(family)
    options = replace(OPTIONS, dtype="bfloat16")
    pipe: Any = opened(folder, options, monkeypatch, ENOUGH).pipe
    networks = [part for part in pipe.components.values() if isinstance(part, nn.Module)]
    held = sum(weight.nbytes for network in networks for weight in network.parameters())
    assert {weight.dtype for weight in pipe.transformer.parameters()} == {torch.bfloat16, torch.float32}
    assert drawing_bytes(count_weights(folder), 2, on_gpu=False) < held
    for free, fits in ((held - 1, False), (held + (1 << 10), True)):
        monkeypatch.setattr(module, "free_memory", lambda _, free=free: free)
        found = Phases.of_model(choose_model(folder), (), torch.device("cpu"), torch.bfloat16)
        assert (found is None) == fits


def _networks() -> dict[str, Any]:
    pipe, _ = open_pipeline(DEMO, torch.device("cpu"))
    return {name: part for name, part in pipe.components.items() if isinstance(part, nn.Module)}
