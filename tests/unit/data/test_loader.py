"""The loader: the same batches for any number of workers, and a bounded number of prefetched batches."""

import gc
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.utils.data import Dataset, get_worker_info

from sd3_light.config.faults import UserError
from sd3_light.data.loader import PipelineDataLoader, _end_workers
from sd3_light.data.stream import CachedDataset, MicroBatches
from tests.refusals import refused
from tests.waiting import HANG_SECONDS, wait_until

MakeCache = Callable[..., CachedDataset]
ONCE = {"toy#0": 1.0}

ROOT = Path(__file__).parents[3]


class Model:
    def __init__(self, prepare: Callable[[Any], Any]) -> None:
        self.prepare = prepare

    def prepare_inputs(self, batch: Any, timestep_quantile: float | None = None) -> Any:
        return self.prepare(batch)


class Items(Dataset[Any]):
    def __init__(self, count: int, make: Callable[[int], Any]) -> None:
        self.count = count
        self.make = make

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, item: int) -> Any:
        return self.make(item)


def row(sample_id: torch.Tensor) -> dict[str, Any]:
    return {"sample_id": sample_id, "moments": 0, "t5": 0, "repeat": 0, "mask": None}


PLAIN = Model(lambda batch: ((batch["sample_id"], batch["moments"], batch["t5"]), (batch["repeat"], batch["mask"])))
IDENTITY = Model(lambda batch: (batch, (torch.zeros(1), None)))


def loader_of(data: CachedDataset, micro: int = 1, first: int = 0, steps: int = 6, **keys: int) -> PipelineDataLoader:
    order = data.order(0, ONCE, lambda resolution: 4)
    items = range(first * micro, steps * micro)
    return PipelineDataLoader(MicroBatches(data, order, 0, 1, micro), object(), micro, PLAIN, items=items, **keys)


def all_steps(loader: PipelineDataLoader) -> list[list[Any]]:
    """Return the steps of a loader; each list is copied before the next step empties it."""
    return [list(step) for step in loader.steps()]


def flat(steps: list[list[Any]]) -> list[torch.Tensor]:
    return [tensor for step in steps for features, label in step for tensor in (*features, label[0])]


def prepare_plain_into(batch: dict[str, Any], empty: Callable[..., torch.Tensor]) -> Any:
    """Return the result of `PLAIN` with one tensor in allocated memory."""
    features, label = PLAIN.prepare(batch)
    laid = empty(tuple(features[2].shape), features[2].dtype)
    return (*features[:2], laid.copy_(features[2])), label


def test_tensors_prepared_in_a_slot_arrive(make_cache: MakeCache) -> None:
    never = Mock(side_effect=AssertionError("a worker has memory to lay it into"))
    data = make_cache(captions=2)
    plain, count = all_steps(loader_of(data)), 0
    batches = MicroBatches(data, data.order(0, ONCE, lambda resolution: 4), 0, 1, 1)
    keys = {"num_dataloader_workers": 2, "items": range(6), "prepare_into": prepare_plain_into}
    laid = PipelineDataLoader(batches, object(), 1, Model(never), **keys)
    for wanted, step in zip(plain, laid.steps(), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(flat([wanted]), flat([step]), strict=True))
        count += 1
    assert count == 6


def test_a_step_has_all_its_micro_batches_or_is_an_error(make_cache: MakeCache) -> None:
    data = make_cache()
    whole, halves = all_steps(loader_of(data)), all_steps(loader_of(data, micro=2))
    assert [len(step) for step in halves] == [2] * 6
    for step, parts in zip(whole, halves, strict=True):
        joined = torch.cat([features[0] for features, _ in parts])
        assert torch.equal(joined, step[0][0][0])
    order = data.order(0, ONCE, lambda resolution: 4)
    loader = PipelineDataLoader(MicroBatches(data, order, 0, 1, 2), object(), 2, PLAIN, items=range(3))
    with pytest.raises(AssertionError, match="too few micro-batches"):
        list(loader.steps())


class Counting(Items):
    """Counts requested items across processes."""

    def __init__(self) -> None:
        super().__init__(100, self.counted)
        self.made = multiprocessing.Value("i", 0)

    def counted(self, item: int) -> dict[str, Any]:
        with self.made.get_lock():
            self.made.value += 1
        return row(torch.tensor([item]))


def count_when_idle(dataset: Counting, at_least: int) -> int:
    """Return the number of items made when all workers are idle."""
    wait_until(lambda: dataset.made.value >= at_least)
    time.sleep(0.2)  # an extra item would be made now
    return int(dataset.made.value)


@pytest.mark.parametrize(("workers", "prefetch"), [(1, 1), (2, 1), (2, 3)])
def test_workers_prepare_at_most_prefetch_items(workers: int, prefetch: int) -> None:
    """Host memory is bounded by workers x prefetch micro-batches (law 10)."""
    dataset = Counting()
    loader = PipelineDataLoader(dataset, object(), 1, PLAIN, workers, prefetch)
    assert loader.dataloader.prefetch_factor == prefetch
    batches = loader.steps()
    for taken in (1, 2):
        next(batches)
        assert count_when_idle(dataset, taken + workers * prefetch) == taken + workers * prefetch
    batches.close()


