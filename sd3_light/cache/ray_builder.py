"""Encode shards on a Ray cluster: an actor per GPU or CPU, decode tasks on spare CPUs, results straight to the store.

Ray repeats lost decode tasks and restarts actors whose process was lost; the driver replaces those that are gone for
good and repeats the shards of both (`dispatch`). The number of actors follows the cluster unless it is given.
Credentials come from the environment of the nodes: none is sent to them.
"""

import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import chdir, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

import sd3_light
from sd3_light.cache.build_folder import StoredFiles
from sd3_light.cache.dispatch import DEPTH, TRIES, WorkerFailed, dispatch
from sd3_light.cache.identity import make_identity
from sd3_light.cache.ray_encoder import EncoderSettings, ShardEncoder, ShardTask, TaskPool, error_line
from sd3_light.cache.shard_builder import BuildJob, Built
from sd3_light.cache.shard_in_progress import write_empty_note, write_rejects
from sd3_light.config import TrainConfig
from sd3_light.config.base import DataLocation
from sd3_light.config.faults import UserError
from sd3_light.data.cache_plan import PlannedShard
from sd3_light.data.manifest import SHARDS, damaged_mark, read_entry
from sd3_light.data.store import private_temp_folder
from sd3_light.runlog import Bar, info
from sd3_light.sources.decode import (
    CRASHED_DECODE,
    CRASHED_PROBE,
    Decoded,
    DecodeTask,
    Probe,
    SampleLocation,
    decode_images,
    probe_images,
)
from sd3_light.sources.records import reject_line

POLL_SECONDS = 2.0
VISIBLE_SECONDS = 60.0
"""How long a file of another node may take to show up on a shared disk."""
_RESIZE_SECONDS = 5.0
_MESSAGE_SECONDS = 60.0
_MOST_FAILED_STARTS = 10

_Result = TypeVar("_Result")


@dataclass(eq=False)
class _Actor:
    """An actor; ``starting`` is its pending answer to `ready`, None once it accepts shards; ``node`` is that answer."""

    handle: Any
    starting: Any = None
    node: str = ""


class ActorPool:
    """Encoders of a cluster: one per GPU or CPU, or ``count``; those that do not fit wait for a node."""

    def __init__(self, settings: EncoderSettings, count: int | None) -> None:
        self._settings = settings
        self._count = count
        self._actors: list[_Actor] = []
        self._cpus = self._devices = 0
        self._next_resize = 0.0
        self._failed_starts = 0
        self._idle_since = time.monotonic()

    def ready(self, wanted: int) -> list[_Actor]:
        """Return the actors that accept shards; start more if the cluster has grown."""
        self._resize(wanted)
        for actor in self._actors:
            if actor.starting is not None and ray.wait([actor.starting], timeout=0)[0]:
                self._take_answer(actor)
        ready = [actor for actor in self._actors if actor.starting is None]
        now = time.monotonic()
        if ready:
            self._idle_since = now
        elif now - self._idle_since > _MESSAGE_SECONDS:
            self._idle_since = now
            info(f"waiting for an encoder to start on the Ray cluster: it needs a node with a free {self._device_name}")
        return ready

    @property
    def _device_name(self) -> str:
        return "CPU" if self._num_cpus else "GPU"

    @property
    def _num_cpus(self) -> int:
        """CPUs that an actor reserves: none beside a GPU, so that decode tasks never keep it from starting."""
        return int(self._settings.device_type == "cpu")

    @property
    def decode_cpus(self) -> int:
        """CPUs that a decode task reserves: 1 if the actors leave any."""
        return int(self._cpus > len(self._actors) * self._num_cpus)

    @property
    def pending(self) -> list[Any]:
        """The answers of actors that are starting."""
        return [actor.starting for actor in self._actors if actor.starting is not None]

    def restart(self, actor: _Actor) -> None:
        """Give an actor no more shards until Ray has restarted it."""
        if actor.starting is None:
            if actor.node:
                info(f"lost an encoder on the node {actor.node}; its shards are built again")
            actor.starting = actor.handle.ready.remote()

    def close(self) -> None:
        """Stop all actors."""
        for actor in self._actors:
            ray.kill(actor.handle)
        self._actors.clear()

    def _resize(self, wanted: int) -> None:
        now = time.monotonic()
        if now >= self._next_resize:
            self._next_resize = now + _RESIZE_SECONDS
            resources = ray.cluster_resources()
            self._cpus = int(resources.get("CPU", 0))
            self._devices = int(resources.get(self._device_name, 0))
        count = min(self._count or max(1, self._devices), wanted)
        while len(self._actors) < count:
            self._actors.append(self._start())

    def _start(self) -> _Actor:
        actor_class = ray.remote(ShardEncoder).options(
            num_cpus=self._num_cpus,
            num_gpus=1 - self._num_cpus,
            max_restarts=-1,
            max_concurrency=DEPTH,
            scheduling_strategy="SPREAD",
        )
        actor = _Actor(actor_class.remote(self._settings))
        self.restart(actor)
        return actor

    def _take_answer(self, actor: _Actor) -> None:
        answer = actor.starting
        actor.starting = None
        try:
            actor.node = ray.get(answer)
            self._failed_starts = 0
        except RayTaskError as error:
            raise error.cause from error
        except RayError as error:
            self._failed_starts += not actor.node  # an actor that was ready before can start
            is_broken = isinstance(error, RayActorError) and error.actor_init_failed
            if is_broken or self._failed_starts > _MOST_FAILED_STARTS:
                hint = "install the same sd3-light, Python and Ray on all nodes"
                raise UserError(f"the encoders cannot start on the Ray cluster: {error_line(error)}; {hint}") from error
            # perhaps dead for good, as after `ray.kill`: another takes its place
            ray.kill(actor.handle)
            self._actors[self._actors.index(actor)] = self._start()


