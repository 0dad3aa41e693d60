"""What the cache stage prints at its end."""

from pathlib import Path

import pytest

from sd3_light.cache.report import CacheReport, log_report
from sd3_light.data.manifest import REJECTED


@pytest.mark.parametrize(
    ("policy", "rejected", "small", "expected"),
    [
        ("drop", 1, 1, ("1 input was rejected: 1 corrupt", "1 sample, fewer than one global batch: it is dropped")),
        (
            "pad",
            2,
            3,
            ("2 inputs were rejected: 2 corrupt", "3 samples, fewer than one global batch: they are repeated"),
        ),
    ],
)
def test_rejected_inputs_and_small_buckets_are_reported(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    policy: str,
    rejected: int,
    small: int,
    expected: tuple[str, str],
) -> None:
    counts = {"used": 9, "pictures": 10, "cropped": 0, "enlarged": 0, f"{REJECTED}corrupt": rejected}
    log_report("train", CacheReport(tmp_path, counts, small_buckets={"80x48": small}), policy, "cache")
    printed = capsys.readouterr()
    text = " ".join((printed.out + printed.err).split())
    assert all(line in text for line in expected), text
