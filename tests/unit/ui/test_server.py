"""The server of `sd3-light ui`: routes, who may use them, starting and stopping runs, drawing."""

import json
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from sd3_light.assets import DEMO
from sd3_light.checkpoint.requests import SAVE_QUIT
from sd3_light.config.faults import UserError
from sd3_light.core.sampling import OwnDrawing
from sd3_light.engines import Launch
from sd3_light.system import state_folder
from sd3_light.ui import connections
from sd3_light.ui import playground as playground_module
from sd3_light.ui.folders import folder_id
from sd3_light.ui.server import make_server, serve
from tests.refusals import refused
from tests.unit.ui.client import HERE, TestClient, client_of, make_app, site_of
from tests.unit.ui.conftest import write_run
from tests.unit.ui.test_pages import held
from tests.waiting import HANG_SECONDS, wait_until

Script = Callable[[str], None]
DIGITS = "9" * 5000  # more than `int` parses


def working_client(folder: Path) -> TestClient:
    """Return a client of a server whose queue works until the end of the test's process."""
    site = site_of(folder)
    site.queue.work()
    return client_of(site)


@pytest.fixture
def client(runs: Path) -> TestClient:
    return client_of(site_of(runs))


def test_every_page_answers_and_an_unchanged_one_is_not_sent_again(client: TestClient, runs: Path) -> None:
    run_id = folder_id(runs / "first")
    paths = ("/", f"/runs/{run_id}", f"/compare?run={run_id}", f"/samples?run={run_id}", "/playground", "/data")
    for path in paths:
        reply = client.get(path)
        assert reply.status_code == 200, path
        assert reply.headers["x-frame-options"] == "DENY"
        assert "sd3-light" in reply.text
    image = client.get(f"/runs/{run_id}/sample?file=samples/step-00000010.png&cell=1&version=1")
    assert image.headers["content-type"] == "image/png"
    assert "immutable" in image.headers["cache-control"]
    path = f"/runs/{folder_id(runs / 'first')}"
    headers = {"If-None-Match": client.get(path).headers["etag"]}
    reply = client.get(path, headers=headers)
    assert (reply.status_code, reply.text) == (304, "")
    write_run(runs / "first", steps=41)
    assert client.get(path, headers=headers).status_code == 200


def test_unknown_things_are_not_found(client: TestClient) -> None:
    paths = ["/compare", "/data/none/inspect", "/playground/images/..%2Fx.png", f"/runs/none/sample?cell={DIGITS}"]
    paths += [f"/data/none?page={DIGITS}", f"/data/none/image?row={DIGITS}", f"/playground/drawings/{DIGITS}"]
    for path in paths:
        reply = client.get(path)
        assert reply.status_code == 404, path
        assert "Traceback" not in reply.text


HOSTS = dict.fromkeys(["localhost:1234", "127.0.0.1", "[::1]:7860"], 200)
HOSTS |= dict.fromkeys(["evil.example", "evil.example:7860", "127.0.0.1.evil.example", "", "[", "127.0.0.1:x"], 403)


@pytest.mark.parametrize("host", HOSTS)
def test_without_a_token_only_names_of_this_machine_are_served(client: TestClient, host: str) -> None:
    assert client.get("/", headers={"host": host}).status_code == HOSTS[host]


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "http://127.0.0.1:9", "https://127.0.0.1.evil", "http://["]
)
def test_other_websites_cannot_change_anything(client: TestClient, origin: str) -> None:
    for path in ("/start", "/playground/drawings"):
        assert client.post(path, headers={"origin": origin}).status_code == 403
    assert client.post("/playground/drawings", headers={"origin": HERE}, content=b"{}").status_code == 400


