"""From images alone: parts, cache, train and sample through the command line."""

from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from sd3_light.parts import verb as stage
from sd3_light.parts.sizes import TextSize, VaeSize
from tests.project import Project


@pytest.fixture
def commands() -> Callable[..., int]:
    from sd3_light.cli import app
    from sd3_light.cli.process import run_guarded

    def run(*words: str | Path) -> int:
        return run_guarded(lambda: app([str(word) for word in words], standalone_mode=False))

    return run


@pytest.mark.slow  # the stock pipeline loads the parts in test_parts.py of the stages
@pytest.mark.usefixtures("unproven")
def test_parts_then_train_then_sample(
    fresh_project: Project, commands: Callable[..., int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(stage.VAE_SIZES, "tiny", VaeSize((8, 8, 8, 8), 1, 4))
    monkeypatch.setitem(stage.TEXT_SIZES, "tiny", TextSize(96, 128, 256, 1, (8, 8, 16, 16), (1, 1, 1, 1)))
    # the widths that the size tiny2 expects
    project, out = fresh_project, tmp_path / "parts"
    sizes = ("--vae-size", "tiny", "--text-size", "tiny", "--vae-batch", "4", "--text-batch", "8")
    steps = ("--vae-steps", "2", "--text-steps", "2", "--workers", "0")
    assert commands("parts", project.data_toml, out, *sizes, *steps) == 0
    overrides = ("--set", f"model.diffusers_path={out}", "--set", "model.t5_max_length=24", "--set", "max_steps=2")
    assert commands("cache", project.train_toml, *overrides) == 0
    assert commands("train", project.train_toml, *overrides) == 0
    images = tmp_path / "images"
    assert commands("sample", project.run, "a red circle", "--steps", "2", "--out", images) == 0
    assert Image.open(images / "00000.png").size == (64, 64)
