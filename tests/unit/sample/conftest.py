"""What the tests of several files need."""

import sys
from types import SimpleNamespace

import diffusers
import pytest

from sd3_light.core.registry import family_named


@pytest.fixture
def prx_without_ftfy(monkeypatch: pytest.MonkeyPatch) -> None:
    """PRX's pipeline cleans captions with a package that may be missing here."""
    same = SimpleNamespace(fix_text=lambda text: text)
    monkeypatch.setattr(sys.modules[diffusers.PRXPipeline.__module__], "ftfy", same, raising=False)
    monkeypatch.setattr(type(family_named("prx")), "packages", ())