def test_with_a_token_every_request_needs_it(runs: Path) -> None:
    client = client_of(site_of(runs), "right", "http://gpu.example")
    for path in ("/", "/?token=wrong", "/playground", "/runs/x/sample?file=a.png"):
        assert client.get(path).status_code == 401
    assert client.post("/start?token=right").status_code == 401
    assert client.get("/", headers={"authorization": "Bearer right"}).status_code == 200
    reply = client.get("/compare?run=a&token=right")
    assert (reply.status_code, reply.headers["location"]) == (303, "/compare?run=a")
    cookie = reply.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert client.get("/").status_code == 200  # the client keeps the cookie
    clients = [client_of(site_of(runs), token, f"http://127.0.0.1:{port}") for port, token in ((1, "a"), (2, "b"))]
    pairs = zip(clients, "ab", strict=True)
    cookies = [client.get(f"/?token={token}").headers["set-cookie"] for client, token in pairs]
    jar = "; ".join(cookie.partition(";")[0] for cookie in cookies)
    for client in clients:
        client.cookies.clear()
        assert client.get("/", headers={"cookie": jar}).status_code == 200


@pytest.mark.parametrize(
    "name", ["none", f"{DIGITS}.png", "a" * 5000 + ".png", "a/" * 2500 + "b.png", "%00.png", "../" + "a" * 300]
)
def test_a_name_that_no_file_has_is_not_found(client: TestClient, runs: Path, name: str) -> None:
    run_id = folder_id(runs / "first")
    paths = [f"/runs/{run_id}/sample?file={name}", f"/runs/{name}", f"/compare?run={name}", f"/samples?run={name}"]
    paths += [f"/data/{name}", f"/data/{name}/image?shard={name}", f"/playground/images/{name}"]
    for path in paths:
        assert client.get(path).status_code == 404, path[:40]
    assert client.get(f"/playground?run={name}").status_code == 200


def test_names_that_are_not_utf8_and_faulty_configs_are_shown_in_errors(tmp_path: Path, client: TestClient) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/run-\xff"))
    write_run(folder, steps=1)
    reply = client_of(site_of(folder)).get(f"/runs/{folder_id(folder)}/sample?file=x.png")
    assert reply.status_code == 404
    assert "is not a sample grid of" in reply.text
    (tmp_path / "train.toml").write_text("max_stepz = 3\n")
    for config, text in (
        (tmp_path / "train.toml", "max_stepz"),
        ("none.toml", "does not exist"),
        ("a" * 5000, "exist"),
        ("~no-user/a", "no-user"),
    ):
        reply = client.post("/start", data={"config": str(config)})
        assert reply.status_code == 400
        assert text in reply.text


def test_a_port_in_use_and_a_token_that_no_cookie_can_hold_are_refused(runs: Path) -> None:
    site = site_of(runs)
    for token in ("密码", "a\nb"):
        refused("--token: use printable ASCII characters", serve, site, "127.0.0.1", 0, token, pytest.fail)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"cannot listen on 127.0.0.1:{port}: .*; choose another --port"):
            serve(site, "127.0.0.1", port, None, pytest.fail)


def test_stop_asks_a_running_run_to_save_and_quit(client: TestClient, runs: Path) -> None:
    first, path = runs / "first", f"/runs/{folder_id(runs / 'first')}"
    assert client.post(f"{path}/stop").status_code == 400
    assert not (first / SAVE_QUIT).exists()
    with held(first):
        assert client.post(f"{path}/stop").status_code == 303
        assert (first / SAVE_QUIT).exists()
        assert "Saving and stopping" in client.get(path).text


@pytest.fixture
def failing(tmp_path: Path) -> Path:
    (tmp_path / "data.toml").write_text('resolutions = [64]\n[[directory]]\npath = "no_images"\n')
    model = '[model]\ndiffusers_path = "no_model"\ntrain_type = "sd3_light_pretrain"\nsize = "tiny2"\n'
    config = tmp_path / "train.toml"
    config.write_text(f'output_dir = "run"\ndataset = "data.toml"\nmax_steps = 2\nsave_every_n_steps = 2\n{model}')
    return config


def notes_of(client: TestClient, path: str) -> str:
    """Return the notes of a page, from the part that the open page updates."""
    main = client.get(path).text.partition("<main")[2].partition("</main>")[0]
    return main.partition('role="note">')[2].partition("</div>")[0]


