"""The demo's encoders as stock diffusers loads them."""

from pathlib import Path
from typing import Any

import pytest
import torch


@pytest.fixture(scope="session")
def stock(demo_parts: Path) -> Any:
    """The stock pipeline in float32, without a denoiser."""
    from diffusers import StableDiffusion3Pipeline

    return StableDiffusion3Pipeline.from_pretrained(
        demo_parts, transformer=None, dtype=torch.float32, local_files_only=True
    )
