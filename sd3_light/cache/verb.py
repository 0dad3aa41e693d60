"""The cache stage: encode images and captions once with the VAE and the three text encoders, into immutable shards.

All processes of a launch, and all other commands on the same folder, divide the shards among themselves; none waits in
a collective (law 9). The name of a shard identifies everything that determines it: existing shards are reused, and
missing ones are built by this run or the next. They copy what the shards of the old manifest have of their images and
captions, and encode the rest.
"""

from sd3_light.cache.dataset_build import DatasetBuild
from sd3_light.cache.identity import is_remote, is_trusted, make_identity
from sd3_light.cache.local_builder import Builder, LocalBuilder
from sd3_light.cache.report import CacheOptions, CacheReport
from sd3_light.config import LoadedConfig, TrainConfig
from sd3_light.config.faults import UserError
from sd3_light.engines import Launch
from sd3_light.runlog import info

__all__ = ["CacheOptions", "CacheReport", "make_identity", "run"]


def run(loaded: LoadedConfig, launch: Launch | None = None, options: CacheOptions | None = None) -> list[CacheReport]:
    """Build or complete the caches of the dataset and of every evaluation set, then free the encoders."""
    launch = launch or Launch()
    options = options or CacheOptions()
    datasets = {"": loaded.dataset, **loaded.eval_datasets}
    if not options.regenerate and (options.trust or not options.at_url):
        datasets = {name: data for name, data in datasets.items() if not is_remote(data, loaded.train)}
    if options.trust and not options.regenerate:
        datasets = {name: data for name, data in datasets.items() if not is_trusted(data, loaded.train)}
        if not datasets:
            info("using the cache without checking it against the sources (--trust-cache)")
    with _open_builder(loaded.train, launch, options) as builder:
        build = DatasetBuild(loaded.train, launch, options, builder)
        if "" not in datasets:
            build.complete_prompts(loaded.dataset)
        return [build.build(name, dataset) for name, dataset in datasets.items()]


def _open_builder(train: TrainConfig, launch: Launch, options: CacheOptions) -> Builder:
    """Return what encodes: this process, or the Ray cluster of the options."""
    if options.ray is None:
        return LocalBuilder(train, launch)
    if launch.world_size > 1:
        raise UserError("--ray starts its own processes; run it without torchrun or another launcher")
    try:
        from sd3_light.cache.ray_builder import RayBuilder
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise UserError("--ray needs Ray, which is not installed; run `pip install 'sd3-light[ray]'`") from error
    return RayBuilder(train, options.ray, options.ray_actors)
