"""Projects in `sd3-light ui`: configs that are found, edited and saved, and new ones that are planned."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from sd3_light.assets import DEMO
from sd3_light.check.verb import load
from sd3_light.config import ConfigFaults, load_config, resolved_toml
from sd3_light.engines import Launch
from sd3_light.new import verb as new
from sd3_light.ui.config_form import form_groups
from sd3_light.ui.folders import Folders, folder_id
from sd3_light.ui.project_pages import review_text
from sd3_light.ui.projects import Planner, Projects
from sd3_light.ui.run_queue import RunQueue
from tests.project import Project
from tests.refusals import refused
from tests.special_files import SPECIAL
from tests.unit.ui.client import TestClient, client_of, make_app, site_of
from tests.waiting import wait_until

JSON = {"content-type": "application/json"}


@pytest.fixture
def served(tmp_path: Path, raw_project: Project) -> Path:
    folder = tmp_path / "served"
    shutil.copytree(raw_project.folder, folder, symlinks=True)
    return folder


def opened(folder: Path) -> TestClient:
    return client_of(site_of(folder, lambda: None))


def path_of(config: Path) -> str:
    return f"/projects/{folder_id(config)}"


def test_configs_are_found_and_other_files_are_not(served: Path, tmp_path: Path) -> None:
    (served / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    (served / "broken.toml").write_text("[model\n")
    (served / "link.toml").symlink_to(served / "train.toml")
    (served / "linked").symlink_to(tmp_path)
    (served / "huge.toml").write_text("a = 1\n" * 100_000)
    run = served / "run"
    run.mkdir()
    (run / "log.jsonl").touch()
    shutil.copy(served / "train.toml", run / "config.toml")
    for kind in ("pipe", "device", "socket", "loop"):
        SPECIAL[kind](served / f"{kind}.toml")
    listed = Projects(Folders([served])).listed.get()
    kinds = {path.name: kind for path, kind in listed.configs.items()}
    assert kinds == {"broken.toml": "train", "data.toml": "dataset", "train.toml": "train"}
    assert served / "images" in listed.images
    page = opened(served).get("/projects").text
    assert f'href="{path_of(served / "train.toml")}"' in page
    assert "huge.toml" not in page


def test_the_faults_of_a_text_are_those_of_check(served: Path) -> None:
    config = served / "train.toml"
    text = config.read_text().replace("lr = 1e-3", "lrr = 1e-3").replace('"images"', '"none"')
    text = f"max_stepz = 1\n{text}"
    client = opened(served)
    answer = client.post(f"{path_of(config)}/review", json={"text": text}).json()
    config.write_text(text)
    with pytest.raises(ConfigFaults) as error:
        load(config)
    expected = [(fault.key, str(fault).partition(f"{fault.key}: ")[2]) for fault in error.value.faults]
    assert [(fault["key"], fault["text"]) for fault in answer["faults"]] == expected
    lines = text.splitlines()
    for fault in answer["faults"]:
        name = fault["key"].rpartition(".")[2]
        assert name in lines[fault["line"] - 1]
    assert "did you mean `lr`?" in str(answer["faults"])


def test_faults_of_syntax_have_their_line(served: Path) -> None:
    for name in ("train.toml", "data.toml"):
        config = served / name
        answer = opened(served).post(f"{path_of(config)}/review", json={"text": "a = 1\nb = [\n"}).json()
        assert answer["faults"][0]["line"] in (2, 3)
        assert answer["form"] == ""
    config = served / "data.toml"
    text = config.read_text()
    config.write_text("size_buckets = 3\n[[directory]]\n")
    answer = opened(served).post(f"{path_of(config)}/review", json={"text": text}).json()
    assert answer["faults"] == []
    assert [key["key"] for key in answer["keys"]] == ["size_buckets", "directory[0].path"]


def test_a_value_of_the_form_changes_its_line_alone(served: Path) -> None:
    config = served / "train.toml"
    text = config.read_text().replace("max_steps = 4", "max_steps = 4   # few")
    client = opened(served)
    answer = client.post(f"{path_of(config)}/value", json={"text": text, "key": "max_steps", "value": "9"}).json()
    assert answer["text"] == text.replace("max_steps = 4", "max_steps = 9")
    assert 'name="max_steps" value="9"' in answer["form"]
    reply = client.post(f"{path_of(config)}/value", json={"text": text, "key": "max_steps", "value": "[9"})
    assert (reply.status_code, "not TOML" in reply.json()["error"]) == (400, True)
    assert config.read_text() != answer["text"], "nothing is written"
    values = {"text": "a = 1\n", "key": ".".join("b" * 5000), "value": "1"}
    reply = opened(served).post(f"{path_of(served / 'train.toml')}/value", json=values)
    assert reply.status_code == 400
    refused("there is no config none", review_text, Projects(Folders([served])), "none", "")


def test_saving_keeps_comments_and_refuses_what_changed(served: Path) -> None:
    config = served / "train.toml"
    first, second = opened(served), opened(served)
    version = first.get(path_of(config)).text.partition('data-version="')[2].partition('"')[0]
    text = f"# a comment\n{config.read_text()}"
    reply = first.post(f"{path_of(config)}/save", json={"text": text, "version": version})
    assert config.read_text() == text
    assert reply.json()["version"] != version
    late = second.post(f"{path_of(config)}/save", json={"text": "lost", "version": version})
    assert (late.status_code, "has changed since the page read it" in late.json()["error"]) == (400, True)
    again = second.post(f"{path_of(config)}/save", json={"text": "# b\n", "version": reply.json()["version"]})
    assert (again.status_code, config.read_text()) == (200, "# b\n")


@pytest.mark.parametrize("action", ["review", "value", "save", "resume"])
def test_requests_that_are_not_valid_are_refused(served: Path, action: str) -> None:
    client = opened(served)
    path = "/projects/none" if action == "resume" else path_of(served / "train.toml")
    half = {"text": "\ud800", "key": "a", "value": "", "version": ""}
    for values in ({}, {"text": 3}, half, [], {**half, "text": "x" * 300_000}):
        reply = client.post(f"{path}/{action}", content=json.dumps(values), headers=JSON)
        assert reply.status_code == 400
        assert reply.json()["error"]


def test_hostile_names_and_texts_stay_text(tmp_path: Path) -> None:
    markup = "</textarea><script>alert(1)</script>"
    config = tmp_path / "<img src=x onerror=alert(2)>.toml"
    config.write_text(f'output_dir = "{markup}"\ndataset = "{markup}"\n')
    client = client_of(site_of(tmp_path, Launch))
    for path in ("/projects", path_of(config), "/queue"):
        page = client.get(path).text
        assert "<img src=x" not in page
        assert "<script>alert" not in page
    answer = client.post(f"{path_of(config)}/review", json={"text": config.read_text()}).json()
    assert "<script>" not in answer["form"]


def test_every_key_of_the_schema_has_a_field() -> None:
    groups = form_groups("train", {"optimizer": {"lr": 1e-4}, "seed": 3})
    fields = {field.key: field for group in groups for field in group.fields}
    assert fields["optimizer.lr"].value == "0.0001"
    assert fields["seed"].value == "3"
    assert fields["output_dir"].default == "required"
    assert fields["fp8"].choices == ("true", "false")
    assert "cosine" in fields["lr_scheduler"].choices
    assert all(field.meaning and field.type for field in fields.values())
    wrong = form_groups("train", {"optimizer": 3, "fp8": "maybe", "ema": {"track": [{"name": "a"}, 4]}})
    fields = {field.key: field for group in wrong for field in group.fields}
    assert (fields["fp8"].value, fields["fp8"].choices) == ("maybe", ())
    assert fields["ema.track[0].name"].value == "a"
    directories = form_groups("dataset", {"directory": [{"path": "a"}, {"path": "true"}]})
    fields = {field.key: field for group in directories for field in group.fields}
    assert (fields["directory[0].path"].value, fields["directory[1].path"].value) == ("a", '"true"')


def planned(client: TestClient, served: Path, **form: str) -> tuple[str, str]:
    """Plan a project; return the address of the plan and its page."""
    values = {"kind": "lora", "data": str(served / "images"), "model": str(DEMO), "out": str(served / "new"), **form}
    address = client.post("/projects/plans", data=values).headers["location"]
    page = wait_until(lambda: "Planning." not in client.get(address).text and client.get(address).text, pause=0.1)
    return address, page


def test_a_plan_is_shown_before_the_files_of_new_are_written(served: Path, tmp_path: Path) -> None:
    client = opened(served)
    address, page = planned(client, served, gpu_memory="24", validation="1")
    assert not (served / "new").exists()
    for text in ("GPU memory", "fits:", "steps of", "disk, run", "EMA"):
        assert text in page, text
    (served / "new").mkdir()
    (served / "new" / "lora.toml").write_text("mine\n")
    reply = client.post(f"{address}/create")
    assert (reply.status_code, "exists; choose another folder" in reply.text) == (400, True)
    assert (served / "new" / "lora.toml").read_text() == "mine\n"
    shutil.rmtree(served / "new")
    created = client.post(f"{address}/create")
    config = served / "new" / "lora.toml"
    assert (created.status_code, created.headers["location"]) == (303, path_of(config))
    gpu = new.Gpu("the GPU", 24 * 2**30)
    project = new.run("lora", str(served / "images"), str(DEMO), tmp_path / "by_new", gpus=(gpu,))
    for name in ("lora.toml", "lora_data.toml"):
        assert (served / "new" / name).read_text() == (tmp_path / "by_new" / name).read_text()
    load(config)
    assert client.post(f"{address}/create").status_code == 303, "a second click changes nothing"
    assert project.memory.fits
    assert client.get(created.headers["location"]).status_code == 200


@pytest.mark.parametrize(
    ("form", "problem"),
    [
        ({"data": " "}, "the folder of images is missing"),
        ({"out": ""}, "the folder of the project is missing"),
        ({"out": "/tmp"}, "not below a served folder"),
        ({"gpu_memory": "nan"}, "gpu_memory is 'nan'"),
        ({"resolution": "7"}, "resolution is '7'"),
    ],
)
def test_a_form_that_is_not_valid_is_refused(served: Path, form: dict[str, str], problem: str) -> None:
    values = {"kind": "lora", "data": "images", "out": str(served / "new"), **form}
    refused(problem, Planner(Folders([served]), lambda: None).submit, values)


@pytest.mark.parametrize(
    ("form", "problem"),
    [({"kind": "magic"}, "unknown kind"), ({"data": "/no/such"}, "--data"), ({"model": "/no/such"}, "--model")],
)
def test_a_plan_that_fails_says_why(served: Path, form: dict[str, str], problem: str) -> None:
    client = opened(served)
    address, page = planned(client, served, gpu_memory="24", **form)
    assert problem in page
    assert client.post(f"{address}/create").status_code == 400
    assert not (served / "new").exists()


def test_a_crash_of_a_plan_is_shown(served: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sd3_light.ui.projects._fill", Mock(side_effect=ZeroDivisionError("x")))
    assert "ZeroDivisionError; this is a bug in sd3-light" in planned(opened(served), served)[1]


def test_a_changed_config_says_what_applies_on_resume(project: Project) -> None:
    project.train("max_steps=2")
    config = project.train_toml
    client = opened(project.folder)

    def lines(change: Callable[[str], str]) -> list[str]:
        before = config.read_text()
        config.write_text(change(before))
        answer: list[str] = client.post(f"{path_of(config)}/resume", json={}).json()["lines"]
        config.write_text(before)
        return answer

    assert lines(lambda text: text.replace("max_steps = 4", "max_steps = 2")) == ["Nothing differs from the run."]
    assert lines(lambda text: text) == ["Applies on resume: max_steps = 4 (was 2)"]
    rate = lines(lambda text: text.replace("lr = 1e-3", "lr = 1e-4"))
    assert "The run keeps its own value: optimizer.lr = 0.0001 (was 0.001)" in rate
    (refused,) = [line for line in lines(lambda text: text.replace("seed = 3", "seed = 4")) if "refused" in line]
    assert "another order of data (seed 3, now 4); write seed = 3" in refused
    assert "has 1 faults" in lines(lambda text: f"max_stepz = 1\n{text}")[0]
    assert 'data-resume="1"' in client.get(path_of(config)).text
    assert resolved_toml(load_config(config))


def test_the_editor_offers_what_the_run_allows(served: Path) -> None:
    config = served / "train.toml"
    client = opened(served)
    assert ">Start</button>" in client.get(path_of(config)).text
    (served / "run" / "checkpoints" / "step-00000002").mkdir(parents=True)
    page = client.get(path_of(config)).text
    assert ">Resume</button>" in page
    assert ">Start again</button>" in page
    queue = RunQueue(Path(os.environ["XDG_STATE_HOME"]) / "sd3_light", [served], list)
    queue.add(config, "resume")
    assert ">Resume</button>" not in client.get(path_of(config)).text


def test_long_names_and_huge_files_leave_the_pages_alive(served: Path) -> None:
    text = (served / "train.toml").read_text()
    (served / "long.toml").write_text(text.replace('"data.toml"', f'"{"x" * 5000}"'))
    (served / "deep.toml").write_text(text.replace('"run"', f'"{"y" * 5000}"'))
    (served / "pipe.toml").symlink_to("/dev/zero")
    client = opened(served)
    for path in ("/projects", "/data", path_of(served / "long.toml"), path_of(served / "deep.toml")):
        assert client.get(path).status_code == 200, path


def test_every_route_that_is_not_get_refuses_other_websites_and_strangers(served: Path) -> None:
    app: Any = make_app(site_of(served))
    posts = [route.path for route in app.routes if "POST" in route.methods]
    for token in (None, "secret"):
        client = client_of(site_of(served), token)
        assert len(posts) > 20
        for path in posts:
            own = {"authorization": f"Bearer {token}"} if token else {}
            assert client.post(path, headers={"origin": "http://evil.example", **own}).status_code == 403, path
            stranger = client.post(path, headers={} if token else {"host": "evil.example"})
            assert stranger.status_code == (401 if token else 403), path
