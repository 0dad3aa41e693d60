"""Folders of tiny pipelines."""

import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import diffusers
import pytest

from tests.families import TinyFolder, make_pipeline
from tests.stock import save_stock


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> TinyFolder:
    """Return a function that writes a family's pipeline once, with the published settings of its scheduler."""

    @cache
    def folder(family: str) -> Path:
        path = tmp_path_factory.mktemp("tiny") / family
        make_pipeline(family).save_pretrained(path)
        return path

    return folder


@pytest.fixture(scope="session")
def stock_folder(tmp_path_factory: pytest.TempPathFactory) -> TinyFolder:
    """Return the same function for pipelines in which every weight matters."""
    return cache(lambda family: save_stock(family, tmp_path_factory.mktemp("stock") / family))


@pytest.fixture(scope="package", autouse=True)
def cleaning() -> Iterator[None]:
    """PRX cleans captions with a package that may be missing here."""
    with pytest.MonkeyPatch.context() as patch:
        same = SimpleNamespace(fix_text=lambda text: text)
        patch.setattr(sys.modules[diffusers.PRXPipeline.__module__], "ftfy", same, raising=False)
        yield
