"""What the user is told in the end of a call that is refused."""

from collections.abc import Callable
from typing import Any

import pytest

from sd3_light.config.faults import ConfigFaults, UserError


def refused(pattern: str, call: Callable[..., Any], *arguments: Any, **options: Any) -> str:
    """Assert that a call raises a `UserError` of one line, in which the pattern is found; return the line."""
    with pytest.raises(UserError, match=pattern or None) as caught:
        call(*arguments, **options)
    text = str(caught.value)
    assert isinstance(caught.value, ConfigFaults) or "\n" not in text, text
    return text
