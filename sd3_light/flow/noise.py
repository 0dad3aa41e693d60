"""Standard normals of a batch, drawn on a device: the same bits as `randomness.fill_normals` draws on the host."""

import importlib.util
from collections.abc import Callable

import torch
from torch import Tensor

from sd3_light.randomness import NORMALS_PER_WORD, WORDS_PER_BLOCK, normal_table, philox, round_keys
from sd3_light.runlog import info

_MASK_16 = (1 << 16) - 1

DrawNormals = Callable[[Tensor, Tensor, int, Tensor], Tensor]
"""See `draw_normals`."""


class DeviceNoise:
    """Draws the normals of a seed's streams on one device."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed = seed
        self._device = device
        self._table = torch.from_numpy(normal_table()).to(device)
        self._keys: dict[str, Tensor] = {}
        self._draw = self._checked_kernel() if device.type == "cuda" else draw_normals

    def normals(self, purpose: str, occurrences_B2: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Return [B, *shape] standard normals; ``occurrences_B2`` are `randomness.occurrence_words` on the device."""
        count = torch.Size(shape).numel()
        return self._draw(self._keys_of(purpose), occurrences_B2, count, self._table).view(-1, *shape)

    def _keys_of(self, purpose: str) -> Tensor:
        if purpose not in self._keys:
            self._keys[purpose] = torch.tensor(round_keys(self._seed, purpose)).to(self._device)
        return self._keys[purpose]

    def _checked_kernel(self) -> DrawNormals:
        """Return the Triton kernel if it draws the same bits as its reference on this GPU, otherwise the reference."""
        if importlib.util.find_spec("triton") is None:
            return draw_normals
        from sd3_light.flow.noise_kernel import draw_normals as kernel

        occurrences = torch.tensor([[0, 0], [(3 << 32) | 1, (1 << 63) - 1]]).to(self._device)
        inputs = self._keys_of("noise"), occurrences, 1000, self._table
        if torch.equal(kernel(*inputs), draw_normals(*inputs)):
            return kernel
        info("the noise kernel draws other numbers than its reference on this GPU: the slower reference is used")
        return draw_normals


def draw_normals(keys: Tensor, occurrences_B2: Tensor, count: int, table: Tensor) -> Tensor:
    """Return [B, count] standard normals of the streams with these `randomness.round_keys`."""
    num_blocks = -(-count // (WORDS_PER_BLOCK * NORMALS_PER_WORD))
    block_1N = torch.arange(1, num_blocks + 1, device=table.device)[None]
    occurrence_B1, identity_B1 = occurrences_B2.split(1, dim=1)
    words = philox((block_1N, torch.zeros_like(block_1N), occurrence_B1, identity_B1), keys)
    words_BN4 = torch.stack(words, dim=-1)
    first, second, third, fourth = (table[(words_BN4 >> shift) & _MASK_16] for shift in (0, 16, 32, 48))
    return torch.stack([first + second, third + fourth], dim=-1).flatten(1)[:, :count].contiguous()
