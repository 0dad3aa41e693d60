"""A cache built on a GPU, where results arrive while the device works on: every sample is what a CPU makes of it."""

import torch
from safetensors.torch import load_file

from sd3_light.data.manifest import Manifest
from tests.project import Project


def test_a_cache_built_on_a_gpu_holds_what_one_of_a_cpu_holds(fresh_project: Project, cached_project: Project) -> None:
    fresh_project.build_cache('caching_device="cuda"', "caching_num_workers=2")
    on_gpu, on_cpu = Manifest.load(fresh_project.cache), Manifest.load(cached_project.cache)
    assert [shard.file for shard in on_gpu.shards] == [shard.file for shard in on_cpu.shards]
    for shard in (*on_gpu.shards, on_gpu.empty):
        one, two = (load_file(project.cache / "shards" / shard.file) for project in (fresh_project, cached_project))
        assert one.keys() == two.keys()
        for name, values in one.items():
            difference = (values.float() - two[name].float()).abs().max() if values.numel() else torch.tensor(0.0)
            assert difference < 0.1, (shard.file, name, difference)
