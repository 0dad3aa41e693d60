"""What the cache stage prints at its end."""

from pathlib import Path

import pytest

from sd3_light.cache.report import CacheReport, log_report
from sd3_light.data.manifest import REJECTED

LINES = {
    ("drop", 1): ("1 input was rejected: 1 corrupt", "1 sample, fewer than one global batch: it is dropped"),
    ("pad", 3): ("3 inputs were rejected: 3 corrupt", "3 samples, fewer than one global batch: they are repeated"),
}


@pytest.mark.parametrize(("policy", "count"), LINES)
def test_rejects_and_small_buckets(capsys: pytest.CaptureFixture[str], tmp_path: Path, policy: str, count: int) -> None:
    counts = {"used": 9, "pictures": 10, "cropped": 0, "enlarged": 0, f"{REJECTED}corrupt": count}
    log_report("train", CacheReport(tmp_path, counts, small_buckets={"80x48": count}), policy, "cache")
    printed = capsys.readouterr()
    text = " ".join((printed.out + printed.err).split())
    assert all(line in text for line in LINES[policy, count]), text
