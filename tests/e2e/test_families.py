"""The example scripts of image families: one step is that of the stock pipeline, which loads what they save.

A stock pipeline with one step from time t returns x_t - t v, so its result shows the velocity v that it uses: with its
own packing, time, guidance and text.
"""

import runpy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from sd3_light.runlog import read_log
from sd3_light.tasks import pack_latents, unpack_latents
from sd3_light.tasks.prepare import identities, rows_of
from sd3_light.world import draw_image, scene_captions
from tests.cases import combinations
from tests.families import PIPELINES, save_pipeline

ROOT = Path(__file__).parents[2]
CLASSES = {"flux": "Flux", "qwen_image": "QwenImage", "z_image": "ZImage", "sana": "Sana"}
PACKED = ("flux", "qwen_image")
# without guidance by a second pass; Flux embeds the example's scale
CALLS: dict[str, dict[str, Any]] = {
    "flux": {"guidance_scale": 1.0},
    "qwen_image": {"true_cfg_scale": 1.0},
    "z_image": {"guidance_scale": 0.0},
    "sana": {"guidance_scale": 1.0, "use_resolution_binning": False},
}

# the layers that ComfyUI's source maps from `transformer.NAME.lora_A.weight`, by list of blocks; it has no Sana
_JOINT = {"attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0", "attn.to_add_out"}
_JOINT |= {"attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"}
_Z_IMAGE = {"attention.to_q", "attention.to_k", "attention.to_v", "attention.to_out.0", "adaLN_modulation.0"}
_Z_IMAGE |= {"feed_forward.w1", "feed_forward.w2", "feed_forward.w3"}
_FLUX = {"norm1.linear", "norm1_context.linear", "ff.net.0.proj", "ff.net.2"}
COMFYUI: dict[str, dict[str, set[str]]] = {
    "flux": {
        "transformer_blocks": _JOINT | _FLUX | {"ff_context.net.0.proj", "ff_context.net.2"},
        "single_transformer_blocks": {"attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp", "proj_out", "norm.linear"},
    },
    "qwen_image": {
        "transformer_blocks": _JOINT
        | {f"{stream}_{layer}" for stream in ("img", "txt") for layer in ("mod.1", "mlp.net.0.proj", "mlp.net.2")}
    },
    "z_image": dict.fromkeys(("layers", "noise_refiner", "context_refiner"), _Z_IMAGE),
}


def require_comfyui_layers(family: str, tensors: dict[str, Tensor]) -> None:
    for name in tensors if family in COMFYUI else ():
        prefix, blocks, _, layer = name.split(".", 3)
        layer, factor = layer.rsplit(".lora_", 1)
        assert (prefix, factor[1:]) == ("transformer", ".weight"), name
        assert layer in COMFYUI[family][blocks], name


