"""Where a run puts its cache: the numbers behind the choice, one choice for all ranks, and a full memory."""

from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from sd3_light.check import verb as check
from sd3_light.core.cost import Cost
from sd3_light.core.registry import family_of, starting_weights
from sd3_light.cost.gpu_memory import CONTEXT_BYTES
from sd3_light.cost.residence import Room
from sd3_light.data.order import Order
from sd3_light.data.resident import CacheTooLarge, ResidentCache
from sd3_light.data.store import RemoteStore
from sd3_light.engines import Launch
from sd3_light.engines.feed import make_order, open_cache
from sd3_light.engines.processes import ProcessGroups
from sd3_light.train import residence
from sd3_light.train.residence import TrainingProcess, place_cache, room_for_cache
from tests.project import Project

pytestmark = pytest.mark.usefixtures("one_thread")

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
GIB = 1 << 30

Place = Callable[..., ResidentCache | None]


class Ranks(ProcessGroups):
    """Rank 0 of two; the other one has ``room`` and ``problem``."""

    room: Room | None = None
    problem: str | None = None

    def gathered(self, value: Any) -> list[Any]:
        other = (self.room or value) if isinstance(value, Room) else self.problem
        return [value, other]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """A GPU of 20 GB; the cache is loaded into host memory in its place."""
    memory = {"free": 20 * GIB, "total": 20 * GIB, "host": 64 * GIB}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (memory["free"], memory["total"]))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(residence, "available_memory", lambda: memory["host"])
    load = residence.load_cache

    def load_on_host(data: Any, config: Any, launch: Launch, device: torch.device) -> Any:
        assert device == CUDA
        cache = load(data, config, launch, CPU)
        cache.device = CUDA if config.residence == "device" else CPU
        return cache

    monkeypatch.setattr(residence, "load_cache", load_on_host)
    return memory


@pytest.fixture
def place(cached_project: Project) -> Place:
    def placed(*settings: str, device: torch.device = CUDA, groups: Any = None, **keys: Any) -> ResidentCache | None:
        loaded = cached_project.load("max_steps=1000", *settings)
        data = open_cache(loaded.dataset, loaded.train, Launch())
        if keys.get("remote"):
            data.store.__class__ = RemoteStore
        order: Order = make_order(data, loaded, Launch())
        groups = groups or ProcessGroups()
        process = TrainingProcess(keys.get("launch", Launch()), device, groups)
        return place_cache(data, order, loaded.train, cost_of(loaded), process)

    return placed


def cost_of(loaded: Any) -> Cost:
    model = loaded.train.model
    return family_of(model).cost(starting_weights(model), model)


def where(cache: ResidentCache | None) -> str:
    return "stream" if cache is None else "device" if cache.device == CUDA else "host"


def test_training_takes_what_check_estimates(cached_project: Project, gpu: dict[str, int]) -> None:
    loaded = cached_project.load()
    data = open_cache(loaded.dataset, loaded.train, Launch())
    process = TrainingProcess(Launch(), CUDA, ProcessGroups())
    room = room_for_cache(data, loaded.train, cost_of(loaded), process, loaded.train.max_steps)
    assert room == (20 * GIB, check.run(loaded).gpu.total, 64 * GIB, 1)
    gpu["free"] = 5 * GIB
    room = room_for_cache(data, loaded.train, cost_of(loaded), process)
    assert room.gpu == 5 * GIB + CONTEXT_BYTES, "other processes use the rest"


def test_auto_takes_the_fastest_memory(place: Place, gpu: dict[str, int], capsys: pytest.CaptureFixture[str]) -> None:
    assert where(place()) == "device"
    line = capsys.readouterr().err
    assert line.startswith('cache: in GPU memory (cache_residence = "auto": it takes ')
    assert line.count("\n") == 1
    gpu["free"] = 1 << 20
    assert where(place()) == "host"
    assert 'cache: in host memory (cache_residence = "auto": ' in capsys.readouterr().err
    gpu["host"] = 1 << 10
    assert where(place()) == "stream"
    assert 'cache: streamed from its shards (cache_residence = "auto": ' in capsys.readouterr().err


def test_auto_streams_on_a_cpu_from_a_url_and_for_less_than_an_epoch_alike(place: Place, gpu: dict[str, int]) -> None:
    assert where(place(device=CPU)) == "stream"
    assert where(place(remote=True)) == "stream"
    assert where(place("max_steps=1")) == "stream"
    assert where(place("pipeline_stages=2", launch=Launch(0, 0, 2))) == "host"
    groups = Ranks()
    assert where(place(groups=groups)) == "device"
    object.__setattr__(groups, "room", Room(1 << 20, 0, 64 * GIB, 1))
    assert where(place(groups=groups)) == "host"
    groups = Ranks()
    object.__setattr__(groups, "problem", "CUDA out of memory")
    assert place(groups=groups) is None


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nmore"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you"),
        CacheTooLarge("the cache takes 8.0 GB"),
    ],
)
def test_a_failed_cache_is_streamed(place: Place, gpu: Any, error: Exception, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(residence, "load_cache", Mock(side_effect=error))
    assert place() is None
    _, line = capsys.readouterr().err.splitlines()
    first = str(error).partition("\n")[0]
    assert line == f"cache: streamed from its shards, because it could not be loaded ({first})"
    for value in ("host", "device"):
        with pytest.raises(type(error)):
            place(f'cache_residence="{value}"')
    monkeypatch.setattr(residence, "load_cache", Mock(side_effect=RuntimeError("a bug")))
    with pytest.raises(RuntimeError, match="a bug"):
        place()


def test_explicit_values_are_not_asked(place: Place, gpu: dict[str, int], capsys: pytest.CaptureFixture[str]) -> None:
    gpu["free"] = gpu["host"] = 0
    assert where(place('cache_residence="device"')) == "device"
    assert where(place('cache_residence="host"')) == "host"
    assert where(place("sd3_streaming_dataset=false")) == "host"
    assert capsys.readouterr().err == ""
