"""`check`, its conclusion and the choice of blocks for a family without formulas, kernels or a position table."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from sd3_light.check import verb as check
from sd3_light.check.render import render
from sd3_light.check.verb import Target, conclude
from sd3_light.config import SIZES, ConfigFaults, Fault, ModelConfig, TrainConfig, UserError
from sd3_light.core import registry
from sd3_light.core.checks import ModelChecks, ModelFact
from sd3_light.core.columns import Bucket, Column
from sd3_light.core.cost import Cost, Layout, Tokens
from sd3_light.core.family import Family
from sd3_light.core.start import WeightsStart
from sd3_light.engines import Launch
from sd3_light.engines.blocks import choose_blocks, require_blocks
from sd3_light.engines.processes import ProcessGroups
from tests.unit.check.conftest import shown
from tests.unit.families.test_counted_cost import DUAL, CountedSD3

CPU = torch.device("cpu")
COST = CountedSD3(DUAL, "Flux")


class Checks(ModelChecks):
    """Finds nothing wrong."""

    def folder_faults(self, model: ModelConfig) -> Iterator[Fault]:
        yield from ()

    def has_size(self, model: ModelConfig) -> bool:
        return True

    def encoder_faults(self, model: ModelConfig, start: WeightsStart | None) -> Iterator[Fault]:
        yield from ()

    def key_faults(self, train: TrainConfig, start: WeightsStart) -> Iterator[Fault]:
        yield from ()

    def largest_side(self, start: WeightsStart, model: ModelConfig) -> None:
        return None

    def facts(self, start: WeightsStart) -> tuple[ModelFact, ...]:
        return (ModelFact("guidance", "3.5", "that the denoiser was distilled with", "guidance 3.5"),)

    def trained_side(self, folder: Path) -> int:
        return 1024

    def text_limit(self, folder: Path) -> None:
        return None


class Weights:
    def start(self, model: ModelConfig) -> WeightsStart:
        return WeightsStart("folder", Path("flux"), SIZES["demo"], "weights of a tiny Flux")


class TinyFlux(Family):
    name, title = "sd3", "Flux"  # the name that a config can give
    fast_blocks = None
    checks = Checks()
    weights: Any = Weights()
    encoding: Any = SimpleNamespace(model_limits=lambda model: [])

    def cost(self, start: WeightsStart, model: ModelConfig) -> Cost:
        return COST

    def columns(self, model: ModelConfig, folder: Path, bucket: Bucket) -> tuple[Column, ...]:
        image = Column("moments", "image", "float16", (8, bucket.height // 8, bucket.width // 8), ("vae",))
        return image, Column("text", "caption", "bfloat16", (96, 32), ("text_encoder",))

    def prepared_columns(self, model: ModelConfig, columns: Sequence[Column]) -> tuple[Column, ...]:
        return tuple(columns)


TinyFlux.__abstractmethods__ = frozenset()  # other parts are not asked for here


@pytest.fixture
def flux(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(registry._FAMILIES, "sd3", f"{__name__}:TinyFlux")
    registry.family_named.cache_clear()
    yield
    registry.family_named.cache_clear()


def test_another_family_is_checked(flux: None, files: Any) -> None:
    files.image("one.png", 640, 320)
    loaded = files.load(dataset='resolutions = [128]\n[[directory]]\npath = "images"\n')
    estimate = check.run(loaded, 1)
    (row,) = estimate.data.rows
    assert row.tokens == Tokens(COST.image_tokens(row.bucket.width, row.bucket.height), 96)
    assert estimate.why_stock == "Flux has no fast blocks"
    assert estimate.setup.block_kind == "stock"
    lines = dict(conclude(loaded.train, estimate, Target()))
    assert lines["trains"] == f"weights of a tiny Flux ({COST.parameters:,} parameters, guidance 3.5)"
    text = shown(render(estimate))
    for words in ("Flux: 4 blocks, width 128", "that the denoiser was distilled with", "96, padded"):
        assert words in text
    assert "because Flux has no fast blocks" in text


def test_kernels_that_a_family_lacks_are_one_fault_each(flux: None, files: Any) -> None:
    files.image("one.png", 64, 64)
    with pytest.raises(ConfigFaults) as error:
        check.run(files.load(top="fast = true\nfp8 = true"))
    assert [(fault.key, fault.problem) for fault in error.value.faults] == [
        ("fast", "Flux has no fast blocks"),
        ("fp8", "Flux has no fast blocks"),
    ]


def test_a_family_without_kernels_runs_stock_blocks(flux: None, files: Any) -> None:
    def kind(top: str) -> tuple[str, str | None, str | None]:
        denoiser: Any = nn.Linear(1, 1)
        return choose_blocks(files.load(top=top).train, COST, denoiser, Layout(), CPU, ProcessGroups())

    assert kind("") == ("stock", "Flux has no fast blocks", "there is no GPU")
    assert kind("compile = true") == ("compiled", "Flux has no fast blocks", None)
    assert kind("compile = false") == ("stock", "Flux has no fast blocks", "compile = false")
    with pytest.raises(
        UserError, match=r'^fast = true is not available: Flux has no fast blocks; write fast = "auto"$'
    ):
        require_blocks(files.load(top="fast = true").train, COST, Launch(), CPU, by_deepspeed=False)
    with pytest.raises(UserError, match=r"^fp8 = true is not available: Flux has no fast blocks; write fp8 = false$"):
        kind("fp8 = true")