def test_without_workers_batches_are_made_on_demand() -> None:
    dataset = Counting()
    batches = PipelineDataLoader(dataset, object(), 1, PLAIN).steps()
    for taken in (1, 2, 3):
        next(batches)
        assert dataset.made.value == taken


def test_collections_in_workers_do_not_visit_what_the_trainer_made() -> None:
    """They would copy memory that workers share with the trainer, and take 0.3 s each after torch's imports."""
    of_trainer: list[Any] = [[]]
    dataset = Items(2, lambda item: row(torch.tensor(any(value is of_trainer for value in gc.get_objects()))))
    assert dataset[0]["sample_id"]
    loader = PipelineDataLoader(dataset, object(), 1, PLAIN, num_dataloader_workers=2)
    assert not any(features[0] for features, _ in loader)


def doubled(batch: dict[str, Any]) -> Any:
    return (batch["sample_id"] * 2, batch["moments"] + 1, batch["t5"].float()), (batch["repeat"], batch["mask"])


@pytest.mark.parametrize(
    ("model", "into"),
    [(PLAIN, None), (Model(doubled), None), (PLAIN, prepare_plain_into)],
    ids=["plain", "doubled", "laid"],
)
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_batch_that_is_kept_never_changes(make_cache: MakeCache, model: Any, into: Any, workers: int) -> None:
    """Memory is reused, but not while a tensor in it is alive."""
    data = make_cache(captions=2, variants=2, mask=True)
    order = data.order(0, ONCE, lambda resolution: 4)
    batches = MicroBatches(data, order, 0, 1, 1)
    expected = [model.prepare_inputs(batches[item]) for item in range(30)]
    keys: dict[str, Any] = {"num_dataloader_workers": workers, "items": range(30), "prepare_into": into}
    kept = list(PipelineDataLoader(batches, None, 1, model, **keys))
    for (features, label), (other, other_label) in zip(kept, expected, strict=True):
        for one, two in zip((*features, *label), (*other, *other_label), strict=True):
            assert torch.equal(one, two)


def test_steps_do_not_hold_batches_of_earlier_steps(make_cache: MakeCache) -> None:
    data = make_cache()
    for workers in (0, 2):
        steps = loader_of(data, micro=2, num_dataloader_workers=workers).steps()
        first = next(steps)
        assert len(first) == 2
        second = next(steps)
        assert len(second) == 2
        assert first is second, "the same list, refilled"


@pytest.mark.parametrize(("workers", "prefetch"), [(1, 1), (2, 1), (2, 2), (2, 4)])
def test_batch_memory_is_workers_times_prefetch_plus_the_one_in_use(workers: int, prefetch: int) -> None:
    batch = 4 << 20
    keys = {"num_dataloader_workers": workers, "prefetch_batches_per_worker": prefetch}
    items = Items(24, lambda item: {"x": torch.full((batch,), item, dtype=torch.uint8), "mask": None})
    loader = PipelineDataLoader(items, None, 1, IDENTITY, **keys)
    for number, step in enumerate(loader.steps()):
        assert (step[0][0]["x"] == number).all()
    held = sum(os.fstat(file).st_blocks * 512 for file in loader._items.pool._files)  # as the kernel counts
    assert workers * prefetch <= held / batch <= workers * prefetch + 1 + 0.1


def faulty(kind: str) -> Items:
    """Item 3 raises a UserError, or kills its worker; without workers it is made."""

    def make(item: int) -> Any:
        if item == 3 and kind == "user":
            raise UserError("shard x is damaged; run y")
        if item == 3 and kind == "killed" and get_worker_info() is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        return {"x": torch.tensor([item])}

    return Items(8, make)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_user_error_in_a_worker_is_one_line_and_ends_the_workers(workers: int) -> None:
    """The traceback still holds the iteration: collected later, torch would wait 5 seconds for each worker."""
    before = set(multiprocessing.active_children())
    loader = PipelineDataLoader(faulty("user"), None, 1, IDENTITY, num_dataloader_workers=workers)
    assert refused("", list, loader) == "shard x is damaged; run y"
    assert set(multiprocessing.active_children()) <= before


def test_a_dead_worker_is_a_one_line_error(monkeypatch: pytest.MonkeyPatch) -> None:
    # torch waits this long for its workers, several times
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.2)
    loader = PipelineDataLoader(faulty("killed"), None, 1, IDENTITY, num_dataloader_workers=2)
    with pytest.raises(UserError) as fault:
        list(loader)
    text = str(fault.value)
    assert "\n" not in text
    assert re.match(r"DataLoader worker \(pid \d+\) was killed by SIGKILL: out of memory", text)
    assert "lower num_dataloader_workers" in text
    del fault, loader
    gc.collect()  # waits for the other worker: later it would take ten seconds of another test


