"""The check stage: report all faults of a config, including those on disk, or else estimate its run.

Every stage calls `require` first; `sd3-light check` calls `run` and prints its result with `render`.
"""

from collections.abc import Iterable
from itertools import accumulate
from pathlib import Path

from sd3_light.check.conclusion import Target, conclude, what_does_not_fit
from sd3_light.check.disk import PATH_HINT, check_disk, disk_faults
from sd3_light.check.estimate import RunEstimate, empty_faults, estimate_run
from sd3_light.check.figures import figures
from sd3_light.check.hub_paths import hub_keys, with_local_paths
from sd3_light.check.render import render
from sd3_light.check.step_time import cpu_speed
from sd3_light.check.training_time import Work
from sd3_light.config import ConfigFaults, Fault, LoadedConfig, UserError, load_config
from sd3_light.config.cross_checks import deepspeed_problem, one_process_problem
from sd3_light.core.cost import Layout
from sd3_light.core.registry import with_family_values
from sd3_light.core.start import WeightsStart

__all__ = [
    "PATH_HINT",
    "RunEstimate",
    "Target",
    "Work",
    "conclude",
    "cpu_speed",
    "disk_faults",
    "estimate_run",
    "figures",
    "load",
    "render",
    "require",
    "run",
    "text_faults",
    "what_does_not_fit",
]


def load(path: str | Path, overrides: Iterable[str] = (), caching: bool = False) -> LoadedConfig:
    """Load a config and check it against the disk: one report of all faults. ``caching`` skips training's checks.

    What the config takes from the hub is downloaded if it has no other faults.
    """
    try:
        loaded = load_config(path, overrides)
    except ConfigFaults as error:
        raise ConfigFaults([*error.faults, *_more_faults(error, caching)]) from None
    if any(hub_keys(loaded)):
        if faults := _local_faults(loaded, caching):  # before a download of gigabytes
            raise ConfigFaults(faults)
        loaded = with_local_paths(loaded)
    require(loaded, caching)
    return with_family_values(loaded)


def text_faults(path: Path, text: str) -> list[Fault]:
    """Return the faults of a train TOML that has this text, as `load` finds them; nothing is downloaded."""
    try:
        return _local_faults(load_config(path, text=text), caching=False)
    except ConfigFaults as error:
        return [*error.faults, *_more_faults(error, caching=False)]


def _local_faults(loaded: LoadedConfig, caching: bool, with_size: bool = True) -> list[Fault]:
    """Return the disk faults of keys that take nothing from the hub."""
    on_hub = {(file, key) for file, key, _ in hub_keys(loaded)}
    return [fault for fault in disk_faults(loaded, caching, with_size) if (fault.file, fault.key) not in on_hub]


def _more_faults(error: ConfigFaults, caching: bool) -> list[Fault]:
    """Return disk faults of the valid part, except for keys that are faulty already or need a missing model folder.

    Without a valid size nothing is compared with the denoiser: the default size would only cause more faults.
    """
    if not isinstance(error.partial, LoadedConfig):
        return []
    faulty = {fault.key for fault in error.faults}
    if "model.diffusers_path" in faulty:
        faulty.add("model")
    has_size = not any(key == "model.size" or key.startswith("model.shape.") for key in faulty)
    return [
        fault
        for fault in _local_faults(error.partial, caching, has_size)
        if faulty.isdisjoint(accumulate(fault.key.split("."), "{}.{}".format))
    ]


def require(loaded: LoadedConfig, caching: bool = False) -> WeightsStart:
    """Raise `ConfigFaults` with all faults on disk, or return the initial weights. Quick: no sample is read."""
    start, faults = check_disk(loaded, caching)
    if faults:
        raise ConfigFaults(faults)
    assert start is not None, "an unknown start is a fault"
    return start


def run(loaded: LoadedConfig, world_size: int | None = None, by_deepspeed: bool = False) -> RunEstimate:
    """Estimate a run on ``world_size`` GPUs (None: as few as possible), with DeepSpeed if requested or needed.

    Raises `ConfigFaults` if the run cannot start or has no data.
    """
    start = require(loaded)
    stages = loaded.train.pipeline_stages
    world_size = world_size or stages
    by_deepspeed = by_deepspeed or stages > 1
    if by_deepspeed and (problem := deepspeed_problem(loaded.train, world_size)):
        raise UserError(problem)
    if problem := one_process_problem(loaded.train, world_size, by_deepspeed):
        raise UserError(problem)
    estimate = estimate_run(loaded, start, Layout(world_size, by_deepspeed))
    if loaded.train.fp8 and (reason := estimate.why_stock or estimate.setup.cost.why_no_fp8(None)):
        raise UserError(f"fp8 = true is not available: {reason}; write fp8 = false")
    faults = empty_faults(estimate, loaded)
    if faults:
        raise ConfigFaults(faults)
    return estimate
