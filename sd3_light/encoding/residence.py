"""Keep all encoders on the device if they fit, otherwise only the one in use."""

import gc
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from sd3_light.cost.drawing_memory import BYTES_PER_PIXEL, LARGEST_IMAGE_PIXELS, RESERVE
from sd3_light.encoding.batching import REFERENCE_PIXELS
from sd3_light.model.folder import stored_weights
from sd3_light.system import available_memory


def all_fit(weights: Iterable[int], batch_size: int, free: int | None) -> bool:
    """Return whether encoders of these sizes in bytes fit on the device together.

    Includes the VAE's peak activations (those of the text encoders are smaller) and `RESERVE`. An unknown ``free``
    (None) counts as enough.
    """
    activations = max(batch_size * REFERENCE_PIXELS, LARGEST_IMAGE_PIXELS) * BYTES_PER_PIXEL
    return free is None or sum(weights) + activations + RESERVE <= free


def free_memory(device: torch.device) -> int | None:
    """Return the free bytes of a GPU, or of the host for a CPU; None if the system does not report them."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return available_memory()


def weight_bytes(folder: Path, dtype: torch.dtype) -> int:
    """Return the size of an encoder's weights in ``dtype``, read from the file headers."""
    return sum(count * _bytes_per_value(name, dtype) for name, count in stored_weights(folder))


def _bytes_per_value(name: str, dtype: torch.dtype) -> int:
    # transformers keeps these T5 weights in float32 because they overflow float16
    return 4 if dtype == torch.float16 and name.endswith(".wo.weight") else dtype.itemsize


class ResidentModules:
    """Frozen modules by name, loaded on first use.

    With ``one_at_a_time`` only the last one used is on the device. On a GPU the others stay in host memory; they are
    never copied back, because their weights do not change. On a CPU they are freed and loaded again.
    """

    def __init__(
        self, loaders: Mapping[str, Callable[[torch.device], nn.Module]], device: torch.device, one_at_a_time: bool
    ) -> None:
        self.device, self.one_at_a_time = device, one_at_a_time
        self.keeps_host_copy = device.type != "cpu"
        self._loaders = loaders
        self._modules: dict[str, nn.Module] = {}
        self._host_tensors: dict[str, list[Tensor]] = {}

    def get(self, name: str) -> nn.Module:
        """Return the module, on the device; with ``one_at_a_time`` it is valid until another one is requested."""
        if self.one_at_a_time:
            for unused in [key for key in self._modules if key != name]:
                self._offload(unused)
        if name not in self._modules:
            self._modules[name] = self._loaders[name](torch.device("cpu") if self.one_at_a_time else self.device)
        if self.one_at_a_time:
            self._onload(name)
        return self._modules[name]

    def _onload(self, name: str) -> None:
        if self.keeps_host_copy and name not in self._host_tensors:
            tensors = _tensors(self._modules[name])
            self._host_tensors[name] = [tensor.data for tensor in tensors]
            for tensor in tensors:
                tensor.data = tensor.data.to(self.device, copy=True)

    def _offload(self, name: str) -> None:
        if not self.keeps_host_copy:
            del self._modules[name]
        elif name in self._host_tensors:
            for tensor, host in zip(_tensors(self._modules[name]), self._host_tensors.pop(name), strict=True):
                tensor.data = host
        self._free_cached_memory()

    def clear(self) -> None:
        """Free all modules."""
        self._modules.clear()
        self._host_tensors.clear()
        self._free_cached_memory()

    def _free_cached_memory(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]
