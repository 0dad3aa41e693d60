"""The tables of the train TOML: [model], [optimizer], [ema], [adapter], [sampling], [monitoring]."""

from typing import Annotated, Any, Literal, Self

from annotated_types import Gt, Le, MinLen
from pydantic import AfterValidator, Field, SecretStr, Strict, model_validator

from sd3_light.config.base import (
    Allowed,
    Choices,
    Count,
    CountOrZero,
    Decay,
    Dtype,
    Flag,
    Fraction,
    Name,
    NotNegative,
    Positive,
    RandomOrPath,
    Table,
    Text,
    TomlPath,
    bad,
)
from sd3_light.config.sizes import SIZES

_SIZE_NAMES = Choices(tuple(SIZES))
SizeName = Annotated[str, Strict(), _SIZE_NAMES, AfterValidator(_SIZE_NAMES)]
LORA_TARGETS = (
    "attn.to_q",
    "attn.to_k",
    "attn.to_v",
    "attn.to_out.0",
    "attn.add_q_proj",
    "attn.add_k_proj",
    "attn.add_v_proj",
    "attn.to_add_out",
)


def _compute_dtype(data: dict[str, Any]) -> Literal["float32", "bfloat16"]:
    return "float32" if data.get("dtype") == "float32" else "bfloat16"


def _rank(data: dict[str, Any]) -> float:
    return float(data["rank"])


class ModelConfig(Table):
    """[model]: the denoiser, where its weights start, its text and its noise."""

    type: Literal["sd3"] = Field(default="sd3", description="Model family.")
    train_type: Literal["sd3_light_pretrain"] | None = Field(
        default=None, description="Pretraining from `size`; absent for fine-tuning the denoiser of `diffusers_path`."
    )
    diffusers_path: TomlPath = Field(
        description="Diffusers folder of a complete SD3, or one by `sd3-light init`: its encoders and VAE are used."
    )
    size: SizeName | None = Field(
        default=None,
        description="Name in the table of sizes. Absent: `sd3_light` with `train_type`, else what the weights are.",
    )
    init: RandomOrPath | None = Field(
        default=None,
        description="Where the denoiser starts: `random`, a folder, or an SD3 single file (`.safetensors`). Absent: "
        "`random` with `train_type` (unless `diffusers_path` was written by `sd3-light init`), else `diffusers_path`.",
    )
    num_layers: Count | None = Field(default=None, description="Depth in joint blocks, in place of the size's own.")
    qk_norm: Flag | None = Field(default=None, description="RMS norm of queries and keys. Absent: what the size says.")
    dtype: Dtype = Field(
        default="bfloat16",
        description="Type in which the text encoders compute on GPUs; the VAE and all on CPUs: float32.",
    )
    transformer_dtype: Literal["float32", "bfloat16"] = Field(
        default_factory=_compute_dtype,
        description="Type in which the denoiser computes; master weights are always float32. float16 is not offered: "
        "it needs loss scaling.",
        json_schema_extra={"default": "float32 when `dtype` is float32, else bfloat16"},
    )
    t5_max_length: Annotated[int, Strict(), Gt(0), Le(512)] = Field(
        default=256, description="Longest T5 input, in tokens."
    )
    text_tokens: Literal["padded", "real"] = Field(
        default="padded",
        description="`padded`: what the stock pipeline computes; `real`: only real tokens, masked attention.",
    )
    enable_uncond_text_dropout: Flag = Field(default=False, description="Drop each text encoder at random in training.")
    uncond_text_dropout_prob: Fraction = Field(
        default=0.464, description="Probability of dropping one encoder; all three fall together with its cube (10%)."
    )
    uncond_text: Literal["zero", "empty"] = Field(
        default="zero",
        description="What a sample without text carries, in training and guidance: zeros, or the encoded empty text.",
    )
    timestep_sample_method: Literal["logit_normal", "uniform"] = Field(
        default="logit_normal", description="Distribution of the time t in (0, 1)."
    )
    sigmoid_scale: Positive = Field(
        default=1.0, description="Standard deviation of the logit of t under `logit_normal`."
    )
    shift: Positive | None = Field(default=None, description="Time shift s: t' = s t / (1 + (s - 1) t). Absent: none.")
    flux_shift: Flag = Field(
        default=False, description="Time shift that grows with the resolution; not together with `shift`."
    )
    text_recon_gamma: NotNegative = Field(
        default=0.0, description="Weight of the text reconstruction loss; 0 turns it off."
    )
    text_recon_target_layer: CountOrZero = Field(
        default=0,
        description="Layer whose text tokens are reconstructed: 0 after the context embedder, k after block k "
        "(at most the number of blocks less 2: the last block has no text output, the last text is no target).",
    )


class OptimizerConfig(Table):
    """[optimizer]: how the weights learn."""

    type: Literal["adamw", "adamw8bit", "muon"] = Field(
        default="adamw",
        description="`muon`: Muon (momentum 0.95) for the matrices of the blocks, its updates scaled to AdamW's size, "
        "and AdamW for the rest. `adamw8bit`: moments in 8 bits, by bitsandbytes. Both run on the torch engine without "
        "sharding only.",
    )
    lr: Positive = Field(default=1e-4, description="Peak learning rate.")
    betas: tuple[Decay, Decay] = Field(default=(0.9, 0.999), description="Decay of AdamW's two moments.")
    weight_decay: NotNegative = Field(
        default=0.01, description="Decoupled weight decay; norms, biases and embeddings never decay."
    )
    eps: Positive = Field(default=1e-8, description="Term added to the denominator.")


