"""A model in phases: one kind of part in memory at a time, and the images of a model with all parts loaded."""

import gc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import ModelMixin
from torch import nn
from transformers import PreTrainedModel

from sd3_light.assets import DEMO
from sd3_light.engines import Launch
from sd3_light.export.lora_stack import Lora
from sd3_light.sample import generate as generate_module
from sd3_light.sample import phases as module
from sd3_light.sample.generate import Cancelled, generate, stream_images
from sd3_light.sample.image_requests import PromptRow
from sd3_light.sample.phases import Phases
from sd3_light.sample.verb import OpenModel, SampleOptions, open_model
from tests.families import make_pipeline

ROWS = [
    PromptRow("a red circle", negative_prompt="blue"),
    PromptRow("two blue squares", steps=3),
    PromptRow("a star"),
    PromptRow("a star", guidance=1.0),
]
OPTIONS = SampleOptions(steps=2, width=32, height=32, batch=2, frames=0)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def folder(family: str) -> Path:
        if family == "sd3":
            return DEMO
        path = tmp_path_factory.mktemp("tiny") / family
        make_pipeline(family).save_pretrained(path)
        return path

    return folder


@pytest.fixture
def small_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "free_memory", lambda _: 1000)


def opened(folder: Path, options: SampleOptions, monkeypatch: pytest.MonkeyPatch, free: int) -> OpenModel:
    monkeypatch.setattr(module, "free_memory", lambda _: free)
    return open_model(folder, options, Launch())


def draw(model: OpenModel, rows: list[PromptRow], exact: bool) -> list[bytes]:
    options = model.options
    requests = [model.request(row, seed) for seed, row in enumerate(rows)]
    images = generate(
        model.pipe, requests, model.policy, options.steps, options.guidance, options.batch, exact=exact
    )
    return [np.asarray(image).tobytes() for image in images]


def rows_for(family: str, folder: Path) -> list[PromptRow]:
    return ROWS if family in ("flux", "wan") else [replace(row, negative_prompt=None) for row in ROWS]


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("family", ["sd3", "flux", "wan", *(
    pytest.param(name, marks=pytest.mark.slow) for name in ("flux2", "qwen_image", "z_image", "sana", "krea2")
)])  # fmt: skip
def test_images_in_phases_equal_those_of_a_loaded_model(
    folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, family: str, exact: bool
) -> None:
    folder = folder_of(family)
    options = replace(OPTIONS, frames=5 if family == "wan" else 0, width=64, height=64)
    loaded = opened(folder, options, monkeypatch, 1 << 50)
    phased = opened(folder, options, monkeypatch, 1000)
    assert not isinstance(loaded.pipe, Phases)
    assert isinstance(phased.pipe, Phases)
    monkeypatch.setattr(generate_module, "PER_ROUND", 3)
    rows = [replace(row, negative_prompt=None) for row in ROWS] if loaded.policy.negative_fault() else ROWS
    expected = draw(loaded, rows, exact)
    assert draw(phased, rows, exact) == expected
    assert len(set(expected)) == len(expected)
