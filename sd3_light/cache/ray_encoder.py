"""What the cache stage runs on a Ray cluster: actors with encoders that build shards, and tasks that decode images."""

import os
import shutil
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, Generic, TypeVar

import ray
from ray.exceptions import OutOfDiskError, OutOfMemoryError, RayTaskError, WorkerCrashedError

from sd3_light.cache.build_folder import StoredFiles, open_shard_folder
from sd3_light.cache.copies import Copies, OldShards
from sd3_light.cache.identity import make_identity
from sd3_light.cache.reuse import ShardCopies
from sd3_light.cache.shard_builder import Built, tokenize_missing
from sd3_light.cache.shard_in_progress import ShardInProgress, decode_batches, teacher_column, write_finished
from sd3_light.config import ModelConfig
from sd3_light.config.base import CacheLocation, DataLocation
from sd3_light.config.faults import UserError
from sd3_light.core.encoding import Encoders
from sd3_light.core.registry import family_of
from sd3_light.data.cache_plan import Member, PlannedShard
from sd3_light.data.manifest import SHARDS
from sd3_light.data.store import private_temp_folder
from sd3_light.engines import Launch
from sd3_light.files import disk_error
from sd3_light.runlog import quiet_libraries
from sd3_light.sources.decode import CRASHED_DECODE, Decoded, DecodeTask, NodeError, decode_images, run_on_node
from sd3_light.sources.workers import BatchPool
from sd3_light.system import machine, process_start

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class EncoderSettings:
    """What an actor needs of the config, and the identity that its own encoders must have.

    ``fetched_bytes`` is the most that old shards of a URL take in ``work_folder``. Actors do not get the rest of the
    config, because it may contain keys of trackers.
    """

    model: ModelConfig
    device_type: str
    batch_size: int
    decode_ahead: int
    work_folder: Path | None
    fetched_bytes: int
    identity: dict[str, Any]


@dataclass(frozen=True)
class ShardTask:
    """A shard to build and what it copies.

    ``stored`` is what the store has of it; ``decode_cpus`` what its decode tasks reserve.
    """

    shard: PlannedShard
    members: Sequence[Member]
    copies: ShardCopies
    root: DataLocation
    location: CacheLocation
    stored: StoredFiles
    decode_cpus: int


class ShardEncoder:
    """Builds shards. While one is encoded, the images of another are decoded and a third is written."""

    def __init__(self, settings: EncoderSettings) -> None:
        quiet_libraries()
        self._settings = settings
        self._node = socket.gethostname()
        self._prepared: tuple[Encoders, Path] | None = None
        self._preparing = threading.Lock()
        self._device = threading.Lock()
        self._tokenizer = ThreadPoolExecutor(1, "tokens")
        self._old: dict[CacheLocation, OldShards] = {}
        self._opening = threading.Lock()

    def __repr__(self) -> str:
        return f"sd3-light encoder ({self._settings.device_type}, {self._node})"

    def ready(self) -> str:
        """Return the name of this node. Raises a UserError if its encoders differ from those of the driver."""
        with self._named_errors():
            try:
                self._prepare()
            except UserError:
                raise
            except Exception as error:  # of a library: about this node's GPU, driver or installation
                hint = "--debug shows the traceback"
                raise UserError(f"cannot load the encoders: {error_line(error)}; {hint}") from error
            return self._node

    def _prepare(self) -> tuple[Encoders, Path]:
        """Return the encoders, checked once, and the folder for files of shards that are being built."""
        with self._preparing:
            if self._prepared is None:
                settings = self._settings
                folder = self._settings.work_folder or private_temp_folder("ray")
                _require_same_encoders(settings, folder / "parts.json")
                device = Launch().device(settings.device_type)
                encoding = family_of(settings.model).encoding
                encoders = encoding.encoders(settings.model, device, settings.batch_size)
                self._prepared = encoders, _new_scratch(folder)
            return self._prepared

    def call(self, function: Callable[..., _Result], *args: Any) -> _Result:
        """Return the result of a function of the encoders."""
        with self._named_errors():
            encoders, _ = self._prepare()
            with self._device:
                return function(encoders, *args)

    def build(self, task: ShardTask) -> tuple[Built, StoredFiles]:
        """Build a shard in the cache. Return what was built and what the store has of it now."""
        with self._named_errors():
            return self._build(task)

    def _build(self, task: ShardTask) -> tuple[Built, StoredFiles]:
        encoders, scratch = self._prepare()
        copies = self._open_copies(task)
        tokens = self._tokenizer.submit(tokenize_missing, encoders, task.members, copies)
        teacher = teacher_column(self._settings.model, task.shard)
        current = ShardInProgress(task.shard, list(task.members), tokens, copies, teacher)
        batches = decode_batches(task.members, copies, task.root, self._settings.model, self._settings.batch_size)
        images = iter([[]]) if current.is_decoded else self._decoder(task).map(batches)
        first = next(images)  # decoding starts now, even if the device is busy
        with self._device:
            for batch in chain([first], images):
                current.add(batch, encoders)
            current.encode_text(encoders)
            wait = encoders.waiter()
        wait()
        with open_shard_folder(task.location, task.stored, scratch) as place:
            fingerprints = self._settings.identity["columns"]
            write_finished(place.folder / SHARDS, current, task.root, self._settings.model, fingerprints)
            place.push_shard(task.shard.file)
            return Built(len(current.accepted), current.counts), place.stored_files(task.shard.file)

    def _open_copies(self, task: ShardTask) -> Copies:
        settings = self._settings
        with self._opening:
            old = self._old.setdefault(
                task.location, OldShards(task.location, settings.work_folder, settings.fetched_bytes)
            )
            return Copies(task.copies, old)

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        """Add the name of this node to user errors, which the driver reports. A full disk is one."""
        try:
            yield
        except NodeError:
            raise
        except UserError as error:
            raise UserError(f"{error} (on the node {self._node})") from error
        except OSError as error:
            if (line := disk_error(error)) is None:
                raise
            raise UserError(f"{line} (on the node {self._node})") from error

    def _decoder(self, task: ShardTask) -> BatchPool[DecodeTask, Decoded]:
        # without spare CPUs more than two tasks would only take the encoder's own
        ahead = self._settings.decode_ahead if task.decode_cpus else 2
        return TaskPool("decode images", decode_images, CRASHED_DECODE, ahead, task.decode_cpus, [task.root])


