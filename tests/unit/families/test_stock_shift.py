"""A stock family's grids and exports have the shift of training: that of the folder's scheduler, or the config's."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sd3_light.check import verb as check
from sd3_light.core.registry import family_named
from sd3_light.export import lora
from sd3_light.export.diffusers_folder import write_folder
from sd3_light.export.lora_merge import denoiser_state
from sd3_light.export.of_run import model_spec
from sd3_light.families.base import StockFamily
from sd3_light.flow.scheduler import folder_scheduler, shift_of
from sd3_light.model.base_values import other_shift, with_base_values
from sd3_light.train import verb as train
from tests.stock import model_table, save_stock
from tests.stock_project import write_project

CPU = torch.device("cpu")
CONSTANT = ("prx", "sana", "wan", "z_image")
DYNAMIC = ("flux", "flux2", "krea2", "qwen_image")


def of(name: str) -> StockFamily:
    family = family_named(name)
    assert isinstance(family, StockFamily)
    return family


def drawn_with(name: str, folder: Path, **keys: Any) -> Any:
    """The scheduler of a grid's images."""
    model = with_base_values(model_table(name, folder, **keys))
    return of(name).sampling.scheduler(model, (64, 64), 3, CPU)


def export(name: str, folder: Path, out: Path, **keys: Any) -> Path:
    model = with_base_values(model_table(name, folder, save_dtype="float32", **keys))
    config = json.loads((folder / "transformer" / "config.json").read_text())
    arguments = {key: value for key, value in config.items() if not key.startswith("_")}
    return write_folder(out, denoiser_state(folder), model_spec(model, arguments, save_dtype=torch.float32))


@pytest.mark.parametrize("name", CONSTANT + DYNAMIC)
def test_grids_and_a_proven_export_have_a_given_shift(name: str, tmp_path: Path) -> None:
    folder = save_stock(name, tmp_path / "model")
    own = folder_scheduler(folder)
    kept = drawn_with(name, folder)
    assert kept.config == own.config
    scheduler = drawn_with(name, folder, shift=5.0)
    assert shift_of(scheduler) == 5.0
    assert type(scheduler) is type(own)
    assert not torch.equal(scheduler.sigmas, kept.sigmas)
    written = folder_scheduler(export(name, folder, tmp_path / "exports" / "given", shift=5.0))
    assert {**written.config, "_": 0}.items() >= {**own.config, **_given(scheduler), "_": 0}.items() - {("_", 0)}
    of(name).set_times(written, 3, 16)
    assert torch.equal(written.sigmas, drawn_with(name, folder, shift=5.0).sigmas)


def _given(scheduler: Any) -> dict[str, Any]:
    return {"flow_shift" if "flow_shift" in scheduler.config else "shift": 5.0, "use_dynamic_shifting": False}
