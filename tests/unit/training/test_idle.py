"""A device's idle time on a simulated clock: how it is measured, and which cause is named."""

import itertools
import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from sd3_light.config.faults import UserError
from sd3_light.data.loader import LoadTimes
from sd3_light.engines.protocol import MicroBatch, StepNumbers, StepStream
from sd3_light.training import device_time, meter
from sd3_light.training.device_time import StepTimer
from sd3_light.training.idle import WARN_WINDOW, HostTimes, IdleAdvice
from sd3_light.training.loop import Hook, Run, every, train
from sd3_light.training.meter import Meter


@dataclass
class Event:
    """When the device reaches it; the host reads its clock."""

    at: float
    clock: "Device"

    def query(self) -> bool:
        return self.at <= self.clock.now

    def elapsed_time(self, later: "Event") -> float:
        return 1000 * (later.at - self.at)


class Device:
    """Runs a step of ten kernels that the host queues one after another; host and device share a simulated clock.

    ``data``, ``launch`` and ``other`` are the host's milliseconds per step, ``work`` the device's, and ``between`` the
    device's between two steps. At most ``depth`` kernels are queued; the host waits before it queues another. Parts of
    a step end after the kernels ``ends_part``.
    """

    rank, world, writers, updates_started = 0, 1, 1, 0

    def __init__(
        self,
        data: float,
        launch: float,
        work: float,
        other: float = 0.0,
        depth: int = 1000,
        ends_part: Sequence[int] = (3, 7),
        between: float = 0.0,
    ) -> None:
        self.weights: dict[str, Any] = {}
        self.milliseconds = {"data": data, "launch": launch, "work": work, "other": other}
        self.between = between
        self.now = self.free_at = 0.0
        self.slept: list[float] = []
        self.part_queued: Any = lambda: None
        self.ends: deque[float] = deque(maxlen=depth)
        self.ends_part = ends_part

    def spend(self, name: str, share: float = 1.0) -> None:
        self.now += self.milliseconds[name] / 1000 * share

    def mark(self) -> Event:
        return Event(max(self.now, self.free_at), self)

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.free_at = max(self.now, self.free_at) + seconds

    def steps(self, first: int) -> StepStream:
        while True:
            self.spend("data")
            yield [((0,), (None,))]

    def weight_norm(self) -> torch.Tensor:
        return torch.tensor(1.0)

    def wait(self, seconds: float) -> None:
        self.now = max(self.now, self.free_at) + seconds

    def begin_step(self, step: int) -> None:
        self.spend("other")
        self.free_at = max(self.now, self.free_at) + self.between / 1000

    def train_step(self, batches: Sequence[MicroBatch], lr: float) -> Any:
        for kernel in range(10):
            self.spend("launch", 0.1)
            if len(self.ends) == self.ends.maxlen:
                self.now = max(self.now, self.ends[0])
            self.free_at = max(self.now, self.free_at) + self.milliseconds["work"] / 10_000
            self.ends.append(self.free_at)
            if kernel in self.ends_part:
                self.part_queued()
        return LateResult(self.free_at, self)


@dataclass
class LateResult:
    """A step's numbers, ready when the device is done."""

    at: float
    device: Device

    @property
    def ready(self) -> bool:
        return self.at <= self.device.now

    def seconds_since(self, earlier: "LateResult") -> float:
        return self.at - earlier.at

    def read(self) -> StepNumbers:
        self.device.now = max(self.device.now, self.at)
        return StepNumbers({"loss": 1.0}, 1.0, True)


def train_on(
    device: Device,
    steps: int,
    monkeypatch: pytest.MonkeyPatch,
    logging_steps: int = 10,
    writing: float = 0.0,
    records: list[dict[str, Any]] | None = None,
    hook_every: int | None = None,
    **advice: Any,
) -> list[dict[str, Any]]:
    """Train on a simulated device; return the step records, each of which takes the host ``writing`` seconds."""
    for module in (meter, device_time):
        monkeypatch.setattr(module.time, "perf_counter", lambda: device.now)
    monkeypatch.setattr(meter.time, "thread_time", lambda: device.now)
    records = [] if records is None else records

    def log(event: str, **fields: Any) -> None:
        device.now += writing
        records.append({**fields, "written": device.now})

    timer = StepTimer(device)
    device.part_queued = timer.split
    train(
        Run(
            engine=device,  # type: ignore[arg-type]
            steps=device.steps,
            samples_in=lambda position: 4,
            learning_rate=lambda step: 0.1,
            total_steps=steps,
            log=log,
            meter=Meter(timer=timer),
            flops_in=lambda batches: 7,
            begin_step=device.begin_step,
            hooks=[Hook("wait", every(hook_every), lambda progress: device.wait(0.5))],
            logging_steps=logging_steps,
            idle_advice=IdleAdvice(**{"workers": 8, **advice}),
        )
    )
    return records


