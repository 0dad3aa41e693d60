"""Pipeline units: what happens to a sample before the loss, each step declared with what it reads and writes.

From the declarations follows what training need not compute again. A unit is *cached* when it uses no part that trains,
draws nothing and reads only data or what cached units wrote: its result is the same in every epoch. It is *drawn* when
it, or what it reads, is random and no part trains. It is of the *gradient* otherwise. Cached and drawn units see one
sample at a time, so a sample's values do not depend on the batch it is in; units of the gradient see the whole batch.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from sd3_light.config.faults import UserError
from sd3_light.training.errors import as_user_error

Values = Mapping[str, Any]
Draw = Callable[[str, tuple[int, ...]], Tensor]
"""(purpose, shape) -> standard normal numbers that belong to the sample, its epoch and the purpose."""
Kind = Literal["cached", "drawn", "gradient"]


class PipelineUnit:
    """One step. A subclass says in ``reads`` and ``writes`` the names of values, in ``uses`` the module's parts that it
    calls, and in ``draws`` whether it is random; names that a sample may lack end with ``?``.

    ``run`` gets the values it reads by name and returns those it writes. Values of one sample have no batch dimension;
    a unit that uses a part which trains gets a batch, with one.
    """

    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    uses: tuple[str, ...] = ()
    draws: bool = False

    @property
    def label(self) -> str:
        """What faults and manifests call it."""
        return type(self).__name__

    def run(self, module: Any, **values: Any) -> Values:
        """Compute; a unit that draws is given ``draw`` too."""
        raise NotImplementedError

    def settings(self) -> Values:
        """What besides the parts it uses decides what it computes, for the fingerprint of a cache. JSON."""
        return {key: value for key, value in sorted(vars(self).items()) if isinstance(value, str | int | float | bool)}


@dataclass(frozen=True)
class Split:
    """The units of a module by kind, in their order, and the values that pass from cached ones to the others."""

    cached: tuple[PipelineUnit, ...]
    drawn: tuple[PipelineUnit, ...]
    gradient: tuple[PipelineUnit, ...]
    kept: tuple[str, ...]


def split_units(module: nn.Module, units: Sequence[PipelineUnit], finally_read: Iterable[str]) -> Split:
    """Derive the kinds from the declarations and from what trains now. ``finally_read`` is what the loss reads."""
    _require_sound(units)
    kinds: dict[str, Kind] = {}
    found: dict[Kind, list[PipelineUnit]] = {"cached": [], "drawn": [], "gradient": []}
    for unit in units:
        read = {kinds.get(name.rstrip("?"), "cached") for name in unit.reads}
        kind: Kind = "cached"
        if "gradient" in read or _trains(module, unit):
            kind = "gradient"
        elif "drawn" in read or unit.draws:
            kind = "drawn"
        found[kind].append(unit)
        kinds |= {name.rstrip("?"): kind for name in unit.writes}
    later = [name for unit in (*found["drawn"], *found["gradient"]) for name in unit.reads]
    wanted = dict.fromkeys(name.rstrip("?") for name in (*later, *finally_read))
    kept = tuple(name for name in wanted if kinds.get(name, "cached") == "cached")
    return Split(tuple(found["cached"]), tuple(found["drawn"]), tuple(found["gradient"]), kept)


def _trains(module: nn.Module, unit: PipelineUnit) -> bool:
    parts = [getattr(module, name, None) for name in unit.uses]
    return any(p.requires_grad for part in parts if isinstance(part, nn.Module) for p in part.parameters())


def _require_sound(units: Sequence[PipelineUnit]) -> None:
    """Every value has one writer, which comes before its readers."""
    for number, unit in enumerate(units):
        _require_unit(number, unit)
    writers: dict[str, str] = {}
    all_written = {name for unit in units for name in unit.writes}
    for unit in units:
        kind = unit.label
        for name in unit.reads:
            plain = name.rstrip("?")
            if plain in all_written and plain not in writers:
                raise UserError(f"unit {kind} reads {plain!r} before it is written; put it after its writer")
        for name in unit.writes:
            if name in writers:
                raise UserError(f"units {writers[name]} and {kind} both write {name!r}; give one of them another name")
            writers[name] = kind


def _require_unit(number: int, unit: Any) -> None:
    if not isinstance(unit, PipelineUnit):
        raise UserError(f"unit {number} is a {type(unit).__name__}; derive it from PipelineUnit, or write @unit(...)")
    for key in ("reads", "writes", "uses"):
        names = getattr(unit, key)
        if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
            raise UserError(f"unit {unit.label}: {key} is {names!r}; give a tuple of names, such as ('latents',)")


def run_unit(unit: PipelineUnit, module: Any, values: Values, draw: Draw | None = None) -> dict[str, Any]:
    """``values`` with what the unit writes; a value that is missing, or a promise not kept, is a fault."""
    kind = unit.label
    given = {}
    for name in unit.reads:
        plain = name.rstrip("?")
        if plain in values:
            given[plain] = values[plain]
        elif not name.endswith("?"):
            raise UserError(f"unit {kind} reads {plain!r}, which neither the data nor an earlier unit gives")
    for part in unit.uses:
        if getattr(module, part, None) is None:
            raise UserError(f"unit {kind} uses {part!r}, which the module lacks; set self.{part}")
    extra = {"draw": draw} if unit.draws else {}
    with as_user_error(f"unit {kind}"):
        written = unit.run(module, **given, **extra)
    if not isinstance(written, Mapping):
        raise UserError(f"unit {kind} gave a {type(written).__name__}; return a dict of {list(unit.writes)}")
    if wrong := sorted(written.keys() ^ {name for name in unit.writes if not name.endswith("?")}):
        missing = [name for name in wrong if f"{name}?" not in unit.writes]
        if missing:
            raise UserError(f"unit {kind} declares that it writes {list(unit.writes)}, and wrote {sorted(written)}")
    return {**values, **written}
