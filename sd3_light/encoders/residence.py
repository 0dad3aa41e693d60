"""Which frozen parts are on the device: all of them where they fit, else only the one in use."""

import gc
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from sd3_light.budget.amount import GIB
from sd3_light.encoders.batching import AREA
from sd3_light.model.pipeline_folder import stored_weights
from sd3_light.system import available_memory

RESERVE = GIB
"""Margin for the libraries' own buffers and for fragmentation."""
BYTES_A_PIXEL = 4096
"""What SD3's VAE holds at its widest, a pixel: eight maps of 128 channels in float32, some of them the kernels' own."""
LARGEST_PICTURE = 1024 * 1024
"""A batch holds one picture at least, and this many pixels are foreseen for it."""


def all_fit(weights: Iterable[int], batch_size: int, free: int | None) -> bool:
    """Whether parts of these bytes can be on the device together, with room to work: the widest activations of the VAE
    (the text encoders' are smaller) and `RESERVE`. An unknown ``free`` is taken for enough."""
    work = max(batch_size * AREA, LARGEST_PICTURE) * BYTES_A_PIXEL
    return free is None or sum(weights) + work + RESERVE <= free


def free_memory(device: torch.device) -> int | None:
    """Bytes that can be had on the device, or on the host for a CPU; None where the system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return available_memory()


def weight_bytes(folder: Path, dtype: torch.dtype) -> int:
    """What a part will weigh in ``dtype``, by the headers of the files that are loaded without naming a variant."""
    return sum(count * _bytes_a_value(name, dtype) for name, count in stored_weights(folder))


def _bytes_a_value(name: str, dtype: torch.dtype) -> int:
    # transformers keeps these of a T5 in float32 when the rest is float16, whose range they leave
    return 4 if dtype == torch.float16 and name.endswith(".wo.weight") else dtype.itemsize


class ResidentModules:
    """Frozen modules by name, loaded when first taken.

    With ``one_at_a_time`` only the one taken last is on the device. On a GPU the others wait in host memory, and since
    nothing changes them they are never copied back; on a CPU they are dropped and loaded again.
    """

    def __init__(
        self, loaders: Mapping[str, Callable[[torch.device], nn.Module]], device: torch.device, one_at_a_time: bool
    ) -> None:
        self.device, self.one_at_a_time = device, one_at_a_time
        self.host_keeps = device.type != "cpu"
        self._loaders = loaders
        self._modules: dict[str, nn.Module] = {}
        self._on_host: dict[str, list[Tensor]] = {}

    def take(self, name: str) -> nn.Module:
        """The module, on the device; with ``one_at_a_time`` valid until another is taken."""
        if self.one_at_a_time:
            for other in [other for other in self._modules if other != name]:
                self._put_away(other)
        if name not in self._modules:
            self._modules[name] = self._loaders[name](torch.device("cpu") if self.one_at_a_time else self.device)
        if self.one_at_a_time:
            self._fetch(name)
        return self._modules[name]

    def _fetch(self, name: str) -> None:
        if self.host_keeps and name not in self._on_host:
            tensors = _tensors(self._modules[name])
            self._on_host[name] = [tensor.data for tensor in tensors]
            for tensor in tensors:
                tensor.data = tensor.data.to(self.device, copy=True)

    def _put_away(self, name: str) -> None:
        if not self.host_keeps:
            del self._modules[name]
        elif name in self._on_host:
            for tensor, host in zip(_tensors(self._modules[name]), self._on_host.pop(name), strict=True):
                tensor.data = host
        self._give_back()

    def clear(self) -> None:
        """Forget all modules and give their memory back."""
        self._modules.clear()
        self._on_host.clear()
        self._give_back()

    def _give_back(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]
