"""An encoder for tests on a Ray cluster that crashes on demand. Actors import this module by its name."""

import os

from sd3_light.cache.build_folder import StoredFiles
from sd3_light.cache.ray_encoder import ShardEncoder, ShardTask, TaskPool
from sd3_light.sources.decode import CRASHED_DECODE, Decoded, DecodeTask
from sd3_light.sources.workers import BatchPool
from tests.ray_decode import decode_or_crash

POISON = "000007.png"
"""The shard with this image crashes its encoder."""


class CrashingEncoder(ShardEncoder):
    """Crashes on poison shards; its decode tasks crash on crashing images."""

    def build(self, task: ShardTask) -> tuple[int, StoredFiles]:
        if any(member.row.key.endswith(POISON) for member in task.members):
            os._exit(1)
        return super().build(task)

    def _decoder(self, task: ShardTask) -> BatchPool[DecodeTask, Decoded]:
        return TaskPool("decode images", decode_or_crash, CRASHED_DECODE, 2, task.decode_cpus)