def test_a_starting_run_has_a_console_and_can_be_stopped(failing: Path, fake_python: Script) -> None:
    fake_python("echo loading\nexec sleep 600")
    client = working_client(failing.parent)
    page = client.post("/start", data={"config": str(failing)}).headers["location"]
    try:
        wait_until(lambda: "The console shows how far it is." in notes_of(client, page))
        assert "<summary>Console</summary>" in client.get(page).text
        assert "<button>Stop</button>" in client.get(page).text
    finally:
        assert client.post(f"{page}/stop").status_code == 303
    wait_until(lambda: "The run is starting" not in client.get(page).text)
    assert "exit code" not in client.get(page).text


def test_a_started_run_that_fails_shows_why(failing: Path, fake_python: Script) -> None:
    fake_python('read -r _ < "$(dirname "$0")/go"\necho "$@"\necho "error: no model"\nexit 2')
    os.mkfifo(failing.parent / "go")
    client = working_client(failing.parent)
    reply = client.post("/start", data={"config": str(failing), "mode": "resume"})
    page = f"/runs/{folder_id(failing.parent / 'run')}"
    assert (reply.status_code, reply.headers["location"]) == (303, page)
    assert "The run is starting" in notes_of(client, page)
    assert "console" not in notes_of(client, page).lower(), "it is empty"
    again = client.post("/start", data={"config": str(failing)})
    assert "a process trains in" in again.text
    (failing.parent / "go").write_text("go\n")
    wait_until(lambda: "exit code 2: error: no model" in notes_of(client, page), lambda: client.get(page).text)
    assert "The run is starting" not in client.get(page).text
    assert f"__main__.py train {failing} --resume" in client.get(page).text


def test_a_copied_run_is_not_resumed_in_the_original(failing: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("it was started"))
    copied = write_run(failing.parent / "copied", steps=1)
    text = failing.read_text().replace('"run"', f'"{failing.parent / "run"}"')
    (copied / "config.toml").write_text(text.replace('"data.toml"', f'"{failing.parent / "data.toml"}"'))
    reply = client_of(site_of(failing.parent)).post(f"/runs/{folder_id(copied)}/resume")
    assert reply.status_code == 400
    assert "output_dir is" in reply.text
    assert not (failing.parent / "run").exists()


def test_a_run_as_model_is_loaded_again_after_a_new_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sd3_light.sample import verb as sample

    loaded: list[Path] = []

    def open_model(folder: Path, options: sample.SampleOptions, launch: Any) -> sample.OpenModel:
        loaded.append(folder)
        return sample.OpenModel(None, None, None, options)  # type: ignore[arg-type]

    monkeypatch.setattr(sample, "open_model", open_model)
    monkeypatch.setattr(sample.OpenModel, "adjusted", lambda opened, _: opened)
    playground = site_of(tmp_path, lambda: None, [tmp_path / "run"]).playground
    for name in ("step-1", "step-1", "step-2"):
        export = tmp_path / "run" / "exports" / name
        export.mkdir(parents=True, exist_ok=True)
        (export / "model_index.json").touch()
        playground._load(tmp_path / "run", sample.SampleOptions(), Event())
    assert len(loaded) == 2


def write_lora_keys(path: Path, keys: list[str]) -> Path:
    save_file({key: torch.zeros(1) for key in keys}, path)
    return path


