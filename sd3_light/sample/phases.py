"""Draw with a model whose parts do not fit in memory together: they are loaded one after another, and freed.

All texts are encoded before the denoiser is loaded, and all latents are drawn before the VAE decodes them. Images have
the same bits as with all parts in memory.
"""

import copy
import gc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import diffusers
import torch
from torch import Tensor

from sd3_light.core.sampling import PipelineInputs
from sd3_light.cost.drawing_memory import drawing_bytes
from sd3_light.encoding.placement import free_memory
from sd3_light.encoding.vae import VaeDecoder, vae_class
from sd3_light.export.chosen import ChosenModel
from sd3_light.export.lora_merge import add_adapters, draw_as_adapters, text_folder
from sd3_light.export.lora_stack import Lora
from sd3_light.export.lycoris_file import is_lycoris
from sd3_light.export.open_pipeline import open_pipeline, open_policy, require_finite_denoiser
from sd3_light.export.stored_parts import read_denoiser
from sd3_light.model.folder import components, count_weights, is_encoder, stored_weights
from sd3_light.model.loading import CPU, empty_model, kept_in_float32, load_diffusers_model
from sd3_light.model.part_configs import read_config, read_json
from sd3_light.runlog import info
from sd3_light.sample.precision import compute_in

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

PER_ROUND = 128
"""Images that are drawn before they are decoded; their texts take a few hundred MB of host memory."""


class LatentsDrawn(Exception):
    """Ends the call of a pipeline whose VAE is not on the device."""

    def __init__(self, latents: Tensor) -> None:
        super().__init__()
        self.latents = latents


class _HostVae:
    """A VAE on the host, in a pipeline on the device: it has the settings, and returns latents in place of images."""

    def __init__(self, vae: Any) -> None:
        self.host = vae

    def __getattr__(self, name: str) -> Any:
        return getattr(self.host, name)

    def decode(self, latents: Tensor, *_: object, **__: object) -> None:
        raise LatentsDrawn(latents)


@dataclass(frozen=True)
class Phases:
    """A model in phases. ``pipe`` has the settings of its denoiser and VAE without their weights, and no encoders."""

    chosen: ChosenModel
    loras: tuple[Lora, ...]
    device: torch.device
    dtype: torch.dtype
    pipe: "DiffusionPipeline"

    @staticmethod
    def of_model(
        chosen: ChosenModel,
        loras: Sequence[Lora],
        device: torch.device,
        dtype: torch.dtype = torch.float32,
    ) -> "tuple[Phases, PipelineInputs] | None":
        """Return the phases of a model with these adapters, and its text policy; None if all parts fit together."""
        family, policy = open_policy(chosen.folder, chosen.text_facts)
        free = free_memory(device)
        is_kept = kept_in_float32(getattr(diffusers, family.denoiser))
        kept = sum(count for name, count in stored_weights(chosen.folder / "transformer") if is_kept(name))
        needed = drawing_bytes(count_weights(chosen.folder), dtype.itemsize, device.type == "cuda", kept)
        if free is None or needed <= free:
            return None
        read_denoiser(chosen.folder / "transformer", family)  # reports missing or wrong weights
        where = "in memory" if device.type == "cpu" else "on the GPU"
        info(f"the parts of the model do not fit {where} together: text encoders, denoiser and VAE take turns")
        config = read_json(chosen.folder / "transformer" / "config.json")
        arguments = {key: value for key, value in config.items() if not key.startswith("_")}
        vae = empty_model(vae_class(chosen.folder), read_config(chosen.folder / "vae", "vae"))
        parts: dict[str, Any] = {name: None for name, kind in components(chosen.folder).items() if is_encoder(*kind)}
        parts |= {"transformer": family.weights.empty(arguments), "vae": vae}
        pipe, _ = open_pipeline(chosen.folder, torch.device("meta"), chosen.text_facts, parts=parts)
        policy = draw_as_adapters(pipe, policy, loras)
        return Phases(chosen, tuple(loras), device, dtype, pipe), policy

    @property
    def scheduler(self) -> Any:
        """The scheduler of the pipeline."""
        return self.pipe.scheduler

    def text_encoders(self) -> "DiffusionPipeline":
        """Return a pipeline with the text encoders alone, on the device."""
        parts = {"transformer": None, "vae": None}
        pipe, _ = open_pipeline(self.chosen.folder, CPU, self.chosen.text_facts, self.dtype, parts)
        return self._completed(pipe)

    def denoiser(self, vae: Any) -> "DiffusionPipeline":
        """Return a pipeline with the denoiser on the device, whose call raises `LatentsDrawn`; ``vae`` is not moved."""
        pipe = copy.copy(self.pipe)
        folder = self.chosen.folder
        place = (self.dtype, self.device)
        if any(is_lycoris(lora.file) for lora in self.loras):
            place = (torch.float32, CPU)  # a LoKr or LoHa is added to the weights, in float32
        pipe.transformer = load_diffusers_model(type(self.pipe.transformer), folder / "transformer", *place)
        require_finite_denoiser(pipe.transformer, folder)
        pipe.vae = _HostVae(vae)
        return self._completed(pipe)

    def _completed(self, pipe: "DiffusionPipeline") -> "DiffusionPipeline":
        """Return a pipeline with its adapters, in its dtype on the device."""
        add_adapters(pipe, self.loras)
        compute_in(pipe, self.dtype)
        return pipe.to(self.device)

    def decoder(self) -> VaeDecoder:
        """Load the VAE on the host."""
        return VaeDecoder(self.chosen.folder, self.device)

    def free(self) -> None:
        """Return the memory of parts that are no longer used."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def open_with_adapters(
    chosen: ChosenModel, loras: Sequence[Lora], device: torch.device
) -> "tuple[DiffusionPipeline | Phases, PipelineInputs]":
    """Open a model in float32 with its own adapters and ``loras``: all parts on the device, or in phases."""
    all_loras = (*chosen.loras, *loras)
    chosen = replace(chosen, text_facts=text_folder(chosen, loras))
    if (in_phases := Phases.of_model(chosen, all_loras, device)) is not None:
        return in_phases
    pipe, policy = open_pipeline(chosen.folder, device, chosen.text_facts)
    policy = draw_as_adapters(pipe, policy, all_loras)
    add_adapters(pipe, all_loras)
    return pipe, policy
