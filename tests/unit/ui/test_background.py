"""Why the work of a thread failed is never empty."""

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
    def work() -> None:
        raise error

    assert error_of(work).startswith(message)
    assert error_of(lambda: None) == ""
