"""The verb `sd3-light ui`: what it refuses."""

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sd3_light.cli import app
from sd3_light.config.faults import UserError
from tests.refusals import refused


@pytest.mark.parametrize("package", ["starlette", "uvicorn"])
def test_a_missing_package_names_the_extra(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith(("starlette", "uvicorn", "sd3_light.ui.server"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "sd3_light.ui.guard", raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    message = rf"sd3-light ui needs the package {package}: pip install 'sd3-light\[ui\]'"
    refused(message, CliRunner().invoke, app, ["ui"], catch_exceptions=False)


def test_a_folder_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("starlette", reason="needs starlette and uvicorn, the extra ui")
    with pytest.raises(UserError, match=f"{tmp_path / 'none'} is not a folder"):
        CliRunner().invoke(app, ["ui", str(tmp_path / "none")], catch_exceptions=False)
