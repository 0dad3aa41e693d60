"""Whether a cache fits into host memory."""

import pytest

from sd3_light.data import manifest as manifest_module
from sd3_light.data.manifest import Manifest, ShardEntry


def cache_of(size: int) -> Manifest:
    entry = ShardEntry("a", "64x64", (64, 64), "set#0", 1, size, "", "")
    return Manifest({}, (entry,), entry)


def test_a_cache_that_is_too_large_is_reported_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest_module, "available_memory", lambda: 10 * 10**9)
    assert cache_of(8 * 10**9).too_large() is None
    assert cache_of(4 * 10**9).too_large(2) is None
    message = cache_of(8 * 10**9 + 1).too_large()
    assert message is not None
    assert "takes 8.0 GB and 10.0 GB of memory are free, of which 80% may be taken" in message
