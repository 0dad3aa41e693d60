"""Keep all encoders on the device if they fit, otherwise only the one in use, or one layer of it at a time."""

import gc
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from sd3_light.core.model import block_lists
from sd3_light.cost.amount import format_bytes
from sd3_light.cost.drawing_memory import BYTES_PER_PIXEL, LARGEST_IMAGE_PIXELS, RESERVE
from sd3_light.encoding.batching import REFERENCE_PIXELS
from sd3_light.model.block_swap import BUFFERS, BlockSwap, is_swapped, resident_tensors
from sd3_light.model.folder import stored_weights
from sd3_light.runlog import info
from sd3_light.system import available_memory

TEXT_ROOM = 2 * RESERVE
"""Memory beside the weights of a text encoder, for its activations and a margin."""


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


class PlacedModules:
    """Frozen modules by name, loaded on first use.

    With ``one_at_a_time`` only the last one used is on the device. On a GPU the others stay in host memory; they are
    never copied back, because their weights do not change. On a CPU they are freed and loaded again. If one of
    ``by_layer`` does not fit on its GPU alone, its layers are in host memory and copied one by one when it runs.
    """

    def __init__(
        self,
        loaders: Mapping[str, Callable[[torch.device], nn.Module]],
        device: torch.device,
        one_at_a_time: bool,
        by_layer: Collection[str] = (),
    ) -> None:
        self.device = device
        self.one_at_a_time = one_at_a_time
        self._by_layer = by_layer
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
            module = self._modules[name]
            if name in self._by_layer and not is_swapped(module):
                self._swap_if_large(module)
            tensors = resident_tensors(module)
            self._host_tensors[name] = [tensor.data for tensor in tensors]
            for tensor in tensors:
                tensor.data = tensor.data.to(self.device, copy=True)

    def _swap_if_large(self, module: nn.Module) -> None:
        """Swap the layers of a module whose weights on the host do not fit on the device."""
        needed = sum(tensor.nbytes for tensor in resident_tensors(module))
        free = free_memory(self.device)
        if free is None or needed + TEXT_ROOM <= free:
            return
        hosted = 0
        module.requires_grad_(False)
        for blocks in block_lists(module):
            if len(list(blocks.children())) > BUFFERS:
                swap = BlockSwap(self.device)
                for block in blocks.children():
                    swap.add(block)
                swap.start()
                hosted += swap.host_bytes
        if hosted:
            info(
                f"text encoders: {format_bytes(needed)} do not fit beside activations in the {format_bytes(free)} that "
                f"are free on {self.device}; layers are copied one by one from host memory ({format_bytes(hosted)})"
            )

    def _offload(self, name: str) -> None:
        if not self.keeps_host_copy:
            del self._modules[name]
        elif name in self._host_tensors:
            tensors = resident_tensors(self._modules[name])
            for tensor, host in zip(tensors, self._host_tensors.pop(name), strict=True):
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
