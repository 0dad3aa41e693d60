"""The tables of the train TOML: [model], [optimizer], [ema], [adapter], [sampling], [metrics], [monitoring]."""

from typing import Annotated, Any, Literal, Self

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, Strict, model_validator

from sd3_light.config.base import (
    Allowed,
    Count,
    CountOrZero,
    Decay,
    DtypeName,
    Flag,
    Fraction,
    ImageSize,
    KnownValues,
    Name,
    NotNegative,
    Positive,
    RandomOrPath,
    Table,
    TomlPath,
    TomlString,
    invalid_value,
)
from sd3_light.config.family_keys import AUTO, FamilyName, KnownTo
from sd3_light.config.hub_ids import ModelFolder
from sd3_light.config.optimizers import OPTIMIZERS, describe_optimizers
from sd3_light.config.schema_blocks import LayerSyncConfig, RoutingConfig, TokenRoute
from sd3_light.config.sizes import IMAGE_ATTENTION, MAX_POSITION_STEP, SIZES, TEXT_ATTENTION

_SIZE_NAMES = KnownValues(tuple(SIZES))
SizeName = Annotated[str, Strict(), _SIZE_NAMES, AfterValidator(_SIZE_NAMES)]
_OPTIMIZER_NAMES = KnownValues(tuple(OPTIMIZERS))


