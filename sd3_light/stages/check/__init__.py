"""The check stage: what is wrong with a config once the disk is looked at, or else what a run of it will do.

Every stage calls `require` first; `sd3-light check` calls `run` and shows what it returns by `render`.
"""

from collections.abc import Iterable
from pathlib import Path

from sd3_light.config import ConfigFaults, Fault, LoadedConfig, UserError, load_config
from sd3_light.config.cross_checks import deepspeed_problem
from sd3_light.model.fast.choice import why_no_fp8
from sd3_light.stages.check.disk import disk_faults
from sd3_light.stages.check.estimate import RunEstimate, empty_faults, estimate_run
from sd3_light.stages.check.render import render

__all__ = ["Survey", "disk_faults", "load", "render", "require", "run", "survey"]


def load(path: str | Path, overrides: Iterable[str] = (), caching: bool = False) -> LoadedConfig:
    """A config that is sound in itself and on disk; both passes' faults are raised in one report (law 7).

    With ``caching`` it need not be one that this version can train.
    """
    try:
        loaded = load_config(path, overrides)
    except ConfigFaults as found:
        more = _more_faults(found, caching) if isinstance(found.partial, LoadedConfig) else []
        raise ConfigFaults([*found.faults, *more]) from None
    require(loaded, caching)
    return loaded


def _more_faults(found: ConfigFaults, caching: bool) -> list[Fault]:
    """Disk faults of the sound part: none of a key that is faulty already, or that hangs on a missing model folder."""
    assert isinstance(found.partial, LoadedConfig)
    blamed = {fault.key for fault in found.faults}
    if "model.diffusers_path" in blamed:
        blamed.add("model")
    return [
        fault
        for fault in disk_faults(found.partial, caching)
        if not any(fault.key == key or fault.key.startswith(f"{key}.") for key in blamed)
    ]


def require(loaded: LoadedConfig, caching: bool = False) -> None:
    """Raise `ConfigFaults` with all that is wrong on disk; quick, as no sample is looked at."""
    faults = disk_faults(loaded, caching)
    if faults:
        raise ConfigFaults(faults)


def run(loaded: LoadedConfig, world: int | None = None, by_deepspeed: bool = False) -> RunEstimate:
    """What a run on ``world`` GPUs will do (None: as few as it takes), by DeepSpeed where that is asked for or needed.

    Raises `ConfigFaults` where it could not start or has nothing to see.
    """
    require(loaded)
    stages = loaded.train.pipeline_stages
    world, by_deepspeed = world or stages, by_deepspeed or stages > 1
    if by_deepspeed and (problem := deepspeed_problem(loaded.train, world)):
        raise UserError(problem)
    found = estimate_run(loaded, world, by_deepspeed)
    if loaded.train.fp8 and (reason := found.stock or why_no_fp8(found.case.size, None)):
        raise UserError(f"fp8 = true cannot be had: {reason}; write fp8 = false")
    faults = empty_faults(found)
    if faults:
        raise ConfigFaults(faults)
    return found
