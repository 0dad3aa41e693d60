"""Layers with weights in bfloat16 that compute in float32, as all do on a CPU; on GPUs autocast casts instead."""

from typing import Any

from torch import Tensor, nn
from torch.nn.functional import linear


class _WideLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return linear(input.float(), self.weight.float(), self.bias)


class _WideConv2d(nn.Conv2d):
    def forward(self, input: Tensor) -> Tensor:
        product: Tensor = self._conv_forward(input.float(), self.weight.float(), self.bias)
        return product


class _WideConv3d(nn.Conv3d):
    def forward(self, input: Tensor) -> Tensor:
        product: Tensor = self._conv_forward(input.float(), self.weight.float(), self.bias)
        return product


_WIDE: dict[Any, type[nn.Module]] = {nn.Linear: _WideLinear, nn.Conv2d: _WideConv2d, nn.Conv3d: _WideConv3d}


def compute_in_float32(model: nn.Module) -> None:
    """Let the layers of a model cast their weights to float32 where they use them; parameters and names stay."""
    for module in model.modules():
        if type(module) in _WIDE:
            module.__class__ = _WIDE[type(module)]
