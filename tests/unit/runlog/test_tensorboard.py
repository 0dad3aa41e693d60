"""TensorBoard shows every step of a run once, however often the run is started."""

import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator

from sd3_light.runlog import RunLog
from sd3_light.runlog.tensorboard import LARGEST_SIDE, shrink


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Control the time: event files are read in the order of their names, which start with the second."""
    now = [1.8e9]
    monkeypatch.setattr(time, "time", lambda: now[0])
    return now


def read(folder: Path) -> EventAccumulator:
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return events


def curve(folder: Path, name: str) -> list[tuple[int, float]]:
    return [(point.step, float(point.tensor_proto.float_val[0])) for point in read(folder).Tensors(name)]


def steps(log: RunLog, first: int, last: int, loss: float) -> None:
    for step in range(first, last + 1):
        log.event("step", step=step, samples=64 * step, loss=loss)
        if step % 4 == 0:
            log.event("eval", step=step, samples=64 * step, set="held", weights="ema", flow=loss)


@pytest.mark.parametrize(("axis", "unit"), [("step", 1), ("samples", 64)])
def test_a_resumed_run_shows_no_step_twice(tmp_path: Path, clock: list[float], axis: str, unit: int) -> None:
    with RunLog(tmp_path, x_axis=axis) as log:
        log.event("start", step=0, samples=0)
        steps(log, 1, 9, loss=1.0)
    clock[0] += 10
    with RunLog(tmp_path, x_axis=axis) as log:
        log.event("resume", step=6, samples=6 * 64)
        steps(log, 7, 7, loss=2.0)
    # the resumed run repeats steps after 6, so the old step 8 and its evaluation are hidden
    assert curve(tmp_path, "train/loss") == [*((step * unit, 1.0) for step in range(1, 7)), (7 * unit, 2.0)]
    assert curve(tmp_path, "eval/held/ema/flow") == [(4 * unit, 1.0)]


def test_a_new_start_in_the_same_folder_hides_the_first_run(tmp_path: Path, clock: list[float]) -> None:
    for loss in (1.0, 2.0):
        clock[0] += 10
        with RunLog(tmp_path) as log:
            log.event("start", step=0, samples=0)
            log.event("eval", step=0, samples=0, set="held", weights="raw", flow=loss)
            steps(log, 1, 3, loss)
    assert curve(tmp_path, "train/loss") == [(1, 2.0), (2, 2.0), (3, 2.0)]
    assert curve(tmp_path, "eval/held/raw/flow") == [(0, 2.0)]


def test_an_image_is_stored_unchanged_and_a_large_one_scaled_down(tmp_path: Path) -> None:
    image = Image.fromarray(np.arange(8 * 5 * 3, dtype=np.uint8).reshape(8, 5, 3))
    with RunLog(tmp_path) as log:
        log.image("samples/ema", image, step=42)
    (point,) = read(tmp_path).Tensors("samples/ema")
    width, height, data = point.tensor_proto.string_val
    assert (point.step, width, height) == (42, b"5", b"8")
    (tmp_path / "shown.png").write_bytes(data)
    with Image.open(tmp_path / "shown.png") as shown:
        assert np.array_equal(np.asarray(shown.convert("RGB")), np.asarray(image))
    image = Image.new("RGBA", (2 * LARGEST_SIDE, 30))
    small = shrink(image)
    assert (small.size, small.mode) == ((LARGEST_SIDE, 15), "RGB")
    assert (image.size, image.mode) == ((2 * LARGEST_SIDE, 30), "RGBA")


def test_a_run_without_curves_has_no_tensorboard_folder(tmp_path: Path) -> None:
    with RunLog(tmp_path) as log:
        log.event("start", step=0, samples=0)
    assert not (tmp_path / "tensorboard").exists()
