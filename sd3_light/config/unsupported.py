# ruff: noqa: E501  (one line a key reads better than a tidy margin)
"""Keys and values of earlier programs' files that are refused, each with the reason and what to write instead."""

from dataclasses import dataclass
from typing import Any

from sd3_light.config.faults import Fault


@dataclass(frozen=True)
class Retired:
    """A refused key (with `value`: a refused value of it). A key of the dataset TOML is refused in directories too."""

    kind: str
    table: str
    key: str
    reason: str
    instead: str
    value: str | None = None

    @property
    def where(self) -> str:
        """Dotted key."""
        return f"{self.table}.{self.key}" if self.table else self.key


_FOLDER = "give the complete diffusers folder as model.diffusers_path"
_VIDEO = "images only: there is no video training"
_CONTROL = "training on pairs of images is not supported"
_ADAMW = 'write type = "adamw"'
_FP32 = "master weights and moments are float32, so tricks against bf16 rounding have no use"
# fmt: off
RETIRED: tuple[Retired, ...] = (
    Retired("train", "", "blocks_to_swap", "blocks are not swapped to host memory", 'use activation_checkpointing = true or parallel = "fsdp2"'),
    Retired("train", "", "disable_block_swap_for_eval", "blocks are not swapped to host memory", "remove the key"),
    Retired("train", "", "reentrant_activation_checkpointing", "only the non-reentrant kind is used", "use activation_checkpointing = true"),
    Retired("train", "", "activation_checkpointing", "activations are recomputed, not moved to the host", "write activation_checkpointing = true", "unsloth"),
    Retired("train", "", "video_clip_mode", _VIDEO, "remove the key"),
    Retired("train", "", "framerate", _VIDEO, "remove the key"),
    Retired("train", "", "image_micro_batch_size_per_gpu", _VIDEO, "use micro_batch_size_per_gpu"),
    Retired("train", "", "image_eval_micro_batch_size_per_gpu", _VIDEO, "use eval_micro_batch_size_per_gpu"),
    Retired("train", "", "save_every_n_hours", "exports follow training, not the clock", "use save_every_n_steps, or checkpoint_every_n_minutes for safety"),
    Retired("train", "", "compile_mode", "blocks are compiled in one mode", "use compile = true"),
    Retired("train", "model", "ckpt_path", "single checkpoint files are not read", _FOLDER),
    Retired("train", "model", "checkpoint_path", "single checkpoint files are not read", _FOLDER),
    Retired("train", "model", "transformer_path", "single weight files are not read", "give a folder as model.init, or as model.diffusers_path"),
    Retired("train", "model", "unet_path", "the denoiser is a transformer", "give a folder as model.init, or as model.diffusers_path"),
    Retired("train", "model", "vae_path", "the VAE comes with the model folder", _FOLDER),
    Retired("train", "model", "llm_path", "SD3 has no LLM encoder", _FOLDER),
    Retired("train", "model", "clip_path", "the text encoders come with the model folder", _FOLDER),
    Retired("train", "model", "t5_path", "the text encoders come with the model folder", _FOLDER),
    Retired("train", "model", "text_encoder_path", "the text encoders come with the model folder", _FOLDER),
    Retired("train", "model", "text_encoders", "the text encoders come with the model folder", _FOLDER),
    Retired("train", "model", "first_frame_conditioning_p", _VIDEO, "remove the key"),
    Retired("train", "model", "min_t", "time is drawn from (0, 1)", "shape it by timestep_sample_method, sigmoid_scale or shift"),
    Retired("train", "model", "max_t", "time is drawn from (0, 1)", "shape it by timestep_sample_method, sigmoid_scale or shift"),
    Retired("train", "model", "bypass_guidance_embedding", "SD3 has no guidance embedding", "remove the key"),
    Retired("train", "model", "guidance", "SD3 has no guidance embedding", "for sampled images use sampling.guidance"),
    Retired("train", "model", "transformer_dtype", "float8 weights do not train in float32", 'write transformer_dtype = "bfloat16"', "float8"),
    Retired("train", "model", "transformer_dtype", "float8 weights do not train in float32", 'write transformer_dtype = "bfloat16"', "float8_e4m3fn"),
    Retired("train", "optimizer", "type", _FP32, _ADAMW, "adamw_optimi"),
    Retired("train", "optimizer", "type", _FP32, _ADAMW, "stableadamw"),
    Retired("train", "optimizer", "type", _FP32, 'write type = "adamw8bit"', "adamw8bitkahan"),
    Retired("train", "optimizer", "type", "it sets its own learning rate, which is then no function of the step", _ADAMW, "automagic"),
    Retired("train", "optimizer", "type", "it sets its own learning rate, which is then no function of the step", _ADAMW, "prodigy"),
    Retired("train", "optimizer", "type", "optimizers are not assembled from parts", 'write type = "adamw" or "muon"', "genericoptim"),
    Retired("train", "optimizer", "type", "states are not moved to the host", 'write type = "adamw8bit", or shard by parallel = "fsdp2"', "offload"),
    Retired("train", "optimizer", "gradient_release", "gradients are clipped by their global norm, so all must exist", "remove the key"),
    Retired("train", "adapter", "fuse_adapters", "adapters are not fused into the weights before training", "give the fused folder as model.diffusers_path"),
    Retired("train", "adapter", "exclude_linear_modules", "layers are chosen, not excluded", "use adapter.target_modules"),
    Retired("train", "monitoring", "wandb_host", "the client reads its host from the environment", "set WANDB_BASE_URL"),
    Retired("dataset", "", "frame_buckets", _VIDEO, "remove the key"),
    Retired("dataset", "", "video_clip_mode", _VIDEO, "remove the key"),
    Retired("dataset", "", "control_path", _CONTROL, "remove the key"),
    Retired("dataset", "", "captions_file", "the file is found by its name", "name it captions.json, in the directory"),
)
# fmt: on


def retired_faults(kind: str, raw: dict[str, Any], file: str, table: str = "", prefix: str = "") -> list[Fault]:
    """The refused keys in one table of a file; they are taken out of `raw`, so that they are reported once."""
    faults = []
    for entry in RETIRED:
        if entry.kind != kind or entry.table not in ("" if kind == "dataset" else table, table) or entry.key not in raw:
            continue
        if entry.value is not None and raw[entry.key] != entry.value:
            continue
        given = None if entry.value is None else f'"{entry.value}"'
        problem = f"not supported: {entry.reason}"
        faults.append(Fault(file, prefix + entry.key, problem, given=given, hint=entry.instead))
        del raw[entry.key]
    return faults
