"""The counters of a run, and the names of kinds."""

import json

from sd3_light.checkpoint.progress import Progress, track_kind


def test_progress_counts_steps_samples_skips_and_the_position() -> None:
    progress = Progress().after(8).after(4).skipping(1).after(8)
    assert progress == Progress(step=3, samples=20, skipped=1, position=3)
    assert progress.counts() == {"step": 3, "samples": 20}


def test_the_position_goes_on_from_where_the_data_began_anew() -> None:
    assert Progress(step=7, samples=56, skipped=2, position=0).after(8) == Progress(8, 64, 2, 1)


def test_progress_survives_json() -> None:
    progress = Progress(7, 2**40, 2, 5)
    assert Progress(**json.loads(json.dumps(progress.as_dict()))) == progress


def test_the_main_average_is_a_kind_and_further_ones_are_kinds_of_their_own() -> None:
    assert [track_kind(name) for name in ("ema", "slow", "power_0.1")] == ["ema", "ema.slow", "ema.power_0.1"]