@dataclass(frozen=True)
class Family:
    name: str
    model: Path
    images: Path

    def pipe(self) -> Any:
        """Load the stock pipeline."""
        pipe = getattr(diffusers, PIPELINES[self.name].kind).from_pretrained(self.model, dtype=torch.float32)
        pipe.set_progress_bar_config(disable=True)
        return pipe

    @property
    def script(self) -> Path:
        name = "qwen" if self.name == "qwen_image" else self.name
        return ROOT / "examples" / f"{name}_task.py"

    def module(self, full: bool) -> Any:
        """Return the example's module over the stock pipeline."""
        return runpy.run_path(str(self.script))[CLASSES[self.name]](self.pipe(), full)

    def run(self, out: Path, *flags: str) -> dict[str, Any]:
        """Run the script in this process; return its variables."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", [str(self.script), str(self.model), str(self.images), str(out), *flags])
            return runpy.run_path(str(self.script), run_name="__main__")

    @cached_property
    def samples(self) -> list[dict[str, Any]]:
        """Two samples of one size, with captions of unequal length."""
        image = draw_image(0, 1)[0].resize((64, 32))
        items = [{"image": image, "prompt": prompt} for prompt in ("a dot", "three red dots")]
        return [{"data": item, "data_id": index, "epoch": 0, "repeat": 0} for index, item in enumerate(items)]

    def stock(self, pipe: Any, latents: Tensor, prompt: str, sigmas: list[float], output: str = "latent") -> Tensor:
        """Return the pipeline's result from normalised latents [C, h, w], with gradients."""
        height, width = latents.shape[-2:]
        start = pack_latents(latents[None]) if self.name in PACKED else latents[None]
        size = {"height": height * pipe.vae_scale_factor, "width": width * pipe.vae_scale_factor}
        call: Callable[..., Any] = type(pipe).__call__.__wrapped__  # without no_grad
        keys = {"latents": start, "sigmas": sigmas, "num_inference_steps": len(sigmas), "output_type": output}
        result = call(pipe, [prompt], **size, **keys, **CALLS[self.name]).images
        if output != "latent":
            return torch.as_tensor(result)
        return (unpack_latents(result, height, width) if self.name in PACKED else result)[0]

    @torch.no_grad()
    def sample(self, pipe: Any) -> Tensor:
        """Return latents after two steps from fixed noise."""
        size = (4, 32 // pipe.vae_scale_factor, 64 // pipe.vae_scale_factor)
        noise = torch.randn(size, generator=torch.Generator().manual_seed(0))
        return self.stock(pipe, noise, "a dot", [0.9, 0.5])


@pytest.fixture(scope="module", params=list(CLASSES))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    folder = tmp_path_factory.mktemp(request.param)
    (folder / "images").mkdir()
    for index in range(2):
        image, scene = draw_image(index, 1)
        image.resize((64, 32)).save(folder / "images" / f"{index}.png")
        (folder / "images" / f"{index}.txt").write_text(scene_captions(scene)["en"], encoding="utf-8")
    return Family(request.param, save_pipeline(request.param, folder / "model"), folder / "images")


def test_one_step_is_that_of_the_stock_pipeline(family: Family) -> None:
    module, pipe = family.module(full=True), family.pipe()
    values = module.inputs(module.preparer().prepare_inputs(rows_of(family.samples)))
    times = module.loss.times(values["quantile"], values["latents"])
    losses = []
    for sample, clean, noise, t in zip(family.samples, values["latents"], values["noise"], times, strict=True):
        noisy = (1 - t) * clean + t * noise
        velocity = (noisy - family.stock(pipe, noisy, sample["data"]["prompt"], [float(t)])) / t
        losses.append((velocity - (noise - clean)).square().mean())
    expected = torch.stack(losses).mean()
    expected.backward()
    loss = module(family.samples)
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    stock = dict(pipe.transformer.named_parameters())
    trained = [name for name, weight in module.transformer.named_parameters() if weight.requires_grad]
    gradients = [
        torch.cat([named[name].grad.flatten() for name in trained]) for named in (stock, dict(module.named_trainable()))
    ]
    error = (gradients[0] - gradients[1]).norm() / gradients[0].norm()
    assert error < 1e-4, f"gradients differ by {error:.1e}"


def test_latents_are_normalised_as_the_stock_pipeline_undoes_it(family: Family) -> None:
    module, pipe, seen = family.module(full=False), family.pipe(), []
    values = module.inputs(module.preparer().prepare_inputs(rows_of(family.samples[:1])))
    decode = pipe.vae.decode

    def spy(latents: Tensor, **keys: Any) -> Any:
        seen.append(latents)
        return decode(latents, **keys)

    pipe.vae.decode = spy
    with torch.no_grad():
        family.stock(pipe, values["latents"][0], "", [1e-8], output="pt")
        pixels = pipe.image_processor.preprocess(family.samples[0]["data"]["image"])
        encoded = pipe.vae.encode(pixels[:, :, None] if family.name == "qwen_image" else pixels)
    (raw,) = seen
    if family.name == "sana":
        expected = encoded.latent
    else:
        draw = module._draw(identities(rows_of(family.samples[0]), None), 0)
        noise = draw("posterior", tuple(encoded.latent_dist.mean.flatten(2)[0].shape)).view_as(encoded.latent_dist.mean)
        expected = encoded.latent_dist.mean + encoded.latent_dist.std * noise
    assert torch.allclose(raw, expected, atol=1e-4)


def test_the_stock_pipeline_loads_the_lora(family: Family, tmp_path: Path) -> None:
    trained, pipe = family.run(tmp_path)["module"], family.pipe()
    steps = [event for event in read_log(tmp_path / "log.jsonl") if event["event"] == "step"]
    assert len(steps) == 2, "two images, twice"
    before, after = (family.sample(one) for one in (pipe, trained.pipe))
    assert not torch.allclose(before, after, atol=1e-5)
    pipe.load_lora_weights(tmp_path, weight_name="epoch-1.safetensors")
    assert torch.allclose(family.sample(pipe), after, atol=1e-5)
    require_comfyui_layers(family.name, load_file(tmp_path / "epoch-1.safetensors"))


@pytest.mark.parametrize("family", combinations(CLASSES, fast=[("z_image",)]), indirect=True)
def test_full_training_saves_the_stock_weights(family: Family, tmp_path: Path) -> None:
    trained, pipe = family.run(tmp_path, "--full")["module"], family.pipe()
    missing, unexpected = pipe.transformer.load_state_dict(load_file(tmp_path / "epoch-1.safetensors"), strict=False)
    frozen = [name for name, weight in trained.transformer.named_parameters() if not weight.requires_grad]
    assert (sorted(missing), unexpected) == (sorted(frozen), [])
    assert torch.equal(family.sample(pipe), family.sample(trained.pipe))


def test_a_script_stays_short(family: Family) -> None:
    """At most 60 lines, with docstring, imports and blank lines."""
    assert len(family.script.read_text(encoding="utf-8").splitlines()) <= 60
