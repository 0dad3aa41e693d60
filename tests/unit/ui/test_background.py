"""Why the work of a thread failed is never empty."""

from unittest.mock import Mock

import pytest

from sd3_light.config import UserError
from sd3_light.ui.background import error_of


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (UserError("no such folder"), "no such folder"),
        (TimeoutError(), "TimeoutError"),
        (ValueError("x"), "ValueError; this is a bug"),
        (SystemExit(3), "SystemExit; this is a bug"),
    ],
)
def test_every_failure_has_a_reason(error: BaseException, message: str) -> None:
    assert error_of(Mock(side_effect=error)).startswith(message)
    assert error_of(lambda: None) == ""
