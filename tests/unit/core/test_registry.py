"""Families by name and by folder; every pipeline of diffusers near one is trained, or refused with its own reason."""

import json
import subprocess
from pathlib import Path

import diffusers
import pytest

from sd3_light.config.family_keys import FAMILY_NAMES
from sd3_light.config.faults import UserError
from sd3_light.core.registry import family_named, family_of_class, family_of_folder

PREFIXES = ("StableDiffusion3", "Flux", "QwenImage", "ZImage", "Sana", "Wan", "Krea2", "PRX")
TRAINED = {family_named(name).pipeline for name in FAMILY_NAMES}
PIPELINES = [name for name in dir(diffusers) if name.endswith("Pipeline") and name.startswith(PREFIXES)]
OPTIONAL = {"pag_applied_layers", "is_distilled", "transformer_2", "boundary_ratio", "expand_timesteps"}
OPTIONAL |= {"image_encoder", "feature_extractor"}
"""Arguments that are settings, or parts that are null in the folders of a family."""


def test_the_list_is_that_of_diffusers() -> None:
    assert set(PIPELINES) > TRAINED
    assert len(PIPELINES) > 60


@pytest.mark.parametrize("kind", PIPELINES)
def test_a_pipeline_is_trained_or_refused_with_its_own_reason(tmp_path: Path, kind: str) -> None:
    name = "modular_model_index.json" if "Modular" in kind else "model_index.json"
    (tmp_path / name).write_text(json.dumps({"_class_name": kind}))
    if kind in TRAINED:
        assert family_of_folder(tmp_path).pipeline == kind
        return
    with pytest.raises(UserError, match=f"describes a '{kind}', which is not trained: ") as error:
        family_of_folder(tmp_path)
    message = str(error.value)
    assert "\n" not in message
    assert any(plain in message.rpartition("; ")[2] for plain in TRAINED), "the remedy names a trained pipeline"


def test_pipelines_with_the_same_weights_have_the_same_parts() -> None:
    """So that another class in `model_index.json` is enough. Parts that a pipeline can do without do not count."""
    import inspect

    from sd3_light.core.other_pipelines import same_weights

    pairs = {kind: plain for kind in PIPELINES if (plain := same_weights(kind)) is not None}
    assert len(pairs) == 14
    for kind, plain in pairs.items():
        parts = [set(inspect.signature(getattr(diffusers, name).__init__).parameters) for name in (kind, plain)]
        assert parts[0] - OPTIONAL == parts[1] - OPTIONAL, kind


def test_the_reasons_need_no_family_and_no_torch() -> None:
    code = """
import json, pathlib, sys, tempfile
from sd3_light.config.faults import UserError
from sd3_light.core.registry import family_of_folder
folder = pathlib.Path(tempfile.mkdtemp())
(folder / "model_index.json").write_text(json.dumps({"_class_name": "FluxFillPipeline"}))
try:
    family_of_folder(folder)
except UserError:
    print([name for name in sys.modules if name in ("torch", "diffusers") or name.startswith("sd3_light.families")])
"""
    environment = {"PYTHONPATH": str(Path(__file__).parents[3])}
    from tests.warm import REAL_PYTHON

    done = subprocess.run([REAL_PYTHON, "-P", "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


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