class Drawings:
    """A playground whose models draw nothing: each load is recorded, and what drew each drawing."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from sd3_light.sample import verb as sample

        self.loads: list[dict[str, Any]] = []
        self.drawn_with: list[dict[str, Any]] = []
        self.failure: Exception | None = None
        drawings = self

        class Model(sample.OpenModel):
            def adjusted(self, options: sample.SampleOptions) -> sample.OpenModel:
                return replace(self, pipe=loaded_with(options) | {"folder": self.pipe["folder"]}, options=options)

            def request(self, row: Any, seed: int) -> Any:
                if drawings.failure is not None:
                    raise drawings.failure
                return SimpleNamespace(seed=seed)

            def cut_prompts(self, requests: Any) -> list[str]:
                return []

            def draw(self, requests: Any, out: Path, **options: Any) -> Any:
                drawings.drawn_with.append(self.pipe)  # type: ignore[arg-type]
                yield {number: out / f"{number}.png" for number in requests}

        def loaded_with(options: sample.SampleOptions) -> dict[str, Any]:
            loras = [(lora.file.name, lora.strength) for lora in options.loras]
            return {"loras": loras, "sampler": options.sampler, "dtype": options.dtype}

        def open_model(folder: Path, options: sample.SampleOptions, launch: Any) -> sample.OpenModel:
            loaded = loaded_with(options) | {"folder": folder}
            self.loads.append(loaded)
            policy = SimpleNamespace(own_drawing=OwnDrawing())
            return Model(loaded, policy, SimpleNamespace(folder=folder), options)  # type: ignore[arg-type]

        monkeypatch.setattr(sample, "open_model", open_model)
        monkeypatch.setattr(playground_module, "set_main_process", lambda _: None, raising=False)
        self.folder = folder / "model"
        self.folder.mkdir()
        (self.folder / "model_index.json").touch()
        self.playground = site_of(folder, lambda: None, [self.folder]).playground

    def draw(self, **values: Any) -> str:
        """Draw with these form values; return the error."""
        form = {"models": [folder_id(self.folder)], "prompt": "a", "seeds": "0", **values}
        drawing = self.playground.submit(form)
        wait_until(lambda: drawing.is_done)
        return drawing.error


def test_a_model_is_loaded_again_with_other_adapters_or_dtype(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that is built into a loaded model: a drawing never uses one with other settings than its own."""
    drawings = Drawings(tmp_path, monkeypatch)
    for name in ("a", "b", "c"):
        write_lora_keys(tmp_path / f"{name}.safetensors", ["transformer.x.lora_A.weight"])
    plain = {"loras": [], "sampler": "euler", "dtype": "float32"}
    forms: list[tuple[dict[str, str], dict[str, Any]]] = [
        ({}, plain),
        ({"loras": f"{tmp_path}/a.safetensors:0.5"}, {**plain, "loras": [("a.safetensors", 0.5)]}),
        ({"loras": f"{tmp_path}/c.safetensors:0.7"}, {**plain, "loras": [("c.safetensors", 0.7)]}),
        ({"loras": f"{tmp_path}/b.safetensors:0.7"}, {**plain, "loras": [("b.safetensors", 0.7)]}),
        ({}, plain),
        ({"dtype": "bfloat16"}, {**plain, "dtype": "bfloat16"}),
    ]
    for form, expected in forms:
        for _ in range(2):
            assert drawings.draw(**form) == ""
            assert {name: drawings.drawn_with[-1][name] for name in plain} == expected
    assert len(drawings.loads) == len(forms), "the second drawing of each uses the loaded model"
    assert drawings.draw(steps="7", guidance="2", dtype="bfloat16") == ""
    assert len(drawings.loads) == len(forms), "no weight depends on steps and guidance"
    file = f"{tmp_path}/a.safetensors"
    assert drawings.draw(loras=f"{file}:0.5") == ""
    loads = len(drawings.loads)
    adjusted: list[tuple[dict[str, str], dict[str, Any]]] = [
        ({"loras": f"{file}:0.7"}, {**plain, "loras": [("a.safetensors", 0.7)]}),
        ({"loras": f"{file}:0.7", "sampler": "heun"}, {**plain, "loras": [("a.safetensors", 0.7)], "sampler": "heun"}),
        ({"loras": file}, {**plain, "loras": [("a.safetensors", 1.0)]}),
    ]
    for form, expected in adjusted:
        assert drawings.draw(**form) == ""
        assert {name: drawings.drawn_with[-1][name] for name in plain} == expected
    assert len(drawings.loads) == loads, "strengths and samplers change in the loaded model"


