"""What processed data were made from: the cached units, their settings, and the weights that they used."""

import hashlib
from typing import Any

from torch import nn

from sd3_light.config.faults import UserError
from sd3_light.tasks.models import CustomForward, UnitModel
from sd3_light.tasks.module import DiffusionTrainingModule
from sd3_light.tasks.processed import ProcessedDataset, fingerprint


def identity_of(model: UnitModel | CustomForward) -> dict[str, Any]:
    """Return the cached units of a module, with hashes of the weights that they use.

    A custom forward is one unit that uses all weights; its settings are the module's plain attributes.
    """
    if isinstance(model, CustomForward):
        plain = {name: value for name, value in vars(model.module).items() if isinstance(value, str | int | float)}
        unit = {"unit": model.name, "settings": plain, "parts": {"": _weights_hash(model.module)}}
        return {"units": [{**unit, "reads": [], "writes": []}], "kept": [], "digest": fingerprint(unit)}
    module: DiffusionTrainingModule = model.module
    split = module.split()
    units = [
        {
            "unit": unit.label,
            "reads": list(unit.reads),
            "writes": list(unit.writes),
            "settings": dict(unit.settings()),
            "parts": {name: _weights_hash(part) for name, part in unit.parts(module).items()},
        }
        for unit in split.cached
    ]
    identity = {"units": units, "kept": list(split.stored)}
    return {**identity, "digest": fingerprint(identity)}


def _weights_hash(part: Any) -> str:
    if not isinstance(part, nn.Module):
        return type(part).__name__
    digest = hashlib.sha256(type(part).__name__.encode())
    for name, tensor in sorted(part.state_dict().items()):
        digest.update(f"{name} {fingerprint(tensor)}".encode())
    return digest.hexdigest()


def require_same_identity(dataset: ProcessedDataset, model: DiffusionTrainingModule) -> None:
    """Raise if a unit of the model would now compute something other than the processed data.

    Units and parts that the second stage does not load are not checked. Units are identified by what they write, as a
    module may have several of one class.
    """
    before = {(unit["unit"], name): unit for unit in dataset.identity["units"] for name in unit["writes"]}
    for unit in model.split().cached:
        recorded = next((before[unit.label, name] for name in unit.writes if (unit.label, name) in before), None)
        if recorded is None:
            continue
        changed = [key for key in ("reads", "writes") if list(getattr(unit, key)) != recorded[key]]
        changed += ["settings"] if dict(unit.settings()) != recorded["settings"] else []
        loaded = {name: part for name, part in unit.parts(model).items() if isinstance(part, nn.Module)}
        changed += [name for name, part in loaded.items() if _weights_hash(part) != recorded["parts"].get(name)]
        if changed:
            raise UserError(
                f"{dataset.folder} was made by unit {unit.label} with another {changed[0]!r} than it has now; run "
                "launch_data_process_task again, or give the module what it had"
            )
