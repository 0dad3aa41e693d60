"""The queue of runs: every change of state, every refusal, restarts of the server and of the machine, two servers."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from sd3_light.checkpoint.lock import is_locked
from sd3_light.checkpoint.requests import SAVE_QUIT
from sd3_light.runlog import CONSOLE
from sd3_light.system import process_start, state_folder
from sd3_light.ui import job_process, run_queue, user_state
from sd3_light.ui.folders import Folders
from sd3_light.ui.job import DONE, FAILED, RUNNING, STARTING, STOPPED, WAITING, Job, write_jobs
from sd3_light.ui.job_process import ProcessIdentity, find_process
from sd3_light.ui.queue_pages import queue_page
from sd3_light.ui.run_queue import CPU, RunQueue, can_resume
from sd3_light.ui.user_state import locked_state
from tests.refusals import refused
from tests.unit.ui.test_pages import held
from tests.waiting import wait_until

TRAINS = """#!/bin/sh
echo "$@" >> "{folder}/commands"
echo "$CUDA_VISIBLE_DEVICES" >> "{folder}/gpus"
while [ ! -e "{folder}/go" ] && [ -d "{folder}" ]; do sleep 0.02; done
echo "error: the code is $(cat "{folder}/go")"
exit "$(cat "{folder}/go")"
"""


class Machine:
    """A folder that is served, with a state folder and a program in the place of training, which ends with the code in
    the file `go`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.served, self.state = folder, folder / "served", folder / "state"
        self.served.mkdir()
        self.program = folder / "python"
        self.program.write_text(TRAINS.format(folder=folder))
        self.program.chmod(0o755)

    def config(self, name: str = "a") -> Path:
        (self.served / "data.toml").write_text('resolutions = [64]\n[[directory]]\npath = "images"\n')
        model = '[model]\ndiffusers_path = "no_model"\ntrain_type = "sd3_light_pretrain"\nsize = "tiny2"\n'
        path = self.served / f"{name}.toml"
        top = f'output_dir = "run-{name}"\ndataset = "data.toml"\nmax_steps = 2\nsave_every_n_steps = 2\n'
        path.write_text(top + model)
        return path

    def run(self, name: str = "a") -> Path:
        return self.served / f"run-{name}"

    def queue(self, slots: tuple[str, ...] = (CPU,)) -> RunQueue:
        """Return the queue of another server."""
        return RunQueue(self.state, [self.served], lambda: list(slots))

    def started(self) -> tuple[RunQueue, Job]:
        queue = self.queue()
        queue.add(self.config())
        (job,) = queue.jobs()
        return queue, job

    def go(self, code: int = 0) -> None:
        """Let all programs end with a code."""
        (self.folder / "go.new").write_text(str(code))
        (self.folder / "go.new").rename(self.folder / "go")

    def commands(self) -> list[str]:
        path = self.folder / "commands"
        return path.read_text().splitlines() if path.exists() else []

    def wait_for(self, queue: RunQueue, number: int, state: str) -> Job:
        """Advance the queue until a job has a state."""

        def reached() -> Job | None:
            queue.advance()
            job = queue.jobs()[number]
            return job if job.state == state else None

        return wait_until(reached, queue.jobs)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    started = Machine(tmp_path)
    monkeypatch.setattr(sys, "executable", str(started.program))
    yield started
    started.go(0)


def test_a_run_starts_at_once_and_its_end_is_noticed(machine: Machine) -> None:
    queue = machine.queue()
    job = queue.add(machine.config())
    assert machine.state.stat().st_mode & 0o077 == 0, "the state is for the user alone"
    with locked_state(machine.state):  # the run does not inherit the lock
        (running,) = queue.jobs()
    assert (running.id, running.state, running.slot) == (job.id, RUNNING, CPU)
    assert running.process.is_alive
    assert queue.is_pending(machine.run())
    assert "The run is starting" in queue.notes(machine.run())[0]
    machine.go(0)
    assert machine.wait_for(queue, 0, DONE).slot == ""
    assert queue.notes(machine.run()) == []
    assert not queue.is_pending(machine.run())
    assert len(machine.commands()) == 1
    assert list(machine.state.glob("exit-*")) == []