def test_a_model_is_dropped_after_a_crash_not_a_users_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What crashed may hold memory, or be in a wrong state."""
    drawings = Drawings(tmp_path, monkeypatch)
    assert drawings.draw() == ""
    drawings.failure = UserError("width is wrong")
    assert drawings.draw() == "width is wrong"
    drawings.failure = None
    assert drawings.draw() == ""
    assert len(drawings.loads) == 1
    drawings.failure = RuntimeError("CUDA out of memory")
    assert drawings.draw() == "RuntimeError: CUDA out of memory"
    drawings.failure = None
    assert drawings.draw() == ""
    assert len(drawings.loads) == 2


def wait_for(client: TestClient, drawing: dict[str, Any]) -> dict[str, Any]:
    def finished() -> dict[str, Any] | None:
        now: dict[str, Any] = client.get(f"/playground/drawings/{drawing['id']}").json()
        return now if now["done"] else None

    return wait_until(finished, pause=0.1)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    other = tmp_path_factory.mktemp("models") / "other"
    other.symlink_to(DEMO)
    return [DEMO, other]


@pytest.fixture(scope="module")
def painter(tmp_path_factory: pytest.TempPathFactory, models: list[Path]) -> TestClient:
    """A client of a playground with both models."""
    return client_of(site_of(tmp_path_factory.mktemp("playground"), Launch, models))


def test_two_models_are_drawn_with_their_settings(painter: TestClient, models: list[Path], tmp_path: Path) -> None:
    from sd3_light.sample.png import read_png_facts

    ids, large = list(map(folder_id, models)), str(2**62 + 1)
    values = {"models": ids, "prompt": "a red circle", "seeds": f"3 {large}", "steps": 2, "guidance": "1.5"}
    drawing = wait_for(painter, painter.post("/playground/drawings", json=values).json())
    assert (drawing["error"], drawing["status"], drawing["total"]) == ("", "done", 4)
    assert drawing["rows"] == ["seed 3", f"seed {large}"]
    assert drawing["columns"] == list(map(str, models))
    content = {}
    for image in drawing["images"]:
        content[image["model"], image["seed"]] = painter.get(f"/playground/images/{image['name']}").content
        (tmp_path / "image.png").write_bytes(content[image["model"], image["seed"]])
        facts = read_png_facts(tmp_path / "image.png")
        settings = [facts[name] for name in ("prompt", "seed", "steps", "guidance")]
        assert settings == ["a red circle", int(image["seed"]), 2, 1.5]
    assert set(content) == {(str(model), seed) for model in models for seed in ("3", large)}
    assert drawing["warnings"] == []
    page = painter.get("/playground").text
    assert page.count('data-facts="') == 4


def test_drawings_warn_of_cut_prompts_and_say_why_they_fail(painter: TestClient, models: list[Path]) -> None:
    values = {"models": [folder_id(models[0])], "prompt": "a red star " * 12, "seeds": "0-1", "steps": 1}
    drawing = wait_for(painter, painter.post("/playground/drawings", json=values).json())
    (line,) = drawing["warnings"]
    assert line.startswith(f"{models[0]}: the prompt 'a red star a red star")
    assert "is cut: CLIP reads 16 of its" in line
    values = {"models": [folder_id(models[0])], "prompt": "a", "seeds": "0", "steps": 1}
    failed = painter.post("/playground/drawings", json={**values, "width": 7}).json()
    assert "multiples of" in wait_for(painter, failed)["error"]
    for lora in ("none.safetensors:0.5", "a" * 5000, "a\0b"):
        no_lora = painter.post("/playground/drawings", json={**values, "loras": lora}).json()
        error = wait_for(painter, no_lora)["error"]
        assert error.startswith(f"LoRA {lora[0]}") or "none.safetensors does not exist" in error
        assert len(error) < 300
    assert wait_for(painter, painter.post("/playground/drawings", json=values).json())["error"] == ""


def test_a_drawing_can_be_cancelled_while_it_waits_and_at_any_time(painter: TestClient, models: list[Path]) -> None:
    values = {"models": [folder_id(models[0])], "prompt": "a", "seeds": "0-3", "steps": 4}
    first, second = (painter.post("/playground/drawings", json=values).json() for _ in range(2))
    assert painter.post(f"/playground/drawings/{second['id']}/cancel").status_code == 200
    assert len(wait_for(painter, first)["images"]) == 4
    cancelled = wait_for(painter, second)
    assert (cancelled["status"], cancelled["images"]) == ("stopped", [])
    values = {"models": [folder_id(models[0])], "prompt": "a", "seeds": "0-3", "steps": 1000}
    path = f"/playground/drawings/{painter.post('/playground/drawings', json=values).json()['id']}"
    wait_until(lambda: painter.get(path).json()["status"].startswith("drawing"))
    assert painter.post(f"{path}/cancel").status_code == 200
    cancelled = wait_for(painter, painter.get(path).json())
    assert (cancelled["status"], cancelled["images"], cancelled["error"]) == ("stopped", [], "")


class BusyPlayground:
    """A playground whose first drawing waits in `prepare` until ``go`` is set."""

    def __init__(self, folder: Path) -> None:
        self.started, self.go = Event(), Event()
        self.client = client_of(site_of(folder, self.prepare, [DEMO]))

    def prepare(self) -> Any:
        self.started.set()
        assert self.go.wait(HANG_SECONDS)
        raise UserError("no device")

    def draw(self) -> Any:
        values = {"models": [folder_id(DEMO)], "prompt": "a", "seeds": "0", "steps": 1}
        return self.client.post("/playground/drawings", json=values)


def test_waiting_drawings_are_limited_and_never_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(playground_module, "MOST_DRAWINGS", 6)
    busy = BusyPlayground(tmp_path)
    first = busy.draw().json()["id"]
    assert busy.started.wait(HANG_SECONDS)
    waiting = [busy.draw().json()["id"] for _ in range(5)]
    refused = busy.draw()
    assert refused.status_code == 400
    assert "6 drawings wait already; try again when" in refused.json()["error"]
    for number in (first, *waiting):
        state = busy.client.get(f"/playground/drawings/{number}")
        assert (state.status_code, state.json()["done"]) == (200, False)
    cancelled = busy.client.post(f"/playground/drawings/{waiting[0]}/cancel").json()
    assert (cancelled["done"], cancelled["status"]) == (True, "stopped")
    waiting = [*waiting[1:], busy.draw().json()["id"]]
    assert busy.draw().status_code == 400
    busy.go.set()
    ended = wait_for(busy.client, {"id": waiting[-1]})
    assert ended["error"] == "no device"
    last = busy.draw().json()["id"]  # of those that are done, the last two are kept
    assert busy.client.get(f"/playground/drawings/{first}").status_code == 404
    assert busy.client.get(f"/playground/drawings/{last}").status_code == 200


def test_two_servers_share_a_folder(models: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sd3_light.sample import verb as sample
    from sd3_light.sample.png import read_png_facts

    out, first_free, others = tmp_path / "out", sample.first_free_number, [b"first", b"second"]
    out.mkdir()

    def other_server_is_faster(folder: Path) -> int:
        number = first_free(folder)
        if others:
            (folder / f"{number:05d}.png").write_bytes(others.pop(0))
        return number

    monkeypatch.setattr(sample, "first_free_number", other_server_is_faster)
    client = client_of(site_of(tmp_path, Launch, models))
    values = {"models": [folder_id(models[0])], "prompt": "a", "steps": 1, "seeds": "0-3"}
    drawing = wait_for(client, client.post("/playground/drawings", json=values).json())
    assert drawing["error"] == ""
    images = {image["name"]: int(image["seed"]) for image in drawing["images"]}
    assert sorted(images.values()) == [0, 1, 2, 3]
    assert {name: read_png_facts(out / name)["seed"] for name in images} == images
    numbered = {path for path in out.iterdir() if path.name != drawing["grid"]}
    assert {path.read_bytes() for path in numbered if path.name not in images} == {b"first", b"second"}
    assert len(numbered) == 6


@pytest.mark.parametrize("body", [b"", b"[1]", b"{", b"[" * 2000, b"\xff", b'{"models": "all"}'])
def test_a_body_that_is_not_valid_is_refused(painter: TestClient, body: bytes) -> None:
    """Values of a form: test_draw_request.py."""
    reply = painter.post("/playground/drawings", content=body)
    assert reply.status_code == 400
    assert reply.json()["error"]


@pytest.fixture
def address(runs: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, int]]:
    """Host and port of a running server that waits half a second for requests."""
    monkeypatch.setattr(connections, "REQUEST_SECONDS", 0.5)
    server = make_server(make_app(site_of(runs)))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = Thread(target=server.run, args=([listening],))
        thread.start()
        wait_until(lambda: server.started)
        yield listening.getsockname()
        server.should_exit = True
        thread.join()


def received(connection: socket.socket) -> bytes:
    """Return everything until the server closes the connection."""
    connection.settimeout(HANG_SECONDS)
    return b"".join(iter(lambda: connection.recv(65536), b""))


GET = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
POST = b"POST /start HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100\r\n\r\nconfig="


@pytest.mark.parametrize(
    ("sent", "answer"),
    [(b"", b""), (GET[:20], b""), (POST[:40], b""), (GET + GET[:9], b"200 OK"), (POST, b"did not arrive within")],
    ids=["nothing", "half a GET", "half a head", "half a second request", "half a body"],
)
def test_a_request_that_does_not_arrive_is_given_up(address: tuple[str, int], sent: bytes, answer: bytes) -> None:
    with socket.create_connection(address) as connection:
        connection.sendall(sent)
        reply = received(connection)
    assert answer in reply
    assert bool(reply) == bool(answer)


def test_a_slow_request_that_arrives_is_answered(address: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "REQUEST_SECONDS", HANG_SECONDS)
    with socket.create_connection(address) as connection:
        for start in range(0, len(GET), 10):
            connection.sendall(GET[start : start + 10])
            time.sleep(0.02)
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 OK")


def test_a_client_that_leaves_is_not_an_error(address: tuple[str, int], capfd: pytest.CaptureFixture[str]) -> None:
    for _ in range(3):
        with socket.create_connection(address) as connection:
            connection.sendall(POST)
            time.sleep(0.05)
    with socket.create_connection(address) as connection:
        connection.sendall(GET)
        received(connection)
    assert "Traceback" not in capfd.readouterr().err


def test_other_websites_can_link_to_pages_and_load_nothing(client: TestClient, runs: Path) -> None:
    run = f"/runs/{folder_id(runs / 'first')}"
    for site in ("cross-site", "same-site"):
        link = {"sec-fetch-site": site, "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
        assert client.get("/", headers=link).status_code == 200
        assert client.get("/data/any-id/inspect", headers=link).status_code == 403
        for dest in ("image", "script", "iframe", "empty"):
            headers = {"sec-fetch-site": site, "sec-fetch-dest": dest}
            for path in ("/", run, f"{run}/sample?file=samples/step-00000010.png", "/data/any-id/inspect"):
                assert client.get(path, headers=headers).status_code == 403
    for site in ("same-origin", "none"):
        headers = {"sec-fetch-site": site, "sec-fetch-dest": "image"}
        assert client.get(f"{run}/sample?file=samples/step-00000010.png", headers=headers).status_code == 200
        assert client.get("/data/any-id/inspect", headers=headers).status_code == 404, "the guard lets it pass"


def test_curves_lists_and_numbers_are_those_of_the_query(client: TestClient, runs: Path) -> None:
    path = f"/runs/{folder_id(runs / 'first')}"
    query = "/curves?from=3&to=5&name=loss&name=lr&name=<b>"
    assert client.get(path + query).json() == {"curves": {}}, "the log was not read yet"
    client.get(path)
    curves = client.get(path + query).json()["curves"]
    assert curves.keys() == {"loss", "lr"}
    assert [x for x, _ in curves["loss"]["mean"]] == [3, 4, 5]
    assert curves["lr"]["extremes"] == [[x, 1e-4] for x in (3, 4, 5)]
    path = f"/runs/{folder_id(runs / 'first')}/sample?file=samples/step-00000010.png"
    assert client.get(f"{path}&cell={DIGITS}").content == client.get(path).content

    def names(query: str) -> list[str]:
        text = client.get(f"/?{query}").text
        return sorted(("first", "second"), key=lambda name: text.find(f">{name}</a>")) if ">first</a>" in text else []

    assert names("sort=name") == ["first", "second"]
    assert names("sort=loss") == ["first", "second"]
    assert names("text=DEEP") == []
    assert ">second</a>" in client.get("/?text=DEEP").text
    assert "No run has this text" in client.get("/?text=<b>").text
    assert client.get("/?sort=<b>").status_code == 404


def test_finer_curves_between_no_steps_are_refused(client: TestClient, runs: Path) -> None:
    for steps in ("", "from=1", "from=nan&to=2", "from=1&to=inf", f"from={DIGITS}&to=1", "from=<b>&to=1"):
        reply = client.get(f"/runs/{folder_id(runs / 'first')}/curves?{steps}")
        assert reply.status_code == 404, steps
        assert "is not a step; use a number" in reply.text
        assert "<b>&" not in reply.text


def test_the_queue_shows_what_runs_waits_and_has_ended(failing: Path, fake_python: Script) -> None:
    here = failing.parent
    fake_python(f'while [ ! -e {here}/go ] && [ -d {here} ]; do sleep 0.02; done\necho "error: <b>"\nexit 2')
    client = working_client(failing.parent)
    other = failing.with_name("other.toml")
    other.write_text(failing.read_text().replace('"run"', '"<i>other"'))
    for config in (failing, other):
        assert client.post("/start", data={"config": str(config)}).status_code == 303
    page = client.get("/queue").text
    assert "starting" in page
    assert "waiting, number 1" in page
    assert "<i>" not in page.partition("<main")[2].replace('<i style="width', "")
    (jobs,) = [json.loads(path.read_text())["jobs"] for path in state_folder().glob("queue-*.json")]
    assert client.post(f"/queue/{jobs[1]['id']}/stop").headers["location"] == "/queue"
    (failing.parent / "go").touch()
    wait_until(lambda: "exit code 2: error: &lt;b&gt;" in client.get("/queue").text)
    assert client.post(f"/queue/{jobs[0]['id']}/again", data={"mode": "nonsense"}).status_code == 400
    assert client.post(f"/queue/{jobs[0]['id']}/again", data={"mode": "start"}).status_code == 303
    assert client.post(f"/queue/{jobs[1]['id']}/remove").status_code == 303
    assert client.post(f"/queue/{jobs[1]['id']}/remove").status_code == 400
    assert client.post("/queue/none/stop").status_code == 400


def read_only_client(folder: Path) -> TestClient:
    site = site_of(folder, models=[DEMO])
    site.is_read_only = True
    return client_of(site)


def test_a_read_only_server_has_no_route_that_writes_or_starts(runs: Path) -> None:
    client = read_only_client(runs)
    app: Any = client.app
    assert {method for route in app.routes for method in route.methods} == {"GET", "HEAD"}
    assert not [route.path for route in app.routes if route.path.startswith(("/playground", "/projects"))]
    run = f"/runs/{folder_id(runs / 'first')}"
    full = make_app(site_of(runs))
    writing = [route.path for route in full.routes if "POST" in route.methods]  # type: ignore[attr-defined]
    assert len(writing) >= 7
    for path in writing:
        assert client.post(path.replace("{run}", "none").replace("{job}", "none")).status_code in (404, 405), path
    before = sorted(runs.rglob("*"))
    for path in ("/", "/queue", run, f"/compare?run={folder_id(runs / 'first')}", "/data"):
        reply = client.get(path)
        assert reply.status_code == 200, path
        main = reply.text.partition("<body")[2]
        assert 'method="post"' not in main, path
        assert 'href="/playground' not in main, path
        assert 'href="/projects' not in main, path
    assert sorted(runs.rglob("*")) == before
    assert not state_folder().exists()


def test_a_read_only_server_starts_nothing_that_waits(failing: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("it was started"))
    queue = site_of(failing.parent).queue
    queue.slots = list
    queue.add(failing)
    with read_only_client(failing.parent) as client:
        time.sleep(1.5)
        assert "waiting, number 1" in client.get("/queue").text
    assert [job.state for job in queue.jobs()] == ["waiting"]


def test_libraries_are_imported_by_one_thread_at_a_time(failing: Path) -> None:
    """The editor asks for the faults of a config and for what applies on resume at once; both import diffusers."""
    site = site_of(failing.parent, Launch)
    client = client_of(site)
    replies: list[int] = []
    path = f"/projects/{folder_id(failing)}/review"
    thread = Thread(target=lambda: replies.append(client.post(path, json={"text": failing.read_text()}).status_code))
    with site.playground.imports:
        thread.start()
        thread.join(0.5)
        assert thread.is_alive()
    thread.join(HANG_SECONDS)
    assert replies == [200]
