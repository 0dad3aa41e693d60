"""The command line: what it calls, what it prints, and its exit codes."""

import errno
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from PIL import Image

from sd3_light import __version__, cli, journeys
from sd3_light.assets import DEMO
from sd3_light.cache.verb import CacheOptions
from sd3_light.cli import process
from sd3_light.config import DEFAULT_GUIDANCE
from sd3_light.config.family_keys import FAMILY_NAMES
from sd3_light.config.faults import PeerLost, Stopped, UserError
from sd3_light.config.schema_tables import SamplingConfig
from sd3_light.core.registry import family_named
from sd3_light.engines import Launch
from sd3_light.evaluate import against
from sd3_light.evaluate import verb as evaluate
from sd3_light.evaluate.composition import ScoreOptions
from sd3_light.export import lora
from sd3_light.export.open_pipeline import open_policy
from sd3_light.report import verb as report
from sd3_light.runlog import console, is_main_process
from sd3_light.sample import verb as sample
from sd3_light.sample.generate import generate
from sd3_light.sample.verb import SampleOptions
from sd3_light.train.verb import Resume
from sd3_light.world.captions import LANGUAGES, parse_caption, scene_captions
from tests.project import Project
from tests.warm import REAL_PYTHON

VERBS = ["new", "demo", "init", "check", "cache", "train", "caption", "control", "mask", "parts", "export", "sample"]
VERBS += ["evaluate", "convert", "inspect", "report", "families", "ui"]
FLAGS = ["--config", "--cache_only", "--trust_cache", "--regenerate_cache", "--resume_from_checkpoint", "--local_rank"]
FLAGS += ["--reset_dataloader", "--reset_optimizer", "--reset_optimizer_params", "--restart", "--deepspeed"]
LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID", "SD3_LIGHT_DEBUG")


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str


Command = Callable[..., Result]


