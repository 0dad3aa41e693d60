"""A model of real text tokens: its folder's own pipeline and this package's give the images of `sd3-light sample`."""

import json
import re
from pathlib import Path
from typing import Any

import diffusers.utils.dynamic_modules_utils as dynamic
import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline, StableDiffusion3Pipeline
from PIL import Image

from sd3_light.config import SIZES
from sd3_light.core.registry import family_named
from sd3_light.export.diffusers_folder import write_folder
from sd3_light.export.export_spec import ExportSpec
from sd3_light.export.open_pipeline import open_pipeline
from sd3_light.export.proof import ProofError, expectation, prove
from sd3_light.families.sd3 import real_pipeline
from sd3_light.families.sd3.real_pipeline import RealTextPipeline
from sd3_light.families.sd3.sample_texts import TextPolicy
from sd3_light.sample.generate import ImageRequest, generate
from tests.project import without_proofs
from tests.unit.export.denoisers import live_denoiser

CONFIG = SIZES["tiny2"].transformer_config()
PROMPTS = ["a red circle", "two small green stars left of a large blue square on a white background"]
SETTINGS = {"num_inference_steps": 2, "guidance_scale": 4.0, "width": 64, "height": 64}
CPU = torch.device("cpu")
Exports = dict[tuple[str, str], Path]


def live_weights() -> dict[str, torch.Tensor]:
    return dict(live_denoiser(CONFIG, seed=7).state_dict())


