"""Trackers mirror the log, use one run per folder, store no secret, and never stop training."""

import json
import os
import sqlite3
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from sd3_light.config import MonitoringConfig, UserError
from sd3_light.runlog import RunLog, open_trackers, set_main_process
from sd3_light.runlog.trackers import TRACKER_IDS
from tests.refusals import refused
from tests.waiting import HANG_SECONDS

SECRET = "0123456789abcdef0123456789abcdef01234567"
CONFIG = {"seed": 1, "model": {"size": "tiny2"}}


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in [name for name in os.environ if name.startswith(("WANDB_", "TRACKIO_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_API_KEY", "none")  # so that monkeypatch restores it after a test that sets it
    monkeypatch.delenv("WANDB_API_KEY")


class WandbError(Exception):
    """wandb.Error"""


class WandbUsageError(WandbError):
    """wandb.errors.UsageError"""


class WandbLoginError(WandbError):
    """wandb.errors.AuthenticationError"""


class FakeRun:
    def __init__(self, **init: Any) -> None:
        self.init, self.step, self.logged, self.finished = init, 0, list[tuple[int, dict[str, Any]]](), 0
        self.error: Exception | None = None

    def log(self, data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
        if self.error is not None:
            raise self.error
        assert step is not None
        self.logged.append((step, data))
        self.step = max(self.step, step)

    def finish(self, exit_code: int | None = None) -> None:
        self.finished += 1
        if self.error is not None:
            raise self.error


class FakeWandb(ModuleType):
    """The part of wandb 0.30 that is used, with its signatures."""

    Error = WandbError
    errors = SimpleNamespace(UsageError=WandbUsageError, AuthenticationError=WandbLoginError)

    def __init__(self) -> None:
        super().__init__("wandb")
        self.runs: list[FakeRun] = []
        self.mode, self.account, self.error = "online", True, None
        self.key: str | None = None
        self.last_step = 0

    def setup(self) -> Any:
        return SimpleNamespace(settings=SimpleNamespace(mode=self.mode))

    def login(self, key: str | None = None, *, verify: bool = True, prompt: bool = True) -> bool:
        assert key is None, "a key passed here is written to the user's .netrc"
        assert not prompt, "a prompt would block a run without a user"
        self.key = os.environ.get("WANDB_API_KEY")
        return self.account

    def init(self, **options: Any) -> FakeRun:
        names = {"project", "name", "id", "dir", "config", "resume", "reinit", "settings"}
        assert options.keys() == names
        if self.error is not None:
            raise self.error
        self.runs.append(FakeRun(**options))
        self.runs[-1].step = self.last_step
        return self.runs[-1]

    @staticmethod
    def Settings(*, console: str, finish_timeout: float) -> dict[str, Any]:  # noqa: N802
        return {"console": console, "finish_timeout": finish_timeout}

    @staticmethod
    def Image(image: Image.Image) -> tuple[str, tuple[int, int]]:  # noqa: N802
        return "image", image.size


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    module = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def monitoring_config(**keys: Any) -> MonitoringConfig:
    return MonitoringConfig.model_validate(keys)


def train(folder: Path, monitoring: MonitoringConfig, first: int, last: int) -> None:
    """Log a short run: steps, then an evaluation and an image."""
    trackers = open_trackers(monitoring, folder, CONFIG)
    with RunLog(folder, tensorboard=False, trackers=trackers) as log:
        log.event("start" if first == 1 else "resume", step=first - 1)
        for step in range(first, last + 1):
            log.event("step", step=step, loss=1 / step)
        log.event("eval", step=last, set="held", weights="ema", flow=0.25)
        log.image("samples/ema", Image.new("RGB", (8, 4)), step=last)


def test_no_tracker_is_opened_by_default_or_on_other_ranks(tmp_path: Path, wandb: FakeWandb) -> None:
    assert open_trackers(monitoring_config(), tmp_path, CONFIG) == []
    set_main_process(False)
    assert open_trackers(monitoring_config(enable_wandb=True), tmp_path, CONFIG) == []
    assert not (tmp_path / TRACKER_IDS).exists()


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_missing_package_is_a_user_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr("sd3_light.runlog.trackers.find_spec", lambda name: None)
    with pytest.raises(UserError, match=rf"monitoring.enable_{name}: .* pip install 'sd3-light\[{name}\]'"):
        open_trackers(monitoring_config(**{f"enable_{name}": True}), tmp_path, CONFIG)


def test_wandb_gets_points_and_images(tmp_path: Path, wandb: FakeWandb) -> None:
    train(tmp_path / "my_run", monitoring_config(enable_wandb=True, wandb_tracker_name="project"), 1, 3)
    (run,) = wandb.runs
    assert (run.init["project"], run.init["name"], run.init["config"]) == ("project", "my_run", CONFIG)
    assert run.logged == [
        (1, {"train/loss": 1.0}),
        (2, {"train/loss": 0.5}),
        (3, {"train/loss": 1 / 3}),
        (3, {"eval/held/ema/flow": 0.25}),
        (3, {"samples/ema": ("image", (8, 4))}),
    ]
    assert run.finished == 1


def test_a_restart_continues_the_same_wandb_run_without_repeats(tmp_path: Path, wandb: FakeWandb) -> None:
    monitoring = monitoring_config(enable_wandb=True, wandb_run_name="named")
    train(tmp_path, monitoring, 1, 5)
    wandb.last_step = 5
    train(tmp_path, monitoring, 3, 6)
    first, second = (run.init for run in wandb.runs)
    assert first["id"] == second["id"] == json.loads((tmp_path / TRACKER_IDS).read_text())["wandb_id"]
    assert (second["resume"], second["name"]) == ("allow", "named")
    assert [step for step, _ in wandb.runs[1].logged] == [5, 6, 6, 6]
    train(tmp_path / "other", monitoring, 1, 1)
    assert wandb.runs[2].init["id"] != first["id"]
    wandb.mode, wandb.account = "offline", False
    train(tmp_path, monitoring, 1, 1)
    assert wandb.runs[3].init["resume"] is None


def test_the_api_key_is_passed_by_the_environment_and_written_nowhere(tmp_path: Path, wandb: FakeWandb) -> None:
    train(tmp_path, monitoring_config(enable_wandb=True, wandb_api_key=SECRET), 1, 1)
    assert wandb.key == SECRET
    assert [path for path in tmp_path.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()] == []


@pytest.mark.parametrize("error", [WandbUsageError("no key"), WandbLoginError("wrong key"), None])
def test_a_missing_account_is_a_user_error(tmp_path: Path, wandb: FakeWandb, error: Any) -> None:
    wandb.error, wandb.account = error, error is not None
    refused("WANDB_API_KEY", open_trackers, monitoring_config(enable_wandb=True), tmp_path, CONFIG)


def test_training_without_wandb(tmp_path: Path, wandb: FakeWandb, capsys: pytest.CaptureFixture[str]) -> None:
    wandb.error = WandbError("no network\nmore")
    train(tmp_path, monitoring_config(enable_wandb=True), 1, 2)
    assert "wandb is not reachable (no network); training continues" in capsys.readouterr().err
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 4


@pytest.mark.parametrize("error", [WandbError("gone"), ConnectionResetError("gone")])
def test_later_failures(tmp_path: Path, wandb: FakeWandb, capsys: pytest.CaptureFixture[str], error: Exception) -> None:
    trackers = open_trackers(monitoring_config(enable_wandb=True), tmp_path, CONFIG)
    wandb.runs[0].error = error
    with RunLog(tmp_path, tensorboard=False, trackers=trackers) as log:
        for step in range(3):
            log.event("step", step=step, loss=1.0)
        log.image("samples/ema", Image.new("RGB", (8, 4)), step=2)
    assert capsys.readouterr().err.count("wandb failed (gone)") == 1
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 3
    wandb.runs[0].error = TypeError("bug")
    with pytest.raises(TypeError):
        trackers[0].log({"train/loss": 1.0}, step=1)


class FakeTrackio(ModuleType):
    """The part of trackio 0.43 that is used, with its signatures."""

    def __init__(self) -> None:
        super().__init__("trackio")
        self.runs: list[FakeTrackioRun] = []
        self.error: Exception | None = None

    def init(self, project: str, name: str, resume: str, **options: Any) -> "FakeTrackioRun":
        assert options.keys() == {"config", "embed", "auto_log_gpu", "auto_log_cpu"}
        print("* Trackio project initialized")
        if self.error is not None:
            raise self.error
        self.runs.append(FakeTrackioRun(project, name, resume))
        return self.runs[-1]

    Image = staticmethod(FakeWandb.Image)


class FakeTrackioRun:
    def __init__(self, project: str, name: str | None, resume: str) -> None:
        self.init, self.logged, self.finished = (project, name, resume), list[tuple[int | None, dict[str, Any]]](), 0

    def log(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self.logged.append((step, metrics))

    def finish(self) -> None:
        self.finished += 1


@pytest.fixture
def trackio(monkeypatch: pytest.MonkeyPatch) -> FakeTrackio:
    module = FakeTrackio()
    monkeypatch.setitem(sys.modules, "trackio", module)
    return module


def test_trackio_gets_the_points(tmp_path: Path, trackio: FakeTrackio, capsys: pytest.CaptureFixture[str]) -> None:
    monitoring = monitoring_config(enable_trackio=True)
    train(tmp_path / "my_run", monitoring, 1, 5)
    train(tmp_path / "my_run", monitoring, 3, 6)
    train(tmp_path / "elsewhere" / "my_run", monitoring, 1, 1)
    first, second, other = trackio.runs
    assert first.logged[0] == (1, {"train/loss": 1.0})
    assert first.logged[-2:] == [(5, {"eval/held/ema/flow": 0.25}), (5, {"samples/ema": ("image", (8, 4))})]
    assert first.init == second.init
    assert first.init[0] == "sd3-light"
    assert str(first.init[1]).startswith("my_run-")
    assert first.init[2] == "allow"
    assert other.init[1] != first.init[1]
    assert [step for step, _ in second.logged] == [5, 6, 6, 6]
    assert first.finished == 1
    assert capsys.readouterr().out == "", "stdout is for results"


def test_training_without_trackio(tmp_path: Path, trackio: FakeTrackio, capsys: pytest.CaptureFixture[str]) -> None:
    trackio.error = OSError("no token")
    assert open_trackers(monitoring_config(enable_trackio=True), tmp_path, CONFIG) == []
    assert "trackio is not reachable (no token)" in capsys.readouterr().err
    trackio.error = ValueError("server_url must be a full URL")
    refused("full URL", open_trackers, monitoring_config(enable_trackio=True), tmp_path, CONFIG)


@pytest.mark.slow  # starts wandb's service
def test_real_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = pytest.importorskip("wandb", reason="needs wandb: pip install 'sd3-light[wandb]'")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_X_SERVICE_WAIT", str(HANG_SECONDS))
    real.teardown()  # its settings are read once per process
    folder = tmp_path / "my_run"
    train(folder, monitoring_config(enable_wandb=True, wandb_api_key=SECRET), 1, 3)
    train(folder, monitoring_config(enable_wandb=True, wandb_api_key=SECRET), 3, 4)
    real.teardown()
    run_id = json.loads((folder / TRACKER_IDS).read_text())["wandb_id"]
    assert len(list(folder.glob(f"wandb/offline-run-*-{run_id}"))) in (1, 2)  # the name has the second of the start
    data = b"".join(path.read_bytes() for path in folder.glob("wandb/*/run-*.wandb"))
    for text in (b"train/loss", b"eval/held/ema/flow", b"samples/ema", b"tiny2"):
        assert text in data
    leaks = [path for path in tmp_path.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
    assert leaks == []


def test_real_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read when the package is imported
    for name in [name for name in sys.modules if name.partition(".")[0] == "trackio"]:
        monkeypatch.delitem(sys.modules, name)
    pytest.importorskip("trackio", reason="needs trackio: pip install 'sd3-light[trackio]'")
    folder = tmp_path / "my_run"
    train(folder, monitoring_config(enable_trackio=True), 1, 3)
    train(folder, monitoring_config(enable_trackio=True), 3, 4)
    with sqlite3.connect(tmp_path / "trackio" / "sd3-light.db") as data:
        points = data.execute("select run_name, step, metrics from metrics").fetchall()
    assert {name for name, _, _ in points} == {json.loads((folder / TRACKER_IDS).read_text())["trackio_name"]}
    losses = [(step, json.loads(text)["train/loss"]) for _, step, text in points if b"train/loss" in bytes(text)]
    assert losses == [(1, 1.0), (2, 0.5), (3, 1 / 3), (3, 1 / 3), (4, 0.25)]
    assert len(list(tmp_path.glob("trackio/media/**/*.png"))) == 2
