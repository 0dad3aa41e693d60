"""Every key and value of diffusion-pipe's example configs and model pages is accepted, or rejected with a remedy.

The lists are facts about its configs at 8f83dbf (20 August 2026): examples/*.toml, docs/supported_models.md and the
keys that its code reads.
"""

from pathlib import Path
from typing import Any

import pytest

from sd3_light.config.family_keys import FAMILY_NAMES
from sd3_light.config.unsupported import FAMILIES, FAMILY_PROBLEM, UNSUPPORTED_KEYS

ROOT = Path(__file__).parents[3]
ACCEPTED = {
    "": """epochs = 1000 | max_steps = 5000 | micro_batch_size_per_gpu = 1
        | micro_batch_size_per_gpu = [[256, 4], [1024, 1]] | pipeline_stages = 1
        | gradient_accumulation_steps = 4 | gradient_clipping = 1 | gradient_clipping = 1.0 | warmup_steps = 100
        | force_constant_lr = 1e-5 | lr_scheduler = "constant" | lr_scheduler = "linear"
        | lr_scheduler = "cosine" | pseudo_huber_c = 0.5 | eval_every_n_epochs = 1 | eval_every_n_steps = 100
        | eval_every_n_examples = 1000 | eval_before_first_step = true | eval_micro_batch_size_per_gpu = 1
        | eval_gradient_accumulation_steps = 1 | save_every_n_epochs = 2 | save_every_n_steps = 100
        | save_every_n_examples = 1000 | checkpoint_every_n_epochs = 1 | checkpoint_every_n_minutes = 120
        | activation_checkpointing = true | partition_method = "parameters" | save_dtype = "bfloat16"
        | caching_batch_size = 8 | map_num_proc = 32 | compile = true | steps_per_print = 1 | logging_steps = 1
        | x_axis_examples = true""",
    "model": " | ".join(f'type = "{name}"' for name in FAMILY_NAMES)
    + """ | guidance = 1.0 | dtype = "bfloat16" | timestep_sample_method = "logit_normal" | sigmoid_scale = 1.0
        | timestep_sample_method = "uniform" | flux_shift = true | shift = 3""",
    "adapter": 'type = "lora" | type = "lokr" | rank = 32 | dtype = "bfloat16" | dropout = 0.0',
    "optimizer": """type = "adamw" | type = "AdamW" | type = "AdamW8bit" | type = "Prodigy" | type = "Adafactor"
        | lr = 2e-5 | lr = 1 | betas = [0.9, 0.99] | weight_decay = 0.01 | eps = 1e-8""",
    "monitoring": 'enable_wandb = false | wandb_api_key = "" | wandb_tracker_name = "" | wandb_run_name = ""',
}
REJECTED_KEYS = {
    "": """image_micro_batch_size_per_gpu image_eval_micro_batch_size_per_gpu eval_image_micro_batch_size_per_gpu
        blocks_to_swap disable_block_swap_for_eval reentrant_activation_checkpointing uncond_fraction
        huber_delta smooth_l1_beta resume_from_checkpoint regenerate_cache""",
    "model": """ckpt_path checkpoint_path single_file_path transformer_path diffusion_model vae_path vae audio_vae
        llm_path clip_path t5_path byt5_path llama3_path llm_adapter_path text_encoder_path text_encoder
        text_encoders text_encoder_fp8 text_encoder_nf4 cache_text_embeddings merge_adapters llama3_4bit
        max_llama3_sequence_length max_sequence_length first_frame_conditioning_p bypass_guidance_embedding
        min_t max_t lumina_shift image_shift cfg v_pred min_snr_gamma debiased_estimation_loss
        multiscale_loss_weight unet_lr text_encoder_1_lr text_encoder_2_lr llm_adapter_lr self_attn_lr
        cross_attn_lr mlp_lr mod_lr""",
    "adapter": """decompose_factor rank_dropout fuse_adapters exclude_modules""",
    "optimizer": """stabilize gradient_release beta2_half_life""",
    "monitoring": """wandb_host""",
}
"""Keys that are rejected with any value."""
REJECTED = {
    "": """activation_checkpointing = "unsloth" | video_clip_mode = "single_beginning"
        | video_clip_mode = "single_middle" """,
    "model": """transformer_dtype = "float8" | transformer_dtype = "float8_e4m3fn" | transformer_dtype = "float8_e5m2"
        | transformer_dtype = "nf4" | diffusion_model_dtype = "float8" """,
    "adapter": "rank = 1e6 | rank = 1000000",
    "optimizer": """type = "adamw_optimi" | type = "AdamW_Optimi" | type = "StableAdamW" | type = "AdamW8bitKahan"
        | type = "adamw8bitkahan" | type = "automagic" | type = "Automagic" | type = "GenericOptim" | type = "offload"
        | type = "SGD" """,
}
DATASET_ACCEPTED = (
    "resolutions = [512]",
    "resolutions = [512, 1024]",
    "resolutions = [[1280, 720]]",
    "num_repeats = 10",
    "skip_empty_caption = false",
    "subsample_ratio = 0.5",
    'caption_prefix = "an image of "',
    "enable_ar_bucket = true\nmin_ar = 0.5\nmax_ar = 2.0\nnum_ar_buckets = 9",
    "enable_ar_bucket = true\nar_buckets = [[512, 512], [448, 576]]",
    "enable_ar_bucket = true\nar_buckets = [1.0, 1.5]",
    'shuffle_tags = true\ncache_shuffle_num = 10\ncache_shuffle_delimiter = ", "',
)
DATASET_REJECTED = ("frame_buckets = [1, 33]", 'control_path = "control"')
DATASET_REJECTED += ("online_captions = true", "shuffle_metadata = false")
UPSTREAM_FAMILIES = """sdxl flux ltx-video hunyuan-video cosmos lumina_2 wan chroma hidream cosmos_predict2 omnigen2
    qwen_image hunyuan_image auraflow z_image hunyuan_video_15 flux2 anima ernie_image ltx2 ideogram4 krea2
    minimax_h3"""


