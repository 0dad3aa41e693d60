"""A device's idle time on a simulated clock: how it is measured, and which cause is named."""

import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from sd3_light.config import TrainConfig
from sd3_light.data.loader import LoadTimes
from sd3_light.engines import Launch
from sd3_light.engines.protocol import MicroBatch, StepNumbers, StepStream
from sd3_light.engines.torch import TorchEngine
from sd3_light.train import meter
from sd3_light.train.idle import WARN_WINDOW, DeviceGaps, HostTimes, IdleAdvice, watch_updates
from sd3_light.train.loop import Hook, every, train
from sd3_light.train.meter import Meter
from tests.unit.engines.test_torch import Line, line_batch
from tests.unit.train.test_loop import run

pytestmark = pytest.mark.usefixtures("one_thread")


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
    device's between two steps. At most ``depth`` kernels are queued; the host waits before it queues another. The last
    two kernels are the optimizer's.
    """

    rank, world_size, writers, updates_started = 0, 1, 1, 0

    def __init__(
        self, data: float, launch: float, work: float, other: float = 0.0, depth: int = 1000, between: float = 0.0
    ) -> None:
        self.weights: dict[str, Any] = {}
        self.milliseconds = {"data": data, "launch": launch, "work": work, "other": other}
        self.between = between
        self.now = self.free_at = 0.0
        self.before_update: Any = lambda: None
        self.ends: deque[float] = deque(maxlen=depth)

    def spend(self, name: str, share: float = 1.0) -> None:
        self.now += self.milliseconds[name] / 1000 * share

    def mark(self) -> Event:
        return Event(max(self.now, self.free_at), self)

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
            if kernel == 7:
                self.before_update()
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


def train_on(device: Device, steps: int, monkeypatch: Any, logging_steps: int = 10, **keys: Any) -> list[Any]:
    """Train on a simulated device; return the step records, each of which takes the host ``writing`` seconds.

    A hook may act every ``hook_every`` steps; other keys are those of the advice.
    """
    writing, hook_every, records = keys.pop("writing", 0.0), keys.pop("hook_every", None), list[Any]()
    monkeypatch.setattr(meter.time, "perf_counter", lambda: device.now)
    monkeypatch.setattr(meter.time, "thread_time", lambda: device.now)

    def log(event: str, **fields: Any) -> None:
        device.now += writing
        records.append({**fields, "written": device.now})

    gaps = DeviceGaps(device.mark)
    device.before_update = gaps.backward_queued
    advice = IdleAdvice(**{"workers": 8, **keys})
    hooks = [Hook("wait", every(hook_every), lambda progress: device.wait(0.5))]
    of_device = {"steps": device.steps, "begin_step": device.begin_step, "meter": Meter(gaps=gaps)}
    logging = {"log": log, "logging_steps": logging_steps, "idle_advice": advice, "flops_in": lambda batches: 7}
    train(run(steps, device, hooks=hooks, **of_device, **logging))  # type: ignore[arg-type]
    return records


@pytest.mark.parametrize(
    ("device", "idle", "bound"),
    [
        (Device(data=1, launch=3, work=20), 0.0, 0.0),  # the host is ahead
        (Device(data=15, launch=3, work=20), 0.0, 0.0),  # data load while the device computes
        (Device(data=1, launch=29, work=18), 0.0, 1.0),  # every kernel waits for the host
        (Device(data=5, launch=25, work=18), 0.105, 1.0),  # and data, too
        (Device(data=27, launch=3, work=18), 0.39, 0.0),  # the device waits for data
        (Device(data=1, launch=3, work=18, other=26), 0.39, 0.0),
        (Device(data=1, launch=3, work=20, depth=6), 0.0, 0.0),  # the host is ahead, but never by a whole step
        (Device(data=1, launch=3, work=15, between=5), 0.0, 0.0),  # averages and inputs are work, too
        (Device(data=27, launch=3, work=17, between=1), 0.43, 0.0),  # inputs that the device prepares count
    ],
)
def test_waits_of_the_device_are_measured(device: Device, idle: float, bound: float, monkeypatch: Any) -> None:
    *_, record, _ = train_on(device, 600, monkeypatch, logging_steps=50)
    assert record["data_wait"] == pytest.approx(idle, abs=0.01)
    assert record["host_bound"] == bound
    if idle or bound:
        for name, seconds in record["host_seconds"].items():
            assert seconds == pytest.approx(device.milliseconds[name] / 1000, abs=1e-5)


def test_measuring_and_records_do_not_slow_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(data=1, launch=3, work=20, depth=2)
    train_on(device, 600, monkeypatch, logging_steps=50)
    assert device.now == pytest.approx(600 * 0.020, rel=0.005)
    # the next step is queued before the host waits for the numbers of this one
    device = Device(data=1, launch=3, work=20)
    records = train_on(device, 100, monkeypatch, logging_steps=2, writing=0.012)
    assert [record["step"] for record in records] == [*range(2, 101, 2)]
    assert all((record["steps"], record["samples"]) == (2, 4 * record["step"]) for record in records)
    assert device.now == pytest.approx(0.004 + 100 * 0.020, abs=0.03)
    assert records[20]["seconds"] == pytest.approx(0.020, rel=0.01)
    # excluded work, such as an evaluation after every step
    *_, record, _ = train_on(Device(data=1, launch=3, work=20), 100, monkeypatch, hook_every=1)
    assert record["data_wait"] == 0


@pytest.mark.parametrize("logging_steps", [1, 5])
@pytest.mark.parametrize(
    ("device", "milliseconds"),
    [
        (Device(data=1, launch=3, work=20), 20),
        (Device(data=27, launch=3, work=18), 30),
        (Device(data=1, launch=29, work=18), 30),
        (Device(data=1, launch=3, work=20, depth=2), 20),
    ],
)
def test_records_time_their_steps(device: Device, milliseconds: float, logging_steps: int, monkeypatch: Any) -> None:
    """Also before and after hooks of half a second, and the last one."""
    records = train_on(device, 300, monkeypatch, logging_steps, hook_every=20)
    times = [1000 * record["seconds"] for record in records[2:]]
    typical = [seconds for seconds in times if seconds == pytest.approx(milliseconds, rel=0.25)]
    assert len(typical) > 0.9 * len(times)
    assert min(times) > 0.99 * device.milliseconds["work"]
    assert times[-1] == pytest.approx(milliseconds, rel=0.25)
    assert 1000 * records[0]["seconds"] > 0.99 * device.milliseconds["work"]


def test_a_record_counts_the_waits_of_the_steps_it_covers(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(data=0, launch=3, work=20)
    gaps = DeviceGaps(device.mark)
    for number in range(1, 7):
        with gaps.step():
            device.train_step([], 0.1)
        device.now = device.free_at + 0.001 * number
    device.now += 100
    assert gaps.take(3) == (pytest.approx(0.003), 0)
    assert gaps.take(6) == (pytest.approx(0.012), 0)
    assert gaps.take(6) == (0.0, 0)
    device = Device(data=27, launch=3, work=18)
    gaps = DeviceGaps(device.mark)
    for number in range(100):
        device.spend("data")
        with gaps.step():
            device.train_step([], 0.1)
        gaps.take(number)
    assert len(gaps._gaps) <= 2
    # an engine that waits for its gradients would always seem to be bound by the host
    device = Device(data=1, launch=29, work=18)
    monkeypatch.setattr(meter.time, "perf_counter", lambda: device.now)
    measuring = Meter(gaps=DeviceGaps(device.mark))
    for number in range(1, 5):
        with measuring.launching():
            result = device.train_step([], 0.1)
        measuring.add(number, result, 1, 1)
    measuring.collect(wait=True)
    assert "host_bound" not in measuring.record()


@pytest.mark.parametrize(("optimizer", "watched"), [("adamw", True), ("adafactor", False)])
def test_only_updates_that_wait_for_nothing_are_watched(optimizer: str, watched: bool, tmp_path: Path) -> None:
    table = {"output_dir": "out", "dataset": "data.toml", "max_steps": 1, "optimizer": {"type": optimizer}}
    config = TrainConfig.model_validate({**table, "model": {"diffusers_path": "."}}, context={"base": tmp_path})
    engine = TorchEngine(Line(), config, Launch(), torch.device("cpu"))
    gaps = DeviceGaps(Device(data=0, launch=1, work=1).mark)
    watch_updates(engine, gaps)
    engine.train_step([line_batch()], 1e-3)
    assert gaps.sees_updates == watched


DISK = LoadTimes(read=9.0, read_cpu=1.0, prepare=2.0, prepare_cpu=2.0)
CORES = LoadTimes(read=9.0, read_cpu=3.0, prepare=6.0, prepare_cpu=2.0)
CAUSES = [
    ((27, 3, 18), {}, "the workers are too slow; raise num_dataloader_workers (now 8"),
    ((27, 3, 18), {"workers": 0}, "the main process prepares the data; raise num_data"),
    ((27, 3, 18), {"load": DISK}, "the workers wait for the disk 73% of the time; put the cache on a faster disk"),
    ((27, 3, 18), {"load": CORES}, "the 8 workers got only 33% of a core each"),
    ((1, 29, 18), {}, "the GPU waited for the host within 100% of the last 50 steps: the batch is too small: "),
    ((1, 29, 18), {"batch_key": "batch_size"}, "kernels takes 29.0 of 30.0 ms per step; raise batch_size"),
    ((1, 3, 18, 26), {}, "the main process spends 26.0 ms per step between steps"),
]


@pytest.mark.parametrize(("times", "keys", "cause"), CAUSES, ids=[cause[:30] for _, _, cause in CAUSES])
def test_one_cause(times: Any, keys: Any, cause: str, monkeypatch: Any, capsys: pytest.CaptureFixture[str]) -> None:
    train_on(Device(*times), 400, monkeypatch, **keys)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "the GPU" in line]
    assert re.search(r"the GPU (was idle for (39|4\d)%|waited for the host within 100%) of the last 50 steps: ", line)
    assert cause in line


def test_advice_comes_after_the_first_steps_and_not_to_a_busy_device(monkeypatch: Any, capsys: Any) -> None:
    """Processes start and kernels are compiled in them."""
    train_on(Device(data=1, launch=29, work=18), 2 * WARN_WINDOW - 10, monkeypatch)
    assert "the GPU" not in capsys.readouterr().err
    train_on(Device(data=1, launch=29, work=18), 2 * WARN_WINDOW + 10, monkeypatch)
    assert "the GPU" in capsys.readouterr().err
    train_on(Device(data=15, launch=3, work=20), 400, monkeypatch, logging_steps=50)
    assert "the GPU" not in capsys.readouterr().err
    times = HostTimes(steps=50, bound=50, seconds=1.5, data=0.1, launch=1.4, launch_cpu=0.7)
    advice = IdleAdvice(12)
    assert advice.of(times) is None
    line = advice.of(times)
    assert "got only 50% of a core while it queued kernels; lower num_dataloader_workers (now 12" in str(line)
