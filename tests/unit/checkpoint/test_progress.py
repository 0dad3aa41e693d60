"""The counters of a run and the names of averages."""

import json
from dataclasses import replace

from sd3_light.checkpoint.progress import Progress, track_kind


def test_progress_counts_steps_samples_skips_and_the_position() -> None:
    progress = replace(Progress().after(8).after(4), skipped=1).after(8)
    assert progress == Progress(step=3, samples=20, skipped=1, position=3)
    assert progress.counts() == {"step": 3, "samples": 20}
    assert Progress(**json.loads(json.dumps(progress.as_dict()))) == progress
    assert Progress(step=7, samples=56, skipped=2, position=0).after(8) == Progress(8, 64, 2, 1), "after a reset"
    # averages have separate kinds
    assert [track_kind(name) for name in ("ema", "slow", "power_0.1")] == ["ema", "ema.slow", "ema.power_0.1"]