def _in_lower_case(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


OptimizerName = Annotated[
    str, Strict(), _OPTIMIZER_NAMES, BeforeValidator(_in_lower_case), AfterValidator(_OPTIMIZER_NAMES)
]
DEFAULT_GUIDANCE = 4.0
"""Guidance wherever images are drawn, unless the user or a family chooses another (docs/reference/sampling.md)."""
PositionStep = Annotated[float, Strict(), Gt(0), Le(MAX_POSITION_STEP)]
LORA_TARGETS = tuple(f"attn.{name}" for name in (*IMAGE_ATTENTION, *TEXT_ATTENTION))
_SD3 = ("sd3",)
_RANDOM = KnownTo("it starts from trained weights, which have their own size", only=_SD3)
_POSITIONS = KnownTo("only SD3 has a position table", only=_SD3)
_BLOCKS = KnownTo("only SD3's own blocks do this", only=_SD3)


class ShapeConfig(Table):
    """[model.shape]: a denoiser of any size; text and pooled widths and latent channels come from `diffusers_path`."""

    num_layers: Annotated[int, Strict(), Ge(1), Le(1000)]
    """Number of joint blocks."""
    num_heads: Annotated[int, Strict(), Ge(1), Le(1024)]
    """Attention heads. ComfyUI reads models with as many heads as blocks, 64 wide."""
    head_dim: Annotated[int, Strict(), Ge(8), Le(256)] = 64
    """Width of a head, a multiple of 8; the model is `num_heads` times as wide."""
    position_step: PositionStep = SIZES["sd3_light"].position_step
    """Distance of neighbouring tokens in the position table, in radians."""


class ModelConfig(Table):
    """[model]: the denoiser, its initial weights, its text conditioning and its noise."""

    type: FamilyName = AUTO
    """Model family. `auto`: that of the pipeline in `model_index.json` of `diffusers_path`, SD3 if it names none. A
    class of an installed package is a `sd3_light.core.family.Family`."""
    train_type: Annotated[Literal["sd3_light_pretrain"] | None, _RANDOM] = None
    """Pretrain a model of this `size`. Absent: fine-tune the denoiser of `diffusers_path`."""
    diffusers_path: ModelFolder
    """Complete model folder in diffusers layout, or one written by `sd3-light init`. Provides the text encoders and the
    VAE. Or the id of a model on the Hugging Face hub (`OWNER/NAME`, also `hf://OWNER/NAME@REVISION`), which is
    downloaded into the hub's cache."""
    size: Annotated[SizeName | None, _RANDOM] = None
    """Name in the table of sizes. Absent: `sd3_light` with `train_type`, otherwise the size of the weights."""
    shape: Annotated[ShapeConfig | None, _RANDOM] = None
    """Shape of the denoiser, in place of `size`. Absent: as in `size`."""
    init: RandomOrPath | None = None
    """Initial weights of the denoiser: `random`, a folder, or an SD3 single file (`.safetensors`). Absent: `random`
    with `train_type` (unless `sd3-light init` wrote `diffusers_path`), otherwise `diffusers_path`."""
    teacher_path: TomlPath | None = None
    """Folder of a vision model (DINOv2, ViT, CLIP, or one of `sd3-light parts`) whose features of the images the cache
    stores, for [objective.alignment]. Another one encodes nothing else again. Absent: none are stored."""
    training_adapter: TomlPath | None = None
    """LoRA file that is added to the denoiser in training and validation, and not in samples, metrics and exports. With
    one that undoes a distillation, a model of few steps is fine-tuned and keeps its few steps
    (docs/reference/distill.md)."""
    num_layers: Annotated[Annotated[int, Strict(), Ge(1), Le(1000)] | None, _RANDOM] = None
    """Number of joint blocks; overrides the size."""
    qk_norm: Annotated[Flag | None, _RANDOM] = None
    """RMS norm of queries and keys. Absent: as in the size."""
    position_step: Annotated[PositionStep | None, _POSITIONS] = None
    """Distance of neighbouring tokens in the position table of random weights, in radians. Absent: as in the size. A
    resumed run keeps its table, and trained weights contain theirs."""
    dtype: DtypeName = "bfloat16"
    """Compute dtype of the text encoders on GPUs. On CPUs everything uses float32. Another value encodes the captions
    of a cache again, and no image."""
    vae_dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    """Compute dtype of the VAE's encoder on GPUs, when images are cached. `auto`: float16 if its error on test images
    is below half of the noise that the latents have anyway, otherwise float32 (TF32). Caches built with `auto`, on CPUs
    or by earlier versions are interchangeable; another value encodes the images again."""
    transformer_dtype: Literal["float32", "bfloat16"] = Field(
        default_factory=lambda data: "float32" if data.get("dtype") == "float32" else "bfloat16",
        json_schema_extra={"default": "float32 if `dtype` is float32, otherwise bfloat16"},
    )
    """Compute dtype of the denoiser; trained weights are stored in `optimizer.weight_dtype`. float16 is not supported
    because it needs loss scaling."""
    t5_max_length: Annotated[
        int, Strict(), Gt(0), Le(512), KnownTo("it is the length of SD3's T5 input", "write text_max_length", _SD3)
    ] = 256
    """Maximum length of the T5 input, in tokens."""
    text_max_length: Annotated[
        Annotated[int, Strict(), Gt(0), Le(4096)] | None,
        KnownTo("its T5 input has its own key", "write t5_max_length", without=_SD3),
    ] = None
    """Maximum length of a caption, in tokens of the text encoder. Absent: as in the stock pipeline."""
    text_tokens: Annotated[
        Literal["padded", "real"], KnownTo("its text is padded, or not, as in its pipeline", only=_SD3)
    ] = "padded"
    """`padded`: padded text, as in the stock pipeline. `real`: only real tokens, with masked attention."""
    enable_uncond_text_dropout: Flag = False
    """Drop the text encoders at random during training."""
    uncond_text_dropout: Annotated[
        Literal["per_encoder", "joint"],
        KnownTo("one draw drops all of its text", only=_SD3, harmless=("joint",)),
    ] = "per_encoder"
    """`per_encoder`: each of the three encoders is dropped by its own draw. `joint`: one draw drops all three, so that
    every other sample trains with its full text, as in other families."""
    uncond_text_dropout_prob: Fraction = Field(
        default_factory=lambda data: 0.1 if data.get("uncond_text_dropout") == "joint" else 0.464,
        json_schema_extra={"default": "0.464; 0.1 with `joint` and in other families"},
    )
    """Probability of each draw. By default 10% of the samples lose all text: 0.464 cubed, or 0.1 in one draw."""
    references: Annotated[
        int,
        Strict(),
        Ge(0),
        Le(8),
        KnownTo(
            "its pipeline says how many images it sees", only=("sd3", "flux2", "qwen_image_edit_plus"), harmless=(0,)
        ),
    ] = 0
    """Number of images that the model sees beside the text; each `[[directory]]` names as many folders of `references`.
    Their tokens follow those of the image. For SD3 the export's `pipeline.py` takes them."""
    reference_dropout_prob: Annotated[
        Fraction, KnownTo("it sees no image beside the text", only=("sd3", "flux2", "flux_kontext"), harmless=(0.0,))
    ] = 0.0
    """Probability that a sample sees zeros in place of its reference images, drawn apart from that of the text."""
    outside_mask_weight: Annotated[float, Strict(), Ge(0), Lt(1)] = 0.0
    """Weight of what a sample's mask excludes, beside 1 for what it includes; 0: what is outside does not train. A
    sample's loss is the mean with these weights, so it counts as much as one without a mask."""
    uncond_text: Annotated[
        Literal["zero", "empty"] | None,
        KnownTo("its unconditional text is that of its pipeline", only=_SD3, harmless=("empty",)),
    ] = Field(default=None, json_schema_extra={"default": '`"zero"`; `"empty"` for continued weights'})
    """Conditioning of a sample without text, in training and guidance: zeros, or the encoded empty string, as in stock
    guidance. Continued weights that sd3-light trained keep what they were trained with, and so does a resumed run."""
    timestep_sample_method: Literal["logit_normal", "uniform"] = "logit_normal"
    """Distribution of the timestep t in (0, 1)."""
    sigmoid_scale: Annotated[float, Strict(), Gt(0), Le(100)] = 1.0
    """Standard deviation of the logit of t under `logit_normal`."""
    logit_mean: Annotated[float, Strict(), Ge(-10), Le(10)] = 0.0
    """Mean of the logit of t under `logit_normal`; above 0 trains more on noise."""
    uniform_share: Annotated[float, Strict(), Ge(0), Lt(1)] = 0.0
    """Share of samples whose t is uniform, the rest `logit_normal`: the ends of (0, 1) are trained too."""
    shift: Annotated[float, Strict(), Ge(0.001), Le(1000)] | None = None
    """Timestep shift s: t' = s t / (1 + (s - 1) t). Absent: that of the scheduler of continued weights (3 for SD3 and
    SD3.5; `flux_shift` if it shifts by resolution), no shift for random ones. A resumed run keeps its shift."""
    flux_shift: Flag = False
    """Timestep shift that grows with the resolution, by the numbers of the scheduler of continued weights (Flux's if it
    has none); excludes `shift`."""
    sqrt_shift: Flag = False
    """Timestep shift sqrt(tokens / 256), for mixed resolutions: with tokens of 16 px 1 at 256 px, 2 at 512 px, 4 at
    1024 px; excludes `shift` and `flux_shift`. The export's sampler has the shift of its default size."""
    last_time: Annotated[
        Annotated[float, Strict(), Ge(0), Lt(1)] | None,
        KnownTo("its pipeline sets the times of sampling", only=_SD3),
    ] = None
    """Time of the last call of sampling, in training and in the export's scheduler (diffusers' `shift_terminal`).
    0: diffusers' own, about 0.001. Absent: that of the scheduler of continued weights; 1 / steps with
    `objective.distill.steps`, so that each of a few calls counts; otherwise 0."""
    guidance: Annotated[
        NotNegative | None,
        KnownTo("SD3 has no guidance embedding", "for sample images use sampling.guidance", without=_SD3),
    ] = None
    """Guidance number that a guidance-distilled denoiser gets in training (Flux.1 dev). Absent: 1, as is usual; no
    other number was measured. Other denoisers take none."""
    text_recon_gamma: Annotated[NotNegative, _BLOCKS] = 0.0
    """Weight of the text reconstruction loss; 0 disables it."""
    text_recon_target_layer: Annotated[CountOrZero, _BLOCKS] = 0
    """Layer whose text tokens are reconstructed: 0 after the context embedder, k after block k. At most the number of
    blocks minus 2: the last block has no text output, and the last text output is the prediction."""
    layer_sync: LayerSyncConfig | None = None
    """Align an early block's image tokens with a later block's. Absent: no such loss."""
    routing: Annotated[RoutingConfig | None, _BLOCKS] = None
    """Let some image tokens skip the middle blocks in training. Absent: all tokens run through all blocks."""
    position_crop_side: Annotated[Count | None, _POSITIONS] = None
    """Give every training sample a random crop of the position table, within the central square of this many tokens per
    side: 64 covers 1024 px. Validation and sampling use the centre. Absent: the centre in training too."""

    @property
    def continues_weights(self) -> bool:
        """Whether trained weights are continued: those of `init`, or of `diffusers_path` in fine-tuning."""
        return self.train_type is None if self.init is None else self.init != "random"

    def route(self, num_blocks: int) -> TokenRoute | None:
        """Return the route of image tokens through a denoiser with ``num_blocks`` blocks, if there is one."""
        return None if self.routing is None else self.routing.route(num_blocks)


class OptimizerConfig(Table):
    """[optimizer]: the optimizer and its settings."""

    type: OptimizerName = Field(default="adamw", description=describe_optimizers())
    lr: Positive = Field(
        default_factory=lambda data: OPTIMIZERS[data.get("type", "adamw")].lr,
        json_schema_extra={"default": "0.0001; 0.01 with `adafactor`, 1 with `prodigy`"},
    )
    """Peak learning rate."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """Decay rates of AdamW's two moments."""
    weight_decay: NotNegative = 0.01
    """Decoupled weight decay; not applied to norms, biases and embeddings."""
    eps: Positive = 1e-8
    """Term added to the denominator."""
    split_modulation: Flag = False
    """With `muon`: orthogonalise the scales, shifts and gates of a block as separate matrices, not as the one tall
    matrix that holds them. Off by default: not measured."""
    weight_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype in which trained weights are stored. `float32`: master weights, the default. `bfloat16`: half of their
    memory; updates are computed in float32 and rounded stochastically, so that small ones are not lost. Vectors, such
    as norms and biases, moments (`adamw`) and averages stay float32. For all weights of a model in one process, with
    `transformer_dtype = "bfloat16"`."""


class EmaTrack(Table):
    """[[ema.track]]: an additional moving average of the weights."""

    name: Name
    """Name of the track in checkpoints and exports; `ema` is the name of the main track."""
    decay: Decay | None = None
    """Decay per update, after the ramp of [ema]; set this or `power_width`."""
    power_width: Annotated[float, Strict(), Gt(0), Le(0.28)] | None = None
    """Width of a power-function average as a fraction of the training length (EDM2's sigma_rel). With two such tracks
    (0.05 and 0.1 in the paper) `export --ema-length` can rebuild averages of other lengths."""
    update_every: Count | None = None
    """Optimizer steps between updates. Absent: as in [ema]."""

    @model_validator(mode="after")
    def _require_one_kind(self) -> Self:
        if (self.decay is None) == (self.power_width is None):
            raise invalid_value("needs exactly one of decay and power_width")
        return self


class EmaConfig(Table):
    """[ema]: an exponential moving average of the weights, in float32."""

    enable: Flag = False
    """Keep a moving average of the weights and export it."""
    decay: Decay = 0.99
    """Decay per update. Early updates use (1 + n) / (10 + n) if that is lower, where n counts the updates before."""
    update_every: Count = 100
    """Optimizer steps between updates."""
    snapshot_every_n_steps: Count | None = None
    """Optimizer steps between snapshots of the power-function tracks, which `export --ema-length` needs. Absent: 1/32
    of the run. No snapshots without such tracks."""
    snapshot_dtype: Literal["float16", "float32"] = "float16"
    """Dtype of snapshots: 2 or 4 bytes per weight, track and snapshot."""
    track: tuple[EmaTrack, ...] = ()
    """Additional averages, one `[[ema.track]]` table each."""


class AdapterConfig(Table):
    """[adapter]: train an adapter, usually a LoRA, instead of all weights."""

    type: Literal["lora", "lokr", "loha"] = "lora"
    """Kind of adapter. `lokr` and `loha` are saved in LyCORIS layout, which ComfyUI reads and diffusers does not."""
    rank: Annotated[int, Strict(), Ge(1), Le(65536)] = 32
    """Rank of the update."""
    alpha: Positive = Field(
        default_factory=lambda data: float(data["rank"]), json_schema_extra={"default": "equal to `rank`"}
    )
    """Scale: the update is multiplied by alpha / rank."""
    dropout: Decay = 0.0
    """Dropout before the adapter during training (`lokr` and `loha`: of rows of the update)."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Compute dtype of a LoRA if the denoiser computes in bfloat16; its weights are float32."""
    init_from_existing: TomlPath | None = None
    """Adapter file, or folder with one, to start from; its rank and layers must match."""
    target_modules: Annotated[tuple[TomlString, ...], MinLen(1)] = LORA_TARGETS
    """Linear layers that get an adapter: suffixes of their names, or shell-style patterns
    (`transformer_blocks.[0-7].attn.to_*`). An entry that matches no layer is an error. Other families than SD3 have
    their own default."""
    use_rslora: Flag = False
    """Scale by alpha / sqrt(rank)."""
    use_dora: Flag = False
    """Learn magnitude and direction separately (DoRA)."""
    base_bits: Annotated[Literal[16, 8, 4], Allowed("16, 8 or 4")] = 16
    """Bits per frozen weight in the linear layers of the blocks under a LoRA. 8: one scale per row, fp8 (e4m3) on GPUs
    with FP8 support, else int8; GPUs in bfloat16 also multiply in it. 4: NF4 of bitsandbytes (`pip install
    'sd3-light[bnb]'`). 16: bfloat16 on GPUs and float32 on CPUs. The saved file works with the unquantized model."""


class SampleImage(Table):
    """[[sampling.image]]: a prompt with its own settings; absent keys have the values of [sampling]."""

    prompt: TomlString
    """The text."""
    negative_prompt: TomlString | None = None
    """What to steer away from."""
    size: ImageSize | None = None
    """Size of the image in pixels."""
    steps: Count | None = None
    """Sampler steps."""
    guidance: NotNegative | None = None
    """Guidance scale."""
    references: tuple[TomlPath, ...] = ()
    """Files of the images that the model sees beside the prompt, in their order. Absent: it sees the prompt alone."""


class SamplingConfig(Table):
    """[sampling]: sample images drawn during training."""

    prompts: tuple[TomlString, ...] = ()
    """One image per prompt and seed. Without these and `image`: no samples."""
    seeds: Annotated[tuple[CountOrZero, ...], MinLen(1)] = (0,)
    """Seeds of the initial noise."""
    every_n_steps: Count | None = None
    """Optimizer steps between sample images; required with `prompts` or `image`."""
    at_steps: tuple[Count, ...] = ()
    """Also draw after these optimizer steps, such as the first."""
    before_first_step: Flag = False
    """Also draw with the initial weights."""
    after_last_step: Flag = True
    """Also draw at the end of the run. The card of an export shows the newest samples."""
    steps: Count = 28
    """Sampler steps per image. Absent: 28, or the model's own (Flux schnell: 4)."""
    guidance: NotNegative = DEFAULT_GUIDANCE
    """Classifier-free guidance scale; 1 or less (Krea 2, Z-Image: 0) disables it. Absent: 4, or that of the family's
    stock pipeline."""
    negative_prompt: TomlString = ""
    """What to steer away from; needs `uncond_text = "empty"`."""
    size: ImageSize | None = None
    """Size of the images in pixels. Absent: that of the bucket with most samples."""
    frames: Count | None = None
    """Frames of the clips of a video model; 1 draws images. Absent: those of the bucket with most samples."""
    image: tuple[SampleImage, ...] = ()
    """Prompts with their own settings, one `[[sampling.image]]` table each."""

    @property
    def images(self) -> tuple[SampleImage, ...]:
        """All prompts with their settings: those of `prompts`, then those of `image`."""
        return (*(SampleImage(prompt=prompt) for prompt in self.prompts), *self.image)

    @property
    def negative_prompts(self) -> tuple[str, ...]:
        """The different negative prompts that are not empty."""
        own = (image.negative_prompt for image in self.images)
        texts = (self.negative_prompt if text is None else text for text in own)
        return tuple(dict.fromkeys(text for text in texts if text))

    @property
    def texts(self) -> tuple[str, ...]:
        """The different texts to encode."""
        return tuple(dict.fromkeys((*(image.prompt for image in self.images), *self.negative_prompts)))


class MetricsConfig(Table):
    """[metrics]: measure against true images during training, as `sd3-light evaluate --against` does."""

    dataset: TomlPath
    """Dataset TOML of the true images; their captions are drawn."""
    features: TomlPath
    """Folder whose features compare images: of `sd3-light parts` (its judge), or a CLIP or vision model, in
    safetensors."""
    every_n_steps: Count
    """Optimizer steps between measurements; the last step is measured too."""
    images: Annotated[int, Strict(), Ge(8), Le(100_000)] = 256
    """Captions to draw, at most: those with the lowest sample ids."""
    steps: Count = 20
    """Sampler steps per image. Absent: 20, or the model's own (Flux schnell: 4)."""
    guidance: NotNegative = DEFAULT_GUIDANCE
    """Classifier-free guidance scale; 1 or less (Krea 2, Z-Image: 0) disables it. Absent: 4, or that of the family's
    stock pipeline."""
    best: Literal["frechet", "kid", "precision", "recall", "retrieval", "distance"] = "distance"
    """Metric that decides which weights are the best. `"distance"` compares every drawn image with its true one, and
    tells checkpoints apart where the others differ by less than their noise. The best weights are exported, the link
    `exports/best` points to them, and `keep_last_n_exports` keeps them."""
    stop_after: Count | None = None
    """Save and stop after this many measurements in a row that are not better than the best. Absent: train to the
    end."""


class MonitoringConfig(Table):
    """[monitoring]: trackers in addition to log.jsonl and TensorBoard, which are always written."""

    enable_wandb: Flag = False
    """Log to Weights & Biases (`pip install 'sd3-light[wandb]'`). Respects WANDB_MODE."""
    wandb_api_key: SecretStr | None = None
    """Prefer the environment variable WANDB_API_KEY. The key is used, but never written or shown."""
    wandb_tracker_name: TomlString = "sd3-light"
    """Project name, also for trackio."""
    wandb_run_name: TomlString | None = None
    """Run name, also for trackio. Absent: the name of the run folder."""
    enable_trackio: Flag = False
    """Log to trackio (`pip install 'sd3-light[trackio]'`), on this machine or as set by TRACKIO_DIR, TRACKIO_SPACE_ID
    or TRACKIO_SERVER_URL."""