def test_the_batches_of_a_dead_worker_are_prepared_without_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.2)
    lost: list[UserError] = []
    loader = PipelineDataLoader(faulty("killed"), None, 1, IDENTITY, 2, 2, on_lost_worker=lost.append)
    before = set(multiprocessing.active_children())
    assert [int(features["x"]) for features, _ in loader] == list(range(8)), "in order, each once"
    (error,) = lost
    assert re.match(r"DataLoader worker \(pid \d+\) was killed by SIGKILL: out of memory", str(error))
    assert set(multiprocessing.active_children()) <= before


def test_a_dead_worker_interrupts_no_step() -> None:
    """torch's handler of SIGCHLD raises its error anywhere in the main thread: in the middle of an update, too."""
    iter(torch.utils.data.DataLoader(range(2), num_workers=1))  # type: ignore[arg-type]  # installs it
    loader = PipelineDataLoader(faulty("none"), None, 1, IDENTITY, num_dataloader_workers=1)
    with closing(iter(loader)) as batches:
        next(batches)
        assert signal.getsignal(signal.SIGCHLD) is signal.SIG_DFL


PROGRAM = """
import torch
from torch.utils.data import Dataset
from sd3_light.data import loader as dataset_util

class TinyDataset(Dataset):
    def __len__(self):
        return 16
    def __getitem__(self, idx):
        return {'x': torch.zeros((4, 3, 256, 256), dtype=torch.float16), 'mask': None}

# 模拟模型接口
class DummyModel:
    name = 'dummy'
    def prepare_inputs(self, batch, timestep_quantile=None):
        return (batch, (torch.zeros(1), None))

    @property
    def grid(self):
        class _G:
            def get_data_parallel_rank(self): return 0
            def get_data_parallel_world_size(self): return 1
            def get_model_parallel_rank(self): return 0
            def get_model_parallel_world_size(self): return 1
            def get_pipe_parallel_rank(self): return 0
            def get_pipe_parallel_world_size(self): return 1
            @property
            def pp_group(self): return [0]
        return _G()
    def gradient_accumulation_steps(self): return 1
    def is_pipe_parallel(self): return False

model = DummyModel()
ds = TinyDataset()

# 默认 DataLoader，预取 2*workers 批次
loader_default = dataset_util.PipelineDataLoader(ds, model, 1, model, num_dataloader_workers=2, prefetch_batches_per_worker=2)
print('default prefetch_factor =', loader_default.dataloader.prefetch_factor)

# 受控预取 DataLoader
loader_limited = dataset_util.PipelineDataLoader(ds, model, 1, model, num_dataloader_workers=2, prefetch_batches_per_worker=1)
print('limited prefetch_factor =', loader_limited.dataloader.prefetch_factor)
"""  # noqa: E501
"""The program of the memory note; only the import line differs."""

TAIL = """
for loader in (loader_default, loader_limited):
    count = sum(features['x'].shape == (4, 3, 256, 256) and features['mask'] is None for features, _ in loader)
    print(count)
"""


def test_the_program_of_the_memory_note_runs(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(PROGRAM + TAIL, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANG_SECONDS)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["default prefetch_factor = 2", "limited prefetch_factor = 1", "16", "16"]


_HELD = """
import multiprocessing
import time
import torch
from torch.utils.data import Dataset
from sd3_light.data.loader import PipelineDataLoader

class Items(Dataset):
    def __len__(self):
        return 100
    def __getitem__(self, number):
        return torch.full((4,), float(number))

class Model:
    def prepare_inputs(self, batch, timestep_quantile=None):
        return (batch,), (None,)

class Circle:
    pass

other = multiprocessing.Process(target=time.sleep, args=(600,), daemon=True)  # of another library, left running
other.start()
held = Circle()
held.itself, held.batches = held, iter(PipelineDataLoader(Items(), None, 1, Model(), 2, 2))
print(len(next(held.batches)))
del held  # still alive: only the garbage collector would free it
"""


def test_a_program_with_an_unclosed_iteration_ends(tmp_path: Path) -> None:
    """Workers ignore the SIGTERM that Python sends to its children, and Python would wait for them."""
    (script := tmp_path / "script.py").write_text(_HELD, encoding="utf-8")
    command, environment = [sys.executable, str(script)], {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=HANG_SECONDS)
    assert (done.stdout.strip(), done.stderr.strip(), done.returncode) == ("2", "", 0)


def test_a_forked_process_leaves_the_workers_of_its_parent_alone(make_cache: MakeCache) -> None:
    steps = loader_of(make_cache(), num_dataloader_workers=1).steps()
    next(steps)
    workers = multiprocessing.active_children()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sd3_light.data.loader.os.getpid", lambda: -1)
        _end_workers()
    assert workers
    assert all(worker.is_alive() for worker in workers)
    steps.close()
