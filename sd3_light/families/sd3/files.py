"""SD3's files: folders with an optional custom pipeline, adapter names of both namings, single files."""

from collections.abc import Mapping
from contextlib import nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sd3_light.config import ModelConfig
from sd3_light.config.faults import UserError
from sd3_light.core.columns import MOST_REFERENCES
from sd3_light.core.files import AdapterNames, CardTexts, CustomPipeline, Files, SingleFiles
from sd3_light.export.card import SEED, SETTINGS
from sd3_light.export.proof_process import sample_image
from sd3_light.families.sd3.lora_names import SD3AdapterNames
from sd3_light.families.sd3.masked_attention import use_masked_attention
from sd3_light.families.sd3.real_pipeline import RealTextPipeline, seeing
from sd3_light.families.sd3.sample_texts import TextPolicy
from sd3_light.families.sd3.single_file import SD3SingleFiles
from sd3_light.model.folder import missing_parts, tokenizer_length, vae_shape
from sd3_light.model.part_configs import FACTS_FILE

_STEPS = 2
_GUIDANCE = 3.0
_MAX_SIDE = 16  # latent pixels of the denoiser's input; the image has half of them
_TEXT_ROWS = 8
_REAL_ROWS = [3, 8]  # of the negative prompt and the prompt
_T5_LENGTH = 256  # of diffusers
_CHOICES: dict[str, tuple[str, ...]] = {"uncond_text": ("zero", "empty"), "text_tokens": ("padded", "real")}
_STOCK = """import torch
from diffusers import StableDiffusion3Pipeline

pipe = StableDiffusion3Pipeline.from_pretrained("this folder", dtype=torch.float32)
"""
_STOCK_CALL = f"""{SEED}
image = pipe("a prompt", max_sequence_length={{t5}}, {SETTINGS}).images[0]"""
_ZERO_CALL = f"""text, _, pooled, _ = pipe.encode_prompt("a prompt", None, None, max_sequence_length={{t5}})
zeros = {{{{"negative_prompt_embeds": 0 * text, "negative_pooled_prompt_embeds": 0 * pooled}}}}
{SEED}
image = pipe(prompt_embeds=text, pooled_prompt_embeds=pooled, **zeros, {SETTINGS}).images[0]"""
_ADAPTER_CALL = f'image = pipe("a prompt", {SETTINGS}).images[0]'
_CUSTOM = f"""import torch
from diffusers import DiffusionPipeline

custom = {{"custom_pipeline": "pipeline", "trust_remote_code": True}}  # runs pipeline.py of this folder: read it first
pipe = DiffusionPipeline.from_pretrained("this folder", dtype=torch.float32, **custom)
{SEED}
{_ADAPTER_CALL}"""

_ZERO_NOTE = """
The unconditional input of training was zeros, not the empty prompt. Guidance must use zeros too: the lines above pass
them as `negative_prompt_embeds` and `negative_pooled_prompt_embeds`. `sd3-light sample` does this automatically.
"""
_REAL_NOTE = """
The model was trained on real text tokens: each encoder's tokens of the prompt without padding, T5 under its mask. The
unconditional input of guidance was {uncond}. `pipeline.py` does the same. The stock class `StableDiffusion3Pipeline`
also loads this folder, but it pads the prompt and lets every token attend to the padding, which differs from training.
`sd3-light sample` does not need `pipeline.py`.
"""


_REFERENCE_CALL = f"""from PIL import Image

reference = Image.open("before.png")
image = pipe("an instruction", image=reference, {SETTINGS}).images[0]"""
_REFERENCE_ADAPTER_CALL = f"""# the stock class shows no reference: see `sd3-light sample --reference`, or merge the
# adapter with `sd3-light lora merge` into a folder whose pipeline.py does
{_ADAPTER_CALL}"""
_REFERENCE_NOTE = """
The model was trained to see {count} reference image(s) beside the text, at the size of the image that is drawn; `image`
takes a list of several. Only `pipeline.py` and `sd3-light sample --reference` pass them: the stock class also loads
this folder and draws from the text alone. The unconditional input of guidance was {uncond}, as in `pipeline.py`.
"""


