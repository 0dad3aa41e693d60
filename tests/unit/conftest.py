"""A fake project and pipelines that tests of several rooms use; what they import is imported on first use."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def files(tmp_path: Path) -> Any:
    from tests.fake_project import FakeProject

    return FakeProject(tmp_path)


@pytest.fixture(scope="session")
def stock(demo_parts: Path) -> Any:
    """The demo's encoders as stock diffusers loads them: its pipeline in float32, without a denoiser."""
    import torch
    from diffusers import StableDiffusion3Pipeline

    return StableDiffusion3Pipeline.from_pretrained(
        demo_parts, transformer=None, dtype=torch.float32, local_files_only=True
    )


@pytest.fixture(scope="session")
def pipe() -> Any:
    """A tiny random SD3 pipeline, whose sides are multiples of 8, up to 192."""
    from tests.tiny_sd3 import tiny_pipeline

    return tiny_pipeline()


@pytest.fixture
def one_thread() -> None:
    import torch

    torch.set_num_threads(1)


@pytest.fixture
def limit_file_size() -> Iterator[Callable[[int], None]]:
    """Return a function that limits the size of this process's files, which acts like a full disk."""
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
