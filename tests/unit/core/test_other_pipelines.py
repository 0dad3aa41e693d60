"""Every pipeline of diffusers that is near a family is trained, or refused with its own reason and remedy."""

import json
import subprocess
from pathlib import Path

import diffusers
import pytest

from sd3_light.config.family_keys import FAMILY_NAMES
from sd3_light.config.faults import UserError
from sd3_light.core.registry import family_named, family_of_folder

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
