"""A disk that fails at any write: one line and exit 2, old files intact, and the next run ends with the same bytes."""

import errno
import hashlib
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from sd3_light.checkpoint.requests import RunRequests
from sd3_light.checkpoint.store import incomplete_checkpoints
from sd3_light.cli.process import run_guarded
from sd3_light.config.faults import UserError
from sd3_light.engines import Launch
from sd3_light.export import diffusers_folder
from sd3_light.export.export_spec import SAMPLES_FILE
from sd3_light.families.sd3 import encoders as frozen_parts
from sd3_light.families.sd3.encoders import FrozenParts
from sd3_light.train import verb as train
from sd3_light.train.verb import Resume
from tests.faults import ERRORS, Call, faulty_disk
from tests.project import Project
from tests.waiting import HANG_SECONDS

KEYS = (
    *("sd3_shard_size=2", "caching_num_workers=0", "micro_batch_size_per_gpu=2", "max_steps=2"),
    *("checkpoint_every_n_steps=1", "keep_last_n_checkpoints=1", "save_every_n_steps=1", "keep_last_n_exports=1"),
    *("sampling.every_n_steps=1", "sampling.prompts=['a red circle']", "sampling.steps=1"),
)
POWER_TRACK = '\n[[ema.track]]\nname = "long"\npower_width = 0.1\n'
FINAL = "/step-00000002/"  # not those that a resumed run sets aside


@dataclass(frozen=True)
class Scenario:
    """A run in a copy of ``before``. After a failure ``again`` repeats it, with the ``results`` of ``reference``.

    ``damage`` yields what the failure has done to the project that it must not do.
    """

    before: Project
    reference: Project
    run: Callable[[Project], object]
    again: Callable[[Project], object]
    results: Callable[[Project], dict[str, str]]
    damage: Callable[["Scenario", Project], Iterator[str]]


# --- caches --------------------------------------------------------------------------------------


def build(project: Project) -> None:
    project.build_cache(*KEYS, prune=True)


def cache_files(project: Project) -> dict[str, str]:
    """Return the files of a cache by hash; the catalogue and the known hashes of encoders have times in them."""
    return {
        name: digest
        for name, digest in digests(project.cache, project.folder).items()
        if name.startswith(("shards", "manifest"))
    }


def cache_damage(scenario: Scenario, project: Project) -> Iterator[str]:
    """Yield files that are neither as before nor as they have to become, and files that are lost."""
    old, new, now = map(cache_files, (scenario.before, scenario.reference, project))
    yield from (name for name, digest in now.items() if digest not in (old.get(name), new.get(name)))
    yield from (f"no {name}" for name in old.keys() & new.keys() - now.keys())


# --- runs ----------------------------------------------------------------------------------------


def train_in(project: Project, resume: Resume | None = None) -> None:
    train.run(project.load(*KEYS), Launch(), resume)


def without_cards(files: dict[str, str]) -> dict[str, str]:
    """Leave out cards, which say how many images the cache contains when they are written."""
    return {name: digest for name, digest in files.items() if not name.endswith("README.md")}


def saved_files(project: Project) -> dict[str, str]:
    return {name: digest for name, digest in digests(project.run, project.folder).items() if FINAL in name}


def run_damage(scenario: Scenario, project: Project) -> Iterator[str]:
    """Yield changes of the cache, half-written saves, and other losses than those of an undisturbed run."""
    yield from cache_damage(scenario, project)
    for kind in ("checkpoints", "ema"):
        yield from (f"{path}: {why}" for path, why in incomplete_checkpoints(project.run / kind).items())
    exports = (project.run / "exports").glob("step-*")
    yield from (f"{export} has no proof" for export in exports if not (export / "proof.json").is_file())
    if (project.run / "log.jsonl").exists():
        losses = scenario.reference.losses()
        yield from (f"loss {loss}" for step, loss in project.losses().items() if loss != losses[step])


# --- the scenarios -------------------------------------------------------------------------------


def digests(folder: Path, project: Path) -> dict[str, str]:
    """Return the hashes of the files in ``folder`` that are not hidden, without the project's path in them."""
    names = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    contents = {name: path.read_bytes() for name, path in names.items() if "/." not in f"/{name}"}
    root = str(project).encode()
    return {name: hashlib.sha256(content.replace(root, b"")).hexdigest() for name, content in contents.items()}