class _ShardRun:
    """The shards of one dataset on an actor pool, as `dispatch` distributes them."""

    def __init__(self, pool: ActorPool, job: BuildJob, bar: Bar) -> None:
        self._pool = pool
        self._job = job
        self._bar = bar
        self._shards = job.place.folder / SHARDS
        self.built = Built()

    def ready(self, wanted: int) -> list[_Actor]:
        """Return the actors that accept shards."""
        return self._pool.ready(wanted)

    def submit(self, worker: _Actor, shard: PlannedShard) -> Any:
        """Send a shard with its samples to an actor."""
        plan = self._job.plan
        place = self._job.place
        stored = StoredFiles(place.stored_files(shard.file).record)
        cpus = self._pool.decode_cpus
        members = plan.members(shard)
        root = plan.source(shard).root
        task = ShardTask(shard, members, self._job.copies(members), root, place.location, stored, cpus)
        return worker.handle.build.options(name="build shard").remote(task)

    def wait(self, handles: Sequence[Any]) -> list[Any]:
        """Return shards that have finished; return early if an actor has started."""
        finished, _ = ray.wait([*handles, *self._pool.pending], timeout=POLL_SECONDS)
        return [handle for handle in finished if handle in handles]

    def finish(self, worker: _Actor, handle: Any, shard: PlannedShard) -> None:
        """Take over what an actor wrote."""
        try:
            built, files = ray.get(handle)
        except RayTaskError as error:
            if isinstance(error.cause, UserError):
                raise error.cause from error
            raise WorkerFailed(error_line(error.cause)) from error
        except RayError as error:
            self._pool.restart(worker)
            raise WorkerFailed(error_line(error)) from error
        self._job.place.adopt_shard(shard.file, files)
        self._require_visible(shard, worker.node)
        damaged_mark(self._shards / shard.file).unlink(missing_ok=True)
        self.built += built
        self._bar.advance(shard.count)

    def reject(self, shard: PlannedShard, cause: str) -> None:
        """Reject all samples of a shard that could not be built. The next run tries again.

        An intact shard that was to be encoded again is kept instead.
        """
        detail = f"failed {TRIES} times alone on a node of the Ray cluster: {cause}"
        self._bar.advance(shard.count)
        entry = read_entry(self._shards, shard.file)
        if entry is not None and self._job.place.is_intact(entry):
            info(f"kept the existing shard {shard.file}; encoding it again {detail}")
            return
        rows = (member.row for member in self._job.plan.members(shard))
        write_rejects(self._shards, shard, [reject_line(row.key, "shard_failed", detail, row.image) for row in rows])
        write_empty_note(self._shards, shard)
        self._job.place.push_shard(shard.file)
        damaged_mark(self._shards / shard.file).unlink(missing_ok=True)
        info(f"rejected the {shard.count} samples of {shard.file}, which {detail}")

    def _require_visible(self, shard: PlannedShard, node: str) -> None:
        deadline = time.monotonic() + VISIBLE_SECONDS
        while not ((self._shards / shard.file).is_file() or (self._shards / shard.file).with_suffix(".none").is_file()):
            if time.monotonic() > deadline:
                raise UserError(
                    f"node {node} wrote {self._shards / shard.file}, which this node does not see; cache_dir must be a "
                    "folder that all nodes share, or a URL"
                )
            time.sleep(0.1)