@pytest.fixture(autouse=True)
def plain_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove launcher variables and global state left by other commands."""
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(process, "_DEBUG", False)
    monkeypatch.setattr(console, "_main_process", None)


@pytest.fixture
def verb(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Run `sd3-light ARGUMENTS` in this process."""

    def call(*arguments: object) -> Result:
        monkeypatch.setattr(sys, "argv", ["sd3-light", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        return Result(int(end.value.code or 0), *capsys.readouterr())

    return call


@pytest.fixture
def train_py(capsys: pytest.CaptureFixture[str]) -> Command:
    """Run `python train.py ARGUMENTS` in this process."""

    def call(*arguments: object) -> Result:
        try:
            code = cli.launch([str(argument) for argument in arguments])
        except SystemExit as end:  # raised by argparse
            code = int(end.code or 0)
        return Result(code, *capsys.readouterr())

    return call


@pytest.fixture
def journey_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Record the calls of the journeys without running them: (name, config, launch, options, resume)."""
    calls: list[tuple[Any, ...]] = []

    def cache_then_train(*arguments: Any, by_deepspeed: bool = False) -> None:
        calls.append(("deepspeed" if by_deepspeed else "train", *arguments))

    monkeypatch.setattr(journeys, "cache_then_train", cache_then_train)

    def build_caches(*arguments: Any) -> list[Path]:
        calls.append(("cache", *arguments))
        return []

    monkeypatch.setattr(journeys, "build_caches", build_caches)
    return calls


def error_line(result: Result, code: int = 2) -> str:
    (line,) = result.err.strip().splitlines()
    assert (result.code, line.startswith("error: ")) == (code, True), result.err
    return line


# --- help and version --------------------------------------------------------------------------


def test_help_lists_every_verb_and_flag(verb: Command, train_py: Command) -> None:
    result = verb("--help")
    assert all(re.search(rf"\b{name}\b", result.out) for name in VERBS)
    names = {command.name or command.callback.__name__ for command in cli.app.registered_commands}
    assert names == set(VERBS)
    shown = train_py("--help")
    assert (result.code, shown.code) == (0, 0)
    assert [flag for flag in FLAGS if flag not in shown.out] == []
    assert verb("--version").out.strip() == __version__
    result = train_py()
    assert result.code == 2
    assert "--config" in result.err


@pytest.mark.parametrize("name", VERBS)
def test_every_verb_has_help(verb: Command, name: str) -> None:
    result = verb(name, "--help")
    assert result.code == 0
    assert f"sd3-light {name}" in result.out
    assert len(result.out.splitlines()) > 5
    assert not re.search(r"--[a-z]+_", result.out), "every option is spelled with hyphens"


@pytest.mark.parametrize("arguments", [(), ("lora",), ("cache",), ("sample",), ("lora", "convert")], ids=" ".join)
def test_help_shows_switches_without_a_type(verb: Command, arguments: tuple[str, ...]) -> None:
    result = verb(*arguments, "--help")
    assert "bool" not in result.out.lower()
    assert re.search(r"--help +Show this", result.out)


def test_commands_start_without_warnings(verb: Command, train_py: Command, tmp_path: Path, monkeypatch: Any) -> None:
    """transformers reads its variable when it is imported, which the first check of a config does."""
    name, levels = "TRANSFORMERS_VERBOSITY", []
    monkeypatch.setattr("sd3_light.check.verb.load", lambda *_: levels.append(os.environ.pop(name, None)))
    monkeypatch.delenv(name, raising=False)
    verb("check", tmp_path / "x.toml")
    train_py("--config", tmp_path / "x.toml")
    assert levels == ["error", "error"]


@pytest.mark.slow
def test_no_command_warns_of_torchvision(raw_project: Project) -> None:
    command = [REAL_PYTHON, "-m", "sd3_light", "check", raw_project.train_toml]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "torchvision" not in result.stderr


# --- exit codes --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "instead"),
    [
        (("--dump_dataset", "folder"), "sd3-light inspect"),
        (("--i_know_what_i_am_doing",), "remove it"),
        (("--master_port", "29501"), "torchrun --master_port"),
        (("--test_sample",), "sd3-light sample"),
        (("--deepspeed_config", "file.json"), "the train TOML"),
    ],
    ids=str,
)
def test_train_py_rejects_flags_of_diffusion_pipe(train_py: Command, arguments: tuple[str, ...], instead: str) -> None:
    line = error_line(train_py("--deepspeed", "--config", "train.toml", *arguments))
    assert line.startswith(f"error: {arguments[0]}: not supported: ")
    assert instead in line


def test_config_faults_have_code_2(verb: Command, train_py: Command, tmp_path: Path, fresh_project: Project) -> None:
    path = tmp_path / "nowhere.toml"
    for result in (verb("train", path), verb("check", path), train_py("--config", path)):
        assert result.code == 2
        assert "Traceback" not in result.err
        assert str(path) in result.err
        assert result.err.startswith("error: 1 problem in the config")
    text = fresh_project.train_toml.read_text()
    fresh_project.train_toml.write_text(text.replace("seed = 3", 'sead = 3\nlr_scheduler = "cosin"'))
    result = verb("check", fresh_project.train_toml)
    assert result.code == 2
    assert "2 problems" in result.err
    assert "sead" in result.err
    assert "seed" in result.err, "the nearest key is suggested"
    assert "lr_scheduler" in result.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("sample", "nowhere", "a prompt"), "nowhere does not exist"),
        (("sample", "nowhere"), "no prompt; pass one"),
        (("sample", "nowhere", "--file", "prompts.txt"), "--file: prompts.txt does not exist"),
        (("evaluate", "nowhere"), "nowhere does not exist"),
        (("evaluate", "one", "two"), "several models are compared with --against DATA"),
        (("evaluate", "one", "--against", "data.toml"), "--against needs --features"),
        (("evaluate", "one", "--page", "page.html"), "--page and --save belong to --against"),
        (("inspect", "nowhere"), "no cache at nowhere"),
        (("report", "nowhere"), "no such log"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_a_user_error_is_a_line(verb: Command, tmp_path: Path, monkeypatch: Any, arguments: Any, message: str) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in error_line(verb(*arguments))


@pytest.mark.parametrize("arguments", [("fly",), ("train",), ("sample", "x", "a prompt", "--steps", "none")])
def test_unparsable_arguments_are_code_2(verb: Command, arguments: tuple[str, ...]) -> None:
    result = verb(*arguments)
    assert result.code == 2
    assert "Traceback" not in result.err


@pytest.fixture
def journey(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """What runs in place of `cache_then_train`."""
    monkeypatch.setattr(journeys, "cache_then_train", Mock())
    return journeys.cache_then_train  # type: ignore[return-value]


DISK = "free disk space or fix the disk, then start again. Finished files are kept"
BUG = r"this is a bug in sd3-light \(at mock.py:\d+\); --debug shows the traceback"


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (RuntimeError("unexpected state"), 1, f"RuntimeError: unexpected state; {BUG}"),
        (OSError(errno.EROFS, "Read-only file system", "run/x"), 2, rf"Read-only file system \(run/x\); {DISK}"),
        (OSError(errno.ESTALE, "Stale file handle", "run/x"), 2, rf"Stale file handle \(run/x\); {DISK}"),
        (OSError(errno.ENOENT, "No such file or directory", "run/x"), 1, f".*{BUG}"),
        (PeerLost("a machine is gone; start again"), cli.RESUMABLE, "a machine is gone; start again"),
    ],
)
def test_a_failure_is_one_line_and_a_code(
    verb: Command, train_py: Command, project: Project, journey: Mock, error: Any, code: int, line: str
) -> None:
    journey.side_effect = error
    for result in (verb("train", project.train_toml), train_py("--config", project.train_toml)):
        assert re.fullmatch(f"error: {line}", error_line(result, code))


def test_debug_shows_the_traceback(verb: Command, train_py: Command, project: Project, journey: Mock) -> None:
    journey.side_effect = UserError("bad input")
    for result in (verb("--debug", "train", project.train_toml), train_py("--config", project.train_toml, "--debug")):
        assert result.code == 2
        assert "Traceback" in result.err
        assert result.err.rstrip().endswith("error: bad input")


def test_a_stopped_run_prints_the_command_that_continues(
    verb: Command, train_py: Command, project: Project, journey: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project.folder)
    for journey.side_effect in (Stopped("SIGINT at step 3 of 9"), KeyboardInterrupt()):
        result = verb("train", "train.toml", "--trust-cache", "--set", "max_steps=9", "--restart")
        command = "sd3-light train train.toml --set max_steps=9 --trust-cache --resume"
        assert result.err.splitlines()[-1] == f"continue with: {command}"
    journey.side_effect = Stopped("SIGTERM")
    result = train_py("--config", "train.toml")  # the launcher's own arguments are not known
    assert result.err.splitlines() == ["stopped: SIGTERM", "continue with: the same command with --resume"]
    monkeypatch.setattr(journeys, "build_caches", Mock(side_effect=KeyboardInterrupt))
    result = verb("cache", "train.toml")
    assert (result.code, result.err.splitlines()[-1]) == (130, "continue with: sd3-light cache train.toml")


def suggested(result: Result) -> list[str]:
    """The commands that follow, as printed at the end."""
    lines = result.err.splitlines()
    return [line.strip() for line in lines[lines.index("next:") + 1 :]]


def test_commands_end_with_the_next_ones(
    verb: Command, train_py: Command, project: Project, journey_calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project.folder)
    (project.run / "exports" / "abandoned-step-00000004").mkdir(parents=True)
    for result, again in (
        (verb("train", "train.toml", "--set", "seed=3"), "sd3-light train train.toml --set seed=3 --resume"),
        (train_py("--config", "train.toml"), "the same command with --resume"),
    ):
        assert f"there is no export yet; continue with: {again}" in result.err.splitlines()
        assert suggested(result) == ["sd3-light report run --out run/report.html"]
    (project.run / "exports" / "step-00000004").mkdir(parents=True)
    after_training = ["sd3-light sample run 'a prompt'", "sd3-light report run --out run/report.html"]
    assert suggested(verb("train", "train.toml")) == suggested(train_py("--config", "train.toml")) == after_training
    assert suggested(verb("inspect", "cache")) == ["sd3-light inspect cache --out cache.html"]
    monkeypatch.setattr(journeys, "build_caches", lambda *_: [project.cache])
    pages = "sd3-light inspect cache --out cache.html"
    train = "sd3-light train train.toml --set seed=3"
    assert suggested(verb("cache", "train.toml", "--set", "seed=3")) == [pages, train]
    assert suggested(verb("cache", "train.toml", "--dry-run")) == ["sd3-light cache train.toml"]
    monkeypatch.setattr(journeys, "build_caches", lambda *_: [])
    assert suggested(verb("cache", "train.toml", "--dry-run")) == ["sd3-light train train.toml"], "nothing is missing"


def test_mistakes_in_sample_are_reported_early(verb: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sd3_light.cli.model_verbs.init_process", lambda: pytest.fail("imports take seconds"))
    (tmp_path / "train.toml").touch()
    assert "no prompt; pass one" in error_line(verb("sample", tmp_path))
    assert "does not exist; pass a run folder" in error_line(verb("sample", tmp_path / "nowhere", "a star"))
    assert "is a config; pass the folder of its run" in error_line(verb("sample", tmp_path / "train.toml", "a star"))
    # its models know only the phrasing of their captions.
    monkeypatch.setattr(journeys, "run_demo", lambda *_: None)
    command = shlex.split(suggested(verb("demo", "--out", "d"))[0])
    assert command[:3] == ["sd3-light", "sample", "d/continue"]
    prompts = command[3:]
    in_order = zip(prompts, LANGUAGES, strict=True)
    assert [scene_captions(parse_caption(prompt))[language] for prompt, language in in_order] == prompts
    guide = (Path(__file__).parents[2] / "docs" / "start" / "guide.md").read_text(encoding="utf-8")
    suggested_there = re.findall(r'sample demo_run/continue "([^"]+)"', guide)
    assert suggested_there
    assert all(scene_captions(parse_caption(prompt))["en"] == prompt for prompt in suggested_there)


@pytest.mark.parametrize("file", ["model_index.json", "pytorch_lora_weights.safetensors"])
def test_an_export_is_converted_or_a_file(verb: Command, tmp_path: Path, monkeypatch: Any, file: str) -> None:
    def write(run: Path, out: Path, *_: Any) -> Path:
        out.mkdir()
        (out / file).write_text("{}")
        return out

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sd3_light.export.verb.run", write)
    commands = suggested(verb("export", "run", "out"))
    assert commands[0] == "sd3-light sample out 'a prompt'"
    assert commands[1:] == (["sd3-light convert out out.safetensors"] if file == "model_index.json" else [])


def test_only_models_with_files_are_converted(verb: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sd3_light.export.verb.run", lambda run, out, *_: out)
    monkeypatch.setattr(lora, "merge", lambda model, loras, out, dtype: out)
    Path("x.safetensors").touch()
    for name in FAMILY_NAMES:
        family = family_named(name)
        Path(name).mkdir()
        Path(name, "model_index.json").write_text(json.dumps({"_class_name": family.pipeline}))
        convert = [f"sd3-light convert {name} {name}.safetensors"] if family.files.single is not None else []
        for arguments in (("export", "run", name), ("lora", "merge", "m", name, "x.safetensors")):
            assert suggested(verb(*arguments)) == [f"sd3-light sample {name} 'a prompt'", *convert]
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    line = error_line(verb("lora", "merge", "flux", "out.safetensors", "x.safetensors"))
    assert line == "error: out.safetensors: merging writes a folder; pass a folder name"
    assert "sd3-light convert" in error_line(verb("lora", "merge", "sd3", "out.safetensors", "x.safetensors"))


def test_sample_suggests_its_own_options(verb: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sample, "run", lambda *_: Path("images/grid.png"))
    monkeypatch.chdir(tmp_path)
    Path("m").mkdir()
    plain = "sd3-light sample m a b c --seed 1 --out samples"
    assert suggested(verb("sample", "m", "a", "b", "c", "--batch", "8")) == [plain], "8 is the default"
    options = "--steps 9 --negative-prompt 'a blur' --lora x.safetensors:0.5 --lora y.safetensors --no-grid --best"
    for name in ("x", "y"):
        Path(f"{name}.safetensors").touch()
    given = shlex.split(f"{options} --seed 3 --seed 8 --out images")
    again = f"sd3-light sample m 'a b' {options} --seed 9 --out images"
    assert suggested(verb("sample", "m", "a b", *given)) == [again]
    Path("p.csv").write_text("prompt,seed\na,\n")
    again = "sd3-light sample m --file p.csv --seed 1 --out samples"
    assert suggested(verb("sample", "m", "--file", "p.csv")) == [again]
    Path("p.csv").write_text("prompt,seed\na,5\n")
    assert "next:" not in verb("sample", "m", "--file", "p.csv").err, "a new seed would change nothing"


def test_files_are_named(verb: Command, project: Project, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(against, "run", Mock(return_value=Mock(table=lambda: "scores")))
    result = verb("evaluate", "m", "--against", "d.toml", "--features", "f", "--page", "e.html", "--out", "e.json")
    assert result.out.splitlines()[-2:] == ["wrote e.json", "wrote e.html"]
    monkeypatch.setattr(lora, "merge", lambda *_: Path("out"))
    Path("x.safetensors").touch()
    commands = ["sd3-light sample out 'a prompt'", "sd3-light convert out out.safetensors"]
    assert suggested(verb("lora", "merge", "m", "out", "x.safetensors")) == commands
    monkeypatch.setattr(report, "write_run_page", lambda *_: [])
    result = verb("report", "run", "--out", "page.html")
    assert (result.out, suggested(result)) == ("wrote page.html\n", ["sd3-light ui run"])


# --- what is called ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ((), ("train", CacheOptions(), None)),
        (("--regenerate_cache",), ("train", CacheOptions(regenerate=True), None)),
        (("--cache_only",), ("cache", CacheOptions())),
        (("--cache_only", "--trust_cache", "--regenerate_cache"), ("cache", CacheOptions(trust=True, regenerate=True))),
        (("--cache_only", "--deepspeed"), ("cache", CacheOptions())),
        (("--deepspeed", "--trust_cache"), ("deepspeed", CacheOptions(trust=True), None)),
        (("--restart",), ("train", CacheOptions(), Resume(restart=True))),
        (("--resume_from_checkpoint",), ("train", CacheOptions(), Resume())),
        (("--resume", "--trust-cache"), ("train", CacheOptions(trust=True), Resume())),
        (("--resume-from", "DIR"), ("train", CacheOptions(), Resume(Path("DIR")))),
        (("--resume_from_checkpoint", "DIR"), ("train", CacheOptions(), Resume(Path("DIR")))),
        *(
            (("--resume", f"--{reset}"), ("train", CacheOptions(), Resume(None, **{reset: True})))
            for reset in ("reset_dataloader", "reset_optimizer", "reset_optimizer_params")
        ),
    ],
    ids=lambda value: " ".join(value) if value and isinstance(value[0], str) and value[0].startswith("--") else "",
)
def test_every_flag_of_train_py_is_passed_on(
    train_py: Command, raw_project: Project, journey_calls: list[Any], flags: tuple[str, ...], expected: tuple[Any, ...]
) -> None:
    assert train_py("--config", raw_project.train_toml, *flags).code == 0
    ((name, loaded, launch, *rest),) = journey_calls
    assert (name, *rest) == expected
    assert loaded.path == raw_project.train_toml
    assert launch == Launch()


@pytest.mark.parametrize(
    "flags", ["--trust-cache --regenerate-cache --dry-run", "--trust_cache --regenerate_cache --dry_run"]
)
def test_cache_flags_are_passed_on(verb: Command, raw_project: Project, journey_calls: list[Any], flags: str) -> None:
    assert verb("cache", raw_project.train_toml, *flags.split(), "--verify", "--prune").code == 0
    ((_, _, _, options),) = journey_calls
    assert options == CacheOptions(*[True] * 5)


def test_the_parts_of_a_cache_also_on_ray(verb: Command, raw_project: Project, journey_calls: list[Any]) -> None:
    result = verb("cache", raw_project.train_toml, "--part", "2/3")
    assert suggested(result) == [f"sd3-light cache {raw_project.train_toml} --finish"]
    assert verb("cache", raw_project.train_toml, "--finish").code == 0
    assert [call[3] for call in journey_calls] == [CacheOptions(part=(2, 3)), CacheOptions(finish=True)]
    for part in ("3/3", "1", "-1/3", "a/b"):
        assert "write I/N with I from 0 to N - 1" in error_line(verb("cache", raw_project.train_toml, f"--part={part}"))
    assert "come after all parts" in error_line(verb("cache", raw_project.train_toml, "--part=0/3", "--prune"))
    config = raw_project.train_toml
    for options, expected in (
        (["--ray"], CacheOptions(ray="")),
        (["--ray", "head:6379", "--ray_actors", "4"], CacheOptions(ray="head:6379", ray_actors=4)),
        (["--ray", "auto", "--verify", "--prune"], CacheOptions(ray="auto", verify=True, prune=True)),
        (["--ray", "--dry_run"], CacheOptions(ray="", dry_run=True)),
    ):
        assert verb("cache", config, *options).code == 0
        assert journey_calls.pop()[3] == expected
    assert verb("cache", "--ray", config).code == 0  # a config is not an address
    assert journey_calls.pop()[3] == CacheOptions(ray="")
    for other in ("--part=0/2", "--finish"):
        assert "give it without --part and --finish" in error_line(verb("cache", config, "--ray", other))
    assert "--ray-actors needs --ray" in error_line(verb("cache", config, "--ray-actors=2"))


def test_keys_may_be_set(train_py: Command, verb: Command, raw_project: Project, journey_calls: list[Any]) -> None:
    overrides = ("--set", "max_steps=9", "--set", "model.shift=3.0")
    assert train_py("--config", raw_project.train_toml, *overrides).code == 0
    assert verb("train", raw_project.train_toml, *overrides).code == 0
    assert [(loaded.train.max_steps, loaded.train.model.shift) for _, loaded, *_ in journey_calls] == [(9, 3.0)] * 2


def test_resets_need_a_resume(verb: Command, train_py: Command, raw_project: Project, journey_calls: list[Any]) -> None:
    for flags in ((), ("--resume",), ("--resume-from", "DIR"), ("--restart",)):
        assert verb("train", raw_project.train_toml, *flags).code == 0
    assert [call[-1] for call in journey_calls] == [None, Resume(), Resume(Path("DIR")), Resume(restart=True)]
    assert "give one of them" in error_line(verb("train", raw_project.train_toml, "--resume", "--restart"))
    for flag in ("--reset_dataloader", "--reset_optimizer", "--reset_optimizer_params"):
        result = train_py("--config", raw_project.train_toml, flag)
        assert "--reset-* flags need --resume or --resume-from" in error_line(result)
    assert len(journey_calls) == 4


# --- launchers ---------------------------------------------------------------------------------


@pytest.fixture
def stale_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "3", "LOCAL_RANK": "3", "WORLD_SIZE": "8"}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("stale_ranks")
def test_stale_ranks(train_py: Command, verb: Command, raw_project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the launch nor the choice of the main process depends on them."""
    launches = []
    train = lambda _, launch, *__, **___: launches.append((launch, is_main_process()))  # noqa: E731
    monkeypatch.setattr(journeys, "cache_then_train", train)
    assert train_py("--config", raw_project.train_toml).code == 0
    monkeypatch.setattr(console, "_main_process", None)
    assert verb("train", raw_project.train_toml).code == 0
    assert launches == [(Launch(), True)] * 2


@pytest.mark.usefixtures("stale_ranks")
@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed"])
def test_the_rank_of_a_launcher_is_used(
    train_py: Command, raw_project: Project, monkeypatch: pytest.MonkeyPatch, journey_calls: list[Any], launcher: str
) -> None:
    flags = ["--local_rank", "3"] if launcher == "deepspeed" else []
    if launcher == "torchrun":
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert train_py("--config", raw_project.train_toml, "--cache_only", *flags).code == 0
    assert journey_calls[0][2] == Launch(rank=3, local_rank=3, world_size=8)
    assert not is_main_process()


# --- read-only verbs -----------------------------------------------------------------------------


def test_check_prints_numbers_and_cache_a_summary(verb: Command, raw_project: Project, project: Project) -> None:
    result = verb("check", raw_project.train_toml, "--json")
    assert result.code == 0, result.err
    numbers = json.loads(result.out)
    assert numbers["train"]["disk_bytes"] > 0
    assert numbers["does_not_fit"] == []
    result = verb("cache", project.train_toml)
    assert result.code == 0, result.err
    assert "40 of 40 images are up to date" in result.err
    assert "orphaned" not in result.err, "the table is for work to do"
    assert "64x64" in result.out


# --- defaults ------------------------------------------------------------------------------------


def test_guidance_has_one_default(verb: Command) -> None:
    for name in ("sample", "evaluate"):
        shown = re.sub(r"[│\s]+", " ", verb(name, "--help").out)
        assert re.search(rf"--guidance .*?default: {DEFAULT_GUIDANCE:g}, or the model's own", shown, re.IGNORECASE)
    of_demo = [open_policy(DEMO)[1].drawing(None, options.guidance)[1] for options in (SampleOptions(), ScoreOptions())]
    assert {*of_demo, SamplingConfig().guidance} == {DEFAULT_GUIDANCE}
    assert signature(generate).parameters["drawing"].default[1] == DEFAULT_GUIDANCE
    # also while the interpreter shuts down, which restores the default handlers of Python.
    script = """
import os, signal
from sd3_light.cli.process import run_guarded
from sd3_light.config.faults import Stopped
def work(): raise Stopped('asked')
code = run_guarded(work)
os.kill(os.getpid(), signal.SIGTERM)
raise SystemExit(code)
"""
    assert subprocess.run([sys.executable, "-c", script], check=False, capture_output=True).returncode == 75


# --- models of other data -------------------------------------------------------------------------


def test_only_demo_models_are_scored(verb: Command, raw_project: Project, tmp_path: Path, monkeypatch: Any) -> None:
    """The score judges the demo's shapes and colours. It is known by the captions of the export's dataset."""
    scored: list[Path] = []
    score = Mock(num_prompts=1, rates=defaultdict(float), by_kind={})
    monkeypatch.setattr(evaluate, "run", lambda model, *_, **__: scored.append(model) or score)
    other = tmp_path / "emoji"
    other.mkdir()
    Image.new("RGB", (64, 64)).save(other / "a.png")
    (other / "a.txt").write_text("a grinning face with large eyes")
    (tmp_path / "emoji.toml").write_text('resolutions = [64]\n[[directory]]\npath = "emoji"\n')
    model = tmp_path / "model"
    model.mkdir()
    (model / "model_index.json").write_text("{}")
    for config in ("", f"dataset = {str(tmp_path / 'emoji.toml')!r}", f"dataset = {str(tmp_path / 'gone.toml')!r}"):
        (model / "config.toml").write_text(config)
        result = verb("evaluate", model)
        assert "is not known to be trained on the demo's images" in error_line(result)
        assert "--config TRAIN.toml" in result.err
        assert "--against DATA.toml --features FOLDER" in result.err
    assert scored == []
    assert verb("evaluate", model, "--demo").code == 0
    (model / "config.toml").write_text(f"dataset = {str(raw_project.data_toml)!r}")
    assert verb("evaluate", model).code == 0
    assert verb("evaluate", DEMO).code == 0
    assert scored == [model, model, DEMO]


def test_gpus_and_datasets_are_checked(verb: Command, project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FOO", ""):
        result = verb("check", project.train_toml, "--gpu", name)
        assert re.search(r"unknown kind of GPU; .*H200, .*4090.*; --gpu-memory GIB alone", error_line(result))
    result = verb("check", project.train_toml, "--gpu", "NVIDIA H200")
    assert result.code == 0
    assert "torchrun" not in result.err
    monkeypatch.chdir(project.folder)
    result = verb("check", "train.toml", "--processes", 2, "--gpu-memory", 80, "--set", "seed=3")
    command = "torchrun --nproc_per_node 2 -m sd3_light train train.toml --set seed=3"
    assert result.err.splitlines()[-1] == f"on all 2 GPUs: {command}"
    monkeypatch.setattr(journeys.cache, "run", Mock(side_effect=AssertionError("encodes")))
    result = verb("evaluate", DEMO, "--config", project.train_toml, "--set", "eval_datasets=[]")
    assert "has no eval_datasets" in error_line(result)


def test_check_fails_if_the_run_does_not_fit(verb: Command, project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts rely on the exit code; the output stays."""
    result = verb("check", project.train_toml)
    assert result.code == 0
    assert "next:" in result.err
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Mock(free=1))
    result = verb("check", project.train_toml)
    assert result.code == 2
    problem = "the run does not fit (disk, run); the lines above say what to change"
    assert f"error: {project.train_toml}: {problem}" in result.err
    assert "next:" not in result.err
    assert result.out.splitlines()[0] == f"{project.train_toml}: no faults, but the run does not fit"
    assert "micro-batch" in result.out


def test_check_for_another_gpu_needs_memory(verb: Command, project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk and the memory of this machine decide nothing about a run elsewhere."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Mock(free=1))
    for options, verdict in (
        (("--gpu", "H200"), "no faults"),
        (("--processes", "2"), "no faults"),
        (("--gpu-memory", "24"), "no faults and the run fits"),
        (("--gpu", "H200", "--gpu-memory", "141"), "no faults and the run fits"),
    ):
        result = verb("check", project.train_toml, *options)
        assert result.code == 0, result.err
        assert result.out.splitlines()[0] == f"{project.train_toml}: {verdict}", "in one line, also if it is long"
    result = verb("check", project.train_toml, "--gpu-memory", "1", "--set", "micro_batch_size_per_gpu=100000")
    assert (result.code, "the run does not fit (GPU memory)" in result.err) == (2, True)


def test_an_error_about_no_file_names_none(capsys: pytest.CaptureFixture[str]) -> None:
    def forbidden() -> None:
        raise PermissionError(errno.EACCES, "no permission to read s3://bucket/cache")

    assert process.run_guarded(forbidden) == 2
    assert capsys.readouterr().err.startswith("error: no permission to read s3://bucket/cache")
