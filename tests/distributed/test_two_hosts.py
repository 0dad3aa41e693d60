"""Training on two virtual machines (see hosts.py), with gloo and tiny sizes.

All tests are slow; the first covers most in one launch.
"""

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sd3_light.train.verb import Resume
from tests.distributed.hosts import ADDRESSES, UNUSED_ADDRESS, Hosts, Job, why_unavailable
from tests.project import Project
from tests.warm import REAL_PYTHON

pytestmark = pytest.mark.usefixtures("unproven")
ROOT = Path(__file__).parents[2]
PORT = 29541
ENDLESS = {"max_steps": 1_000_000, "checkpoint_every_n_steps": 3, "micro_batch_size_per_gpu": 2}
LOST = r"^error: (alpha|beta) lost another process of the run \((.*)\): .* with --resume$"


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    if reason := why_unavailable():
        pytest.skip(f"network namespaces are not available: {reason}")
    with Hosts(tmp_path / "hosts") as two_hosts:
        yield two_hosts


def training(project: Project, *flags: str, **overrides: object) -> list[str]:
    """Return the command `train.py --config ... FLAGS --set KEY=VALUE ...`."""
    command = [str(ROOT / "train.py"), "--config", str(project.train_toml), *flags]
    for key, value in overrides.items():
        command += ["--set", f"{key}={value}"]
    return command


def torchrun(node: int, address: str = ADDRESSES[0], port: int = PORT, timeout: int = 60) -> list[str]:
    """Return the documented launcher, whose rendezvous is limited by `--rdzv_conf timeout`."""
    command = [REAL_PYTHON, "-m", "torch.distributed.run", "--nnodes=2", f"--node_rank={node}"]
    command += ["--nproc_per_node=1", f"--master_addr={address}", f"--master_port={port}"]
    return [*command, f"--rdzv_conf=timeout={timeout}"]


def on_both(hosts: Hosts, project: Project, *flags: str, port: int = PORT, **overrides: object) -> list[Job]:
    return [hosts.start(node, [*torchrun(node, port=port), *training(project, *flags, **overrides)]) for node in (0, 1)]


def finish(jobs: list[Job]) -> None:
    for job in jobs:
        assert job.end() == 0, job.text


def reach(job: Job, project: Project, kind: str, step: int) -> int:
    """Wait until an event of this kind is logged at this step or later; return its step."""

    def latest() -> int | None:
        if not (project.run / "log.jsonl").exists():
            return None
        steps = [event["step"] for event in project.events(kind)]
        return steps[-1] if steps and steps[-1] >= step else None

    return job.until(latest)


def assert_timed_out(job: Job, seconds: int) -> None:
    """The first of several operations on a connection that waits too long closes it for the others."""
    reason = lost_reason(job)
    assert f"Timed out waiting {seconds * 1000}ms" in reason or "timeout caused pair closure" in reason, reason


def lost_reason(job: Job) -> str:
    """Return the reason from the one-line error of a process that lost another."""
    line = re.search(LOST, job.text, re.MULTILINE)
    assert line is not None, job.text
    assert "bug in sd3-light" not in job.text
    return line[2]


def curve(project: Project, run: str) -> list[float]:
    events = {event["step"]: event for event in project.events("step", run)}
    assert sorted(events) == list(range(1, len(events) + 1))
    return [number for _, event in sorted(events.items()) for number in (event["loss"], event["grad_norm"])]


def shards(project: Project) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (project.cache / "shards").glob("*.safetensors")}


def require_curve(project: Project, steps: int) -> None:
    """Train the same steps in this process, and compare the run with their curve."""
    project.train('output_dir="alone"', f"max_steps={steps}", "checkpoint_every_n_steps=1000")
    assert curve(project, "run")[: 2 * steps] == pytest.approx(curve(project, "alone"), rel=1e-5)


def require_resumed(project: Project, more: int, compared: bool = True) -> None:
    """Resume the run in this process from its newest checkpoint, and compare it up to some steps later."""
    newest = newest_checkpoint(project)
    project.train(f"max_steps={newest + more}", resume=Resume())
    assert project.events("resume")[-1]["step"] == newest
    if compared:
        require_curve(project, newest + more)


def newest_checkpoint(project: Project) -> int:
    return max(map(int, re.findall(r"/step-(\d+)'", str(list((project.run / "checkpoints").iterdir())))))


@pytest.mark.slow  # one host covers the ranks, unit tests the claims and lost peers
def test_two_hosts_cache_and_train_till_one_dies(hosts: Hosts, fresh_project: Project, cached_project: Project) -> None:
    """Both fill the shared cache, then train; the second dies; the first reports it and exits; the run resumes."""
    project = fresh_project
    first, second = on_both(hosts, project, **ENDLESS, dist_timeout_sec=1000)
    saved = reach(first, project, "checkpoint", 3)
    reach(first, project, "step", saved + 1)
    second.kill()
    assert shards(project) == shards(cached_project)
    assert first.end() != 0, "a closed connection is noticed at once, not after dist_timeout_sec"
    assert re.search(r"Connection (closed|reset) by peer", lost_reason(first))
    assert project.events("stop")[-1]["reason"].startswith("alpha lost another process")
    require_resumed(project, 2)


