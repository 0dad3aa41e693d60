"""What continued weights bring along: the shift of their scheduler, and their unconditional text."""

import json
from pathlib import Path
from typing import Any

import pytest

from sd3_light.config import ModelConfig
from sd3_light.config.faults import UserError
from sd3_light.core.start import MARKER
from sd3_light.model.base_values import FLUX_LINE, ShiftLine, kept_scheduler, other_shift, shift_line, with_base_values
from sd3_light.tensor_file import METADATA_KEY, header_bytes

PRETRAIN = {"train_type": "sd3_light_pretrain"}
DYNAMIC = {"use_dynamic_shifting": True, "shift": 1.0, "base_shift": 0.3}


def folder(path: Path, scheduler: dict[str, Any] | None = None, uncond_text: str | None = None) -> Path:
    """Write what is read of a model folder."""
    (path / "transformer").mkdir(parents=True)
    (path / "transformer/config.json").write_text("{}")
    if scheduler is not None:
        (path / "scheduler").mkdir()
        (path / "scheduler/scheduler_config.json").write_text(json.dumps(scheduler))
    if uncond_text is not None:
        (path / "sd3_light.json").write_text(json.dumps({"text": {"uncond_text": uncond_text}}))
    return path


@pytest.fixture
def sd3(tmp_path: Path) -> Path:
    return folder(tmp_path / "sd3", {"shift": 3.0})


def model(path: Path, **keys: Any) -> ModelConfig:
    return ModelConfig.model_validate({"diffusers_path": str(path), **keys}, context={"base": path.parent})


def values(table: ModelConfig) -> tuple[float | None, str | None]:
    resolved = with_base_values(table)
    return resolved.shift, resolved.uncond_text


def test_values_are_those_of_the_folder_unless_given(sd3: Path) -> None:
    assert values(model(sd3)) == (3.0, "empty")
    (sd3 / "scheduler/scheduler_config.json").write_text('{"shift": 3}')
    assert values(model(sd3)) == (3.0, "empty")
    assert type(with_base_values(model(sd3)).shift) is float
    assert values(model(sd3, shift=1.0, uncond_text="zero")) == (1.0, "zero")
    line = f"model.shift = 1, but the scheduler of {sd3} has shift 3; leave it out to train and sample with 3"
    assert other_shift(model(sd3, shift=1.0)) == line
    assert other_shift(model(sd3, shift=3.0)) is None
    for key in ("flux_shift", "sqrt_shift"):
        assert values(model(sd3, **{key: True})) == (None, "empty")
        assert (other_shift(model(sd3, **{key: True})) or "").startswith(f"model.{key} = true, but the scheduler of ")
    assert kept_scheduler(model(sd3)) is None
    (sd3 / MARKER).write_text("{}")
    assert values(model(sd3, **PRETRAIN)) == (None, "zero")


def test_random_weights_take_nothing(sd3: Path) -> None:
    for keys in (PRETRAIN, {**PRETRAIN, "init": "random"}, {"init": "random", "size": "tiny2"}):
        assert values(model(sd3, **keys)) == (None, "zero")
        assert other_shift(model(sd3, **keys)) is None


@pytest.mark.parametrize("keys", [{}, PRETRAIN])
def test_initial_weights_bring_their_own_values(sd3: Path, tmp_path: Path, keys: dict[str, str]) -> None:
    """A folder of sd3-light says what it was trained with."""
    own = folder(tmp_path / "export", {"shift": 6.0}, "zero")
    assert values(model(sd3, init=str(own), **keys)) == (6.0, "zero")
    assert values(model(sd3, init=str(own / "transformer"), **keys)) == (6.0, "zero")
    (own / "sd3_light.json").write_text('{"text": {"uncond_text": "empty"}}')
    assert values(model(sd3, init=str(own), **keys)) == (6.0, "empty")


def test_denoisers_and_files_alone_get_the_scheduler_of_the_folder(sd3: Path, tmp_path: Path) -> None:
    alone = folder(tmp_path / "alone")
    assert values(model(sd3, init=str(alone))) == (3.0, "empty")
    foreign = single_file(tmp_path / "foreign.safetensors")
    assert values(model(sd3, init=str(foreign))) == (3.0, "empty")
    facts = {"text": {"uncond_text": "zero"}}
    own = single_file(tmp_path / "own.safetensors", scheduler={"shift": 6.0}, facts=facts)
    assert values(model(sd3, init=str(own))) == (6.0, "zero")
    bare = single_file(tmp_path / "bare.safetensors", scheduler={}, facts={})
    assert values(model(sd3, init=str(bare))) == (3.0, "empty")


def single_file(path: Path, **metadata: Any) -> Path:
    stored = {METADATA_KEY: json.dumps({"config": {}, **metadata})} if metadata else {}
    path.write_bytes(header_bytes([], stored))
    return path


def test_a_dynamic_scheduler_is_kept(tmp_path: Path) -> None:
    flux = folder(tmp_path / "flux", DYNAMIC)
    assert values(model(flux)) == (None, "empty")
    assert with_base_values(model(flux)).flux_shift
    assert other_shift(with_base_values(model(flux))) is None
    line = f"model.shift = 2, but the scheduler of {flux} shifts by resolution; write flux_shift = true to train"
    assert other_shift(model(flux, shift=2.0)) == f"{line} with such a shift"
    for keys in ({}, {"flux_shift": True}):
        assert kept_scheduler(model(flux, **keys)) == DYNAMIC
        assert shift_line(model(flux, **keys)) == ShiftLine(base_shift=0.3)
    for keys in ({"shift": 3.0}, {"sqrt_shift": True}, PRETRAIN):
        assert kept_scheduler(model(flux, **keys)) is None
    assert shift_line(model(flux, **PRETRAIN)) == FLUX_LINE
    assert values(model(folder(tmp_path / "none"))) == (None, "empty")
    assert values(model(folder(tmp_path / "other", {"_class_name": "OtherScheduler"}))) == (None, "empty")
    assert other_shift(model(tmp_path / "other")) is None
    with pytest.raises(UserError, match=r"its scheduler has shift 5000; write model\.shift"):
        with_base_values(model(folder(tmp_path / "huge", {"shift": 5000.0})))
    with pytest.raises(UserError, match="which is not a number"):
        with_base_values(model(folder(tmp_path / "wrong", {"shift": "3"})))


def test_the_numbers_of_a_shift_by_resolution_are_those_of_the_scheduler(tmp_path: Path, sd3: Path) -> None:
    numbers = {"base_shift": 0.5, "max_shift": 0.9, "base_image_seq_len": 256, "max_image_seq_len": 8192}
    qwen = folder(tmp_path / "qwen", {"use_dynamic_shifting": True, **numbers})
    assert shift_line(model(qwen)) == ShiftLine(*numbers.values())
    assert shift_line(model(sd3, flux_shift=True)) == FLUX_LINE
    equal = folder(tmp_path / "equal", {"use_dynamic_shifting": True, "max_image_seq_len": 256})
    with pytest.raises(UserError, match="shifts between equal numbers of tokens"):
        shift_line(model(equal))
    assert values(model(folder(tmp_path / "wan", {"flow_shift": 5.0}))) == (5.0, "empty")
