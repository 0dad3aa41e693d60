"""The command line: what it calls, what it prints, and with which code it exits."""

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sd3_light import __version__, cli, journeys
from sd3_light.cli import process
from sd3_light.config.faults import PeerLost, UserError
from sd3_light.engines import Launch
from sd3_light.runlog import console, is_main_process
from sd3_light.stages.cache import CacheOptions
from sd3_light.stages.train import Resume
from tests.project import Project

VERBS = ("demo", "init", "check", "cache", "train", "export", "sample", "evaluate", "convert", "inspect", "report")
FLAGS = (
    "--config",
    "--cache_only",
    "--trust_cache",
    "--regenerate_cache",
    "--resume_from_checkpoint",
    "--reset_dataloader",
    "--reset_optimizer",
    "--reset_optimizer_params",
    "--deepspeed",
    "--local_rank",
)
LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID", "SD3_LIGHT_DEBUG")


@dataclass(frozen=True)
class Said:
    """What a call left behind."""

    code: int
    out: str
    err: str


@pytest.fixture(autouse=True)
def plain_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    """No launcher's variables, and nothing remembered from other calls."""
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(process, "_DEBUG", False)
    monkeypatch.setattr(console, "_main_process", None)


@pytest.fixture
def verb(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Said]:
    """`sd3-light ARGUMENTS` in this process."""

    def call(*arguments: object) -> Said:
        monkeypatch.setattr(sys, "argv", ["sd3-light", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        return Said(int(end.value.code or 0), *capsys.readouterr())

    return call


@pytest.fixture
def train_py(capsys: pytest.CaptureFixture[str]) -> Callable[..., Said]:
    """`python train.py ARGUMENTS` in this process."""

    def call(*arguments: object) -> Said:
        try:
            code = cli.launch([str(argument) for argument in arguments])
        except SystemExit as end:  # argparse's own
            code = int(end.code or 0)
        return Said(code, *capsys.readouterr())

    return call


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The calls of the journeys, which do nothing here: (name, config, launch, trust, regenerate, resume)."""
    calls: list[tuple[Any, ...]] = []

    def cache_then_train(*given: Any, by_deepspeed: bool = False) -> None:
        calls.append(("deepspeed" if by_deepspeed else "train", *given))

    monkeypatch.setattr(journeys, "cache_then_train", cache_then_train)

    def build_caches(*given: Any) -> list[Path]:
        calls.append(("cache", *given))
        return []

    monkeypatch.setattr(journeys, "build_caches", build_caches)
    return calls


def one_line(said: Said) -> str:
    """The single line of an error."""
    assert "Traceback" not in said.err
    lines = said.err.strip().splitlines()
    assert len(lines) == 1, said.err
    assert lines[0].startswith("error: ")
    return lines[0]


# --- help and version --------------------------------------------------------------------------


def test_help_names_every_verb(verb: Callable[..., Said]) -> None:
    said = verb("--help")
    assert said.code == 0
    assert all(re.search(rf"\b{name}\b", said.out) for name in VERBS)
    names = {command.name or command.callback.__name__ for command in cli.app.registered_commands}
    assert names == set(VERBS)


@pytest.mark.parametrize("name", VERBS)
def test_every_verb_explains_itself(verb: Callable[..., Said], name: str) -> None:
    said = verb(name, "--help")
    assert said.code == 0
    assert f"sd3-light {name}" in said.out
    assert len(said.out.splitlines()) > 5


def test_train_py_explains_its_flags(train_py: Callable[..., Said]) -> None:
    said = train_py("--help")
    assert said.code == 0
    for flag in FLAGS:
        assert flag in said.out


def test_the_version(verb: Callable[..., Said]) -> None:
    assert verb("--version").out.strip() == __version__


# --- exit codes --------------------------------------------------------------------------------


def test_a_missing_config_is_one_line_and_code_2(
    verb: Callable[..., Said], train_py: Callable[..., Said], tmp_path: Path
) -> None:
    path = tmp_path / "nowhere.toml"
    for said in (verb("train", path), verb("check", path), train_py("--config", path)):
        assert said.code == 2
        assert "Traceback" not in said.err
        assert str(path) in said.err
        assert said.err.startswith("error: 1 problem in the config")


def test_all_faults_come_in_one_report(verb: Callable[..., Said], fresh_project: Project) -> None:
    text = fresh_project.train_toml.read_text()
    fresh_project.train_toml.write_text(text.replace("seed = 3", 'sead = 3\nlr_scheduler = "cosin"'))
    said = verb("check", fresh_project.train_toml)
    assert said.code == 2
    assert "2 problems" in said.err
    assert "sead" in said.err
    assert "seed" in said.err, "the nearest key is suggested"
    assert "lr_scheduler" in said.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("sample", "nowhere", "a prompt"), "nowhere is no diffusers folder"),
        (("sample", "nowhere"), "no prompt given"),
        (("sample", "nowhere", "--file", "prompts.txt"), "--file: prompts.txt does not exist"),
        (("evaluate", "nowhere"), "nowhere is no diffusers folder"),
        (("inspect", "nowhere"), "no cache at nowhere"),
        (("report", "nowhere"), "there is no such log"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_the_users_fault_is_one_line_and_code_2(
    verb: Callable[..., Said], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    said = verb(*arguments)
    assert said.code == 2
    assert words in one_line(said)


@pytest.mark.parametrize("arguments", [("fly",), ("train",), ("sample", "x", "a prompt", "--steps", "none")])
def test_what_cannot_be_parsed_is_code_2(verb: Callable[..., Said], arguments: tuple[str, ...]) -> None:
    said = verb(*arguments)
    assert said.code == 2
    assert "Traceback" not in said.err


def test_our_fault_is_code_1(
    verb: Callable[..., Said], train_py: Callable[..., Said], project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("a wheel came off")

    monkeypatch.setattr(journeys, "cache_then_train", broken)
    for said in (verb("train", project.train_toml), train_py("--config", project.train_toml)):
        assert said.code == 1
        line = one_line(said)
        assert line.startswith("error: RuntimeError: a wheel came off; this is a bug in sd3-light (at test_cli.py:")
        assert line.endswith("); --debug shows the traceback")


def test_a_lost_process_is_one_line_and_says_try_again(
    train_py: Callable[..., Said], project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*_: object, **__: object) -> None:
        raise PeerLost("a machine is gone; start again")

    monkeypatch.setattr(journeys, "cache_then_train", lost)
    said = train_py("--config", project.train_toml)
    assert said.code == cli.RESUMABLE
    assert one_line(said) == "error: a machine is gone; start again"


def test_debug_shows_where(
    verb: Callable[..., Said], train_py: Callable[..., Said], project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise UserError("a fault of the user")

    monkeypatch.setattr(journeys, "cache_then_train", broken)
    for said in (
        verb("--debug", "train", project.train_toml),
        train_py("--config", project.train_toml, "--debug"),
    ):
        assert said.code == 2
        assert "Traceback" in said.err
        assert said.err.rstrip().endswith("error: a fault of the user")


def test_an_interrupt_is_code_130(verb: Callable[..., Said], project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(journeys, "cache_then_train", interrupted)
    assert verb("train", project.train_toml).code == 130


# --- what is called ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ((), ("train", CacheOptions(trust=False, regenerate=False), None)),
        (("--trust_cache",), ("train", CacheOptions(trust=True, regenerate=False), None)),
        (("--regenerate_cache",), ("train", CacheOptions(trust=False, regenerate=True), None)),
        (("--cache_only",), ("cache", CacheOptions(trust=False, regenerate=False))),
        (("--cache_only", "--trust_cache", "--regenerate_cache"), ("cache", CacheOptions(trust=True, regenerate=True))),
        (("--cache_only", "--deepspeed"), ("cache", CacheOptions(trust=False, regenerate=False))),
        (("--deepspeed", "--trust_cache"), ("deepspeed", CacheOptions(trust=True, regenerate=False), None)),
        (("--resume_from_checkpoint",), ("train", CacheOptions(trust=False, regenerate=False), Resume())),
        (
            ("--resume_from_checkpoint", "DIR"),
            ("train", CacheOptions(trust=False, regenerate=False), Resume(Path("DIR"))),
        ),
        (
            ("--resume_from_checkpoint", "--reset_dataloader"),
            ("train", CacheOptions(trust=False, regenerate=False), Resume(None, reset_dataloader=True)),
        ),
        (
            ("--resume_from_checkpoint", "--reset_optimizer"),
            ("train", CacheOptions(trust=False, regenerate=False), Resume(None, reset_optimizer=True)),
        ),
        (
            ("--resume_from_checkpoint", "--reset_optimizer_params"),
            ("train", CacheOptions(trust=False, regenerate=False), Resume(None, reset_optimizer_params=True)),
        ),
    ],
    ids=lambda value: " ".join(value) if value and isinstance(value[0], str) and value[0].startswith("--") else "",
)
def test_every_flag_of_train_py_arrives(
    train_py: Callable[..., Said],
    raw_project: Project,
    called: list[Any],
    flags: tuple[str, ...],
    expected: tuple[Any, ...],
) -> None:
    assert train_py("--config", raw_project.train_toml, *flags).code == 0
    ((name, loaded, launch, *rest),) = called
    assert (name, *rest) == expected
    assert loaded.path == raw_project.train_toml
    assert launch == Launch()


def test_every_flag_of_the_cache_verb_arrives(
    verb: Callable[..., Said], raw_project: Project, called: list[Any]
) -> None:
    flags = ("--trust_cache", "--regenerate_cache", "--verify", "--prune", "--dry_run")
    assert verb("cache", raw_project.train_toml, *flags).code == 0
    ((_, _, _, options),) = called
    assert options == CacheOptions(*[True] * 5)


def test_keys_can_be_set_from_the_command_line(
    train_py: Callable[..., Said], verb: Callable[..., Said], raw_project: Project, called: list[Any]
) -> None:
    wishes = ("--set", "max_steps=9", "--set", "model.shift=3.0")
    assert train_py("--config", raw_project.train_toml, *wishes).code == 0
    assert verb("train", raw_project.train_toml, *wishes).code == 0
    assert [(loaded.train.max_steps, loaded.train.model.shift) for _, loaded, *_ in called] == [(9, 3.0)] * 2


def test_the_train_verb_resumes(verb: Callable[..., Said], raw_project: Project, called: list[Any]) -> None:
    for flags in ((), ("--resume",), ("--resume-from", "DIR")):
        assert verb("train", raw_project.train_toml, *flags).code == 0
    assert [call[-1] for call in called] == [None, Resume(), Resume(Path("DIR"))]


@pytest.mark.parametrize("flag", ["--reset_dataloader", "--reset_optimizer", "--reset_optimizer_params"])
def test_a_reset_without_a_resume_is_refused(
    train_py: Callable[..., Said], raw_project: Project, called: list[Any], flag: str
) -> None:
    said = train_py("--config", raw_project.train_toml, flag)
    assert said.code == 2
    assert "--resume_from_checkpoint" in one_line(said)
    assert called == []


def test_a_config_is_required(train_py: Callable[..., Said]) -> None:
    said = train_py()
    assert said.code == 2
    assert "--config" in said.err


# --- launchers ---------------------------------------------------------------------------------


@pytest.fixture
def stale(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "3"), ("LOCAL_RANK", "3"), ("WORLD_SIZE", "8")):
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("stale")
def test_a_rank_left_over_in_the_shell_means_nothing(
    train_py: Callable[..., Said], verb: Callable[..., Said], raw_project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither to who takes part nor to who speaks and keeps the log."""
    seen = []
    monkeypatch.setattr(journeys, "cache_then_train", lambda *given, **_: seen.append((given[1], is_main_process())))
    assert train_py("--config", raw_project.train_toml).code == 0
    monkeypatch.setattr(console, "_main_process", None)
    assert verb("train", raw_project.train_toml).code == 0
    assert seen == [(Launch(), True)] * 2


@pytest.mark.usefixtures("stale")
@pytest.mark.parametrize("by", ["torchrun", "deepspeed"])
def test_a_launchers_rank_counts(
    train_py: Callable[..., Said],
    raw_project: Project,
    monkeypatch: pytest.MonkeyPatch,
    called: list[Any],
    by: str,
) -> None:
    flags = ["--local_rank", "3"] if by == "deepspeed" else []
    if by == "torchrun":
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert train_py("--config", raw_project.train_toml, "--cache_only", *flags).code == 0
    assert called[0][2] == Launch(rank=3, local_rank=3, world=8)
    assert not is_main_process()


# --- verbs that look -----------------------------------------------------------------------------


def test_check_tells_what_a_run_will_do(verb: Callable[..., Said], raw_project: Project) -> None:
    said = verb("check", raw_project.train_toml)
    assert said.code == 0, said.err
    assert "tiny2" in said.out


def test_inspect_shows_a_cache(verb: Callable[..., Said], cached_project: Project) -> None:
    said = verb("inspect", cached_project.cache)
    assert said.code == 0, said.err
    assert "64x64" in said.out
    assert "40" in said.out


def test_cache_then_shows_what_the_data_became(verb: Callable[..., Said], project: Project) -> None:
    said = verb("cache", project.train_toml)
    assert said.code == 0, said.err
    assert "40 of 40 samples are there already" in said.err
    assert "64x64" in said.out