class RayBuilder:
    """Encodes on a Ray cluster; ``actors`` is the number of encoders, None as many as the cluster has devices."""

    def __init__(self, train: TrainConfig, address: str, actors: int | None) -> None:
        self._train = train
        self._address = address
        self._num_actors = actors
        self._pool: ActorPool | None = None

    def __enter__(self) -> Self:
        self._has_connected = not ray.is_initialized()
        if self._has_connected:
            _connect(self._address)
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.close()
        if self._has_connected:
            ray.shutdown()

    @property
    def device_type(self) -> str:
        """The kind of device that encodes: that of the config, or GPUs if the cluster has any."""
        if self._train.caching_device != "auto":
            return self._train.caching_device
        return "cuda" if ray.cluster_resources().get("GPU", 0) >= 1 else "cpu"

    @property
    def pool(self) -> ActorPool:
        """The actors, which start when they are first needed."""
        if self._pool is None:
            train = self._train
            folder = self._train.stream_cache_dir
            identity = make_identity(train.model, (folder or private_temp_folder("ray")) / "parts.json")
            ahead = train.caching_num_workers + 1
            settings = EncoderSettings(
                train.model,
                self.device_type,
                train.caching_batch_size,
                ahead,
                folder,
                int(train.stream_cache_gb * 1e9),
                identity,
            )
            self._pool = ActorPool(settings, self._num_actors)
        return self._pool

    def probe_pool(self, roots: Sequence[DataLocation]) -> TaskPool[SampleLocation, Probe]:
        """Probe on all CPUs of the cluster that encoders of an earlier dataset leave."""
        return TaskPool("probe images", probe_images, CRASHED_PROBE, *self._spare_cpus(), roots)

    @contextmanager
    def decode_pool(self, roots: Sequence[DataLocation]) -> Iterator[TaskPool[DecodeTask, Decoded]]:
        """Decode on all CPUs of the cluster that the encoders leave; the first must have started."""
        self._wait_for_actor()
        yield TaskPool("decode images", decode_images, CRASHED_DECODE, *self._spare_cpus(), roots)

    def _spare_cpus(self) -> tuple[int, int]:
        """Return how many batches may be pending, and the CPUs that one reserves."""
        ahead = 2 * max(1, int(ray.cluster_resources().get("CPU", 0)))
        return ahead, 1 if self._pool is None else self._pool.decode_cpus

    def build(self, job: BuildJob, planned: Sequence[PlannedShard], bar: Bar) -> Built:
        """Build shards on the actors. Return what they built."""
        if not planned:
            return Built()
        run = _ShardRun(self.pool, job, bar)
        for shard, cause in dispatch(planned, run).items():
            run.reject(shard, cause)
        return run.built

    def call(self, function: Callable[..., _Result], *args: Any) -> _Result:
        """Call a function with the encoders of an actor; again on another if that is lost."""
        cause: RayError | None = None
        for _ in range(TRIES):
            actor = self._wait_for_actor()
            try:
                result: _Result = ray.get(actor.handle.call.remote(function, *args))
                return result
            except RayTaskError as error:
                raise error.cause from error
            except RayError as error:
                self.pool.restart(actor)
                cause = error
        raise UserError(f"an encoder of the Ray cluster was lost {TRIES} times: {error_line(cause)}") from cause

    def _wait_for_actor(self) -> _Actor:
        while not (ready := self.pool.ready(1)):
            ray.wait(self.pool.pending, timeout=POLL_SECONDS)
        return ready[0]


def _connect(address: str) -> None:
    try:
        with chdir(_code_folder()):  # its workers import from this directory first
            # actors log to Ray's own files; the driver reports what matters
            ray.init(address=address or None, log_to_driver=False, logging_level="ERROR")
    except (OSError, RuntimeError, ValueError) as error:
        target = f"to {address}" if address else "to a Ray cluster, or start one"
        hint = "give the address of its head node as HOST:PORT, and use the cluster's versions of Python and Ray"
        raise UserError(f"--ray: cannot connect {target}: {error_line(error)}; {hint}") from error
    resources = ray.cluster_resources()
    devices = ", ".join(f"{int(resources.get(name, 0))} {name}s" for name in ("CPU", "GPU"))
    info(f"using the Ray cluster with {len(ray.nodes())} nodes, {devices}")


def _code_folder() -> Path:
    """Return the folder of a checkout that is not installed, else one without modules."""
    parent = Path(sd3_light.__file__).resolve().parents[1]
    return Path(sys.prefix) if str(parent) in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")) else parent
