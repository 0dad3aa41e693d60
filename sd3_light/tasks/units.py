"""Pipeline units: the steps before the loss. Each declares what it reads and writes.

The declarations decide how often a unit runs. A *cached* unit uses no part that trains, draws nothing and reads only
data or what cached units wrote: its result is the same in every epoch. A *drawn* unit is random, or reads what is, and
uses no part that trains. All others are *gradient* units. Cached and drawn units get one sample at a time, so a
sample's values do not depend on its batch; gradient units get the whole batch.
"""

import inspect
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from torch import Tensor, nn

from sd3_light.config.faults import UserError
from sd3_light.engines.errors import as_user_error

Values = Mapping[str, Any]
Function = Callable[..., Any]
UnitKind = Literal["cached", "drawn", "gradient"]


class Draw(Protocol):
    """Draws standard normal numbers that belong to the sample, its epoch and the purpose."""

    def __call__(self, purpose: str, shape: tuple[int, ...], on_host: bool = False) -> Tensor:
        """Return the numbers on the module's device; on the host they can be read without waiting for the device."""


class PipelineUnit:
    """One step before the loss.

    A subclass declares the names of the values it ``reads`` and ``writes``, the module's parts that it ``uses``, and
    whether it ``draws`` random numbers. Names of optional values end with ``?``.

    ``run`` gets the values it reads by name and returns those it writes. Values of one sample have no batch dimension;
    a unit that uses a part which trains gets a batch, which has one.
    """

    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    uses: tuple[str, ...] = ()
    draws: bool = False

    def __init__(self, **interface: Any) -> None:
        """Accept DiffSynth's arguments (``input_params``, ``output_params``, ...) of a unit with `process`."""
        known = ("input_params", "output_params", "input_params_posi", "input_params_nega", "onload_model_names")
        for name in interface:
            if name not in (*known, "seperate_cfg", "take_over"):
                raise UserError(f"unit {self.label} does not know {name!r}; it knows {', '.join(known)}")
        vars(self).update(interface)

    @property
    def label(self) -> str:
        """The unit's name in errors and manifests."""
        return type(self).__name__

    def run(self, module: Any, **values: Any) -> Values:
        """Return the values that it writes; a unit that draws also gets ``draw``."""
        raise NotImplementedError

    def parts(self, module: Any) -> dict[str, Any]:
        """Return the parts of the module that it uses; None for those that the module does not have."""
        return {name: getattr(module, name, None) for name in self.uses}

    def require_no_gradient(self) -> None:
        """Raise if the unit cannot be a gradient unit."""

    def settings(self) -> Values:
        """Return what decides its result besides the parts it uses, as JSON, for the fingerprint of a cache."""
        return {key: value for key, value in sorted(vars(self).items()) if isinstance(value, str | int | float | bool)}


@dataclass(frozen=True)
class UnitSplit:
    """The units of a module by kind, in order, and the values that the others read from cached units or the data.

    Of the ``stored`` values, training cannot do without those that are ``required``.
    """

    cached: tuple[PipelineUnit, ...]
    drawn: tuple[PipelineUnit, ...]
    gradient: tuple[PipelineUnit, ...]
    stored: tuple[str, ...]
    required: tuple[str, ...]


def split_units(module: nn.Module, units: Sequence[PipelineUnit], loss_reads: Iterable[str]) -> UnitSplit:
    """Sort the units by kind, from their declarations and from what trains; ``loss_reads`` is what the loss reads."""
    _require_valid(units)
    loss_reads = tuple(loss_reads)
    kinds: dict[str, UnitKind] = {}
    by_kind: dict[UnitKind, list[PipelineUnit]] = {"cached": [], "drawn": [], "gradient": []}
    for unit in units:
        read = {kinds.get(name.rstrip("?"), "cached") for name in unit.reads}
        kind: UnitKind = "cached"
        if "gradient" in read or _trains(module, unit):
            kind = "gradient"
            unit.require_no_gradient()
        elif "drawn" in read or unit.draws:
            kind = "drawn"
        by_kind[kind].append(unit)
        kinds |= {name.rstrip("?"): kind for name in unit.writes}
    later = [name for unit in (*by_kind["drawn"], *by_kind["gradient"]) for name in unit.reads]
    later += loss_reads
    wanted = dict.fromkeys(name.rstrip("?") for name in later)
    stored = tuple(name for name in wanted if kinds.get(name, "cached") == "cached")
    required = tuple(name for name in stored if name in later)
    return UnitSplit(tuple(by_kind["cached"]), tuple(by_kind["drawn"]), tuple(by_kind["gradient"]), stored, required)


def units_to_run(units: Sequence[PipelineUnit], values: Container[str], wanted: Iterable[str]) -> list[PipelineUnit]:
    """Return the units, in order, whose results are wanted, directly or by such units, and not among the values."""
    wanted = set(wanted)
    to_run: list[PipelineUnit] = []
    for unit in reversed(units):
        needed = [name for name in unit.writes if name.rstrip("?") in wanted]
        required = [name for name in needed if not name.endswith("?")]
        has_all = all(name in values for name in required) if required else any(n[:-1] in values for n in needed)
        if needed and not has_all:
            to_run.insert(0, unit)
            wanted |= {name.rstrip("?") for name in unit.reads}
    return to_run