def spec(base: Path, tokens: str, uncond: str) -> ExportSpec:
    text = {"text_tokens": tokens, "uncond_text": uncond, "t5_max_length": 16}
    return ExportSpec(base, CONFIG, torch.float32, text=text, family=family_named("sd3"))


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory, demo_parts: Path) -> Exports:
    """One export per text policy, all of the same weights. Read only."""
    root, weights = tmp_path_factory.mktemp("exports"), live_weights()
    with without_proofs():
        return {
            (tokens, uncond): write_folder(root / f"{tokens}-{uncond}", weights, spec(demo_parts, tokens, uncond))
            for tokens in ("padded", "real")
            for uncond in ("zero", "empty")
        }


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let diffusers copy a folder's pipeline file here, not to the user's home."""
    monkeypatch.setattr(dynamic, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))


def seeded(*seeds: int) -> list[torch.Generator]:
    return [torch.Generator("cpu").manual_seed(seed) for seed in seeds]


def distance(first: Image.Image, second: Image.Image) -> int:
    return int(np.abs(np.asarray(first, dtype=int) - np.asarray(second, dtype=int)).max())


def ours(folder: Path, uncond: Any, prompts: list[str]) -> list[Image.Image]:
    """Generate images as `sd3-light sample` does, with the stock pipeline and the text policy."""
    pipe = StableDiffusion3Pipeline.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    requests = [ImageRequest(prompt, seed, 64, 64) for seed, prompt in enumerate(prompts)]
    return generate(pipe, requests, TextPolicy(16, uncond, "real"), (2, 4.0))


@pytest.mark.parametrize("uncond", ["zero", "empty"])
def test_the_folders_pipeline_equals_sd3_light_sample(exports: Exports, uncond: str, modules: None) -> None:
    """Loaded as diffusers documents, with prompts of different lengths in one batch."""
    folder = exports["real", uncond]
    pipe = DiffusionPipeline.from_pretrained(
        folder, custom_pipeline="pipeline", trust_remote_code=True, dtype=torch.float32, local_files_only=True
    )
    assert type(pipe).__name__ == "RealTextPipeline"
    assert type(pipe) is not RealTextPipeline, "it is the folder's own class"
    assert (pipe.config.t5_max_length, pipe.config.uncond_text) == (16, uncond)
    images = pipe(PROMPTS, generator=seeded(0, 1), **SETTINGS).images
    expected = ours(folder, uncond, PROMPTS)
    assert max(map(distance, images, expected)) <= 1
    alone = [pipe(prompt, generator=seeded(seed), **SETTINGS).images[0] for seed, prompt in enumerate(PROMPTS)]
    assert max(map(distance, alone, expected)) <= 1, "in any batch"
    assert distance(*images) > 8


def test_this_package_uses_its_own_class_and_never_runs_the_folders_file(exports: Exports, tmp_path: Path) -> None:
    folder, trap = exports["real", "zero"], tmp_path / "trap"
    trap.mkdir()
    for path in folder.iterdir():
        (trap / path.name).symlink_to(path)
    (trap / "pipeline.py").unlink()
    (trap / "pipeline.py").write_text("raise SystemExit('this was run')")
    pipe, policy = open_pipeline(trap, CPU)
    assert isinstance(pipe, RealTextPipeline)
    assert (policy.text_tokens, policy.uncond_text, policy.t5_max_length) == ("real", "zero", 16)
    expected = ours(folder, "zero", PROMPTS)
    assert max(map(distance, pipe(PROMPTS, generator=seeded(0, 1), **SETTINGS).images, expected)) <= 1
    requests = [ImageRequest(prompt, seed, 64, 64) for seed, prompt in enumerate(PROMPTS)]
    assert max(map(distance, generate(pipe, requests, policy, (2, 4.0)), expected)) == 0, "sampling too"


def test_the_pipeline_file_is_not_inherited(exports: Exports, tmp_path: Path, unproven: None) -> None:
    assert (exports["real", "zero"] / "pipeline.py").read_bytes() == Path(real_pipeline.__file__).read_bytes()
    assert not (exports["padded", "zero"] / "pipeline.py").exists()
    index = json.loads((exports["real", "zero"] / "model_index.json").read_text())
    assert index["_class_name"] == "StableDiffusion3Pipeline", "stock diffusers refuses folders with another class"
    out = write_folder(tmp_path / "out", live_weights(), spec(exports["real", "zero"], "padded", "empty"))
    assert not (out / "pipeline.py").exists()
    assert "t5_max_length" not in json.loads((out / "model_index.json").read_text())


def test_the_proof_uses_the_folders_pipeline(exports: Exports, demo_parts: Path, tmp_path: Path) -> None:
    real_spec, weights = spec(demo_parts, "real", "zero"), live_weights()
    proof = prove(exports["real", "zero"], real_spec, expectation(exports["real", "zero"], real_spec, weights))
    assert proof["pipeline"] == "pipeline.py of this folder"
    assert proof["picture_max_difference"] <= 1 / 255
    unmasked = tmp_path / "unmasked"
    unmasked.mkdir()
    for path in exports["real", "zero"].iterdir():
        (unmasked / path.name).symlink_to(path)
    source = (unmasked / "pipeline.py").read_text()
    (unmasked / "pipeline.py").unlink()
    (unmasked / "pipeline.py").write_text(source.replace("attn_mask=mask", "attn_mask=None"))
    with pytest.raises(ProofError, match="an image of the reloaded pipeline differs by"):
        prove(unmasked, real_spec, expectation(unmasked, real_spec, weights))


@pytest.fixture(scope="module")
def real(exports: Exports) -> Any:
    return open_pipeline(exports["real", "empty"], CPU)[0]


def test_custom_embeddings_use_all_rows_or_the_given_lengths(real: Any) -> None:
    text, negative, pooled, negative_pooled = real.encode_prompt([PROMPTS[0]], None, None)
    lengths = real._text_lengths
    assert lengths.tolist()[0] < lengths.tolist()[1] == text.shape[1] == negative.shape[1]
    garbage = torch.cat([negative[:, : lengths[0]], torch.full_like(negative[:, lengths[0] :], 7.0)], dim=1)
    embeds = {
        "prompt_embeds": text,
        "pooled_prompt_embeds": pooled,
        "negative_prompt_embeds": garbage,
        "negative_pooled_prompt_embeds": negative_pooled,
    }
    options = {"joint_attention_kwargs": {"text_lengths": lengths}}
    expected = real(PROMPTS[0], generator=seeded(0), **SETTINGS).images[0]
    assert distance(real(**embeds, **options, generator=seeded(0), **SETTINGS).images[0], expected) == 0
    assert distance(real(**embeds, generator=seeded(0), **SETTINGS).images[0], expected) > 0


def test_several_images_per_prompt_no_guidance_and_a_negative_prompt(real: Any) -> None:
    images = real(PROMPTS, num_images_per_prompt=2, generator=seeded(0, 1, 2, 3), **SETTINGS).images
    again = real(PROMPTS[1], generator=seeded(2), **SETTINGS).images[0]
    assert distance(images[2], again) <= 1
    real(PROMPTS, **{**SETTINGS, "guidance_scale": 1.0})
    assert len(real._text_lengths) == 2
    guided = real(PROMPTS[0], negative_prompt="a blue square", generator=seeded(0), **SETTINGS).images[0]
    assert distance(guided, real(PROMPTS[0], generator=seeded(0), **SETTINGS).images[0]) > 1


def test_without_t5_its_tokens_are_left_out(exports: Exports, real: Any) -> None:
    options = {"text_encoder_3": None, "dtype": torch.float32, "local_files_only": True}
    pipe = RealTextPipeline.from_pretrained(exports["real", "empty"], **options)
    clip_only, full = (p.encode_prompt(PROMPTS[0], do_classifier_free_guidance=False)[0] for p in (pipe, real))
    assert clip_only.shape[1] < full.shape[1]
    assert torch.equal(clip_only, full[:, : clip_only.shape[1]])


def test_options_that_training_did_not_use_are_refused(exports: Exports, real: Any) -> None:
    with pytest.raises(ValueError, match="clip_skip"):
        real(PROMPTS[0], clip_skip=1, **SETTINGS)
    zero, _ = open_pipeline(exports["real", "zero"], CPU)
    with pytest.raises(ValueError, match="trained with zeros as its unconditional text"):
        zero(PROMPTS[0], negative_prompt="a blue square", **SETTINGS)
    zero(PROMPTS[:1], negative_prompt=[""], **{**SETTINGS, "num_inference_steps": 1})


@pytest.mark.parametrize(("tokens", "uncond"), [("padded", "empty"), ("padded", "zero"), ("real", "zero")])
def test_the_cards_code_equals_sd3_light_sample(exports: Exports, tokens: Any, uncond: Any, modules: None) -> None:
    folder = exports[tokens, uncond]
    (code,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    assert len([line for line in code.splitlines() if line and "import" not in line]) <= 5
    names: dict[str, Any] = {}
    exec(code.replace("this folder", str(folder)), names)
    pipe, policy = open_pipeline(folder, CPU)
    side = CONFIG["sample_size"] * pipe.vae_scale_factor
    request = ImageRequest("a prompt", 0, side, side)
    (expected,) = generate(pipe, [request], policy)
    assert distance(names["image"], expected) <= 1
