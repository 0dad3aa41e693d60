"""Encoders on one device, as the cache stage uses them: the half that every family shares, images to moments.

Results are CPU tensors that are filled asynchronously. They are complete after `synchronize`, or once the function
returned by `waiter` has returned.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from sd3_light.config import ModelConfig
from sd3_light.core.columns import TEACHER, Column
from sd3_light.encoding.batching import image_batches
from sd3_light.encoding.half_vae import load_encoding_vae, resolve_vae_dtype
from sd3_light.encoding.host_copies import AsyncHostCopies
from sd3_light.encoding.placement import PlacedModules, all_fit, free_memory, weight_bytes
from sd3_light.encoding.teacher import VisionTeacher, quantised
from sd3_light.encoding.vae import decode_moments, raw_moments
from sd3_light.model.device_copy import to_device
from sd3_light.model.vision import vision_settings

Loader = Callable[[torch.device], nn.Module]


class ImageEncoders(ABC):
    """The VAE of a [model] table's folder, and a family's text encoders, each loaded on first use.

    On GPUs the VAE encodes as `vae_dtype` says (float32: with TF32 convolutions) and text encoders run in `dtype`; on
    CPUs everything is float32.
    ``one_at_a_time`` keeps only the encoder in use on the device; None decides by the free memory. Batches depend on
    the inputs and ``batch_size`` only. `teacher_path` is the folder of `encode_features`. One thread encodes;
    `tokenize` may run on another.
    """

    stores_frames = False
    """Whether images are stored as clips of one frame."""

    def __init__(
        self, model: ModelConfig, device: torch.device, batch_size: int, one_at_a_time: bool | None = None
    ) -> None:
        self.path = model.diffusers_path
        self.device = device
        self.batch_size = batch_size
        self._model = model
        self._text_dtype = getattr(torch, model.dtype) if device.type == "cuda" else torch.float32
        self._one_at_a_time = one_at_a_time
        self._teacher = model.teacher_path
        self._modules: PlacedModules | None = None
        self._copies = AsyncHostCopies(device)

    @property
    @abstractmethod
    def _text_folders(self) -> tuple[str, ...]:
        """The subfolders of the text encoders."""

    @abstractmethod
    def _text_loaders(self) -> Mapping[str, Loader]:
        """Return what loads each text encoder, by name."""

    @property
    def one_at_a_time(self) -> bool:
        """Whether only the encoder in use is on the device; decided once."""
        if self._one_at_a_time is None:
            weights = [weight_bytes(self.path / "vae", torch.float32)]
            weights += [weight_bytes(self.path / folder, self._text_dtype) for folder in self._text_folders]
            if self._teacher is not None:
                weights.append(weight_bytes(vision_settings(self._teacher).folder, torch.float32))
            self._one_at_a_time = not all_fit(weights, self.batch_size, free_memory(self.device))
        return self._one_at_a_time

    @cached_property
    def vae_dtype(self) -> torch.dtype:
        """The dtype in which the VAE encodes; decided once."""
        return resolve_vae_dtype(self._model.vae_dtype, self.path, self.device)

    def part(self, name: str) -> Any:
        """Return the module ``vae`` or a text encoder on the device, valid as in `PlacedModules.get`."""
        if self._modules is None:
            texts = self._text_loaders()
            loaders = dict(texts)
            # float32 is channels first: 7% faster than channels last on an H200
            loaders["vae"] = lambda device: load_encoding_vae(self.path, device, self.vae_dtype)
            if (folder := self._teacher) is not None:
                loaders[TEACHER] = lambda device: VisionTeacher(folder).to(device)
            self._modules = PlacedModules(loaders, self.device, self.one_at_a_time, by_layer=texts.keys())
        return self._modules.get(name)

    def encode_images(self, pixels: NDArray[np.uint8] | Tensor, flip: bool) -> dict[str, Tensor]:
        """Encode uint8 pixels [B, H, W, 3] to fp16 ``moments`` [B, v, 2C, h, w]; ``flip`` adds mirrored ones.

        Clips have pixels [B, F, H, W, 3] and moments [B, v, 2C, f, h, w], as images do that are stored with a frame.
        """
        source = torch.as_tensor(pixels)
        if self.stores_frames and source.dim() == 4:
            source = source.unsqueeze(1)
        *_, height, width, _ = source.shape
        batches = image_batches(len(source), height * source.shape[1:-3].numel(), width, self.batch_size)
        vae = self.part("vae")
        encoded: Tensor | None = None
        for rows in batches:
            images = to_device(source[rows], self.device)
            for variant in range(1 + flip):
                with torch.inference_mode():
                    moments = raw_moments(vae, images, flip=variant == 1)
                if encoded is None:
                    encoded = torch.empty(len(source), 1 + flip, *moments.shape[1:], dtype=moments.dtype)
                self._copies.submit(moments, encoded[rows, variant].copy_, self._describe("vae", self.vae_dtype))
        assert encoded is not None, "no images"
        return {"moments": encoded}

    def encode_features(self, pixels: NDArray[np.uint8] | Tensor, flip: bool, column: Column) -> Tensor:
        """Encode uint8 pixels [B, H, W, 3] to a teacher's features [B, v, D, h, w] of its column."""
        source = torch.as_tensor(pixels)
        teacher = self.part(TEACHER)
        encoded = torch.empty(len(source), 1 + flip, *column.shape, dtype=torch.int8)
        side = teacher.settings.side
        _, height, width = column.shape
        for rows in image_batches(len(source), side, side, self.batch_size):
            images = to_device(source[rows], self.device)
            for variant in range(1 + flip):
                with torch.inference_mode():
                    features = teacher(images, (height, width), flip=variant == 1)
                target = encoded[rows, variant]
                self._copies.submit(features, partial(_store_quantised, target), f"the teacher {self._teacher}")
        return encoded

    def reconstruct(self, pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return uint8 pixels [B, H, W, 3] as the VAE decodes them from the means of their moments."""
        moments = self.encode_images(pixels, flip=False)["moments"]
        self.synchronize()
        return decode_moments(self.part("vae"), moments[:, 0])

    def _describe(self, folder: str, dtype: torch.dtype) -> str:
        return f"the encoder {self.path / folder}, computed in {str(dtype).removeprefix('torch.')},"

    # --- the device -----------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Wait until all results so far are complete."""
        self._copies.waiter()()

    def waiter(self) -> Callable[[], None]:
        """Return a function that waits, on any thread, until all results so far are complete."""
        return self._copies.waiter()

    def close(self) -> None:
        """Wait for pending results, then free all encoders."""
        self._copies.close()
        if self._modules is not None:
            self._modules.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _store_quantised(target: Tensor, features: Tensor) -> None:
    target.copy_(quantised(features))