@pytest.fixture(scope="module", autouse=True)
def _fast() -> Iterator[None]:
    """Load the encoders once, and leave out the proof of an export: it takes seconds and writes nothing here."""
    parts: list[FrozenParts] = []

    def load(*args: Any, **keys: Any) -> AbstractContextManager[FrozenParts]:
        parts[:] = parts or [FrozenParts(*args, **keys)]
        return nullcontext(parts[0])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frozen_parts, "FrozenParts", load)
        patch.setattr(diffusers_folder, "prove", lambda folder, spec, expected: {"tensors": len(expected.digests)})
        yield


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory, raw_project: Project) -> Project:
    """Six images of one size; one is broken."""
    project = raw_project.copy(tmp_path_factory.mktemp("raw") / "project")
    images = sorted(project.images.glob("*.png"))
    for path in images[6:]:
        path.unlink()
    images[0].write_bytes(images[0].read_bytes()[:-100])
    project.data('size_buckets = [[64, 64]]\n\n[[directory]]\npath = "images"\n')
    project.train_toml.write_text(project.train_toml.read_text(encoding="utf-8") + POWER_TRACK, encoding="utf-8")
    return project


@pytest.fixture(scope="module")
def cached(tmp_path_factory: pytest.TempPathFactory, raw: Project) -> Project:
    project = raw.copy(tmp_path_factory.mktemp("cached") / "project")
    build(project)
    return project


@pytest.fixture(scope="module")
def building(raw: Project, cached: Project) -> Scenario:
    """Building a cache."""
    return Scenario(raw, cached, build, build, cache_files, cache_damage)


@pytest.fixture(scope="module")
def updating(tmp_path_factory: pytest.TempPathFactory, cached: Project) -> Scenario:
    """Building a cache whose data have changed, and pruning it."""
    folder = tmp_path_factory.mktemp("updated")
    changed = cached.copy(folder / "changed")
    max(changed.images.glob("*.png")).unlink()
    updated = changed.copy(folder / "updated")
    build(updated)
    return Scenario(changed, updated, build, build, cache_files, cache_damage)


@pytest.fixture(scope="module")
def dividing(tmp_path_factory: pytest.TempPathFactory, cached: Project) -> Scenario:
    """Holding out a part of a dataset that is cached."""
    folder = tmp_path_factory.mktemp("divided")
    undivided = cached.copy(folder / "undivided")
    undivided.data(undivided.data_toml.read_text(encoding="utf-8").replace("\n\n", "\nvalidation = true\n\n"))
    divided = undivided.copy(folder / "divided")
    build(divided)
    return Scenario(undivided, divided, build, build, cache_files, cache_damage)


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory, cached: Project) -> Scenario:
    """Training with checkpoints, snapshots, exports and samples."""
    trained = cached.copy(tmp_path_factory.mktemp("trained") / "project")
    train_in(trained)
    return Scenario(cached, trained, train_in, partial(train_in, resume=Resume()), saved_files, run_damage)


def count_calls(scenario: Scenario, folder: Path) -> list[Call]:
    """Return one call of each kind and path, the first and the last, in the order of a whole run."""
    project = scenario.before.copy(folder)
    with faulty_disk(project.folder) as disk:
        scenario.run(project)
    shutil.rmtree(folder)
    ends = {(call.kind, call.path): call for call in disk.calls}
    return [call for call in disk.calls if call.number == 1 or call == ends[call.kind, call.path]]


