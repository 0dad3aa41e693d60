"""Requirements of --deepspeed are checked up front, with one-line errors."""

import ast
from pathlib import Path
from typing import Any

import pytest

from sd3_light.config import TrainConfig
from sd3_light.config.faults import UserError
from sd3_light.engines import Launch, deepspeed


def config(folder: Path, **keys: Any) -> TrainConfig:
    model = {"diffusers_path": "folder", "train_type": "sd3_light_pretrain", "size": "tiny2"}
    table = {"output_dir": "out", "dataset": "data.toml", "max_steps": 1, "model": model, **keys}
    return TrainConfig.model_validate(table, context={"base": folder})


@pytest.mark.parametrize(
    ("keys", "world", "wanted", "message"),
    [
        ({"pipeline_stages": 2}, 2, False, "add --deepspeed"),
        ({"optimizer": {"type": "muon"}}, 1, True, "write 'adamw'"),
        ({"parallel": "fsdp2"}, 2, True, "zero_stage = 3 instead"),
        ({"pipeline_stages": 2}, 3, True, "a multiple of pipeline_stages"),
        ({"adapter": {"base_bits": 4}}, 1, True, "write zero_stage = 2, or base_bits = 16"),
        ({"adapter": {}, "swap_blocks": "all"}, 1, True, "start without --deepspeed, or write swap_blocks = 0"),
        ({"adapter": {"base_bits": 8}, "zero_stage": 3}, 1, True, "write zero_stage = 2, or base_bits = 16"),
    ],
)
def test_rejected_configs(tmp_path: Path, monkeypatch: Any, keys: Any, world: int, wanted: bool, message: str) -> None:
    monkeypatch.setattr(deepspeed, "require_installed", lambda option: None)
    with pytest.raises(UserError) as raised:
        deepspeed.require(config(tmp_path, **keys), Launch(world_size=world), wanted)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_missing_deepspeed_names_the_install_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'sd3-light\[deepspeed\]'"):
        deepspeed.require(config(tmp_path), Launch(), wanted=True)
    deepspeed.require(config(tmp_path), Launch(), wanted=False)


@pytest.mark.parametrize(
    ("keys", "world", "name", "all_write"),
    [
        ({}, 1, "deepspeed pp1 dp1 zero1", True),
        ({"zero_stage": 0}, 2, "deepspeed pp1 dp2 zero0", False),
        ({"pipeline_stages": 2}, 4, "deepspeed pp2 dp2 zero1", True),
        ({"zero_stage": 3}, 2, "deepspeed pp1 dp2 zero3", True),
    ],
)
def test_layouts_have_names(tmp_path: Path, keys: dict[str, Any], world: int, name: str, all_write: bool) -> None:
    settings = config(tmp_path, **keys)
    assert deepspeed.engine_name(settings, Launch(world_size=world)) == name
    assert deepspeed.all_write(settings) is all_write


def top_level_imports(path: Path) -> list[str]:
    """Return the modules that a file imports at its top level."""
    modules = []
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            modules += [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules.append(node.module or "")
    return modules


def test_deepspeed_is_imported_only_on_use() -> None:
    """Without DeepSpeed installed everything else works."""
    room = Path(deepspeed.__file__).parent
    deferred = {f"sd3_light.engines.deepspeed.{path.stem}" for path in room.glob("[!_]*.py")}
    files = [path for path in room.parents[1].rglob("*.py") if path.parent != room or path.stem == "__init__"]
    assert len(files) > 200
    for path in files:
        names = top_level_imports(path)
        assert not [name for name in names if name.split(".")[0] == "deepspeed" or name in deferred], path
    assert "deepspeed" in top_level_imports(room / "engine_base.py")


def test_the_stages_of_a_pipeline_read_the_same_data() -> None:
    for rank, stages, expected in ((0, 1, (0, 4)), (3, 1, (3, 4)), (3, 2, (1, 2)), (2, 4, (0, 1))):
        share = Launch(rank, rank, 4).data_launch(stages)
        assert (share.rank, share.world_size) == expected
