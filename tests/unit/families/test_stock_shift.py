"""A stock family's grids and exports have the shift of training: that of the folder's scheduler, or the config's."""

import json
import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler as Euler

from sd3_light.config import ModelConfig, UserError
from sd3_light.core.registry import family_named
from sd3_light.export.diffusers_folder import write_folder
from sd3_light.export.export_spec import DYNAMIC
from sd3_light.export.lora_merge import denoiser_state
from sd3_light.export.of_run import model_spec
from sd3_light.export.open_pipeline import open_policy
from sd3_light.flow.scheduler import folder_scheduler, shift_of
from sd3_light.model.base_values import other_shift, with_base_values
from sd3_light.model.part_configs import FACTS_FILE
from tests.families import TinyFolder
from tests.stock import model_table, save_stock

CPU = torch.device("cpu")
KEYS = dict.fromkeys(["prx", "z_image", "flux", "flux2", "krea2", "qwen_image"], "shift")
KEYS |= dict.fromkeys(["sana", "wan"], "flow_shift")


@pytest.fixture(autouse=True)
def _without_proofs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "proven" not in request.node.name:
        monkeypatch.setattr("sd3_light.export.diffusers_folder.prove", lambda *_: {})


def table(name: str, folder: Path, **keys: Any) -> ModelConfig:
    """The [model] table of a run."""
    return with_base_values(model_table(name, folder, **keys))


def drawn_with(name: str, folder: Path, **keys: Any) -> Any:
    """The scheduler of a grid's images."""
    return family_named(name).sampling.scheduler(table(name, folder, **keys), (64, 64), 3, CPU)


def export(name: str, folder: Path, out: Path, **keys: Any) -> Path:
    config = json.loads((folder / "transformer" / "config.json").read_text())
    arguments = {key: value for key, value in config.items() if not key.startswith("_")}
    spec = model_spec(table(name, folder, **keys), arguments, save_dtype=torch.float32)
    return write_folder(out, denoiser_state(folder), spec)


def stored(folder: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((folder / "scheduler" / "scheduler_config.json").read_text())
    return values


@pytest.mark.parametrize("name", KEYS)
def test_grids_and_exports_have_a_given_shift(name: str, tmp_path: Path, stock_folder: TinyFolder) -> None:
    folder = stock_folder(name)
    own = drawn_with(name, folder)
    assert own.config == folder_scheduler(folder).config
    given = drawn_with(name, folder, shift=5.0)
    assert type(given) is type(own)
    assert not torch.equal(given.sigmas, own.sigmas)
    out = export(name, folder, tmp_path / "given", shift=5.0)
    assert stored(out) == {**stored(folder), KEYS[name]: 5.0, "use_dynamic_shifting": False}
    assert "| schedule | shift 5 |" in (out / "README.md").read_text()
    written = folder_scheduler(out)
    family: Any = family_named(name)
    family.set_times(written, 3, 16)
    assert torch.equal(written.sigmas, given.sigmas)


@pytest.mark.parametrize("name", ["sana", "qwen_image"])
def test_the_stock_pipeline_draws_a_proven_export(name: str, tmp_path: Path, stock_folder: TinyFolder) -> None:
    out = export(name, stock_folder(name), tmp_path / "out", shift=5.0)
    assert json.loads((out / "proof.json").read_text())["picture_max_difference"] < 1 / 255


@pytest.mark.parametrize("name", ["sana", "flux"])
def test_the_folders_own_shift_keeps_its_file(name: str, tmp_path: Path, stock_folder: TinyFolder) -> None:
    folder = stock_folder(name)
    keys = [{}, {"shift": 3.0}] if name == "sana" else [{}, {"flux_shift": True}]
    for number, shift in enumerate(keys):
        out = export(name, folder, tmp_path / str(number), **shift)
        file = "scheduler/scheduler_config.json"
        assert (out / file).read_bytes() == (folder / file).read_bytes()
        row = "shift 3" if name == "sana" else "shift by resolution"
        assert f"| schedule | {row} |" in (out / "README.md").read_text()


@pytest.mark.parametrize("name", KEYS)
def test_a_shift_by_resolution_that_the_pipeline_does_not_compute_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sd3_light.families.stock.checks.find_spec", lambda _: True)  # ftfy
    monkeypatch.setattr("sd3_light.export.open_pipeline.find_spec", lambda _: True)
    folder = save_stock(name, tmp_path / "model", scheduler=Euler(use_dynamic_shifting=True))
    family: Any = family_named(name)
    faults = [fault.problem for fault in family.checks.folder_faults(model_table(name, folder))]
    if name not in ("prx", "sana", "wan"):
        assert not faults
        assert open_policy(folder)
        return
    reason = f"its scheduler shifts by resolution, and {family.pipeline} computes no such shift; write "
    reason += '"use_dynamic_shifting": false in scheduler/scheduler_config.json'
    assert faults == [reason]
    with pytest.raises(UserError) as error:
        open_policy(folder)
    assert str(error.value) == f"{folder}: {reason}"
    for own in ({"shift": 3.0}, {"sqrt_shift": True}):
        table = model_table(name, folder).model_copy(update=own)
        assert not list(family.checks.folder_faults(table)), "the run's own shift"
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    for shift, is_open in ((3.0, True), (DYNAMIC, False)):
        (adapter / FACTS_FILE).write_text(json.dumps({"shift": shift}))
        with nullcontext() if is_open else pytest.raises(UserError):
            open_policy(folder, adapter)
    file = folder / "scheduler" / "scheduler_config.json"
    file.write_text(json.dumps({**stored(folder), "use_dynamic_shifting": False}))
    assert not list(family.checks.folder_faults(model_table(name, folder)))
    assert open_policy(folder)


def test_a_square_root_shift_follows_the_size_and_one_by_resolution_is_for_training(
    tmp_path: Path, stock_folder: TinyFolder
) -> None:
    folder = stock_folder("sana")
    tokens = family_named("sana").sampling.latent_shape(table("sana", folder), (64, 64))[-1] ** 2
    assert shift_of(drawn_with("sana", folder, sqrt_shift=True)) == math.sqrt(tokens / 256)
    out = export("sana", folder, tmp_path / "out", sqrt_shift=True)
    side = 1024 // family_named("sana").checks.side_step(table("sana", folder))
    assert stored(out)["flow_shift"] == side / 16
    assert other_shift(table("sana", folder, flux_shift=True)) == (
        f"model.flux_shift = true, but the scheduler of {folder} has shift 3; leave it out to train and sample with 3: "
        "only training changes, images and exports keep 3"
    )
    assert shift_of(drawn_with("sana", folder, flux_shift=True)) == 3.0
    assert stored(export("sana", folder, tmp_path / "constant", flux_shift=True)) == stored(folder)