@pytest.mark.slow
def test_two_hosts_resume_after_one_died(hosts: Hosts, project: Project) -> None:
    """Both machines are relaunched, on a free port."""
    first, second = on_both(hosts, project, **ENDLESS, dist_timeout_sec=1000)
    reach(first, project, "checkpoint", 3)
    second.kill()
    assert first.end() != 0
    newest = newest_checkpoint(project)
    flags = ("--trust_cache", "--resume_from_checkpoint")
    finish(on_both(hosts, project, *flags, port=PORT + 1, **{**ENDLESS, "max_steps": newest + 4}))
    (resumed,) = project.events("resume")
    assert (resumed["step"], resumed["world"]) == (newest, 2)
    require_curve(project, newest + 4)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_two_hosts_train_like_one_process(hosts: Hosts, project: Project, parallel: str) -> None:
    finish(on_both(hosts, project, micro_batch_size_per_gpu=2, parallel=f'"{parallel}"', max_steps=13))
    (start,) = project.events("start")
    assert (start["world"], start["engine"]) == (2, f"torch {parallel}")
    require_curve(project, 13)


@pytest.mark.slow
def test_the_first_host_dies(hosts: Hosts, project: Project) -> None:
    """It has the launcher's store and the log; a single process resumes from its checkpoint exactly."""
    first, second = on_both(hosts, project, **ENDLESS, dist_timeout_sec=1000)
    reach(first, project, "checkpoint", 3)
    first.kill()
    assert second.end() != 0
    lost_reason(second)
    require_resumed(project, 3)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_a_cut_cable_stops_both_hosts_within_the_timeout(hosts: Hosts, project: Project, parallel: str) -> None:
    """No connection is closed: `dist_timeout_sec` ends the wait, also while checkpoints are being written."""
    timeout_sec = 12
    shares = {**ENDLESS, "checkpoint_every_n_steps": 1, "keep_last_n_checkpoints": 3}
    jobs = on_both(hosts, project, **shares, dist_timeout_sec=timeout_sec, parallel=f'"{parallel}"')
    reach(jobs[0], project, "checkpoint", 3)
    cut_at = time.monotonic()
    hosts.cut_cable()
    for job in jobs:
        assert job.end() != 0
        assert_timed_out(job, timeout_sec)
    assert time.monotonic() - cut_at > timeout_sec - 2, "the timeout ended them"
    require_resumed(project, 2, compared=False)


BLOCKED_SAVE = """
import os, sys, threading
from pathlib import Path
from sd3_light.checkpoint import background

def never(temporary, rank, pieces):
    Path(os.environ["STARTED"]).touch()
    threading.Event().wait()

if os.environ["RANK"] == "1":
    background.write_part = never
from sd3_light.cli import launch
sys.exit(launch(sys.argv[1:]))
"""
"""A training program whose second process never finishes its part of a checkpoint."""


@pytest.mark.slow
def test_a_cable_cut_during_the_last_save_is_noticed(hosts: Hosts, project: Project) -> None:
    """Both processes have finished training and wait for the save: without limit while both are alive, and at most
    `dist_timeout_sec` for a lost one."""
    timeout_sec, started = 6, hosts.folder / "started"
    hosts.folder.mkdir(parents=True, exist_ok=True)
    (program := hosts.folder / "blocked_save.py").write_text(BLOCKED_SAVE, encoding="utf-8")
    keys = {"max_steps": 2, "checkpoint_every_n_steps": 100, "parallel": '"fsdp2"', "dist_timeout_sec": timeout_sec}
    command = [REAL_PYTHON, str(program), *plain(project, micro_batch_size_per_gpu=2, **keys)[2:]]
    environment = {"PYTHONPATH": str(ROOT), "STARTED": str(started)}
    jobs = [hosts.start(node, command, **variables(node, ADDRESSES[0]), **environment) for node in (0, 1)]
    jobs[1].until(started.exists)
    deadline = time.monotonic() + 2 * timeout_sec
    jobs[0].until(lambda: time.monotonic() > deadline)
    assert jobs[1].process.poll() is None, "a slow save is not a lost process"
    hosts.cut_cable()
    for job in jobs:
        assert job.end() == 75, job.text
        assert_timed_out(job, timeout_sec)


@pytest.mark.slow
def test_torchrun_stops_at_its_timeout(hosts: Hosts, project: Project) -> None:
    """With an unused address; the launcher's own error names address and port."""
    launchers = [torchrun(node, UNUSED_ADDRESS, timeout=8) for node in (0, 1)]
    jobs = [hosts.start(node, [*launchers[node], *training(project, **ENDLESS)]) for node in (0, 1)]
    for job in jobs:
        assert job.end() != 0
        assert f"({UNUSED_ADDRESS}, {PORT})" in job.text.splitlines()[-1]
    assert not project.run.exists()