class SD3Files(Files):
    """See `Files`. A model of real text tokens has a custom pipeline."""

    writes_scheduler = True
    pipeline_settings = ("t5_max_length", "uncond_text", "text_tokens", "references")

    @cached_property
    def adapters(self) -> AdapterNames:
        """See `Files.adapters`."""
        return SD3AdapterNames("an SD3 denoiser", comfyui=True)

    @cached_property
    def single(self) -> SingleFiles:
        """See `Files.single`."""
        return SD3SingleFiles()

    def missing(self, folder: Path, denoiser: bool) -> tuple[str, ...]:
        """See `Files.missing`."""
        return missing_parts(folder, transformer=denoiser)

    def text_facts(self, model: ModelConfig) -> dict[str, Any]:
        """See `Files.text_facts`."""
        uncond_text = model.uncond_text or "zero"
        return TextPolicy(model.t5_max_length, uncond_text, model.text_tokens, references=model.references).facts()

    def text_policy(self, folder: Path, text: Mapping[str, Any]) -> TextPolicy:
        """See `Files.text_policy`. By default there are no more T5 tokens than the folder's tokenizer accepts."""
        length = min(_T5_LENGTH, tokenizer_length(folder / "tokenizer_3") or _T5_LENGTH)
        usual = {"t5_max_length": length, "uncond_text": "empty", "text_tokens": "padded", "references": 0}
        values: dict[str, Any] = {**usual, **text}
        invalid = [key for key, choices in _CHOICES.items() if values[key] not in choices]
        if type(values["t5_max_length"]) is not int or values["t5_max_length"] < 1:
            invalid.append("t5_max_length")
        if type(values["references"]) is not int or not 0 <= values["references"] <= MOST_REFERENCES:
            invalid.append("references")
        if invalid:
            value = values[invalid[0]]
            raise UserError(
                f"{folder / FACTS_FILE}: {invalid[0]} has the invalid value {value!r}; export the folder again"
            )
        return TextPolicy(**{key: values[key] for key in usual})

    def custom_pipeline(self, text: Mapping[str, Any]) -> CustomPipeline | None:
        """See `Files.custom_pipeline`."""
        if text.get("text_tokens") != "real" and not text.get("references"):
            return None
        names = self.pipeline_settings if text.get("references") else self.pipeline_settings[:2]
        return CustomPipeline(RealTextPipeline, {key: text[key] for key in names})

    def denoiser_inputs(self, config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
        """See `Files.denoiser_inputs`."""
        latent, text, pooled, *_ = _draws(config)
        return {
            "hidden_states": latent,
            "timestep": torch.tensor([500.0]),
            "encoder_hidden_states": text,
            "pooled_projections": pooled,
        }

    def pipeline_inputs(self, folder: Path, config: Mapping[str, Any], text: Mapping[str, Any]) -> dict[str, Any]:
        """See `Files.pipeline_inputs`. With real text tokens the two texts have different lengths."""
        latent, rows, pooled, negative_rows, negative_pooled = _draws(config)
        channels, pixels = vae_shape(folder)
        small = max(2, latent.shape[-1] // 4 * 2)  # of whole patches
        side = small * pixels
        inputs = {
            "prompt_embeds": rows,
            "pooled_prompt_embeds": pooled,
            "negative_prompt_embeds": negative_rows,
            "negative_pooled_prompt_embeds": negative_pooled,
            "width": side,
            "height": side,
            "num_inference_steps": _STEPS,
            "guidance_scale": _GUIDANCE,
        }
        if count := text.get("references"):
            generator = torch.Generator().manual_seed(1)
            inputs["image"] = [torch.randn(1, channels, small, small, generator=generator) for _ in range(count)]
        if text.get("text_tokens") == "real":
            inputs["joint_attention_kwargs"] = {"text_lengths": torch.tensor(_REAL_ROWS)}
        return inputs

    def reference_image(self, pipe: Any, inputs: Mapping[str, Any]) -> Tensor:
        """See `Files.reference_image`. References and real text are as in training, without `pipeline.py`."""
        references = inputs.get("image", [])
        inputs = {name: value for name, value in inputs.items() if name != "image"}
        is_real = "joint_attention_kwargs" in inputs
        masked = use_masked_attention(pipe.transformer) if is_real else nullcontext()
        with seeing(pipe.transformer, references), masked:
            return sample_image(pipe, inputs)

    def card(self, config: Mapping[str, Any], text: Mapping[str, Any]) -> CardTexts:
        """See `Files.card`."""
        heads = f"{config['num_attention_heads']} heads of {config['attention_head_dim']}"
        denoiser = f"{config['num_layers']} joint blocks, {heads}"
        tokens = text.get("text_tokens", "padded")
        t5 = text.get("t5_max_length", 256)
        uncond = text.get("uncond_text", "empty")
        policy = f"{tokens} tokens, T5 length {t5}, unconditional input: {uncond}"
        words = "zeros" if uncond == "zero" else "the empty prompt"
        if count := text.get("references"):
            note = _REFERENCE_NOTE.format(count=count, uncond=words)
            code = _CUSTOM.replace(_ADAPTER_CALL, _REFERENCE_CALL)
            return CardTexts(denoiser, policy, code, note, "diffusers with `pipeline.py`", _REFERENCE_ADAPTER_CALL)
        if tokens == "real":
            note = _REAL_NOTE.format(uncond=words)
            return CardTexts(denoiser, policy, _CUSTOM, note, "diffusers with `pipeline.py`", _ADAPTER_CALL)
        call, note = (_ZERO_CALL, _ZERO_NOTE) if uncond == "zero" else (_STOCK_CALL, "")
        return CardTexts(denoiser, policy, _STOCK + call.format(t5=t5), note, "stock diffusers", _ADAPTER_CALL)


def _draws(config: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """Return a latent, text rows and a pooled vector, and those of a negative prompt."""
    generator = torch.Generator().manual_seed(0)
    side = min(config["sample_size"], _MAX_SIDE)
    latent = (1, config["in_channels"], side, side)
    text = (1, _TEXT_ROWS, config["joint_attention_dim"])
    pooled = (1, config["pooled_projection_dim"])
    return tuple(torch.randn(shape, generator=generator) for shape in (latent, text, pooled, text, pooled))