def rows(tables: dict[str, str]) -> list[tuple[str, str]]:
    return [(table, line.strip()) for table, lines in tables.items() for line in lines.split(" | ")]


def place(table: str, line: str) -> dict[str, str]:
    """Return the arguments of `Files` that write a line into a table of an otherwise valid config."""
    if table in ("", "model"):
        return {table or "top": line}
    other = 'type = "lokr"\n' if table == "adapter" and "type" not in line else ""
    return {"tables": f"[{table}]\n{other}{line}"}


@pytest.mark.parametrize(("table", "line"), rows(ACCEPTED))
def test_a_supported_line_is_accepted(files: Any, table: str, line: str) -> None:
    files.load(**place(table, line))


def test_every_key_that_is_not_supported_is_in_the_list() -> None:
    """`test_unsupported.py` writes every key of the list into a config."""
    rejected = {(entry.table, entry.key) for entry in UNSUPPORTED_KEYS if entry.file_kind == "train"}
    named = {(table, key) for table, keys in REJECTED_KEYS.items() for key in keys.split()}
    assert named <= rejected


@pytest.mark.parametrize(("table", "line"), rows(REJECTED))
def test_an_unsupported_line_says_why_and_what_to_write_instead(only_fault: Any, table: str, line: str) -> None:
    key, value = line.split(" = ", 1)
    fault = only_fault(**place(table, line))
    assert fault.key == (f"{table}.{key}" if table else key)
    assert fault.problem.startswith("not supported: ")
    assert fault.hint
    if key in ("type", "transformer_dtype"):
        assert fault.value == value  # as it was written


@pytest.mark.parametrize("line", DATASET_ACCEPTED)
def test_a_supported_line_of_a_dataset_is_accepted(files: Any, line: str) -> None:
    resolutions = "" if "resolutions" in line else "resolutions = [512]\n"
    files.load(dataset=f'{resolutions}{line}\n[[directory]]\npath = "images"\n')


@pytest.mark.parametrize("line", DATASET_REJECTED)
def test_an_unsupported_line_of_a_dataset_says_why_and_what_to_write_instead(only_fault: Any, line: str) -> None:
    fault = only_fault(dataset=f'resolutions = [512]\n[[directory]]\npath = "images"\n{line}\n')
    assert fault.key == f"directory[0].{line.split(' = ')[0]}"
    assert fault.problem.startswith("not supported: ")
    assert fault.hint


def test_a_size_bucket_with_frames_says_what_to_write_instead(only_fault: Any) -> None:
    fault = only_fault(dataset='size_buckets = [[960, 704, 1]]\n[[directory]]\npath = "images"\n')
    assert "write [width, height]" in fault.problem


def test_every_family_of_other_trainers_is_trained_or_named() -> None:
    assert {name for name in UPSTREAM_FAMILIES.split() if name not in FAMILY_NAMES} == FAMILIES.keys()
    for instead in FAMILIES.values():
        scripts = [word for word in instead.split() if word.startswith("examples/")]
        assert "docs/reference/tasks.md" in instead
        assert all((ROOT / script).is_file() for script in scripts)


@pytest.mark.parametrize("family", [*FAMILIES, "SDXL"])
def test_another_family_is_one_message_with_what_trains_it(files: Any, family: str) -> None:
    """Its other keys are not reported: none of them makes it an SD3 config."""
    (fault,) = files.faults(
        top="blocks_to_swap = 32\nvideo_clip_mode = 'single_beginning'",
        model=f"type = '{family}'\nckpt_path = 'folder'\ntransformer_dtype = 'float8'",
        tables="[optimizer]\ntype = 'AdamW8bitKahan'\nstabilize = false",
        dataset="frame_buckets = [1, 33]\n[[directory]]\npath = 'videos'\n",
    )
    assert (fault.key, fault.problem, fault.value) == ("model.type", FAMILY_PROBLEM, f'"{family}"')
    assert fault.hint == FAMILIES[family.lower()]


def test_a_family_from_the_command_line_names_it(files: Any) -> None:
    (fault,) = files.faults(overrides=("model.type=sdxl",))
    assert fault.file == "--set"
