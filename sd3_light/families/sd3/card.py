"""What the card of an SD3 model says about its denoiser, its text and its use."""

from collections.abc import Mapping
from typing import Any

from sd3_light.core.files import CardTexts
from sd3_light.export.card import SEED, SETTINGS

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


def card_texts(config: Mapping[str, Any], text: Mapping[str, Any]) -> CardTexts:
    """Return the texts for a denoiser config and a text policy."""
    heads = f"{config['num_attention_heads']} heads of {config['attention_head_dim']}"
    denoiser = f"{config['num_layers']} joint blocks, {heads}"
    tokens, t5 = text.get("text_tokens", "padded"), text.get("t5_max_length", 256)
    uncond = text.get("uncond_text", "empty")
    policy = f"{tokens} tokens, T5 length {t5}, unconditional input: {uncond}"
    if tokens == "real":
        note = _REAL_NOTE.format(uncond="zeros" if uncond == "zero" else "the empty prompt")
        return CardTexts(denoiser, policy, _CUSTOM, note, "diffusers with `pipeline.py`", _ADAPTER_CALL)
    code = _STOCK + (_ZERO_CALL if uncond == "zero" else _STOCK_CALL).format(t5=t5)
    return CardTexts(denoiser, policy, code, _ZERO_NOTE if uncond == "zero" else "", "stock diffusers", _ADAPTER_CALL)
