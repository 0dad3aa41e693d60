"""The disk faults of the fake project, and what a screen shows."""

import io
from collections.abc import Callable

import pytest
from rich.console import Console, RenderableType

from sd3_light.check.verb import disk_faults
from sd3_light.config import Fault
from tests.fake_project import FakeProject


@pytest.fixture
def only_fault(files: FakeProject) -> Callable[..., Fault]:
    """The single disk fault of a config."""

    def single(**kwargs: str) -> Fault:
        faults = disk_faults(files.load(**kwargs))
        assert len(faults) == 1, [str(fault) for fault in faults]
        return faults[0]

    return single


def shown(content: RenderableType, width: int = 240) -> str:
    """Return what a wide screen shows."""
    console = Console(record=True, width=width, file=io.StringIO())
    console.print(content)
    return console.export_text()
