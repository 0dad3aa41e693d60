"""The model card: what a folder is and how to load it."""

from collections.abc import Mapping
from typing import Any

_CARD = """---
library_name: diffusers
pipeline_tag: text-to-image
tags: [sd3, flow-matching, sd3-light]
---

# A text-to-image model trained with SD3-Light

| | |
|---|---|
| denoiser | {layers} joint blocks, {heads} heads of {head_dim} |
| weights | {weights} |
| optimizer steps | {step} |
| samples seen | {samples} |
| text | {text_tokens} tokens, T5 length {t5}, unconditional input: {uncond} |

```python
import torch
from diffusers import StableDiffusion3Pipeline

pipe = StableDiffusion3Pipeline.from_pretrained("this folder", dtype=torch.float32)
image = pipe("a prompt", max_sequence_length={t5}, generator=torch.Generator("cpu").manual_seed(0)).images[0]
```
{note}
`proof.json` records that stock diffusers loaded this folder in a clean process and computed what the trained weights
compute.
"""

_ZERO_NOTE = """
The unconditional input of training was zeros, not the empty prompt: pass `negative_prompt_embeds` and
`negative_pooled_prompt_embeds` of zeros, or sample with `sd3-light sample`.
"""


_REAL_NOTE = """
It was trained on real text tokens: each encoder's tokens of the prompt without padding, T5 under its mask. The stock
call above pads the prompt and lets every token see the padding, so it is not the model that was trained: it shows how
the folder loads, not what the model can do. Sample with `sd3-light sample`.
"""


def model_card(transformer_config: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    """The card's Markdown."""
    text = facts.get("text", {})
    return _CARD.format(
        layers=transformer_config["num_layers"],
        heads=transformer_config["num_attention_heads"],
        head_dim=transformer_config["attention_head_dim"],
        weights=facts.get("weights", "random"),
        step=facts.get("step", 0),
        samples=facts.get("samples", 0),
        text_tokens=text.get("text_tokens", "padded"),
        t5=text.get("t5_max_length", 256),
        uncond=text.get("uncond_text", "empty"),
        note=_notes(text),
    )


def _notes(text: Mapping[str, Any]) -> str:
    """What the stock call does otherwise than training did."""
    real = _REAL_NOTE if text.get("text_tokens") == "real" else ""
    return real + (_ZERO_NOTE if text.get("uncond_text") == "zero" else "")
