"""A cache built on a GPU has the samples of a cache built on a CPU."""

import torch
from safetensors.torch import load_file

from sd3_light.data.manifest import Manifest
from tests.project import Project


def test_a_cache_built_on_a_gpu_matches_one_built_on_a_cpu(fresh_project: Project, cached_project: Project) -> None:
    fresh_project.build_cache('caching_device="cuda"', "caching_num_workers=2")
    on_gpu, on_cpu = Manifest.load(fresh_project.cache), Manifest.load(cached_project.cache)
    assert [shard.file for shard in on_gpu.shards] == [shard.file for shard in on_cpu.shards]
    for shard in (*on_gpu.shards, on_gpu.empty):
        gpu, cpu = (load_file(project.cache / "shards" / shard.file) for project in (fresh_project, cached_project))
        assert gpu.keys() == cpu.keys()
        for name, values in gpu.items():
            difference = (values.float() - cpu[name].float()).abs().max() if values.numel() else torch.tensor(0.0)
            assert difference < 0.1, (shard.file, name, difference)
