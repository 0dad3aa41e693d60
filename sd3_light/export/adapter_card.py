"""The model card of an adapter: what it is, its base model, and how to use it in diffusers and ComfyUI."""

from collections.abc import Mapping
from typing import Any

from huggingface_hub import ModelCardData

from sd3_light.config import AdapterConfig
from sd3_light.export.export_spec import AdapterSpec

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


def adapter_card(spec: AdapterSpec, facts: Mapping[str, Any]) -> str:
    """Return the card as Markdown."""
    data = ModelCardData(
        library_name="diffusers",
        pipeline_tag="text-to-image",
        tags=["sd3", "sd3-light", spec.adapter.type],
        base_model=None,
        license="other",
        license_name="not-stated",
        license_link="LICENSE",
    )
    return _ADAPTER_CARD.format(
        metadata=str(data.to_yaml()).strip(),
        title=_title(spec.adapter),
        table="\n".join(f"| {name} | {value} |" for name, value in _rows(spec, facts)),
        use=_use(spec),
        file=spec.file,
    )


def _title(adapter: AdapterConfig) -> str:
    if adapter.type == "lora":
        return "A DoRA" if adapter.use_dora else "A LoRA"
    return {"lokr": "A LoKr", "loha": "A LoHa"}[adapter.type]


def _rows(spec: AdapterSpec, facts: Mapping[str, Any]) -> list[tuple[str, Any]]:
    adapter, about = spec.adapter, spec.about
    rows: list[tuple[str, Any]] = [
        ("base model", spec.base_name),
        ("rank, alpha", f"{adapter.rank}, {adapter.alpha:g}" + (" (rsLoRA)" if adapter.use_rslora else "")),
        ("layers", ", ".join(f"`{name}`" for name in adapter.target_modules)),
        ("weights", facts.get("weights", "raw")),
        ("optimizer steps", facts.get("step", 0)),
        ("samples seen", facts.get("samples", 0)),
    ]
    rows += [(name, about[name]) for name in ("data set", "resolutions") if about.get(name)]
    rows += [(f"flow matching loss, {name}", f"{loss:.4g}") for name, loss in about.get("losses", {}).items()]
    return [(name, str(value).replace("|", "\\|")) for name, value in rows]


def _use(spec: AdapterSpec) -> str:
    if spec.adapter.type != "lora":
        return _LYCORIS.format(file=spec.file, kind=_title(spec.adapter).removeprefix("A "))
    comfy = _NO_COMFY if spec.adapter.use_dora else _COMFY.format(file=spec.file)
    return _DIFFUSERS.format(base=spec.base_name) + "\n" + comfy
