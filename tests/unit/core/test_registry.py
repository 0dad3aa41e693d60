"""Families by name and by folder."""

import json
from pathlib import Path

import pytest

from sd3_light.config.faults import UserError
from sd3_light.core.registry import family_named, family_of_class, family_of_folder


@pytest.mark.parametrize(
    ("file", "kind"),
    [
        ("model_index.json", "StableDiffusion3Pipeline"),
        ("config.json", "SD3Transformer2DModel"),
        ("transformer/config.json", "SD3Transformer2DModel"),
    ],
)
def test_a_folder_names_its_family(tmp_path: Path, file: str, kind: str) -> None:
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"_class_name": kind}))
    assert family_of_folder(tmp_path) is family_named("sd3")


def test_a_folder_without_a_class_is_sd3(tmp_path: Path) -> None:
    assert family_of_folder(tmp_path) is family_named("sd3")
    (tmp_path / "config.json").write_text(json.dumps({"num_layers": 1}))
    assert family_of_folder(tmp_path) is family_named("sd3")


def test_an_unknown_class_and_a_file_that_is_not_json_are_named(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "NoPipeline"}))
    with pytest.raises(UserError, match=r"model_index.json describes a 'NoPipeline', which is of no known family"):
        family_of_folder(tmp_path)
    (tmp_path / "model_index.json").write_text("{")
    with pytest.raises(UserError, match=r"model_index.json cannot be read .*; download or write the folder again"):
        family_of_folder(tmp_path)


def test_a_class_names_its_family_also_through_its_parents() -> None:
    from diffusers import AuraFlowTransformer2DModel, SD3Transformer2DModel

    class Changed(SD3Transformer2DModel):
        pass

    assert family_of_class(SD3Transformer2DModel) is family_of_class(Changed) is family_named("sd3")
    assert family_of_class(AuraFlowTransformer2DModel) is None