def run_in_child(work: Callable[[], object], output: Path) -> int:
    """Run ``work`` as a command does, in a forked process; return its exit code, -1 if it hangs."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with open(output, "w", encoding="utf-8") as file, redirect_stdout(file), redirect_stderr(file):
                torch.set_num_threads(1)  # makes torch's thread pool here: threads that load models would race for it
                code = run_guarded(work)
        finally:
            os._exit(code)
    deadline = time.monotonic() + HANG_SECONDS
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return -1
        time.sleep(0.02)


def violations(scenario: Scenario, call: Call, error: int, lasting: bool, folder: Path) -> list[str]:
    """Return what is wrong after a run in which ``call`` failed, and after the run that follows it."""
    project = scenario.before.copy(folder)
    output = folder.with_name("output.txt")

    def fail() -> None:
        with faulty_disk(project.folder, call, error, lasting) as disk:
            refused = None
            try:
                scenario.run(project)
            except UserError as fault:
                refused = fault
            assert disk.failed, f"{call} was not made: {refused}"
            if refused is not None:
                raise refused

    code = run_in_child(fail, output)
    text = output.read_text(encoding="utf-8")
    problems = list(scenario.damage(scenario, project))
    errors = [line for line in text.splitlines() if line.startswith("error: ")]
    if code not in (0, 2) or len(errors) != (code == 2) or "Traceback" in text:
        problems.append(f"exit {code}: {' '.join(text.split())[-300:]}")
    code = run_in_child(lambda: scenario.again(project), output)
    if code:
        problems.append(f"the next run: exit {code}: {' '.join(output.read_text(encoding='utf-8').split())[-300:]}")
    results, expected = scenario.results(project), scenario.results(scenario.reference)
    different = [name for name in expected if results.get(name) != expected[name]]
    if "run/samples/" in str(call):  # a grid that cannot be written is reported, and the card shows an earlier one
        different = [name for name in different if not name.endswith(SAMPLES_FILE)]
    problems += [f"then {name} differs" for name in different]
    problems += [f"then {name} is left" for name in results.keys() - expected.keys()]
    shutil.rmtree(folder)
    return [f"{call} {errno.errorcode[error]}{' lasting' * lasting}: {problem}" for problem in problems]


# --- tests ---------------------------------------------------------------------------------------


def check(scenario: Scenario, folder: Path, lasting: bool, sample: int | None = None) -> None:
    """Let each call of a whole run fail in turn, or ``sample`` of them, with the errors in turn."""
    calls = count_calls(scenario, folder / "count")
    step = 1 if sample is None else len(calls) // sample
    problems = []
    for number in range(step // 2, len(calls), step):
        error = ERRORS[number % len(ERRORS)]
        problems += violations(scenario, calls[number], error, lasting, folder / "project")
        print(f"{number + 1} of {len(calls)}: {calls[number]} {problems[-1:]}", flush=True)
    assert not problems, "\n".join(problems)


def test_a_full_disk_does_not_harm_a_cache(building: Scenario, tmp_path: Path) -> None:
    check(building, tmp_path, lasting=True, sample=2)


def test_a_write_that_fails_does_not_harm_a_run(training: Scenario, tmp_path: Path) -> None:
    check(training, tmp_path, lasting=False, sample=2)


def test_a_failed_write_does_not_change_sides(dividing: Scenario, tmp_path: Path) -> None:
    calls = count_calls(dividing, tmp_path / "count")
    decisions = [call for call in calls if "sides.arrow" in str(call) or ".split.json" in str(call)]
    assert len(decisions) > 1
    for call in (decisions[0], decisions[-1]):
        assert violations(dividing, call, errno.ENOSPC, True, tmp_path / "project") == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("scenario", ["building", "updating", "dividing", "training"])
@pytest.mark.parametrize("lasting", [False, True], ids=["once", "lasting"])
def test_every_write_may_fail(request: pytest.FixtureRequest, scenario: str, lasting: bool, tmp_path: Path) -> None:
    check(request.getfixturevalue(scenario), tmp_path, lasting)


def test_pruning_during_training(
    training: Scenario, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Shards that a run still needs are deleted: it trains on nothing else, and continues when they are back."""
    project, poll, steps = training.before.copy(tmp_path / "project"), RunRequests.poll, iter(range(100))
    removed = max(project.images.glob("*.png"))
    content = removed.read_bytes()

    def prune(requests: RunRequests) -> None:
        if next(steps) == 0:
            removed.unlink()
            build(project)
        poll(requests)

    monkeypatch.setattr(RunRequests, "poll", prune)
    code = run_guarded(lambda: train_in(project))
    assert code == 0 or (code == 2 and "is missing; run `sd3-light cache" in capsys.readouterr().err)
    losses, expected = project.losses(), training.reference.losses()
    assert losses == {step: expected[step] for step in losses}
    removed.write_bytes(content)
    build(project)
    train_in(project, Resume())
    assert without_cards(saved_files(project)) == without_cards(saved_files(training.reference))
