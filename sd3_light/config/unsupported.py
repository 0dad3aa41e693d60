# ruff: noqa: E501  (one line per key reads better than wrapped lines)
"""Keys and values of other trainers that are rejected, each with the reason and a replacement."""

from dataclasses import dataclass
from typing import Any

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
_CLIP_START = "a clip is the start of its video"
_ONE_BATCH = "images and clips have the same key"
_CONTROL = "training on image pairs is not supported"
_ADAMW = 'write type = "adamw"'
_FP32 = "master weights and moments are float32, so compensation for bf16 rounding is not needed"
_ADAPTIVE = "it sets its own learning rate; here the learning rate is a function of the step"
_KOHYA = "it has this name in sd-scripts"
_OTHER_FAMILY = "it belongs to none of the model families that are trained here"
_NOISE_LOSS = "it is for models that predict noise; those that are trained here predict a velocity"
_ONE_RATE = "all trained weights have one learning rate"
_ENCODERS = "the text encoders are part of the model folder"
_NO_FLOAT8 = "weights are not stored in float8"
_BFLOAT16 = (
    'write transformer_dtype = "bfloat16", and base_bits = 8 or 4 in [adapter] to quantize the weights under a LoRA'
)
_BLOCK_SWAP = "blocks are not offloaded to host memory"
_LESS_MEMORY = 'write base_bits = 4 in [adapter] (for a LoRA), activation_checkpointing = true, or with several GPUs parallel = "fsdp2"'
_LOSSES = "the loss is the mean squared error or pseudo-Huber"
_FLAG = "it is an option of the command"
# fmt: off
UNSUPPORTED_KEYS: tuple[UnsupportedKey, ...] = (
    UnsupportedKey("train", "", "blocks_to_swap", _BLOCK_SWAP, _LESS_MEMORY),
    UnsupportedKey("train", "", "disable_block_swap_for_eval", _BLOCK_SWAP, "remove the key"),
    UnsupportedKey("train", "", "reentrant_activation_checkpointing", "only non-reentrant checkpointing is used", "use activation_checkpointing = true"),
    UnsupportedKey("train", "", "activation_checkpointing", "activations are recomputed, not offloaded to the host", "write activation_checkpointing = true", "unsloth"),
    UnsupportedKey("train", "", "video_clip_mode", _CLIP_START, "remove the key"),
    UnsupportedKey("train", "", "framerate", "the rate of clips is a key of the dataset TOML", "write fps there"),
    UnsupportedKey("train", "", "image_micro_batch_size_per_gpu", _ONE_BATCH, "use micro_batch_size_per_gpu"),
    UnsupportedKey("train", "", "image_eval_micro_batch_size_per_gpu", _ONE_BATCH, "use eval_micro_batch_size_per_gpu"),
    UnsupportedKey("train", "", "eval_image_micro_batch_size_per_gpu", _ONE_BATCH, "use eval_micro_batch_size_per_gpu"),
    UnsupportedKey("train", "", "uncond_fraction", "the dropout of captions has keys in [model]", 'write enable_uncond_text_dropout = true, uncond_text_dropout = "joint" and uncond_text_dropout_prob in [model]'),
    UnsupportedKey("train", "", "huber_delta", _LOSSES, "use pseudo_huber_c"),
    UnsupportedKey("train", "", "smooth_l1_beta", _LOSSES, "use pseudo_huber_c"),
    UnsupportedKey("train", "", "resume_from_checkpoint", _FLAG, "run `sd3-light train train.toml --resume`"),
    UnsupportedKey("train", "", "regenerate_cache", _FLAG, "run `sd3-light cache train.toml --regenerate-cache`"),
    UnsupportedKey("train", "", "save_every_n_hours", "exports are scheduled by training progress, not by time", "use save_every_n_steps; for checkpoints use checkpoint_every_n_minutes"),
    UnsupportedKey("train", "", "compile_mode", "only the default compile mode is used", "use compile = true"),
    UnsupportedKey("train", "model", "ckpt_path", "a single file holds only part of the model", _FILE),
    UnsupportedKey("train", "model", "checkpoint_path", "a single file holds only part of the model", _FILE),
    UnsupportedKey("train", "model", "transformer_path", "the denoiser's weights have another key", "give the folder or file as model.init"),
    UnsupportedKey("train", "model", "unet_path", "the denoiser is a transformer", "give its folder or file as model.init"),
    UnsupportedKey("train", "model", "vae_path", "the VAE is part of the model folder", _FOLDER),
    UnsupportedKey("train", "model", "llm_path", "the text encoders are those of the model folder", _FOLDER),
    UnsupportedKey("train", "model", "clip_path", _ENCODERS, _FOLDER),
    UnsupportedKey("train", "model", "t5_path", _ENCODERS, _FOLDER),
    UnsupportedKey("train", "model", "text_encoder_path", _ENCODERS, _FOLDER),
    UnsupportedKey("train", "model", "text_encoders", _ENCODERS, _FOLDER),
    UnsupportedKey("train", "model", "first_frame_conditioning_p", "training with a given first frame is not supported", "remove the key"),
    UnsupportedKey("train", "model", "min_t", "timesteps are drawn from the whole interval (0, 1)", "change their distribution with timestep_sample_method, sigmoid_scale or shift"),
    UnsupportedKey("train", "model", "max_t", "timesteps are drawn from the whole interval (0, 1)", "change their distribution with timestep_sample_method, sigmoid_scale or shift"),
    UnsupportedKey("train", "model", "bypass_guidance_embedding", "a denoiser runs as it was trained, with its guidance embedding", "write guidance, a number; SD3 has none"),
    UnsupportedKey("train", "model", "transformer_dtype", _NO_FLOAT8, _BFLOAT16, "float8"),
    UnsupportedKey("train", "model", "transformer_dtype", _NO_FLOAT8, _BFLOAT16, "float8_e4m3fn"),
    UnsupportedKey("train", "model", "transformer_dtype", _NO_FLOAT8, _BFLOAT16, "float8_e5m2"),
    UnsupportedKey("train", "model", "transformer_dtype", "quantized weights have another key", _BFLOAT16, "nf4"),
    UnsupportedKey("train", "model", "diffusion_model", "the denoiser's weights have another key", "give the folder or file as model.init"),
    UnsupportedKey("train", "model", "diffusion_model_dtype", "the denoiser's dtype has another key", _BFLOAT16),
    UnsupportedKey("train", "model", "single_file_path", "a single file holds only part of the model", _FILE),
    UnsupportedKey("train", "model", "vae", "the VAE is part of the model folder", _FOLDER),
    UnsupportedKey("train", "model", "text_encoder", _ENCODERS, _FOLDER),
    UnsupportedKey("train", "model", "text_encoder_fp8", "the text encoders run while caching, in model.dtype", "remove the key"),
    UnsupportedKey("train", "model", "text_encoder_nf4", "the text encoders run while caching, in model.dtype", "remove the key"),
    UnsupportedKey("train", "model", "cache_text_embeddings", "text features are always cached", "remove the key"),
    UnsupportedKey("train", "model", "max_sequence_length", "the length of the text has another key", "write text_max_length, or for SD3 t5_max_length"),
    UnsupportedKey("train", "model", "merge_adapters", "adapters are not merged before training", "run `sd3-light lora merge` and give the new folder as model.diffusers_path"),
    UnsupportedKey("train", "model", "image_shift", "only images are trained, with one shift", "write it as shift"),
    UnsupportedKey("train", "model", "lumina_shift", _OTHER_FAMILY, "use flux_shift, a shift that grows with the resolution too"),
    UnsupportedKey("train", "model", "cfg", _OTHER_FAMILY, "remove the key; for sample images use sampling.guidance"),
    UnsupportedKey("train", "model", "audio_vae", _OTHER_FAMILY, "remove the key"),
    UnsupportedKey("train", "model", "byt5_path", _OTHER_FAMILY, "remove the key"),
    UnsupportedKey("train", "model", "llama3_path", _OTHER_FAMILY, "remove the key"),
    UnsupportedKey("train", "model", "llama3_4bit", _OTHER_FAMILY, "remove the key"),
    UnsupportedKey("train", "model", "max_llama3_sequence_length", _OTHER_FAMILY, "remove the key"),
    UnsupportedKey("train", "model", "llm_adapter_path", _OTHER_FAMILY, "remove the key"),
    UnsupportedKey("train", "model", "llm_adapter_lr", _OTHER_FAMILY, "remove the key"),
    UnsupportedKey("train", "model", "v_pred", _NOISE_LOSS, "remove the key"),
    UnsupportedKey("train", "model", "min_snr_gamma", _NOISE_LOSS, "remove the key; timestep_sample_method and shift weight the timesteps"),
    UnsupportedKey("train", "model", "debiased_estimation_loss", _NOISE_LOSS, "remove the key; timestep_sample_method and shift weight the timesteps"),
    UnsupportedKey("train", "model", "multiscale_loss_weight", _LOSSES, "remove the key"),
    UnsupportedKey("train", "model", "unet_lr", _ONE_RATE, "write lr in [optimizer]"),
    UnsupportedKey("train", "model", "text_encoder_1_lr", "text encoders are always frozen", "remove the key"),
    UnsupportedKey("train", "model", "text_encoder_2_lr", "text encoders are always frozen", "remove the key"),
    UnsupportedKey("train", "model", "self_attn_lr", _ONE_RATE, "write lr in [optimizer]"),
    UnsupportedKey("train", "model", "cross_attn_lr", _ONE_RATE, "write lr in [optimizer]"),
    UnsupportedKey("train", "model", "mlp_lr", _ONE_RATE, "write lr in [optimizer]"),
    UnsupportedKey("train", "model", "mod_lr", _ONE_RATE, "write lr in [optimizer]"),
    UnsupportedKey("train", "optimizer", "type", _FP32, _ADAMW, "adamw_optimi"),
    UnsupportedKey("train", "optimizer", "type", _FP32, _ADAMW, "stableadamw"),
    UnsupportedKey("train", "optimizer", "type", _FP32, 'write type = "adamw8bit"', "adamw8bitkahan"),
    UnsupportedKey("train", "optimizer", "type", _ADAPTIVE, _ADAMW, "automagic"),
    UnsupportedKey("train", "optimizer", "type", "optimizers cannot be composed", 'write type = "adamw" or "muon"', "genericoptim"),
    UnsupportedKey("train", "optimizer", "type", "optimizer state is not offloaded to the host", 'write type = "adamw8bit", or shard with parallel = "fsdp2"', "offload"),
    UnsupportedKey("train", "optimizer", "type", "it is not available", _ADAMW, "sgd"),
    UnsupportedKey("train", "optimizer", "stabilize", "only AdamW8bitKahan has it", "remove the key"),
    UnsupportedKey("train", "optimizer", "beta2_half_life", "betas are written as numbers", "write betas; the second is 0.5 ** (samples per step / beta2_half_life)"),
    UnsupportedKey("train", "optimizer", "gradient_release", "clipping by the global norm needs all gradients at once", "remove the key"),
    UnsupportedKey("train", "adapter", "fuse_adapters", "adapters are not merged before training", "run `sd3-light lora merge` and give the new folder as model.diffusers_path"),
    UnsupportedKey("train", "adapter", "rank", "the largest rank is 65536", "write rank = 65536: a LoKr of that rank stores full matrices too", 1e6),
    UnsupportedKey("train", "adapter", "decompose_factor", "the two factors of a LoKr are as square as possible, as with decompose_factor = -1", "remove the key"),
    UnsupportedKey("train", "adapter", "rank_dropout", "dropout has one key for all adapters", "write dropout"),
    UnsupportedKey("train", "adapter", "exclude_modules", "layers are selected, not excluded", "use adapter.target_modules"),
    UnsupportedKey("train", "adapter", "exclude_linear_modules", "layers are selected, not excluded", "use adapter.target_modules"),
    UnsupportedKey("train", "monitoring", "wandb_host", "the wandb client reads its host from the environment", "set WANDB_BASE_URL"),
    UnsupportedKey("dataset", "", "frame_buckets", "the lengths of clips have another name", "write frames: a number, or a list without the 1 of images"),
    UnsupportedKey("dataset", "", "video_clip_mode", _CLIP_START, "remove the key"),
    UnsupportedKey("dataset", "", "control_path", _CONTROL, "remove the key"),
    UnsupportedKey("dataset", "", "online_captions", "a changed caption updates the cache", "remove the key"),
    UnsupportedKey("dataset", "", "shuffle_metadata", "the order of samples depends on the seed alone", "remove the key"),
    UnsupportedKey("dataset", "", "captions_file", "the caption file is recognized by its name", "name it captions.json and put it in the directory"),
    UnsupportedKey("train", "", "pretrained_model_name_or_path", _KOHYA, "write diffusers_path in [model]: a folder in diffusers' layout, or its id on the hub"),
    UnsupportedKey("train", "", "dataset_config", _KOHYA, "write dataset"),
    UnsupportedKey("train", "", "train_data_dir", _KOHYA, "write a dataset TOML and name it as dataset"),
    UnsupportedKey("train", "", "network_module", _KOHYA, "write [adapter]"),
    UnsupportedKey("train", "", "network_dim", _KOHYA, "write rank in [adapter]"),
    UnsupportedKey("train", "", "network_alpha", _KOHYA, "write alpha in [adapter]"),
    UnsupportedKey("train", "", "network_weights", _KOHYA, "write init_from_existing in [adapter]"),
    UnsupportedKey("train", "", "network_args", _KOHYA, "write target_modules in [adapter]"),
    UnsupportedKey("train", "", "network_train_unet_only", _KOHYA, "remove the key: text encoders are always frozen"),
    UnsupportedKey("train", "", "text_encoder_lr", _KOHYA, "remove the key: text encoders are always frozen"),
    UnsupportedKey("train", "", "learning_rate", _KOHYA, "write lr in [optimizer]"),
    UnsupportedKey("train", "", "unet_lr", _KOHYA, "write lr in [optimizer]"),
    UnsupportedKey("train", "", "optimizer_type", _KOHYA, "write type in [optimizer]"),
    UnsupportedKey("train", "", "optimizer_args", _KOHYA, "write betas, weight_decay or eps in [optimizer]"),
    UnsupportedKey("train", "", "lr_warmup_steps", _KOHYA, "write warmup_steps"),
    UnsupportedKey("train", "", "max_train_epochs", _KOHYA, "write epochs"),
    UnsupportedKey("train", "", "max_train_steps", _KOHYA, "write max_steps"),
    UnsupportedKey("train", "", "train_batch_size", _KOHYA, "write micro_batch_size_per_gpu"),
    UnsupportedKey("train", "", "max_grad_norm", _KOHYA, "write gradient_clipping"),
    UnsupportedKey("train", "", "gradient_checkpointing", _KOHYA, "write activation_checkpointing = true"),
    UnsupportedKey("train", "", "mixed_precision", _KOHYA, 'write transformer_dtype = "bfloat16" in [model]'),
    UnsupportedKey("train", "", "save_precision", _KOHYA, "write save_dtype"),
    UnsupportedKey("train", "", "cache_latents", _KOHYA, "remove the key: latents and text features are always cached"),
    UnsupportedKey("train", "", "cache_latents_to_disk", _KOHYA, "remove the key: latents and text features are always cached"),
    UnsupportedKey("train", "", "cache_text_encoder_outputs", _KOHYA, "remove the key: latents and text features are always cached"),
    UnsupportedKey("train", "", "cache_text_encoder_outputs_to_disk", _KOHYA, "remove the key: latents and text features are always cached"),
    UnsupportedKey("train", "", "weighting_scheme", _KOHYA, "write timestep_sample_method in [model]"),
    UnsupportedKey("train", "", "training_shift", _KOHYA, "write shift in [model]"),
    UnsupportedKey("train", "", "t5xxl_max_token_length", _KOHYA, "write text_max_length in [model], or for SD3 t5_max_length"),
    UnsupportedKey("train", "", "sample_prompts", _KOHYA, "write prompts in [sampling]"),
    UnsupportedKey("train", "", "sample_every_n_steps", _KOHYA, "write every_n_steps in [sampling]"),
    UnsupportedKey("dataset", "", "general", _KOHYA, "write its keys at the top of the file"),
    UnsupportedKey("dataset", "", "datasets", _KOHYA, "write one [[directory]] with a path per subset"),
    UnsupportedKey("dataset", "", "image_dir", _KOHYA, "write path"),
    UnsupportedKey("dataset", "", "class_tokens", _KOHYA, "write the text into NAME.txt next to each image without a caption"),
    UnsupportedKey("dataset", "", "caption_extension", _KOHYA, "remove the key: NAME.txt and NAME.caption are read"),
    UnsupportedKey("dataset", "", "shuffle_caption", _KOHYA, "write shuffle_tags = true and cache_shuffle_num = 8"),
    UnsupportedKey("dataset", "", "caption_separator", _KOHYA, "write cache_shuffle_delimiter"),
    UnsupportedKey("dataset", "", "caption_suffix", _KOHYA, "write it into the captions"),
    UnsupportedKey("dataset", "", "caption_tag_dropout_rate", _KOHYA, "write tag_dropout"),
    UnsupportedKey("dataset", "", "caption_dropout_rate", _KOHYA, "write enable_uncond_text_dropout in [model] of the train TOML"),
    UnsupportedKey("dataset", "", "resolution", _KOHYA, "write resolutions, a list"),
    UnsupportedKey("dataset", "", "batch_size", _KOHYA, "write micro_batch_size_per_gpu in the train TOML"),
    UnsupportedKey("dataset", "", "enable_bucket", _KOHYA, "write enable_ar_bucket"),
    UnsupportedKey("dataset", "", "min_bucket_reso", _KOHYA, "write min_ar"),
    UnsupportedKey("dataset", "", "max_bucket_reso", _KOHYA, "write max_ar"),
    UnsupportedKey("dataset", "", "bucket_reso_steps", _KOHYA, "write num_ar_buckets"),
    UnsupportedKey("dataset", "", "bucket_no_upscale", _KOHYA, "write no_upscale"),
    UnsupportedKey("dataset", "", "flip_aug", _KOHYA, "write flip"),
    UnsupportedKey("dataset", "", "is_reg", _KOHYA, "write the images of the class as another [[directory]]"),
    UnsupportedKey("dataset", "", "metadata_file", _KOHYA, "remove the key, and put the file into the folder of the images as the only table there: meta_cap.json"),
)
# fmt: on


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
        faults.append(Fault(file, prefix + entry.key, problem, value=value, hint=entry.instead))
        del raw[entry.key]
    return faults