def test_a_process_without_a_command_yet_is_alive(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel wakes the parent before the command of the new program can be read."""
    queue, _ = machine.started()
    monkeypatch.setattr(job_process, "_command", lambda _: b"")
    queue.advance()
    (running,) = queue.jobs()
    assert running.state == RUNNING
    assert find_process(running.token) is None
    monkeypatch.undo()
    machine.go(0)
    machine.wait_for(queue, 0, DONE)


def test_one_run_per_gpu_and_the_next_one_follows(machine: Machine) -> None:
    queue = machine.queue(("0", "1"))
    for name in "abc":
        queue.add(machine.config(name))
    assert [(job.state, job.slot) for job in queue.jobs()] == [(RUNNING, "0"), (RUNNING, "1"), (WAITING, "")]
    assert queue.notes(machine.run("c")) == ["The run is in the queue."]
    queue.stop(machine.run("a"))
    assert machine.wait_for(queue, 2, RUNNING).slot == "0"
    assert queue.jobs()[0].state == STOPPED
    wait_until(lambda: len((machine.folder / "gpus").read_text().split()) == 3)
    assert sorted((machine.folder / "gpus").read_text().split()) == ["0", "0", "1"]


def test_a_waiting_run_is_stopped_and_queued_again(machine: Machine) -> None:
    queue = machine.queue()
    queue.add(machine.config("a"))
    second = queue.add(machine.config("b"))
    queue.stop(machine.run("b"))
    assert queue.job(second.id).state == STOPPED
    again = queue.requeue(second.id, "start")
    assert queue.job(again.id).state == WAITING
    refused("has not ended; stop it first", queue.requeue, again.id, "start")
    refused("has not ended; stop it first", queue.remove, again.id)
    queue.remove(second.id)
    assert [job.state for job in queue.jobs()] == [RUNNING, WAITING]
    assert len(machine.commands()) <= 1


@pytest.mark.parametrize(("mode", "option"), [("start", []), ("resume", ["--resume"]), ("restart", ["--restart"])])
def test_modes_are_options_of_train(machine: Machine, mode: str, option: list[str]) -> None:
    queue, config = machine.queue(), machine.config()
    queue.add(config, mode)
    wait_until(machine.commands)
    assert machine.commands()[0].split()[2:] == ["train", str(config), *option]


def test_what_cannot_be_added_is_refused(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    queue, config = machine.queue(), machine.config()
    refused("does not exist", queue.add, tmp_path / "none.toml")
    refused("unknown mode 'now'", queue.add, config, "now")
    refused("the run was copied or moved", queue.add, config, "resume", machine.served / "copied")
    (machine.served / "faulty.toml").write_text("max_stepz = 1\n")
    refused("max_stepz", queue.add, machine.served / "faulty.toml")
    outside = machine.served / "outside.toml"
    outside.write_text(config.read_text().replace('"run-a"', f'"{tmp_path / "elsewhere"}"'))
    refused("is not below a served folder", queue.add, outside)
    (machine.served / "run-b").symlink_to(tmp_path)
    refused("is a link, or is reached through one", queue.add, machine.config("b"))
    assert queue.jobs() == []
    queue.add(config)
    refused("a process trains in", queue.add, config)
    queue.add(machine.config("c"))
    refused("is in the queue already", queue.add, machine.config("c"))
    refused("there is no run none in the queue", queue.job, "none")
    monkeypatch.setattr(run_queue, "MOST_WAITING", 1)
    refused("1 runs wait already", queue.add, machine.config("d"))


def test_a_config_that_changed_while_it_waited_is_checked_again(machine: Machine) -> None:
    queue = machine.queue()
    for name in "abcd":
        queue.add(machine.config(name))
    faulty = machine.config("b")
    faulty.write_text("max_stepz = 1\n" + faulty.read_text())
    moved = machine.config("c")
    moved.write_text(moved.read_text().replace("run-c", "run-z"))
    machine.go(0)
    machine.wait_for(queue, 3, DONE)
    states = [(job.state, job.message.partition(":")[0]) for job in queue.jobs()]
    assert states == [(DONE, ""), (FAILED, "The run did not start"), (FAILED, "The run did not start"), (DONE, "")]
    assert "max_stepz" in queue.jobs()[1].message
    assert "run-z; add it to the queue again" in queue.jobs()[2].message


def test_a_run_continues_while_no_server_runs(machine: Machine) -> None:
    machine.queue().add(machine.config("a"))
    machine.queue().add(machine.config("b"))
    later = machine.queue()
    later.advance()
    assert [job.state for job in later.jobs()] == [RUNNING, WAITING]
    assert len(machine.commands()) <= 1
    machine.go(3)
    job = machine.wait_for(machine.queue(), 0, FAILED)
    assert job.message == "The run ended with exit code 3: error: the code is 3"
    machine.wait_for(machine.queue(), 1, FAILED)


def test_a_restarted_server_stops_a_run_with_all_its_processes(machine: Machine) -> None:
    machine.queue().add(machine.config())
    wait_until(machine.commands)
    later = machine.queue()
    later.stop(machine.run())
    assert later.jobs()[0].is_stopping
    job = machine.wait_for(later, 0, STOPPED)
    wait_until(lambda: not process_start(job.pid))
    assert find_process(job.token) is None


def test_a_reused_process_number_is_another_process(machine: Machine) -> None:
    queue, job = machine.started()
    other = subprocess.Popen(["sleep", "600"], start_new_session=True)
    try:
        identity = ProcessIdentity.of(other.pid, job.token)
        assert not identity.is_alive, "its command has not the token"
        assert not replace(job.process, started="1").is_alive, "it started at another time"
        assert not replace(job.process, machine="another").is_alive
        identity.end()
        assert other.poll() is None
        machine.go(0)
        wait_until(lambda: not job.process.is_alive)
        (machine.state / f"exit-{job.token}").unlink()
        write_jobs(queue.file, [replace(job, pid=other.pid, started=process_start(other.pid))])
        queue.stop(machine.run())
        queue.advance()
        assert queue.jobs()[0].state == STOPPED
        assert other.poll() is None, "a process of another program was ended"
    finally:
        other.kill()
        other.wait()


def test_a_run_that_was_killed_is_failed(machine: Machine) -> None:
    queue, job = machine.started()
    os.killpg(job.pid, signal.SIGKILL)
    job = machine.wait_for(queue, 0, FAILED)
    assert "The run was killed, perhaps because memory was short." in job.message


def test_a_shell_that_was_killed_without_its_run_ends_nothing(machine: Machine) -> None:
    """The run folder is locked as long as the run trains."""
    queue, job = machine.started()
    with held(machine.run()):
        os.killpg(job.pid, signal.SIGKILL)
        wait_until(lambda: not queue.jobs()[0].process.is_alive)
        queue.advance()
        assert queue.jobs()[0].state == RUNNING
        queue.stop(machine.run())
        assert (machine.run() / SAVE_QUIT).exists()
    assert machine.wait_for(queue, 0, STOPPED)


def test_runs_continue_after_a_restart_of_the_machine(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = machine.queue()
    queue.add(machine.config("a"))
    queue.add(machine.config("b"))
    os.killpg(queue.jobs()[0].pid, signal.SIGKILL)
    for module in (job_process, run_queue):
        monkeypatch.setattr(module, "machine", lambda: "host-next-boot")
    (machine.run("a") / "checkpoints" / "step-1").mkdir(parents=True)
    assert can_resume(machine.run("a"))
    later = machine.queue()
    later.advance()
    first, second = later.jobs()
    assert (first.state, first.mode, first.machine, second.state) == (RUNNING, "resume", "host-next-boot", WAITING)
    wait_until(lambda: len(machine.commands()) >= 1 and machine.commands()[-1].endswith("--resume"))


@pytest.mark.parametrize("is_started", [False, True])
def test_a_server_that_died_as_it_started(machine: Machine, monkeypatch: pytest.MonkeyPatch, is_started: bool) -> None:
    """Before or after the process was made: the next server starts it, or finds it by its token. Never both."""
    queue = machine.queue()
    real = run_queue.start_process

    def die(*arguments: object) -> None:
        if is_started:
            real(*arguments)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    monkeypatch.setattr(run_queue, "start_process", die)
    with pytest.raises(KeyboardInterrupt):
        queue.add(machine.config())
    (job,) = queue.jobs()
    assert (job.state, job.pid) == (STARTING, 0)
    monkeypatch.setattr(run_queue, "start_process", real)
    if is_started:
        wait_until(lambda: find_process(job.token))
    later = machine.queue()
    machine.wait_for(later, 0, RUNNING)
    (found,) = later.jobs()
    assert (found.token == job.token) == is_started
    wait_until(machine.commands)
    later.advance()
    assert len(machine.commands()) == 1


def test_many_servers_start_a_run_once(machine: Machine) -> None:
    for name in "abcd":
        machine.queue(()).add(machine.config(name))
    queues = [machine.queue(("0", "1")) for _ in range(6)]
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda queue: [queue.advance() for _ in range(5)], queues))
    assert [queue.problem for queue in queues] == [""] * 6
    assert sorted(job.state for job in queues[0].jobs()) == [RUNNING, RUNNING, WAITING, WAITING]
    wait_until(lambda: len(machine.commands()) >= 2)
    machine.go(0)
    for number in range(4):
        machine.wait_for(queues[0], number, DONE)
    assert len(machine.commands()) == len(set(machine.commands())) == 4


def test_two_clicks_add_a_run_once(machine: Machine) -> None:
    config = machine.config()
    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(machine.queue().add, config) for _ in range(4)]
    assert [job.exception() is None for job in jobs].count(True) == 1
    assert len(machine.queue().jobs()) == 1


def test_the_lock_of_a_killed_server_blocks_no_other(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import sys, time; from pathlib import Path; from sd3_light.ui.user_state import locked_state\n"
    code += "with locked_state(Path(sys.argv[1])): print('held', flush=True); time.sleep(600)"
    holder = subprocess.Popen([sys.orig_argv[0], "-c", code, str(machine.state)], stdout=subprocess.PIPE)
    try:
        holder.stdout.readline()
        monkeypatch.setattr(user_state, "_LOCK_SECONDS", 0.1)
        refused("another program has locked", machine.queue().add, machine.config())
    finally:
        holder.kill()
        holder.wait()
    machine.queue().add(machine.config())


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:-5],
        lambda text: text.replace('"format": 1', '"format": 2'),
        lambda text: text.replace('"waiting"', '"ready"'),
        lambda text: text.replace('"mode": "start"', '"mode": "--set=a=b"'),
        lambda text: text.replace('"pid": 0', '"pid": "0"'),
        lambda text: text.replace('"pid": 0,', ""),
        lambda text: "[" * 5000,
    ],
)
def test_a_damaged_queue_starts_nothing_and_stays(machine: Machine, damage: Callable[[str], str]) -> None:
    queue = machine.queue(())
    queue.add(machine.config())
    text = damage(queue.file.read_text())
    queue.file.write_text(text)
    later = machine.queue()
    later.advance()
    assert "cannot be read" in later.problem
    refused("Move it away", later.add, machine.config("b"))
    assert queue.file.read_text() == text
    assert machine.commands() == []
    assert later.job_of(machine.run()) is None


def test_a_queue_in_a_served_folder_starts_nothing(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = machine.queue(())
    waiting.add(machine.config())
    for folder in (machine.served, machine.run()):
        folder.mkdir(exist_ok=True)
        (folder / "queue.json").write_text(waiting.file.read_text())
        (folder / waiting.file.name).write_text(waiting.file.read_text())
        (folder / "sd3_light").mkdir()
        (folder / "sd3_light" / waiting.file.name).write_text(waiting.file.read_text())
    monkeypatch.chdir(machine.served)
    monkeypatch.setenv("XDG_STATE_HOME", ".")
    assert not state_folder().is_relative_to(machine.served), "a relative path would be a served folder"
    empty = RunQueue(machine.folder / "other", [machine.served], lambda: [CPU])
    empty.advance()
    assert empty.jobs() == []
    assert machine.commands() == []


@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_a_state_folder_that_others_can_write_to_is_refused(machine: Machine, mode: int) -> None:
    machine.started()
    machine.state.chmod(mode)
    refused("others can write to it", machine.queue().add, machine.config("b"))
    refused("others can write to it", machine.queue().jobs)
    machine.state.chmod(0o700)


def test_a_request_to_stop_and_the_console_follow_no_link(machine: Machine, tmp_path: Path) -> None:
    run = machine.run()
    with held(run):
        assert is_locked(run)
        (run / SAVE_QUIT).symlink_to(tmp_path / "victim")
        refused("is a link", machine.queue().stop, run)
        assert not (tmp_path / "victim").exists()
    refused("it has ended already", machine.queue().stop, run)
    (machine.run() / SAVE_QUIT).unlink()
    (machine.run() / SAVE_QUIT).touch()
    (machine.run() / CONSOLE).symlink_to(tmp_path / "private")
    (tmp_path / "private").write_text("secret")
    assert machine.queue().console(machine.run()) == ""
    machine.queue().add(machine.config())
    assert not (machine.run() / SAVE_QUIT).exists()


def test_ended_runs_are_forgotten_in_the_end(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_queue, "_MOST_ENDED", 2)
    queue = machine.queue()
    machine.go(0)
    for name in "abcd":
        queue.add(machine.config(name))
        machine.wait_for(queue, -1, DONE)
    assert [Path(job.run).name for job in queue.jobs()] == ["run-c", "run-d"]


def test_the_gpus_of_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_queue, "visible_gpus", lambda: [])
    assert run_queue.machine_slots() == [CPU]
    monkeypatch.setattr(run_queue, "visible_gpus", lambda: ["a", "b"])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert run_queue.machine_slots() == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-1")
    assert run_queue.machine_slots() == ["3", "GPU-1"]


def test_the_thread_starts_what_waits_without_token_and_ends(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SD3_LIGHT_UI_TOKEN", "secret")
    machine.program.write_text(f'#!/bin/sh\necho "[$SD3_LIGHT_UI_TOKEN]" > "{machine.folder}/commands"\n')
    machine.queue(()).add(machine.config())
    queue = machine.queue()
    queue.work()
    wait_until(machine.commands)
    assert machine.commands() == ["[]"]
    queue.end()
    assert not queue._thread.is_alive()


def test_a_server_leaves_the_runs_of_other_folders_to_their_server(machine: Machine, tmp_path: Path) -> None:
    queue = machine.queue(("0",))
    queue.add(machine.config("a"))
    queue.add(machine.config("b"))
    other = RunQueue(machine.state, [tmp_path / "other"], lambda: ["0", "1"])
    other.advance()
    assert [job.state for job in queue.jobs()] == [RUNNING, WAITING]
    assert "as soon as a server of its folder runs" in queue_page(Folders(other.roots), other)
    machine.go(0)
    assert machine.wait_for(queue, 1, DONE)
