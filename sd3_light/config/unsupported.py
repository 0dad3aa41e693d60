# ruff: noqa: E501  (one line per key reads better than wrapped lines)
"""Keys, values and model families of other trainers that are rejected, each with the reason and a replacement."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sd3_light.config.family_keys import FAMILY_NAMES
from sd3_light.config.faults import Fault
from sd3_light.config.validation import format_value


@dataclass(frozen=True)
class UnsupportedKey:
    """A rejected key, or one rejected `value` of it (strings in any case). Keys of the dataset TOML are rejected in
    directories too."""

    file_kind: str
    table: str
    key: str
    reason: str
    instead: str
    value: str | float | None = None

    @property
    def dotted_key(self) -> str:
        """The key with its table."""
        return f"{self.table}.{self.key}" if self.table else self.key

    def rejects(self, value: Any) -> bool:
        """Return whether the key is rejected with this value."""
        written = value.lower() if isinstance(value, str) else value
        return self.value is None or written == self.value


_FOLDER = "give the complete diffusers folder as model.diffusers_path"
_FILE = "give the single file (.safetensors) as model.init and a complete diffusers folder as model.diffusers_path"
_INIT = "give the folder or file as model.init"
_ITS_INIT = "give its folder or file as model.init"
_OF_SD3 = (_FILE, _INIT, _ITS_INIT)  # other families start from folders only
_CLIP_START = "a clip is the start of its video"
_ONE_BATCH = "images and clips have the same key"
_ADAMW = 'write type = "adamw"'
_FP32 = (
    "master weights are float32, or bfloat16 with stochastic rounding, so compensation for bf16 rounding is not needed"
)
_ADAPTIVE = "it sets its own learning rate; here the learning rate is a function of the step"
_KOHYA = "it has this name in sd-scripts"
_OTHER_FAMILY = "it belongs to none of the model families that are trained here"
_NOISE_LOSS = "it is for models that predict noise; those that are trained here predict a velocity"
_ONE_RATE = "all trained weights have one learning rate"
_ENCODERS = "the text encoders are part of the model folder"
_NO_FLOAT8 = "quantized weights have another key"
_BFLOAT16 = (
    'write transformer_dtype = "bfloat16", and base_bits = 8 or 4 in [adapter] to quantize the weights under a LoRA'
)
_BLOCK_SWAP = "blocks are swapped in evaluation and sampling, too"
_LOSSES = "the loss is the mean squared error or pseudo-Huber"
_FLAG = "it is an option of the command"


def _in_table(file_kind: str, table: str, *rows: tuple[Any, ...]) -> list[UnsupportedKey]:
    """Return keys of one table; a row has keys, reason and replacement, and the value if only one is rejected."""
    return [UnsupportedKey(file_kind, table, key, *row) for keys, *row in rows for key in keys.split()]


def _of_sd_scripts(file_kind: str, keys: Mapping[str, str]) -> list[UnsupportedKey]:
    """Return top-level keys of sd-scripts, with their replacements."""
    return _in_table(file_kind, "", *((names, _KOHYA, instead) for names, instead in keys.items()))


# fmt: off
UNSUPPORTED_KEYS: tuple[UnsupportedKey, ...] = (
    *_in_table("train", "",
        ("blocks_to_swap", "it has another name here", "write swap_blocks, for all weights with gradient_release = true"),
        ("disable_block_swap_for_eval", _BLOCK_SWAP, "remove the key"),
        ("reentrant_activation_checkpointing", "only non-reentrant checkpointing is used", "use activation_checkpointing = true"),
        ("activation_checkpointing", "it has another name here", 'write activation_checkpointing = "host", or true to keep the inputs of blocks on the GPU', "unsloth"),
        ("video_clip_mode", _CLIP_START, "remove the key"),
        ("framerate", "the rate of clips is a key of the dataset TOML", "write fps there"),
        ("image_micro_batch_size_per_gpu", _ONE_BATCH, "use micro_batch_size_per_gpu"),
        ("image_eval_micro_batch_size_per_gpu eval_image_micro_batch_size_per_gpu", _ONE_BATCH, "use eval_micro_batch_size_per_gpu"),
        ("uncond_fraction", "the dropout of captions has keys in [model]", 'write enable_uncond_text_dropout = true, uncond_text_dropout = "joint" and uncond_text_dropout_prob in [model]'),
        ("huber_delta smooth_l1_beta", _LOSSES, "use pseudo_huber_c"),
        ("resume_from_checkpoint", _FLAG, "run `sd3-light train train.toml --resume`"),
        ("regenerate_cache", _FLAG, "run `sd3-light cache train.toml --regenerate-cache`"),
        ("save_every_n_hours", "exports are scheduled by training progress, not by time", "use save_every_n_steps; for checkpoints use checkpoint_every_n_minutes"),
        ("compile_mode", "only the default compile mode is used", "use compile = true"),
    ),
    *_in_table("train", "model",
        ("ckpt_path checkpoint_path single_file_path", "a single file holds only part of the model", _FILE),
        ("transformer_path diffusion_model", "the denoiser's weights have another key", _INIT),
        ("unet_path", "the denoiser is a transformer", _ITS_INIT),
        ("vae_path vae", "the VAE is part of the model folder", _FOLDER),
        ("llm_path", "the text encoders are those of the model folder", _FOLDER),
        ("clip_path t5_path text_encoder_path text_encoders text_encoder", _ENCODERS, _FOLDER),
        ("first_frame_conditioning_p", "training with a given first frame is not supported", "remove the key"),
        ("min_t max_t", "timesteps are drawn from the whole interval (0, 1)", "change their distribution with timestep_sample_method, sigmoid_scale or shift"),
        ("bypass_guidance_embedding", "a denoiser runs as it was trained, with its guidance embedding", "write guidance, a number; SD3 has none"),
        ("transformer_dtype", _NO_FLOAT8, _BFLOAT16, "float8"),
        ("transformer_dtype", _NO_FLOAT8, _BFLOAT16, "float8_e4m3fn"),
        ("transformer_dtype", _NO_FLOAT8, _BFLOAT16, "float8_e5m2"),
        ("transformer_dtype", "quantized weights have another key", _BFLOAT16, "nf4"),
        ("diffusion_model_dtype", "the denoiser's dtype has another key", _BFLOAT16),
        ("text_encoder_fp8 text_encoder_nf4", "the text encoders run while caching, in model.dtype", "remove the key"),
        ("cache_text_embeddings", "text features are always cached", "remove the key"),
        ("max_sequence_length", "the length of the text has another key", "write text_max_length, or for SD3 t5_max_length"),
        ("merge_adapters", "adapters are not merged before training", "run `sd3-light lora merge` and give the new folder as model.diffusers_path"),
        ("image_shift", "images and clips have one shift", "write it as shift"),
        ("lumina_shift", _OTHER_FAMILY, "use flux_shift, a shift that grows with the resolution too"),
        ("cfg", _OTHER_FAMILY, "remove the key; for sample images use sampling.guidance"),
        ("audio_vae byt5_path llama3_path llama3_4bit max_llama3_sequence_length llm_adapter_path llm_adapter_lr", _OTHER_FAMILY, "remove the key"),
        ("v_pred", _NOISE_LOSS, "remove the key"),
        ("min_snr_gamma debiased_estimation_loss", _NOISE_LOSS, "remove the key; timestep_sample_method and shift weight the timesteps"),
        ("multiscale_loss_weight", _LOSSES, "remove the key"),
        ("unet_lr self_attn_lr cross_attn_lr mlp_lr mod_lr", _ONE_RATE, "write lr in [optimizer]"),
        ("text_encoder_1_lr text_encoder_2_lr", "text encoders are always frozen", "remove the key"),
    ),
    *_in_table("train", "optimizer",
        ("type", _FP32, _ADAMW, "adamw_optimi"),
        ("type", _FP32, _ADAMW, "stableadamw"),
        ("type", _FP32, 'write type = "adamw8bit"', "adamw8bitkahan"),
        ("type", _ADAPTIVE, _ADAMW, "automagic"),
        ("type", "optimizers cannot be composed", 'write type = "adamw" or "muon"', "genericoptim"),
        ("type", "optimizer state is in host memory with the blocks that it belongs to", 'write type = "adamw8bit", gradient_release = true and swap_blocks = "all"', "offload"),
        ("type", "it is not available", _ADAMW, "sgd"),
        ("stabilize", "only AdamW8bitKahan has it", "remove the key"),
        ("beta2_half_life", "betas are written as numbers", "write betas; the second is 0.5 ** (samples per step / beta2_half_life)"),
        ("gradient_release", "it is a key of the top level", "write gradient_release = true before the first table, and gradient_clipping = 0"),
    ),
    *_in_table("train", "adapter",
        ("fuse_adapters", "adapters are not merged before training", "run `sd3-light lora merge` and give the new folder as model.diffusers_path"),
        ("rank", "the largest rank is 65536", "write rank = 65536: a LoKr of that rank stores full matrices too", 1e6),
        ("decompose_factor", "the two factors of a LoKr are as square as possible, as with decompose_factor = -1", "remove the key"),
        ("rank_dropout", "dropout has one key for all adapters", "write dropout"),
        ("exclude_modules exclude_linear_modules", "layers are selected, not excluded", "use adapter.target_modules"),
    ),
    *_in_table("train", "monitoring",
        ("wandb_host", "the wandb client reads its host from the environment", "set WANDB_BASE_URL"),
    ),
    *_in_table("dataset", "",
        ("frame_buckets", "the lengths of clips have another name", "write frames: a number, or a list without the 1 of images"),
        ("video_clip_mode", _CLIP_START, "remove the key"),
        ("control_path", "reference images have another key", 'write references = ["FOLDER"]'),
        ("online_captions", "a changed caption updates the cache", "remove the key"),
        ("shuffle_metadata", "the order of samples depends on the seed alone", "remove the key"),
        ("captions_file", "the caption file is recognized by its name", "name it captions.json and put it in the directory"),
    ),
    *_of_sd_scripts("train", {
        "pretrained_model_name_or_path": "write diffusers_path in [model]: a folder in diffusers' layout, or its id on the hub",
        "dataset_config": "write dataset",
        "train_data_dir": "write a dataset TOML and name it as dataset",
        "network_module": "write [adapter]",
        "network_dim": "write rank in [adapter]",
        "network_alpha": "write alpha in [adapter]",
        "network_weights": "write init_from_existing in [adapter]",
        "network_args": "write target_modules in [adapter]",
        "network_train_unet_only text_encoder_lr": "remove the key: text encoders are always frozen",
        "learning_rate unet_lr": "write lr in [optimizer]",
        "optimizer_type": "write type in [optimizer]",
        "optimizer_args": "write betas, weight_decay or eps in [optimizer]",
        "lr_warmup_steps": "write warmup_steps",
        "max_train_epochs": "write epochs",
        "max_train_steps": "write max_steps",
        "train_batch_size": "write micro_batch_size_per_gpu",
        "max_grad_norm": "write gradient_clipping",
        "gradient_checkpointing": "write activation_checkpointing = true",
        "mixed_precision": 'write transformer_dtype = "bfloat16" in [model]',
        "save_precision": "write save_dtype",
        "cache_latents cache_latents_to_disk cache_text_encoder_outputs cache_text_encoder_outputs_to_disk": "remove the key: latents and text features are always cached",
        "weighting_scheme": "write timestep_sample_method in [model]",
        "training_shift": "write shift in [model]",
        "t5xxl_max_token_length": "write text_max_length in [model], or for SD3 t5_max_length",
        "sample_prompts": "write prompts in [sampling]",
        "sample_every_n_steps": "write every_n_steps in [sampling]",
    }),
    *_of_sd_scripts("dataset", {
        "general": "write its keys at the top of the file",
        "datasets": "write one [[directory]] with a path per subset",
        "image_dir": "write path",
        "class_tokens": "write the text into NAME.txt next to each image without a caption",
        "caption_extension": "remove the key: NAME.txt and NAME.caption are read",
        "shuffle_caption": "write shuffle_tags = true and cache_shuffle_num = 8",
        "caption_separator": "write cache_shuffle_delimiter",
        "caption_suffix": "write it into the captions",
        "caption_tag_dropout_rate": "write tag_dropout",
        "caption_dropout_rate": "write enable_uncond_text_dropout in [model] of the train TOML",
        "resolution": "write resolutions, a list",
        "batch_size": "write micro_batch_size_per_gpu in the train TOML",
        "enable_bucket": "write enable_ar_bucket",
        "min_bucket_reso": "write min_ar",
        "max_bucket_reso": "write max_ar",
        "bucket_reso_steps": "write num_ar_buckets",
        "bucket_no_upscale": "write no_upscale",
        "flip_aug": "write flip",
        "is_reg": "write the images of the class as another [[directory]]",
        "metadata_file": "remove the key, and put the file into the folder of the images as the only table there: meta_cap.json",
    }),
)
# fmt: on


FAMILY_PROBLEM = "a config does not train this family"
_IMAGE_SCRIPT = "write a script for it (docs/reference/tasks.md, section 8), starting from examples/own_family.py"
_VIDEO_SCRIPT = (
    "write a script for it (docs/reference/tasks.md, sections 7 and 8), starting from examples/own_family.py"
)
_OTHER_LOSS = "write a script with a custom forward (docs/reference/tasks.md, section 2): its loss is not flow matching"
FAMILIES: dict[str, str] = {
    "anima": _IMAGE_SCRIPT,
    "auraflow": _IMAGE_SCRIPT,
    "chroma": _IMAGE_SCRIPT,
    "cosmos": _OTHER_LOSS,
    "cosmos_predict2": _IMAGE_SCRIPT,
    "ernie_image": _IMAGE_SCRIPT,
    "hidream": _IMAGE_SCRIPT,
    "hunyuan-video": _VIDEO_SCRIPT,
    "hunyuan_image": _IMAGE_SCRIPT,
    "hunyuan_video_15": _VIDEO_SCRIPT,
    "ideogram4": _IMAGE_SCRIPT,
    "ltx-video": _VIDEO_SCRIPT,
    "ltx2": _VIDEO_SCRIPT,
    "lumina_2": _IMAGE_SCRIPT,
    "minimax_h3": _VIDEO_SCRIPT,
    "omnigen2": _IMAGE_SCRIPT,
    "sdxl": _OTHER_LOSS,
}
"""`model.type` in other trainers without a family here, and what to do instead."""


def pop_unsupported(file_kind: str, raw: dict[str, Any], file: str, table: str = "", prefix: str = "") -> list[Fault]:
    """Remove the rejected keys of one table from `raw` and return their faults, so that each is reported once."""
    faults = []
    tables = ("", table) if file_kind == "dataset" else (table,)
    for entry in UNSUPPORTED_KEYS:
        if entry.file_kind != file_kind or entry.table not in tables or entry.key not in raw:
            continue
        if not entry.rejects(raw[entry.key]):
            continue
        value = None if entry.value is None else format_value(raw[entry.key])
        problem = f"not supported: {entry.reason}"
        hint = _FOLDER if entry.instead in _OF_SD3 and _names_other_family(raw) else entry.instead
        faults.append(Fault(file, prefix + entry.key, problem, value=value, hint=hint))
        del raw[entry.key]
    return faults


def _names_other_family(model: Mapping[str, Any]) -> bool:
    """Return whether a [model] table names a family that is not SD3."""
    name = model.get("type")
    return isinstance(name, str) and name.lower() in FAMILY_NAMES and name.lower() != "sd3"


def family_fault(raw: Mapping[str, Any], file: str) -> Fault | None:
    """Return the fault of a train TOML for another family, or None. Its other keys describe that family, so their
    faults would only mislead."""
    model = raw.get("model")
    name = model.get("type") if isinstance(model, dict) else None
    instead = FAMILIES.get(name.lower()) if isinstance(name, str) else None
    if instead is None:
        return None
    return Fault(file, "model.type", FAMILY_PROBLEM, value=format_value(name), hint=instead)
