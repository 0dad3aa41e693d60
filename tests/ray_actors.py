"""Encoders for tests on a Ray cluster that crash on demand. Actors import this module by its name."""

import os
from collections.abc import Sequence

from sd3_light.data.building.decode import CRASHED_DECODE, Decoded, DecodeTask, decode_images
from sd3_light.data.building.workers import BatchPool
from sd3_light.data.store.build_folder import UnitFiles
from sd3_light.stages.cache.ray_encoder import ShardEncoder, UnitTask
from sd3_light.stages.cache.ray_tasks import TaskPool

POISON = "poison"
"""A unit with an image of this name crashes its encoder."""
CRASHING = "crashing"
"""An image of this name crashes its decoder."""


class CrashingEncoder(ShardEncoder):
    def build(self, task: UnitTask) -> tuple[int, UnitFiles]:
        if any(POISON in member.row.key for member in task.members):
            os._exit(1)
        return super().build(task)

    def _decoder(self, task: UnitTask) -> BatchPool[DecodeTask, Decoded]:
        return TaskPool("decode images", decode_or_crash, CRASHED_DECODE, 2, task.decode_cpus)


def decode_or_crash(tasks: Sequence[DecodeTask]) -> list[Decoded]:
    if any(CRASHING in str(task.location.image) for task in tasks):
        os._exit(1)
    return decode_images(tasks)
