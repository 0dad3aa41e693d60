"""The schema has every key of the reference, and its generated page is up to date."""

from pathlib import Path

import pytest

from sd3_light.config import ModelConfig
from sd3_light.config.base import describe_type, field_types, walk_tables
from sd3_light.config.docs import PAGE, render_config_page
from sd3_light.config.schema_dataset import DatasetDefaults, DirectoryConfig
from sd3_light.config.schema_train import ALIASES, TrainConfig
from sd3_light.config.validation import SCHEMAS, is_secret_key

ROOT = Path(__file__).parents[3]
TRAIN_KEYS = {
    "": """output_dir dataset eval_datasets epochs max_steps seed micro_batch_size_per_gpu eval_micro_batch_size_per_gpu
        gradient_accumulation_steps eval_gradient_accumulation_steps gradient_clipping pipeline_stages partition_method
        partition_split activation_checkpointing compile warmup_steps lr_scheduler force_constant_lr pseudo_huber_c
        save_every_n_steps save_every_n_epochs save_every_n_examples save_dtype checkpoint_every_n_steps
        checkpoint_every_n_epochs checkpoint_every_n_minutes keep_last_n_checkpoints eval_every_n_steps
        eval_every_n_epochs eval_every_n_examples eval_before_first_step logging_steps steps_per_print x_axis_examples
        caching_batch_size caching_num_workers caching_device map_num_proc num_dataloader_workers
        dataloader_prefetch_per_worker prefetch_batches_per_worker sd3_streaming_dataset sd3_shard_size
        sd3_manifest_timeout_sec cache_dir stream_cache_dir stream_cache_gb shuffle_window small_buckets parallel
        zero_stage dist_timeout_sec max_nonfinite_steps freeze
        keep_last_n_exports model optimizer ema adapter sampling monitoring""",
    "model": """type train_type diffusers_path num_layers dtype transformer_dtype t5_max_length timestep_sample_method
        sigmoid_scale shift flux_shift enable_uncond_text_dropout uncond_text_dropout_prob text_recon_gamma
        text_recon_target_layer size init qk_norm text_tokens uncond_text""",
    "optimizer": "type lr betas weight_decay eps",
    "ema": "enable decay update_every track",
    "ema.track": "name decay power_width",
    "adapter": "type rank alpha dropout dtype init_from_existing target_modules use_rslora use_dora",
    "sampling": "prompts seeds every_n_steps steps guidance",
    "monitoring": "enable_wandb wandb_tracker_name wandb_run_name wandb_api_key enable_trackio",
}
SHARED_KEYS = """resolutions enable_ar_bucket ar_buckets min_ar max_ar num_ar_buckets side_step size_buckets
    caption_prefix num_repeats flip shuffle_tags cache_shuffle_num cache_shuffle_delimiter subsample_ratio
    skip_empty_caption image_column caption_column"""


@pytest.mark.parametrize("name", TRAIN_KEYS)
def test_every_reference_key_of_the_train_toml_exists(name: str) -> None:
    table = dict(walk_tables(TrainConfig))[name]
    known = set(table.model_fields) | (set(ALIASES) if name == "" else set())
    assert not set(TRAIN_KEYS[name].split()) - known


def test_every_reference_key_of_the_dataset_toml_exists() -> None:
    limits = {"max_image_mb", "min_side", "max_crop", "no_upscale"}
    ours = {*limits, "keep_tokens", "tag_dropout", "where", "exclude", "duplicates", "caption_weights"}
    ours |= {"frames", "fps", "validation"}  # beyond the reference
    assert set(DatasetDefaults.model_fields) == set(SHARED_KEYS.split()) | ours
    own = {"path", "mask_path", "default_mask_file", "rejected", "references"}
    assert set(DirectoryConfig.model_fields) == set(SHARED_KEYS.split()) | ours | own


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


def test_every_key_has_a_description_and_a_type_text() -> None:
    for schema in SCHEMAS.values():
        for name, table in walk_tables(schema):
            for key, annotation in field_types(table).items():
                assert table.model_fields[key].description, f"{name}.{key}"
                assert describe_type(annotation), f"{name}.{key}"


def test_only_the_wandb_key_counts_as_secret() -> None:
    keys = {key for schema in SCHEMAS.values() for _, table in walk_tables(schema) for key in table.model_fields}
    assert {key for key in keys if is_secret_key(key)} == {"wandb_api_key"}


def test_the_page_matches_the_schema() -> None:
    written = (ROOT / PAGE).read_text(encoding="utf-8")
    assert written == render_config_page(), "run: python -m sd3_light.config.docs"
