"""A reward that a config can name."""

from collections.abc import Sequence
from typing import Any

from sd3_light.tasks import reward


@reward
def redness(images: Any, prompts: Sequence[str]) -> Any:
    """Return how much more red than blue each image is."""
    return images[..., 0].mean((1, 2)) - images[..., 2].mean((1, 2))
