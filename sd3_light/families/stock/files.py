"""The files of a stock pipeline: diffusers' own layouts, and a proof whose inputs follow from the family's columns."""

import inspect
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import diffusers
import torch
from diffusers.configuration_utils import FrozenDict
from torch import Tensor, nn

from sd3_light.config import ModelConfig, UserError
from sd3_light.core.batch import LENGTH, Batch
from sd3_light.core.columns import Bucket, reference_entry
from sd3_light.core.files import AdapterNames, CardTexts, Files
from sd3_light.export.proof_process import sample_image
from sd3_light.families.stock.inputs import StockInputs
from sd3_light.families.stock.latents import LatentShape
from sd3_light.model.folder import missing_components
from sd3_light.model.part_configs import FACTS_FILE

if TYPE_CHECKING:
    from sd3_light.families.base import StockFamily

_STEPS = 2
_GUIDANCE = 3.0
_SIDE = 4  # image tokens in each direction
_LENGTHS = (5, 8)  # rows of two texts

_CODE = """import torch
from diffusers import {pipeline}

pipe = {pipeline}.from_pretrained("this folder", dtype=torch.float32)
seed = torch.Generator("cpu").manual_seed(0)
{drawn}"""
_IMAGE = 'load_image("before.png")'
_DRAWN = {
    "image": 'image = pipe(prompt="a prompt", %sgenerator=seed).images[0]',
    "video": 'frames = pipe(prompt="a prompt", %sgenerator=seed).frames[0]  # see diffusers.utils.export_to_video',
}