@pytest.mark.parametrize(
    ("device", "idle"),
    [
        (Device(data=1, launch=3, work=20), 0.0),  # the host is ahead
        (Device(data=15, launch=3, work=20), 0.0),  # data load while the device computes
        (Device(data=1, launch=29, work=18), 0.4),  # every kernel waits for the host
        (Device(data=27, launch=3, work=18), 0.4),  # the device waits for data
        (Device(data=1, launch=3, work=18, other=26), 0.4),
        (Device(data=1, launch=3, work=20, depth=6), 0.0),  # the host is ahead, but never by a whole step
        (Device(data=1, launch=29, work=6, depth=6), 0.8),  # even a sleeping device does not get a whole step queued
        (Device(data=1, launch=3, work=20, depth=2, ends_part=range(9)), 0.0),  # parts as short as the queue
        (Device(data=1, launch=3, work=15, between=5), 0.0),  # averages and inputs are work, too
        (Device(data=27, launch=3, work=14, between=4), 0.4),
    ],
    ids=[
        *("computing", "loading", "launching", "waiting", "other", "full queue", "slow and full queue", "short queue"),
        *("work between steps", "waiting with work between steps"),
    ],
)
def test_data_wait_is_the_idle_share_of_the_device(device: Device, idle: float, monkeypatch: Any) -> None:
    """Also where it is idle inside a step."""
    *_, record, _ = train_on(device, 600, monkeypatch, logging_steps=50)
    assert record["data_wait"] == pytest.approx(idle, abs=0.03)
    assert record["gpu_seconds"] == pytest.approx((device.milliseconds["work"] + device.between) / 1000, rel=1e-6)
    assert 1 - record["gpu_seconds"] / record["seconds"] == pytest.approx(record["data_wait"])
    for name, seconds in record["host_seconds"].items():
        if idle:
            assert seconds == pytest.approx(device.milliseconds[name] / 1000, abs=1e-5)


def test_the_device_works_while_a_record_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next step is queued before the host waits for the numbers of this one."""
    device = Device(data=1, launch=3, work=20)
    records = train_on(device, 100, monkeypatch, logging_steps=2, writing=0.012)
    assert [record["step"] for record in records] == [*range(2, 101, 2)]
    assert all((record["steps"], record["samples"]) == (2, 4 * record["step"]) for record in records)
    assert device.now == pytest.approx(0.004 + 100 * 0.020, abs=0.03)
    assert records[20]["seconds"] == pytest.approx(0.020, rel=0.01)


@pytest.mark.parametrize("logging_steps", [1, 5])
@pytest.mark.parametrize(
    ("device", "milliseconds"),
    [
        (Device(data=1, launch=3, work=20), 20),
        (Device(data=27, launch=3, work=18), 30),
        (Device(data=1, launch=29, work=18), 30),
        (Device(data=1, launch=3, work=20, depth=2, ends_part=range(9)), 20),
    ],
    ids=["computing", "waiting", "launching", "short queue"],
)
def test_every_record_has_the_time_of_its_steps(
    device: Device, milliseconds: float, logging_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also before and after hooks of half a second, and the last one. A probe makes a step longer, the next shorter."""
    records = train_on(device, 300, monkeypatch, logging_steps, hook_every=20)
    times = [1000 * record["seconds"] for record in records[2:]]
    typical = [seconds for seconds in times if seconds == pytest.approx(milliseconds, rel=0.25)]
    assert len(typical) > 0.9 * len(times)
    assert min(times) > 0.99 * device.milliseconds["work"]
    assert times[-1] == pytest.approx(milliseconds, rel=0.25)
    assert 1000 * records[0]["seconds"] > 0.99 * device.milliseconds["work"]


