"""The model card of an adapter: what it is, its base model, and how to use it in diffusers and ComfyUI."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from sd3_light.config import AdapterConfig

_ADAPTER_CARD = """---
{metadata}
---

# {title} trained with SD3-Light

| | |
|---|---|
{table}

## Use

{use}

`proof.json` records that a clean process loaded `{file}` on its base model and computed what the trained weights
compute.

## Licence

Not stated. Fill in `license` at the top of this file before you publish. The base model keeps its own licence.
"""

_DIFFUSERS = """In diffusers, on its base model:

```python
import torch
from diffusers import StableDiffusion3Pipeline

pipe = StableDiffusion3Pipeline.from_pretrained("{base}", dtype=torch.float32)
pipe.load_lora_weights("this folder")
image = pipe("a prompt", generator=torch.Generator("cpu").manual_seed(0)).images[0]
```
"""
_COMFY = "In ComfyUI: copy `{file}` to `models/loras` and choose it in a `Load LoRA` node, strength 1."
_NO_COMFY = "ComfyUI ignores the magnitudes of a DoRA: merge it into the model to use it there."
_LYCORIS = """In ComfyUI: copy `{file}` to `models/loras` and choose it in a `Load LoRA` node, strength 1. It is a
{kind} in LyCORIS' layout, which diffusers does not read."""


def adapter_card(
    adapter: AdapterConfig, file: str, base: Path, facts: Mapping[str, Any], about: Mapping[str, Any]
) -> str:
    """Return the card as Markdown."""
    data = ModelCardData(
        library_name="diffusers",
        pipeline_tag="text-to-image",
        tags=["sd3", "sd3-light", adapter.type],
        base_model=None,
        license="other",
        license_name="not-stated",
        license_link="LICENSE",
    )
    return _ADAPTER_CARD.format(
        metadata=str(data.to_yaml()).strip(),
        title=_title(adapter),
        table="\n".join(f"| {name} | {value} |" for name, value in _rows(adapter, base, facts, about)),
        use=_use(adapter, file, base),
        file=file,
    )


def _title(adapter: AdapterConfig) -> str:
    if adapter.type == "lora":
        return "A DoRA" if adapter.use_dora else "A LoRA"
    return {"lokr": "A LoKr", "loha": "A LoHa"}[adapter.type]


def _rows(
    adapter: AdapterConfig, base: Path, facts: Mapping[str, Any], about: Mapping[str, Any]
) -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = [
        ("base model", base_name(base)),
        ("rank, alpha", f"{adapter.rank}, {adapter.alpha:g}" + (" (rsLoRA)" if adapter.use_rslora else "")),
        ("layers", ", ".join(f"`{name}`" for name in adapter.target_modules)),
        ("weights", facts.get("weights", "raw")),
        ("optimizer steps", facts.get("step", 0)),
        ("samples seen", facts.get("samples", 0)),
    ]
    rows += [(name, about[name]) for name in ("data set", "resolutions") if about.get(name)]
    rows += [(f"flow matching loss, {name}", f"{loss:.4g}") for name, loss in about.get("losses", {}).items()]
    return [(name, str(value).replace("|", "\\|")) for name, value in rows]


def base_name(base: Path) -> str:
    """Return the name of the model in a denoiser's folder or file."""
    return base.parent.name if base.name == "transformer" else base.name


def _use(adapter: AdapterConfig, file: str, base: Path) -> str:
    if adapter.type != "lora":
        return _LYCORIS.format(file=file, kind=_title(adapter).removeprefix("A "))
    comfy = _NO_COMFY if adapter.use_dora else _COMFY.format(file=file)
    return _DIFFUSERS.format(base=base_name(base)) + "\n" + comfy
