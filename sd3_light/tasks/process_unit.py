"""Units with DiffSynth's interface: `input_params`, `output_params`, `onload_model_names` and `process(pipe, ...)`."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from sd3_light.config.faults import UserError
from sd3_light.tasks.units import PipelineUnit, Values


class ProcessUnit(PipelineUnit):
    """Runs a DiffSynth unit on one sample, with the module's ``pipe`` (or the module, if it has none).

    Of a unit with separate inputs for guidance the positive ones are used. A value that is missing is passed as None.
    Tensors have a batch dimension of one there and none here: it is added to the values of earlier units, which are in
    ``batched``, and removed from results.
    """

    def __init__(self, unit: Any, batched: frozenset[str]) -> None:
        self.unit, self.batched = unit, batched
        if getattr(unit, "take_over", False):
            raise UserError(f"unit {self.label} takes over the unit runner; call it in a custom forward(data)")
        names = dict(getattr(unit, "input_params_posi", None) or {})
        self.names: dict[str, str] = {**{name: name for name in unit.input_params or ()}, **names}
        self.reads = tuple(f"{name}?" for name in dict.fromkeys(self.names.values()))
        self.writes = tuple(f"{name}?" for name in unit.output_params or ())
        self.uses = tuple(getattr(unit, "onload_model_names", None) or ())

    @property
    def label(self) -> str:
        """The name of the unit's class."""
        return type(self.unit).__name__

    def parts(self, module: Any) -> dict[str, Any]:
        """Return the models of the pipe that it uses and that are loaded."""
        parts = {name: getattr(getattr(module, "pipe", module), name, None) for name in self.uses}
        return {name: part for name, part in parts.items() if part is not None}

    def require_no_gradient(self) -> None:
        """Raise: it cannot run on a batch."""
        raise UserError(f"unit {self.label} uses a part that trains; call its process(...) in denoise instead")

    def settings(self) -> Values:
        """Return the plain attributes of the unit."""
        return {key: value for key, value in sorted(vars(self.unit).items()) if isinstance(value, str | int | float)}

    def run(self, module: Any, **values: Any) -> Values:
        """Return what ``process`` returns, without the batch dimension."""
        inputs = {name: self._batch_of_one(source, values.get(source)) for name, source in self.names.items()}
        written = self.unit.process(getattr(module, "pipe", module), **inputs)
        return {name: self._sample(name, value) for name, value in dict(written).items() if f"{name}?" in self.writes}

    def _batch_of_one(self, name: str, value: Any) -> Any:
        return value[None] if isinstance(value, Tensor) and name in self.batched else value

    def _sample(self, name: str, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.ndim == 0 or len(value) != 1:
            raise UserError(
                f"unit {self.label} wrote {name!r} of shape {tuple(value.shape)}; write a batch of one sample"
            )
        return value[0]


def adapt_units(units: Sequence[Any]) -> tuple[PipelineUnit, ...]:
    """Return the units, those with DiffSynth's interface as `ProcessUnit`."""
    adapted: list[PipelineUnit] = []
    written: set[str] = set()
    for unit in units:
        processes = all(hasattr(unit, name) for name in ("input_params", "output_params", "process"))
        adapted.append(ProcessUnit(unit, frozenset(written)) if processes else unit)
        written |= {name.rstrip("?") for name in getattr(adapted[-1], "writes", None) or () if isinstance(name, str)}
    return tuple(adapted)
