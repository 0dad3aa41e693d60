"""The one list of what a checkpoint holds."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from torch import Tensor

WEIGHTS = "param"
EMA = "ema"


@dataclass(frozen=True)
class Progress:
    """Counters of a run: optimizer steps tried (the position in the order), samples seen, skipped steps."""

    step: int = 0
    samples: int = 0
    skipped: int = 0

    def after(self, samples: int, taken: bool) -> "Progress":
        """One step later."""
        return Progress(self.step + 1, self.samples + samples, self.skipped + (not taken))

    def as_dict(self) -> dict[str, int]:
        """For JSON."""
        return asdict(self)


def gather(
    weights: Mapping[str, Tensor], optimizer: Mapping[str, Tensor], ema: Mapping[str, Tensor] | None
) -> dict[str, Tensor]:
    """``KIND/NAME`` -> tensor: float32 weights, the optimizer's state, the running average (law 4)."""
    tensors = {f"{WEIGHTS}/{name}": tensor.detach() for name, tensor in weights.items()}
    tensors.update(optimizer)
    tensors.update({f"{EMA}/{name}": tensor for name, tensor in (ema or {}).items()})
    return tensors


def of_kind(tensors: Mapping[str, Tensor], kind: str) -> dict[str, Tensor]:
    """NAME -> tensor of one kind."""
    return {key.removeprefix(f"{kind}/"): tensor for key, tensor in tensors.items() if key.startswith(f"{kind}/")}