def _require_same_encoders(settings: EncoderSettings, memo: Path) -> None:
    """Raise a UserError unless this node has the encoders that the driver has."""
    path = settings.model.diffusers_path
    if not path.is_dir():
        raise UserError(f"model.diffusers_path: {path} does not exist; every node needs it at the same path")
    own = make_identity(settings.model, memo)
    for key, value in settings.identity.items():
        if own.get(key) != value:
            hint = "copy the same model folder and version of sd3-light to all nodes"
            raise UserError(f"model.diffusers_path: {path} has another {key} than on the driver's node; {hint}")


def _new_scratch(folder: Path) -> Path:
    """Return a folder for the files of shards that are being built; remove those of actors that were killed."""
    prefix = f"ray-{machine()}-"
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob(f"{prefix}*-*"):
        pid, _, start = old.name.removeprefix(prefix).partition("-")
        if process_start(int(pid)) != start:
            shutil.rmtree(old, ignore_errors=True)
    scratch = folder / f"{prefix}{os.getpid()}-{process_start(os.getpid())}"
    scratch.mkdir(exist_ok=True)
    return scratch


QUEUE_SECONDS = 20.0
"""If a task has not finished by then, it and all others share the CPUs that others reserved: perhaps none is free."""
_RETRIES = 3  # by Ray, for a lost process or node

Task = TypeVar("Task")
Result = TypeVar("Result")


class TaskPool(Generic[Task, Result]):
    """Runs ``work``, which maps a batch of tasks to a list of results, as Ray tasks named ``name``.

    ``crashed`` is the result of a task that kills its process every time. At most ``ahead`` batches are pending.
    ``num_cpus`` is what a task reserves; 0 lets it share the CPUs that others reserved. ``roots`` are the folders of
    the sources, which all nodes must have.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[Sequence[Task]], list[Result]],
        crashed: Result,
        ahead: int,
        num_cpus: int = 1,
        roots: Sequence[DataLocation] = (),
    ) -> None:
        self._name = name
        self._work = work
        self._crashed = crashed
        self._ahead = ahead
        self._num_cpus = num_cpus
        self._roots = roots

    def map(self, batches: Iterable[Sequence[Task]]) -> Iterator[list[Result]]:
        """Yield the results of each batch, in order; batches are taken from the iterable as they are needed."""
        pending: deque[_Pending[Task]] = deque()
        for batch in batches:
            pending.append(self._submit(batch))
            if len(pending) >= self._ahead:
                yield self._result(pending.popleft())
        while pending:
            yield self._result(pending.popleft())

    def _submit(self, batch: Sequence[Task]) -> "_Pending[Task]":
        options = {"name": self._name, "max_retries": _RETRIES, "num_cpus": self._num_cpus}
        task = _remote_function().options(**options).remote(self._work, self._roots, batch)
        return _Pending(batch, task, self._num_cpus)

    def _result(self, pending: "_Pending[Task]") -> list[Result]:
        if pending.num_cpus and not ray.wait([pending.task], timeout=QUEUE_SECONDS if self._num_cpus else 0)[0]:
            ray.cancel(pending.task)
            self._num_cpus = 0
            pending = self._submit(pending.batch)
        try:
            results: list[Result] = _get(pending.task)
            return results
        except OutOfDiskError as error:
            problem = "the object store of Ray and the disk of a node are full"
            raise UserError(f"cannot {self._name}: {problem}; free disk space there, then start again") from error
        except (WorkerCrashedError, OutOfMemoryError):
            if len(pending.batch) == 1:
                return [self._crashed]
            return [result for item in pending.batch for result in self._result(self._submit([item]))]


@dataclass(frozen=True)
class _Pending(Generic[Task]):
    batch: Sequence[Task]
    task: Any
    num_cpus: int


@cache
def _remote_function() -> Any:
    """Return one remote function for all pools: the cluster and its processes keep each until the end."""
    return ray.remote(run_on_node)


def error_line(error: BaseException | None) -> str:
    """Return an exception in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def _get(task: Any) -> Any:
    try:
        return ray.get(task)
    except RayTaskError as error:
        raise error.cause from error