def plain(project: Project, **overrides: object) -> list[str]:
    """Return the command of a process as the DeepSpeed launcher starts it, without an earlier rendezvous."""
    return [REAL_PYTHON, *training(project, "--local_rank=0", "--trust_cache", **overrides)]


def variables(node: int, address: str) -> dict[str, str]:
    ranks = {"RANK": str(node), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": "2"}
    return {**ranks, "MASTER_ADDR": address, "MASTER_PORT": str(PORT)}


@pytest.mark.slow
@pytest.mark.parametrize("address", [UNUSED_ADDRESS, "no-such-host", ADDRESSES[0]])
def test_our_rendezvous_times_out_and_names_the_address(hosts: Hosts, project: Project, address: str) -> None:
    """An unused address, an unknown name, and the address of a machine that was not started."""
    job = hosts.start(1, plain(project, dist_timeout_sec=6), **variables(1, address))
    assert job.end() == 2
    last = job.text.splitlines()[-1]
    assert last.startswith(
        f"error: rank 1 of 2 on beta could not connect to the other ranks at {address}:{PORT} within"
    )
    assert "dist_timeout_sec = 6" in last
    assert "GLOO_SOCKET_IFNAME" in last


@pytest.mark.slow
@pytest.mark.parametrize("device", ["eth9", "lo"])
def test_a_wrong_network_device_is_reported(hosts: Hosts, project: Project, device: str) -> None:
    """A missing device, and one without a route."""
    command = plain(project, dist_timeout_sec=10)
    own = [{**variables(node, ADDRESSES[0]), "GLOO_SOCKET_IFNAME": device} for node in (0, 1)]
    jobs = [hosts.start(node, command, **own[node]) for node in (0, 1)]
    exit_codes = [job.end() for job in jobs]
    assert 2 in exit_codes
    assert 0 not in exit_codes
    messages = [job.text for job in jobs if "could not connect to the other ranks" in job.text]
    assert messages
    assert all("GLOO_SOCKET_IFNAME" in text.splitlines()[-1] for text in messages)


def deepspeed(hosts: Hosts, node: int) -> list[str]:
    """Return `deepspeed --hostfile F --no_ssh --node_rank R --master_addr A --master_port P`."""
    pytest.importorskip("deepspeed")
    hostfile = hosts.folder / "hostfile"
    hostfile.parent.mkdir(parents=True, exist_ok=True)
    hostfile.write_text("".join(f"{address} slots=1\n" for address in ADDRESSES), encoding="utf-8")
    command = [str(Path(REAL_PYTHON).parent / "deepspeed"), f"--hostfile={hostfile}", "--no_ssh"]
    return [*command, f"--node_rank={node}", f"--master_addr={ADDRESSES[0]}", f"--master_port={PORT}"]


@pytest.mark.slow
def test_deepspeed_launcher_caches_on_two_hosts(hosts: Hosts, fresh_project: Project, cached_project: Project) -> None:
    flags = ("--deepspeed", "--cache_only")
    finish([hosts.start(node, [*deepspeed(hosts, node), *training(fresh_project, *flags)]) for node in (0, 1)])
    assert shards(fresh_project) == shards(cached_project)


@pytest.mark.slow
def test_the_deepspeed_launcher_trains_on_two_hosts(hosts: Hosts, project: Project) -> None:
    """With the DeepSpeed engine: the same steps as one process of the torch engine."""
    shares = {"micro_batch_size_per_gpu": 2, "max_steps": 8}
    command = training(project, "--deepspeed", "--trust_cache", **shares)
    jobs = [hosts.start(node, [*deepspeed(hosts, node), *command]) for node in (0, 1)]
    exit_codes = [job.end() for job in jobs]
    assert exit_codes == [0, 0], jobs[0].text
    assert project.events("start")[0]["world"] == 2
    require_curve(project, 8)


@pytest.mark.slow
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("failure", ["killed", "cut off"])
def test_the_deepspeed_engine_loses_a_host(hosts: Hosts, project: Project, stages: int, failure: str) -> None:
    """Replicas with ZeRO-1, and a pipeline across the two hosts; one process of the torch engine resumes."""
    pytest.importorskip("deepspeed")
    timeout_sec = 12
    shares = {**ENDLESS, "pipeline_stages": stages, "micro_batch_size_per_gpu": 2 * stages}
    jobs = on_both(hosts, project, "--deepspeed", **shares, dist_timeout_sec=timeout_sec)
    reach(jobs[0], project, "checkpoint", 3)
    if failure == "killed":
        jobs.pop().kill()
    else:
        hosts.cut_cable()
    for job in jobs:
        assert job.end() != 0
        lost_reason(job)
    require_resumed(project, 2)
