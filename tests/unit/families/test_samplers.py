"""Every sampler with every family: an image, or a refusal in one line."""

from pathlib import Path
from typing import Any

import pytest
from diffusers import FlowMatchEulerDiscreteScheduler
from PIL import Image

from sd3_light.assets import DEMO
from sd3_light.config.faults import UserError
from sd3_light.core.registry import family_named
from sd3_light.flow.scheduler import SAMPLERS
from sd3_light.sample import verb as sample
from sd3_light.sample.image_requests import PromptRow
from sd3_light.sample.verb import SampleOptions
from tests.families import TinyFolder, make_pipeline

EULER_ONLY = r"sets times that this sampler does not support; use --sampler euler"
REFUSED = {
    "sd3": {},
    "prx": {},
    "flux": {"heun": "does not support flux_shift"},
    "flux2": {"heun": "does not support flux_shift"},
    "krea2": {"heun": f"Krea2Pipeline {EULER_ONLY}", "dpm++": f"Krea2Pipeline {EULER_ONLY}"},
    "z_image": {"heun": f"ZImagePipeline {EULER_ONLY}", "dpm++": f"ZImagePipeline {EULER_ONLY}"},
    "qwen_image": {"heun": "shift_terminal, which only euler supports", "dpm++": "shift_terminal"},
    "sana": {"heun": "a DPMSolverMultistepScheduler; leave", "dpm++": "a DPMSolverMultistepScheduler; leave"},
    "wan": {"heun": "a UniPCMultistepScheduler; leave", "dpm++": "a UniPCMultistepScheduler; leave"},
}


def draw(folder: Path, out: Path, sampler: str) -> None:
    """Draw an image; its pixels are finite, or `sample` refuses to write it."""
    options = SampleOptions(steps=2, width=64, height=64, sampler=sampler, grid=False)
    sample.run(folder, [PromptRow("a fox")], [3], out, options)
    with Image.open(out / "00000.png") as image:
        assert image.size == (64, 64)


def check_samplers(folder: Path, out: Path, refused: dict[str, str]) -> None:
    for number, sampler in enumerate(SAMPLERS):
        if sampler in refused:
            with pytest.raises(UserError, match=refused[sampler]) as raised:
                draw(folder, out / str(number), sampler)
            assert "\n" not in str(raised.value)
        else:
            draw(folder, out / str(number), sampler)


@pytest.fixture(autouse=True)
def _without_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(family_named("prx")), "packages", ())


@pytest.mark.parametrize("family", REFUSED)
def test_every_sampler_draws_or_is_refused(family: str, tmp_path: Path, stock_folder: TinyFolder) -> None:
    check_samplers(DEMO if family == "sd3" else stock_folder(family), tmp_path, REFUSED[family])


@pytest.mark.parametrize(
    ("family", "is_dynamic", "refused"),
    [
        ("flux", False, ("heun", "dpm++")),
        ("flux2", False, ("heun", "dpm++")),
        ("qwen_image", False, ("heun", "dpm++")),
        ("qwen_image", True, ("heun", "dpm++")),
        ("krea2", False, ("heun", "dpm++")),
        ("z_image", True, ("heun", "dpm++")),
        ("sana", False, ()),
        ("wan", False, ()),
    ],
)
def test_other_scheduler_settings(family: str, is_dynamic: bool, refused: tuple[str, ...], tmp_path: Path) -> None:
    """A distilled Flux has a constant shift, and a family of other schedulers may come with Euler's."""
    config: dict[str, Any] = {"guidance_embeds": False} if family == "flux" else {}
    euler = FlowMatchEulerDiscreteScheduler(shift=2.0, use_dynamic_shifting=is_dynamic)
    make_pipeline(family, euler, **config).save_pretrained(tmp_path / "model")
    check_samplers(tmp_path / "model", tmp_path, dict.fromkeys(refused, EULER_ONLY))
