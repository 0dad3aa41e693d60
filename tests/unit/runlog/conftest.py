"""Tests of the log run as the main process."""

import pytest


@pytest.fixture(autouse=True)
def _main(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sd3_light.runlog.console._main_process", True)
