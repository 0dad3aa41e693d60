"""Folders of tiny pipelines."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.families import make_pipeline


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that writes a family's pipeline once, with the published settings of its scheduler."""

    @cache
    def folder(family: str) -> Path:
        path = tmp_path_factory.mktemp("tiny") / family
        make_pipeline(family).save_pretrained(path)
        return path

    return folder
