"""The schema has the defaults of the reference, and its generated page, which lists every key, is up to date."""

from pathlib import Path

import pytest
from pydantic_core import PydanticCustomError

from sd3_light.config import ModelConfig
from sd3_light.config.base import describe_type, field_types, parse_steps_or_share, walk_tables
from sd3_light.config.docs import PAGE, render_config_page
from sd3_light.config.schema_train import TrainConfig
from sd3_light.config.validation import SCHEMAS, is_secret_key

ROOT = Path(__file__).parents[3]


def test_defaults_that_the_reference_fixes() -> None:
    schemas = dict(walk_tables(TrainConfig))
    defaults = {
        "": {"gradient_clipping": 1.0, "pipeline_stages": 1, "dataloader_prefetch_per_worker": 1, "zero_stage": 1},
        "model": {"t5_max_length": 256, "sigmoid_scale": 1.0, "enable_uncond_text_dropout": False, "qk_norm": None},
        "ema": {"decay": 0.99, "update_every": 100},
    }
    for name, values in defaults.items():
        assert {key: schemas[name].model_fields[key].default for key in values} == values
    model = ModelConfig(diffusers_path=Path("folder"))
    assert (model.uncond_text_dropout, model.uncond_text_dropout_prob) == ("per_encoder", 0.464)
    assert model.text_recon_gamma == 0.0
    assert TrainConfig.model_fields["sd3_streaming_dataset"].default is True
    joint = ModelConfig(diffusers_path=Path("folder"), uncond_text_dropout="joint")
    assert (joint.uncond_text_dropout_prob, round(0.464**3, 3)) == (0.1, 0.1), "a tenth of the samples have no text"


def test_every_key_has_a_description_and_a_type_text_and_one_is_secret() -> None:
    for schema in SCHEMAS.values():
        for name, table in walk_tables(schema):
            for key, annotation in field_types(table).items():
                assert table.model_fields[key].description, f"{name}.{key}"
                assert describe_type(annotation), f"{name}.{key}"
    keys = {key for schema in SCHEMAS.values() for _, table in walk_tables(schema) for key in table.model_fields}
    assert {key for key in keys if is_secret_key(key)} == {"wandb_api_key"}


def test_the_page_matches_the_schema() -> None:
    written = (ROOT / PAGE).read_text(encoding="utf-8")
    assert written == render_config_page(), "run: python -m sd3_light.config.docs"


def test_a_share_of_all_steps_is_below_one() -> None:
    assert [parse_steps_or_share(value) for value in (0, 1, 0.0, 0.99)] == [0, 1, 0.0, 0.99]
    for value in (1.0, -0.1, -1, True):
        with pytest.raises(PydanticCustomError, match="not a number of steps or a share"):
            parse_steps_or_share(value)