def test_hooks_after_every_step_leave_probes_on_time(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(data=1, launch=29, work=18)
    train_on(device, 600, monkeypatch, hook_every=1)
    assert 5 <= len(device.slept) / 3 <= 7
    assert max(device.slept) < 0.02


def test_a_late_record_is_written_if_the_data_end_in_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    device, records = Device(data=1, launch=3, work=20), list[dict[str, Any]]()
    steps = device.steps

    def some_steps(first: int) -> StepStream:
        yield from itertools.islice(steps(first), 4)
        raise UserError("a shard is damaged")

    device.steps = some_steps  # type: ignore[method-assign]
    with pytest.raises(UserError, match="damaged"):
        train_on(device, 100, monkeypatch, logging_steps=2, records=records)
    assert [record["step"] for record in records] == [2, 4]


def test_a_device_sleeps_rarely_and_only_if_the_host_is_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    behind, ahead = Device(data=1, launch=29, work=18), Device(data=1, launch=3, work=20)
    train_on(behind, 600, monkeypatch)
    assert 5 <= len(behind.slept) / 3 <= 7, "the device sleeps before each of three parts"
    for part, kernels in enumerate((4, 4, 2)):
        assert all(seconds == pytest.approx(1.25 * 0.0029 * kernels, rel=0.01) for seconds in behind.slept[part::3])
    train_on(ahead, 600, monkeypatch, logging_steps=50)
    assert len(ahead.slept) <= 1


def test_a_device_that_waits_for_data_sleeps_before_it_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(data=27, launch=3, work=18)
    train_on(device, 600, monkeypatch)
    before_data = [seconds for seconds in device.slept if seconds > 0.03]
    assert 4 <= len(before_data) <= 7
    assert before_data == pytest.approx([1.25 * 0.027] * len(before_data), rel=0.05)


def test_excluded_work_between_steps_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as an evaluation that the host only queues."""
    device = Device(data=0, launch=3, work=20)
    monkeypatch.setattr(device_time.time, "perf_counter", lambda: device.now)
    timer = StepTimer(device)
    device.part_queued = timer.split
    for number in range(20):
        with timer.step():
            device.train_step([], 0.1)
        timer.add(1.0)
        if number % 2:
            device.free_at += 0.5
            timer.exclude()
    device.now += 100
    assert timer.own_seconds(1.0) == pytest.approx(0.020, rel=1e-6)


def test_without_the_time_of_the_device_waiting_for_data_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that is longer than the queue is never measured."""
    *_, record, _ = train_on(Device(data=10, launch=3, work=20, depth=2), 600, monkeypatch, logging_steps=50)
    assert record["data_wait"] == pytest.approx(0.01 / record["seconds"], rel=0.01)
    assert "gpu_seconds" not in record


@pytest.mark.parametrize("ends_part", [(3, 7), (3,), ()])
def test_parts_that_cannot_be_measured_do_not_slow_training(ends_part: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sleep before such a part is as long as the part itself: with one in every fourth step, training loses 23%."""
    device = Device(data=1, launch=3, work=20, depth=2, ends_part=ends_part)
    train_on(device, 600, monkeypatch, logging_steps=50)
    assert 1000 * device.now / 600 < 1.02 * 20
    assert len(device.slept) <= 6 * (len(ends_part) + 1), "after 3, 10, 30, 100, 200 and 400 steps"


def test_only_parts_that_were_not_measured_are_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of two parts is longer than the queue."""
    device = Device(data=1, launch=3, work=20, depth=2, ends_part=(7, 8))
    train_on(device, 600, monkeypatch, logging_steps=300)
    assert 1 <= len(device.slept) <= 8
    assert min(device.slept) > 0.010, "no sleep before a part of one kernel"


def test_a_probe_that_succeeds_ends_the_longer_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(data=1, launch=3, work=20, depth=2)
    monkeypatch.setattr(device_time.time, "perf_counter", lambda: device.now)
    timer = StepTimer(device)
    device.part_queued = timer.split

    def sleeps(steps: int) -> int:
        before = len(device.slept)
        for _ in range(steps):
            device.now += 0.001
            with timer.step():
                device.train_step([], 0.1)
        return (len(device.slept) - before) // 3

    assert sleeps(50) == 3
    device.ends, device.milliseconds = deque(maxlen=1000), {"launch": 29.0, "work": 18.0}
    assert sleeps(52) == 1
    assert sleeps(202) == 2, "after 200 and 300 steps, instead of 200 and 400"


def test_the_probes_of_one_rank_do_not_count_as_the_time_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host of one falls behind in the middle of the run; the other waits for its gradients."""
    behind, ahead = Device(data=0, launch=3, work=20), Device(data=0, launch=3, work=20)
    timers = [StepTimer(behind), StepTimer(ahead)]
    slept_in, seen = list[int](), 0
    for step in range(400):
        behind.milliseconds["launch"] = 3.0 if step < 40 else 29.0
        for device, timer in zip((behind, ahead), timers, strict=True):
            monkeypatch.setattr(device_time.time, "perf_counter", lambda device=device: device.now)
            device.part_queued = timer.split
            with timer.step():
                device.train_step([], 0.1)
                slept, seen = sum(behind.slept[seen:]), len(behind.slept)
                if device is behind:
                    slept_in += [step] * (slept > 0)
                    ahead.milliseconds["work"] = 20.0 + 1000 * slept
            timer.add(1.0)
            device.now = max(device.now, device.free_at - 0.015)
    assert slept_in == [100, 200, 300]
    assert ahead.slept == []
    for timer in timers:
        assert timer.own_seconds(1.0) == pytest.approx(0.020, rel=1e-6)


def test_events_are_read_between_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """A timer does not hold the events of all steps since the last record."""
    device = Device(data=1, launch=3, work=20, depth=6)
    monkeypatch.setattr(device_time.time, "perf_counter", lambda: device.now)
    timer = StepTimer(device)
    device.part_queued = timer.split
    for _ in range(100):
        with timer.step():
            device.train_step([], 0.1)
        timer.add(1.0)
    assert len(timer._pending) <= 2


def test_steps_of_different_sizes_are_weighted_by_their_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small steps are launch-bound and never measured; their own time follows from that of large ones."""
    queue = Device(data=0, launch=10, work=0)
    monkeypatch.setattr(device_time.time, "perf_counter", lambda: queue.now)
    timer = StepTimer(queue)
    for number in range(20):
        queue.milliseconds["work"] = 400.0 if number % 2 else 4.0
        with timer.step():
            queue.train_step([], 0.1)
        timer.add(100.0 if number % 2 else 1.0)
        queue.now = max(queue.now, queue.free_at - 0.2 * (number % 2 == 0))
    queue.now += 10
    assert timer.own_seconds(101.0) == pytest.approx(0.404, rel=1e-6)
    assert timer.own_seconds(1.0) == pytest.approx(0.004, rel=1e-6), "without a new measurement the last one counts"


CAUSES = [
    (Device(data=27, launch=3, work=18), {}, "the workers are too slow; raise num_dataloader_workers (now 8"),
    (Device(data=27, launch=3, work=18), {"workers": 0}, "the main process prepares the data; raise num_data"),
    (
        Device(data=27, launch=3, work=18),
        {"load": LoadTimes(read=9.0, read_cpu=1.0, prepare=2.0, prepare_cpu=2.0)},
        "the workers wait for the disk 73% of the time; put the cache on a faster disk",
    ),
    (
        Device(data=27, launch=3, work=18),
        {"load": LoadTimes(read=9.0, read_cpu=3.0, prepare=6.0, prepare_cpu=2.0)},
        "the 8 workers got only 33% of a core each",
    ),
    (
        Device(data=1, launch=29, work=18),
        {"batch_key": "batch_size"},
        "the batch is too small: the main process needs 29.0 ms to queue the kernels of a step, the GPU 18.0 ms to "
        "run them; raise batch_size",
    ),
    (Device(data=1, launch=3, work=18, other=26), {}, "the main process spends 26.0 ms per step between steps"),
]


@pytest.mark.parametrize(("device", "keys", "cause"), CAUSES, ids=[cause[:30] for _, _, cause in CAUSES])
def test_the_cause_is_named_once(
    device: Device, keys: Any, cause: str, monkeypatch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    train_on(device, 400, monkeypatch, **keys)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "idle" in line]
    assert re.search(r"the GPU was idle for (39|4\d)% of the last 50 steps: ", line)
    assert cause in line


def test_a_main_process_without_a_core_is_named() -> None:
    times = HostTimes(steps=50, seconds=1.5, gpu=0.9, data=0.1, launch=1.4, launch_cpu=0.7)
    advice = IdleAdvice(12)
    assert advice.of(times) is None
    assert "got only 50% of a core while it queued kernels; lower num_dataloader_workers (now 12" in str(
        advice.of(times)
    )


def test_the_first_steps_do_not_count(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Processes start and kernels are compiled in them."""
    train_on(Device(data=1, launch=29, work=18), 2 * WARN_WINDOW - 10, monkeypatch)
    assert "idle" not in capsys.readouterr().err
    train_on(Device(data=1, launch=29, work=18), 2 * WARN_WINDOW + 10, monkeypatch)
    assert "idle" in capsys.readouterr().err


def test_a_busy_device_needs_no_advice(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    train_on(Device(data=15, launch=3, work=20), 400, monkeypatch, logging_steps=50)
    assert "idle" not in capsys.readouterr().err
