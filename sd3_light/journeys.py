"""The only place that strings stages together: cache then train, and the demo."""

from pathlib import Path

from sd3_light.checkpoint.state import Progress
from sd3_light.config import LoadedConfig
from sd3_light.engines import Launch
from sd3_light.stages import cache, check, train


def cache_then_train(
    loaded: LoadedConfig,
    launch: Launch,
    trust_cache: bool = False,
    regenerate_cache: bool = False,
    resume: train.Resume | None = None,
) -> Progress:
    """Encode what is missing, then train."""
    check.require(loaded)
    cache.run(loaded, launch, trust_cache, regenerate_cache)
    return train.run(loaded, launch, resume)


def only_cache(loaded: LoadedConfig, launch: Launch, trust_cache: bool, regenerate_cache: bool) -> list[Path]:
    """Encode what is missing; returns the cache folders."""
    check.require(loaded)
    return [report.folder for report in cache.run(loaded, launch, trust_cache, regenerate_cache)]
