# ruff: noqa: E501  (one line per key reads better than wrapped lines)
"""Keys and values of other trainers that are rejected, each with the reason and a replacement."""

from dataclasses import dataclass
from typing import Any

from sd3_light.config.faults import Fault


@dataclass(frozen=True)
class UnsupportedKey:
    """A rejected key, or one rejected `value` of it. Keys of the dataset TOML are rejected in directories too."""

    file_kind: str
    table: str
    key: str
    reason: str
    instead: str
    value: str | None = None

    @property
    def dotted_key(self) -> str:
        """The key with its table."""
        return f"{self.table}.{self.key}" if self.table else self.key


_FOLDER = "give the complete diffusers folder as model.diffusers_path"
_FILE = "give the single file (.safetensors) as model.init and a complete diffusers folder as model.diffusers_path"
_VIDEO = "only images are supported, not video"
_CONTROL = "training on image pairs is not supported"
_ADAMW = 'write type = "adamw"'
_FP32 = "master weights and moments are float32, so compensation for bf16 rounding is not needed"
_ADAPTIVE = "it sets its own learning rate; here the learning rate is a function of the step"
# fmt: off
UNSUPPORTED_KEYS: tuple[UnsupportedKey, ...] = (
    UnsupportedKey("train", "", "blocks_to_swap", "blocks are not offloaded to host memory", 'use activation_checkpointing = true or parallel = "fsdp2"'),
    UnsupportedKey("train", "", "disable_block_swap_for_eval", "blocks are not offloaded to host memory", "remove the key"),
    UnsupportedKey("train", "", "reentrant_activation_checkpointing", "only non-reentrant checkpointing is used", "use activation_checkpointing = true"),
    UnsupportedKey("train", "", "activation_checkpointing", "activations are recomputed, not offloaded to the host", "write activation_checkpointing = true", "unsloth"),
    UnsupportedKey("train", "", "video_clip_mode", _VIDEO, "remove the key"),
    UnsupportedKey("train", "", "framerate", _VIDEO, "remove the key"),
    UnsupportedKey("train", "", "image_micro_batch_size_per_gpu", _VIDEO, "use micro_batch_size_per_gpu"),
    UnsupportedKey("train", "", "image_eval_micro_batch_size_per_gpu", _VIDEO, "use eval_micro_batch_size_per_gpu"),
    UnsupportedKey("train", "", "save_every_n_hours", "exports are scheduled by training progress, not by time", "use save_every_n_steps; for checkpoints use checkpoint_every_n_minutes"),
    UnsupportedKey("train", "", "compile_mode", "only the default compile mode is used", "use compile = true"),
    UnsupportedKey("train", "model", "ckpt_path", "a single file holds only part of the model", _FILE),
    UnsupportedKey("train", "model", "checkpoint_path", "a single file holds only part of the model", _FILE),
    UnsupportedKey("train", "model", "transformer_path", "the denoiser's weights have another key", "give the folder or file as model.init"),
    UnsupportedKey("train", "model", "unet_path", "the denoiser is a transformer", "give its folder or file as model.init"),
    UnsupportedKey("train", "model", "vae_path", "the VAE is part of the model folder", _FOLDER),
    UnsupportedKey("train", "model", "llm_path", "SD3 has no LLM encoder", _FOLDER),
    UnsupportedKey("train", "model", "clip_path", "the text encoders are part of the model folder", _FOLDER),
    UnsupportedKey("train", "model", "t5_path", "the text encoders are part of the model folder", _FOLDER),
    UnsupportedKey("train", "model", "text_encoder_path", "the text encoders are part of the model folder", _FOLDER),
    UnsupportedKey("train", "model", "text_encoders", "the text encoders are part of the model folder", _FOLDER),
    UnsupportedKey("train", "model", "first_frame_conditioning_p", _VIDEO, "remove the key"),
    UnsupportedKey("train", "model", "min_t", "timesteps are drawn from the whole interval (0, 1)", "change their distribution with timestep_sample_method, sigmoid_scale or shift"),
    UnsupportedKey("train", "model", "max_t", "timesteps are drawn from the whole interval (0, 1)", "change their distribution with timestep_sample_method, sigmoid_scale or shift"),
    UnsupportedKey("train", "model", "bypass_guidance_embedding", "SD3 has no guidance embedding", "remove the key"),
    UnsupportedKey("train", "model", "guidance", "SD3 has no guidance embedding", "for sample images use sampling.guidance"),
    UnsupportedKey("train", "model", "transformer_dtype", "weights are not stored in float8", 'write transformer_dtype = "bfloat16"; fp8 = true computes matrix products in float8', "float8"),
    UnsupportedKey("train", "model", "transformer_dtype", "weights are not stored in float8", 'write transformer_dtype = "bfloat16"; fp8 = true computes matrix products in float8', "float8_e4m3fn"),
    UnsupportedKey("train", "optimizer", "type", _FP32, _ADAMW, "adamw_optimi"),
    UnsupportedKey("train", "optimizer", "type", _FP32, _ADAMW, "stableadamw"),
    UnsupportedKey("train", "optimizer", "type", _FP32, 'write type = "adamw8bit"', "adamw8bitkahan"),
    UnsupportedKey("train", "optimizer", "type", _ADAPTIVE, _ADAMW, "automagic"),
    UnsupportedKey("train", "optimizer", "type", "optimizers cannot be composed", 'write type = "adamw" or "muon"', "genericoptim"),
    UnsupportedKey("train", "optimizer", "type", "optimizer state is not offloaded to the host", 'write type = "adamw8bit", or shard with parallel = "fsdp2"', "offload"),
    UnsupportedKey("train", "optimizer", "gradient_release", "clipping by the global norm needs all gradients at once", "remove the key"),
    UnsupportedKey("train", "adapter", "fuse_adapters", "adapters are not merged before training", "run `sd3-light lora merge` and give the new folder as model.diffusers_path"),
    UnsupportedKey("train", "adapter", "exclude_linear_modules", "layers are selected, not excluded", "use adapter.target_modules"),
    UnsupportedKey("train", "monitoring", "wandb_host", "the wandb client reads its host from the environment", "set WANDB_BASE_URL"),
    UnsupportedKey("dataset", "", "frame_buckets", _VIDEO, "remove the key"),
    UnsupportedKey("dataset", "", "video_clip_mode", _VIDEO, "remove the key"),
    UnsupportedKey("dataset", "", "control_path", _CONTROL, "remove the key"),
    UnsupportedKey("dataset", "", "captions_file", "the caption file is recognized by its name", "name it captions.json and put it in the directory"),
)
# fmt: on


def pop_unsupported(file_kind: str, raw: dict[str, Any], file: str, table: str = "", prefix: str = "") -> list[Fault]:
    """Remove the rejected keys of one table from `raw` and return their faults, so that each is reported once."""
    faults = []
    tables = ("", table) if file_kind == "dataset" else (table,)
    for entry in UNSUPPORTED_KEYS:
        if entry.file_kind != file_kind or entry.table not in tables or entry.key not in raw:
            continue
        if entry.value is not None and raw[entry.key] != entry.value:
            continue
        value = None if entry.value is None else f'"{entry.value}"'
        problem = f"not supported: {entry.reason}"
        faults.append(Fault(file, prefix + entry.key, problem, value=value, hint=entry.instead))
        del raw[entry.key]
    return faults
