"""A decoder for tests on a Ray cluster that crashes on demand; without torch, so that its processes start fast."""

import os
from collections.abc import Sequence

from sd3_light.data.building.decode import Decoded, DecodeTask, decode_images

CRASHING = "crashing"
"""An image with this in its name crashes its decoder."""


def decode_or_crash(tasks: Sequence[DecodeTask]) -> list[Decoded]:
    """Decode images."""
    if any(CRASHING in os.path.basename(task.location.image.path) for task in tasks):
        os._exit(1)
    return decode_images(tasks)