class StockFiles(Files):
    """See `Files`."""

    def __init__(self, family: "StockFamily") -> None:
        self._family = family

    @cached_property
    def adapters(self) -> AdapterNames:
        """See `Files.adapters`."""
        return self._family.adapter_names()

    def missing(self, folder: Path, denoiser: bool) -> tuple[str, ...]:
        """See `Files.missing`."""
        return missing_components(folder, denoiser)

    def text_facts(self, model: ModelConfig) -> dict[str, Any]:
        """See `Files.text_facts`."""
        return self._family.text_settings(model)

    def text_policy(self, folder: Path, text: Mapping[str, Any]) -> StockInputs:
        """See `Files.text_policy`."""
        usual = self._family.text_settings(ModelConfig.model_construct(diffusers_path=folder))
        settings = {key: text.get(key, value) for key, value in usual.items()}
        for key, value in settings.items():
            if type(value) is not type(usual[key]) or (type(value) is int and value < 1):
                raise UserError(
                    f"{folder / FACTS_FILE}: {key} has the invalid value {value!r:.80}; export the folder again"
                )
        return StockInputs(self._family, folder, settings)

    def denoiser_inputs(self, config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
        """See `Files.denoiser_inputs`. They are what the family's `denoise` calls a denoiser with."""
        stand_in = _StandIn(config)
        batch = self._texts(folder, {}, 2)
        shape = LatentShape.of_folder(folder)
        latents = shape.latents(self._size(folder), self._family.media == "video")
        noisy = torch.randn(2, *latents, generator=torch.Generator().manual_seed(1))
        seen = max(self._family.references, self._family.texts_see_references)
        others = {reference_entry(number): noisy.flip(0) * 0.5 for number in range(seen)}
        values = {"noisy": noisy, "t": torch.tensor([0.25, 0.5]), **others}
        try:
            self._family.denoise(stand_in, batch.with_values(values), 1.0)
        except _Called as call:
            kind = getattr(diffusers, self._family.denoiser)
            bound = inspect.signature(kind.forward).bind(None, *call.args, **call.kwargs)
            inputs = {name: value for name, value in bound.arguments.items() if name not in ("self", "return_dict")}
            return {name: _copied(value) for name, value in inputs.items()}
        raise AssertionError(f"denoise of {self._family.title} does not call its denoiser")

    def pipeline_inputs(self, folder: Path, config: Mapping[str, Any], text: Mapping[str, Any]) -> dict[str, Any]:
        """See `Files.pipeline_inputs`."""
        texts, negative = (self._texts(folder, text, 1, seed) for seed in (0, 1))
        is_guided = not self._family.takes_guidance(config) and self._family.is_guided(_GUIDANCE)
        arguments = self._family.pipeline_arguments(texts, negative if is_guided else None, _GUIDANCE)
        size = self._size(folder)
        arguments |= {"num_frames": size.frames} if self._family.media == "video" else {}
        if self._family.texts_see_references:  # pixels: their pipelines take no latents
            pixels = torch.randint(256, (32, 32, 3), generator=torch.Generator().manual_seed(2), dtype=torch.uint8)
            arguments |= self._family.reference_arguments([pixels], (size.width, size.height))
        elif self._family.references:
            latents = LatentShape.of_folder(folder).latents(size)
            reference = torch.randn(1, *latents, generator=torch.Generator().manual_seed(2))
            arguments |= self._family.reference_arguments(reference, (size.width, size.height))
        return {**arguments, "width": size.width, "height": size.height, "num_inference_steps": _STEPS}

    def _size(self, folder: Path) -> Bucket:
        """Return the size of the smallest image, or clip, that shows whether all weights are right."""
        side = _SIDE * self._family.token_side(folder)
        return Bucket(side, side, 1 + (self._family.frame_step(folder) or 0))

    def _texts(self, folder: Path, text: Mapping[str, Any], count: int, seed: int = 0) -> Batch:
        """Return a few texts with values drawn from a seed."""
        generator = torch.Generator().manual_seed(seed)
        values: dict[str, Tensor] = {}
        host: dict[str, Tensor] = {}
        for column in self._family.text_columns(self.text_policy(folder, text).model(), folder):
            rows = min(_LENGTHS[-1], column.shape[0])
            shape = column.shape if len(column.shape) == 1 else (rows, *column.shape[1:])
            values[column.name] = torch.randn(count, *shape, generator=generator)
            if column.ragged:
                host[column.name + LENGTH] = torch.tensor([min(rows, length) for length in _LENGTHS[:count]])
        return Batch(count, values, host)

    def reference_image(self, pipe: Any, inputs: Mapping[str, Any]) -> Tensor:
        """See `Files.reference_image`."""
        return sample_image(pipe, inputs)

    def card(self, config: Mapping[str, Any], text: Mapping[str, Any]) -> CardTexts:
        """See `Files.card`."""
        layers = next((config[key] for key in ("num_layers", "n_layers", "depth") if key in config), None)
        blocks = "of the base model's size" if layers is None else f"{layers} blocks"
        policy = ", ".join(f"{key} = {value}" for key, value in text.items()) or "as in the stock pipeline"
        call = self._call(text)
        code = _CODE.format(pipeline=self._family.pipeline, drawn=call)
        known = self._call_parameters()
        # Flux's negative prompts have one too, which is 1 by default
        is_true = "true_cfg_scale" in known and known["true_cfg_scale"].default > 1
        guidance = "true_cfg_scale" if is_true else "guidance_scale"
        return CardTexts(blocks, policy, code, "", "stock diffusers", call, guidance)

    def _call_parameters(self) -> Mapping[str, inspect.Parameter]:
        return inspect.signature(getattr(diffusers, self._family.pipeline).__call__).parameters

    def _call(self, text: Mapping[str, Any]) -> str:
        """Return how an image or a clip is drawn with text of the length of training."""
        if self._family.texts_see_references:  # which have no length of their own
            image = _IMAGE if self._family.references == 1 else f"[{_IMAGE}]"
            return f"from diffusers.utils import load_image\n\n{_DRAWN['image'] % f'image={image}, '}"
        length = text.get("text_max_length") if "max_sequence_length" in self._call_parameters() else None
        options = "" if length is None else f"max_sequence_length={length}, "
        return _DRAWN[self._family.media] % options


class _Called(Exception):
    """The arguments that a denoiser was called with."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__("called")
        self.args = args
        self.kwargs = kwargs


class _StandIn(nn.Module):
    """Takes the place of a denoiser with a config, and raises what it is called with."""

    dtype = torch.float32

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.config = FrozenDict(config)

    def forward(self, *args: Any, **kwargs: Any) -> None:
        """Raise the arguments."""
        raise _Called(args, kwargs)


def _copied(value: Any) -> Any:
    """Return an argument with its own memory for every tensor."""
    if isinstance(value, Tensor):
        return value.clone()
    return [_copied(item) for item in value] if isinstance(value, list) else value