class EmaTrack(Table):
    """[[ema.track]]: one more running average of the weights."""

    name: Name = Field(description="Name of the track in checkpoints and exports; `ema` is the main one's.")
    decay: Decay | None = Field(default=None, description="Constant decay per update; give this or `power_width`.")
    power_width: Annotated[float, Strict(), Gt(0), Le(0.28)] | None = Field(
        default=None,
        description="Width of a power-function average, as a share of the training length (EDM2's sigma_rel). Two such "
        "tracks (0.05 and 0.1 in the paper) let `export --ema-length` rebuild averages of other lengths.",
    )
    update_every: Count | None = Field(
        default=None, description="Optimizer steps between two updates. Absent: that of [ema]."
    )

    @model_validator(mode="after")
    def _one_memory(self) -> Self:
        if (self.decay is None) == (self.power_width is None):
            raise bad("needs exactly one of decay and power_width")
        return self


class EmaConfig(Table):
    """[ema]: a running average of the weights in float32."""

    enable: Flag = Field(default=False, description="Keep a running average and export it.")
    decay: Decay = Field(default=0.99, description="Decay per update.")
    update_every: Count = Field(default=100, description="Optimizer steps between two updates.")
    snapshot_every_n_steps: Count | None = Field(
        default=None,
        description="Steps between two snapshots of the power-function tracks, which `export --ema-length` needs. "
        "Absent: a 32nd of the run; without such tracks there are none.",
    )
    snapshot_dtype: Literal["float16", "float32"] = Field(
        default="float16", description="Type of snapshots; a track takes 2 or 4 bytes a weight and snapshot."
    )
    track: tuple[EmaTrack, ...] = Field(default=(), description="Further averages, each a `[[ema.track]]` table.")


class AdapterConfig(Table):
    """[adapter]: train an adapter, a LoRA as a rule, in place of all weights."""

    type: Literal["lora", "lokr", "loha"] = Field(
        default="lora",
        description="Kind of adapter. `lokr` and `loha` are saved in LyCORIS' layout, which ComfyUI reads and "
        "diffusers does not.",
    )
    rank: Count = Field(default=32, description="Rank of the update.")
    alpha: Positive = Field(
        default_factory=_rank,
        description="Scale: the update is multiplied by alpha / rank.",
        json_schema_extra={"default": "equal to `rank`"},
    )
    dropout: Decay = Field(
        default=0.0, description="Dropout before the adapter in training (of `lokr` and `loha`: of the update's rows)."
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        default="bfloat16",
        description="Type in which a LoRA computes where the denoiser computes in bfloat16; its weights are float32.",
    )
    init_from_existing: TomlPath | None = Field(
        default=None,
        description="Adapter file, or a folder that holds one, to start from; its rank and layers must fit.",
    )
    target_modules: Annotated[tuple[Text, ...], MinLen(1)] = Field(
        default=LORA_TARGETS,
        description="Ends of the names of the linear layers that get an adapter, or patterns of shell style "
        "(`transformer_blocks.[0-7].attn.to_*`); one that matches no layer is a fault.",
    )
    use_rslora: Flag = Field(default=False, description="Scale by alpha / sqrt(rank).")
    use_dora: Flag = Field(default=False, description="Learn the magnitude apart from the direction (DoRA).")
    base_bits: Annotated[Literal[16, 8, 4], Allowed("16, 8 or 4")] = Field(
        default=16,
        description="Bits of a frozen weight under a LoRA. 8 and 4 keep the linear layers of the blocks so, by "
        "bitsandbytes (`pip install 'sd3-light[bnb]'`); 16 is bfloat16 on GPUs and float32 on CPUs. The file that is "
        "saved goes on the unquantized model as any other.",
    )


class SamplingConfig(Table):
    """[sampling]: images drawn while training."""

    prompts: tuple[Text, ...] = Field(default=(), description="One image for each prompt and seed; none: no samples.")
    seeds: Annotated[tuple[CountOrZero, ...], MinLen(1)] = Field(
        default=(0,), description="Seeds of the initial noise."
    )
    every_n_steps: Count | None = Field(
        default=None, description="Optimizer steps between two draws; needed with `prompts`."
    )
    steps: Count = Field(default=28, description="Sampler steps an image.")
    guidance: NotNegative = Field(default=5.0, description="Classifier-free guidance scale; 1 or less turns it off.")


class MonitoringConfig(Table):
    """[monitoring]: trackers beside log.jsonl and TensorBoard, which are always written."""

    enable_wandb: Flag = Field(
        default=False, description="Log to Weights & Biases (`pip install 'sd3-light[wandb]'`). WANDB_MODE is obeyed."
    )
    wandb_api_key: SecretStr | None = Field(
        default=None, description="Better left to the environment (WANDB_API_KEY). Used, and never written or shown."
    )
    wandb_tracker_name: Text = Field(default="sd3-light", description="Project of the run, in trackio too.")
    wandb_run_name: Text | None = Field(
        default=None, description="Name of the run, in trackio too. Absent: the name of the run folder."
    )
    enable_trackio: Flag = Field(
        default=False,
        description="Log to trackio (`pip install 'sd3-light[trackio]'`): to this machine, or where TRACKIO_DIR, "
        "TRACKIO_SPACE_ID or TRACKIO_SERVER_URL say.",
    )
