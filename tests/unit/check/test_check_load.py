"""Law 7: faults of the config and faults on disk come in one report."""

from pathlib import Path

import pytest

from sd3_light.check import verb as check
from sd3_light.config import ConfigFaults
from tests.project import Project

BAD = """
output_dir = "run"
dataset = "data.toml"
max_steps = "ten"
micro_batch_sise_per_gpu = 4
save_every_n_steps = 5
[model]
train_type = "sd3_light_pretrain"
size = "tiny2"
{path}
"""


def _faults(folder: Path, path: str) -> dict[str, str]:
    (folder / "train.toml").write_text(BAD.format(path=path), encoding="utf-8")
    (folder / "data.toml").write_text('resolutions = [64]\n[[directory]]\npath = "images"\n', encoding="utf-8")
    with pytest.raises(ConfigFaults) as caught:
        check.load(folder / "train.toml")
    return {fault.key: fault.problem for fault in caught.value.faults}


def test_both_passes_report_together_and_a_faulty_key_is_not_checked_on_disk(tmp_path: Path) -> None:
    faults = _faults(tmp_path, 'diffusers_path = "nowhere"')
    assert {"max_steps", "micro_batch_sise_per_gpu", "model.diffusers_path", "directory[0].path"} == set(faults)
    assert faults["model.diffusers_path"] == "no such folder"
    faults = _faults(tmp_path, "")
    assert {key for key in faults if key.startswith("model")} == {"model.diffusers_path"}
    assert faults["model.diffusers_path"] != "no such folder"


def faulty_keys(project: Project, *overrides: str) -> set[str]:
    with pytest.raises(ConfigFaults) as caught:
        check.load(project.train_toml, overrides)
    return {fault.key for fault in caught.value.faults}


def test_a_folder_is_not_compared_with_the_default_size_if_another_was_meant(fresh_project: Project) -> None:
    assert faulty_keys(fresh_project, "model.size=tiny") == {"model.size"}
    text = fresh_project.train_toml.read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.startswith("size =")]
    fresh_project.train_toml.write_text("\n".join(lines), encoding="utf-8")
    typo = ("model.shape.num_layers=2", "model.shape.num_head=2")
    assert faulty_keys(fresh_project, *typo) == {"model.shape.num_head", "model.shape.num_heads"}


def test_encoders_that_do_not_fit_a_size_come_with_a_remedy(fresh_project: Project) -> None:
    with pytest.raises(
        ConfigFaults, match=r"needs 4096.*write \[model\.shape\] instead of a size.*`sd3-light new icons`"
    ):
        check.load(fresh_project.train_toml, ["model.size=sd3_light"])
