"""A stand-in for the part of Ray that the cache stage uses: tasks and actors run at once, in this process."""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest

from sd3_light import cache

USERS = ("sd3_light.cache.ray_builder", "sd3_light.cache.ray_encoder")
"""The modules that import Ray."""


class RayError(Exception):
    pass


class RayTaskError(RayError):
    def __init__(self, cause: Exception) -> None:
        super().__init__("the traceback of the task")
        self.cause = cause


class RayActorError(RayError):
    actor_init_failed = False


WorkerCrashedError = type("WorkerCrashedError", (RayError,), {})
OutOfMemoryError = type("OutOfMemoryError", (RayError,), {})
OutOfDiskError = type("OutOfDiskError", (RayError,), {})


class Ref:
    """A finished result, or an error."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.error: Exception | None = None
        try:
            self.value = work()
        except RayError as error:
            self.error = error
        except Exception as error:
            self.error = RayTaskError(error)


class _Remote:
    """A remote function or method; ``options`` are collected."""

    def __init__(self, work: Callable[..., Any], options: dict[str, Any]) -> None:
        self._work, self._options = work, options

    def options(self, **options: Any) -> "_Remote":
        assert not self._options, "what `options` returns can only be called"
        return _Remote(self._work, options)

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        return self._work(self._options, *args, **kwargs)


class _Actor:
    def __init__(self, fake: "FakeRay", target: Any) -> None:
        self._fake, self._target = fake, target

    def __getattr__(self, name: str) -> _Remote:
        def call(options: dict[str, Any], *args: Any, **kwargs: Any) -> Ref:
            def work() -> Any:
                self._fake.before(name, args)
                return getattr(self._target, name)(*args, **kwargs)

            return Ref(work)

        return _Remote(call, {})


class FakeRay(ModuleType):
    """The module. ``before`` is called with the name and arguments of every call and may raise its error."""

    def __init__(self, resources: dict[str, float]) -> None:
        super().__init__("ray")
        self.resources, self.connected = resources, False
        self.before: Callable[[str, Sequence[Any]], None] = lambda name, args: None
        self.actor_options: list[dict[str, Any]] = []
        self.task_options: list[dict[str, Any]] = []
        self.remote_functions: list[Any] = []
        self.num_killed = 0
        self.worker_path = ""

    def init(self, **_: Any) -> None:
        self.worker_path = os.getcwd()  # Ray's workers import from there
        self.connected = True

    def shutdown(self) -> None:
        self.connected = False

    def is_initialized(self) -> bool:
        return self.connected

    def cluster_resources(self) -> dict[str, float]:
        return self.resources

    def nodes(self) -> list[Any]:
        return [{}, {}]

    def remote(self, target: Any) -> _Remote:
        if isinstance(target, type):
            return _Remote(self._start_actor(target), {})
        self.remote_functions.append(target)
        return _Remote(self._start_task(target), {})

    def _start_actor(self, target: type) -> Callable[..., _Actor]:
        def start(options: dict[str, Any], *args: Any) -> _Actor:
            self.actor_options.append(options)
            return _Actor(self, target(*args))

        return start

    def _start_task(self, function: Callable[..., Any]) -> Callable[..., Ref]:
        def start(options: dict[str, Any], *args: Any) -> Ref:
            self.task_options.append(options)

            def work() -> Any:
                self.before(options["name"], args)
                return function(*args)

            return Ref(work)

        return start

    def get(self, ref: Ref) -> Any:
        if ref.error is not None:
            raise ref.error
        return ref.value

    def wait(self, refs: Sequence[Ref], timeout: float | None = None) -> tuple[list[Ref], list[Ref]]:
        return list(refs[:1]), list(refs[1:])

    def kill(self, actor: _Actor) -> None:
        self.num_killed += 1


@contextmanager
def installed_ray(**resources: float) -> Iterator[FakeRay]:
    """Replace the module `ray` by a stand-in for a cluster with these resources."""
    fake = FakeRay(resources)
    exceptions: Any = ModuleType("ray.exceptions")
    for error in (RayError, RayTaskError, RayActorError, WorkerCrashedError, OutOfMemoryError, OutOfDiskError):
        setattr(exceptions, error.__name__, error)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "ray", fake)
        patch.setitem(sys.modules, "ray.exceptions", exceptions)
        forget_users()
        yield fake
    forget_users()


def forget_users() -> None:
    """Let the modules that import Ray be imported again."""
    for name in USERS:
        sys.modules.pop(name, None)
        vars(cache).pop(name.rpartition(".")[2], None)  # `from ... import ray_builder` looks here first
