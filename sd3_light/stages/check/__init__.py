"""The check stage: what is wrong with a config once the disk is looked at, or else what a run of it will do.

Every stage calls `require` first; `sd3-light check` calls `run` and shows what it returns by `render`.
"""

from sd3_light.config import ConfigFaults, LoadedConfig
from sd3_light.stages.check.disk import disk_faults
from sd3_light.stages.check.not_yet import NOT_YET
from sd3_light.stages.check.render import render
from sd3_light.stages.check.survey import Survey, empty_faults, survey

__all__ = ["NOT_YET", "Survey", "disk_faults", "render", "require", "run", "survey"]


def require(loaded: LoadedConfig) -> None:
    """Raise `ConfigFaults` with all that is wrong on disk; quick, as no sample is looked at."""
    faults = disk_faults(loaded)
    if faults:
        raise ConfigFaults(faults)


def run(loaded: LoadedConfig, world: int = 1) -> Survey:
    """What a run on ``world`` GPUs will do; raises `ConfigFaults` where it could not start or has nothing to see."""
    require(loaded)
    found = survey(loaded, world)
    faults = empty_faults(found)
    if faults:
        raise ConfigFaults(faults)
    return found
