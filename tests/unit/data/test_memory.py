"""Whether a cache fits into host memory."""

import pytest

from sd3_light.data import memory as memory_module
from sd3_light.data.memory import too_large


def test_a_cache_that_is_too_large_is_reported_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_module, "available_memory", lambda: 10 * 10**9)
    assert too_large(8 * 10**9) is None
    assert too_large(4 * 10**9, 2) is None
    message = too_large(8 * 10**9 + 1)
    assert message is not None
    assert "takes 8.0 GB and 10.0 GB of memory are free, of which 80% may be taken" in message
