"""A decoder for tests on a Ray cluster that crashes on demand; without torch, so that its processes start fast."""

import os
from collections.abc import Sequence

from sd3_light.sources.decode import Decoded, DecodeTask, decode_images

CRASHING = "000021.png"
"""The image that crashes its decoder."""


def decode_or_crash(tasks: Sequence[DecodeTask]) -> list[Decoded]:
    if any(task.location.image.path.endswith(CRASHING) for task in tasks):
        os._exit(1)
    return decode_images(tasks)
