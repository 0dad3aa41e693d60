"""Speed, utilisation, bands and memory as they are logged."""

import json
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sd3_light.data.loader import LoadTimes
from sd3_light.engines.protocol import StepNumbers, StepResult
from sd3_light.flow.objective import BAND_NAMES, NUM_BANDS, sum_by_band
from sd3_light.train import meter
from sd3_light.train.meter import Meter, Window

pytestmark = pytest.mark.usefixtures("one_thread")


def numbers(loss: float, bands: list[float], counts: list[float]) -> StepNumbers:
    pad = [0.0] * (NUM_BANDS - len(bands))
    return StepNumbers({"loss": loss}, 1.0, True, (*bands, *pad), (*counts, *pad))


def result(loss: float = 1.0, taken: bool = True) -> StepResult:
    values = torch.cat([torch.tensor([loss]), torch.zeros(2 * NUM_BANDS), torch.tensor([2.0, float(taken)])])
    return StepResult(["loss"], values)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(meter.time, "perf_counter", lambda: now[0])
    return now


def test_speed_counts_training_only(clock: list[float]) -> None:
    """Two processes, two steps of 3 s of which 1 s waits for data; a minute of evaluation is excluded."""
    training_meter = Meter(world_size=2, peak_flops=100.0)
    for step in (1, 2):
        with training_meter.waiting():
            clock[0] += 1
        clock[0] += 2
        training_meter.add(step, result(), samples=12, flops=600)
        with training_meter.excluded():
            clock[0] += 60
    training_meter.collect(wait=True)
    fields = training_meter.record()
    assert fields["samples_per_second"] == pytest.approx(24 / 6)
    assert fields["images_per_second_per_gpu"] == pytest.approx(2.0)
    assert fields["data_wait"] == pytest.approx(1 / 3)
    assert fields["seconds"] == pytest.approx(3.0)
    assert fields["tflops_per_gpu"] == pytest.approx(100e-12)
    assert fields["mfu"] == pytest.approx(1.0)
    clock[0] += 1
    training_meter.add(3, result(), samples=12, flops=600)
    training_meter.collect(wait=True)
    assert training_meter.record()["samples_per_second"] == pytest.approx(12.0), "a record resets the counters"
    # a step takes 5 s to queue, 3 of them until its data arrive
    load = LoadTimes()
    training_meter = Meter(load=load)
    for _ in range(2):
        with training_meter.launching():
            clock[0] += 5
            load.waited += 3
        load.waited += 10  # outside of steps
    assert training_meter.mark().clock.launched == pytest.approx(2 * 2)
    assert training_meter.mark().clock.loaded == pytest.approx(2 * 13)


def test_a_record_ends_at_its_mark(clock: list[float]) -> None:
    """The host may have queued further steps."""
    training_meter = Meter()
    training_meter.add(1, result(), samples=12, flops=1)
    mark = training_meter.mark()
    training_meter.collect(wait=True)
    training_meter.add(2, result(), samples=99, flops=1)
    clock[0] += 4
    fields = training_meter.record(mark)
    assert (fields["steps"], fields["samples_per_second"]) == (1, pytest.approx(3.0))


def test_bands_are_means_over_their_samples() -> None:
    window = Window()
    window.add(numbers(1.0, [6.0, 0.0], [2.0, 0.0]))
    window.add(numbers(3.0, [3.0, 5.0], [1.0, 1.0]))
    means = window.means()
    assert means["band"] == {"0.0-0.1": 3.0, "0.1-0.2": 5.0}
    assert (means["loss"], means["steps"]) == (2.0, 2)
    window = Window()
    window.add(numbers(0.1 + 0.2, [1 / 3], [1.0]))
    again = Window(**json.loads(json.dumps(asdict(window))))
    assert again == window


def test_a_skipped_step_is_not_in_the_means() -> None:
    training_meter = Meter()
    training_meter.add(1, result(5.0), 1, 1)
    training_meter.add(2, result(float("nan"), taken=False), 1, 1)
    assert [(step, numbers.taken) for step, numbers in training_meter.collect(wait=True)] == [(1, True), (2, False)]
    assert training_meter.record()["loss"] == 5.0
    assert "mfu" not in Meter().record()
    assert Meter().record()["loss"] != Meter().record()["loss"]


def test_samples_are_sorted_into_bands_by_timestep() -> None:
    times = torch.tensor([0.0, 0.05, 0.1, 0.55, 0.999, 1.0])
    each = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0, float("nan")])
    sums, counts = sum_by_band(each, times)
    assert counts.tolist() == [2, 1, 0, 0, 0, 1, 0, 0, 0, 2]
    assert sums[:9].tolist() == [3, 4, 0, 0, 0, 8, 0, 0, 0]
    assert sums[9] != sums[9], "a non-finite loss stays in its band"
    assert (BAND_NAMES[0], BAND_NAMES[9]) == ("0.0-0.1", "0.9-1.0")


def test_numbers_have_arrived_if_all_until_the_mark_have() -> None:
    training_meter = Meter()
    first: Any = SimpleNamespace(ready=False)
    later: Any = SimpleNamespace(ready=False)
    training_meter.add(1, first, 1, 1)
    mark = training_meter.mark()
    assert not training_meter.has_arrived(mark), "the step at the mark counts"
    training_meter.add(2, later, 1, 1)
    first.ready = True
    assert training_meter.has_arrived(mark), "later steps do not"
    assert not training_meter.has_arrived(training_meter.mark())