def _trains(module: nn.Module, unit: PipelineUnit) -> bool:
    parts = unit.parts(module).values()
    return any(p.requires_grad for part in parts if isinstance(part, nn.Module) for p in part.parameters())


def _require_valid(units: Sequence[PipelineUnit]) -> None:
    """Raise unless every value has one writer, which comes before its readers."""
    for number, unit in enumerate(units):
        _require_unit(number, unit)
    writers: dict[str, str] = {}
    all_written = {name for unit in units for name in unit.writes}
    for unit in units:
        label = unit.label
        for name in unit.reads:
            plain = name.rstrip("?")
            if plain in unit.writes or f"{plain}?" in unit.writes:
                raise UserError(f"unit {label} reads and writes {plain!r}; give what it writes another name")
            if plain in all_written and plain not in writers:
                raise UserError(f"unit {label} reads {plain!r} before it is written; put it after its writer")
        for name in unit.writes:
            if name in writers:
                raise UserError(f"units {writers[name]} and {label} both write {name!r}; rename one of the values")
            writers[name] = label


def _require_unit(number: int, unit: Any) -> None:
    if not isinstance(unit, PipelineUnit):
        raise UserError(
            f"unit {number} is a {type(unit).__name__}; derive it from PipelineUnit, write @unit(...), or give a class "
            "with input_params, output_params and process(pipe, ...)"
        )
    for key in ("reads", "writes", "uses"):
        names = getattr(unit, key)
        if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
            raise UserError(f"unit {unit.label}: {key} is {names!r}; give a tuple of names, such as ('latents',)")


def run_unit(unit: PipelineUnit, module: Any, values: Values, draw: Draw | None = None) -> dict[str, Any]:
    """Return ``values`` with what the unit writes; a missing value, or a wrong declaration, is an error."""
    label = unit.label
    inputs = {}
    for name in unit.reads:
        plain = name.rstrip("?")
        if plain in values:
            inputs[plain] = values[plain]
        elif not name.endswith("?"):
            raise UserError(f"unit {label} reads {plain!r}; it is neither in the data nor written by an earlier unit")
    for name, part in unit.parts(module).items():
        if part is None:
            raise UserError(f"unit {label} uses {name!r}, which the module does not have; set self.{name}")
    extra = {"draw": draw} if unit.draws else {}
    with as_user_error(f"unit {label}"):
        written = unit.run(module, **inputs, **extra)
    if not isinstance(written, Mapping):
        raise UserError(f"unit {label} returned a {type(written).__name__}; return a dict of {list(unit.writes)}")
    required = {name for name in unit.writes if not name.endswith("?")}
    if any(f"{name}?" not in unit.writes for name in written.keys() ^ required):
        raise UserError(f"unit {label} declares that it writes {list(unit.writes)} but wrote {sorted(written)}")
    return {**values, **written}


# --- ready-made units ---------------------------------------------------------------------------


def unit(*writes: str, uses: str | Sequence[str] = ()) -> Callable[[Function], PipelineUnit]:
    """Turn a function into a unit: ``@unit("text", "pooled", uses="encoders")``.

    The function's first argument is the module; the others are the values that it reads, optional if they have a
    default. An argument ``draw`` makes the unit random. The function returns the value that the unit writes, or a tuple
    for several ``writes``.
    """
    parts = (uses,) if isinstance(uses, str) else tuple(uses)
    if not writes or not all(isinstance(name, str) for name in (*writes, *parts)):
        raise UserError('unit(...) needs the names of the values that it writes: @unit("latents", uses="vae")')
    return lambda function: _FunctionUnit(function, writes, parts)


class _FunctionUnit(PipelineUnit):
    """A unit from a function and its signature."""

    def __init__(self, function: Function, writes: tuple[str, ...], uses: tuple[str, ...]) -> None:
        parameters = list(inspect.signature(function).parameters.values())
        if not parameters or any(item.kind in (item.VAR_POSITIONAL, item.VAR_KEYWORD) for item in parameters):
            raise UserError("a unit's function names its arguments: the module first, then each value that it reads")
        values = parameters[1:]
        self.reads = tuple(
            item.name if item.default is item.empty else f"{item.name}?" for item in values if item.name != "draw"
        )
        self.draws = any(item.name == "draw" for item in values)
        self.writes = writes
        self.uses = uses
        self.function = function
        self.name = function.__name__

    @property
    def label(self) -> str:
        """The function's name."""
        return self.name

    def run(self, module: Any, **values: Any) -> Values:
        """Call the function."""
        written = self.function(module, **values)
        if len(self.writes) == 1:
            return {self.writes[0]: written}
        if not isinstance(written, tuple) or len(written) != len(self.writes):
            raise UserError(f"unit {self.name} writes {list(self.writes)}: return a tuple of {len(self.writes)} values")
        return dict(zip(self.writes, written, strict=True))


# --- units with DiffSynth's interface: input_params, output_params, onload_model_names, process ---


class ProcessUnit(PipelineUnit):
    """Runs a DiffSynth unit on one sample, with the module's ``pipe`` (or the module, if it has none).

    Of a unit with separate inputs for guidance the positive ones are used. A value that is missing is passed as None.
    Tensors have a batch dimension of one there and none here: it is added to the values of earlier units, which are in
    ``batched``, and removed from results.
    """

    def __init__(self, unit: Any, batched: frozenset[str]) -> None:
        self.unit = unit
        self.batched = batched
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
