"""The cards of exported models and adapters, in the format of the Hugging Face hub."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from sd3_light.config import DEFAULT_GUIDANCE, AdapterConfig
from sd3_light.core.drawing import stated_drawing
from sd3_light.core.family import Family
from sd3_light.core.files import CardTexts
from sd3_light.core.sampling import OwnDrawing
from sd3_light.export.export_spec import SAMPLES_FILE, AdapterSpec, ExportSpec
from sd3_light.export.licence import INHERITED, NO_LICENCE, licence_of
from sd3_light.flow.scheduler import folder_scheduler
from sd3_light.model.part_configs import FACTS_FILE

_MODEL_CARD = """---
{metadata}
---

# A text-to-{media} model trained with SD3-Light

| | |
|---|---|
{table}
{samples}
## Use

```python
{code}
```
{note}
`proof.json` records that {loader} loaded this folder in a clean process and computed what the
trained weights compute.

## Licence

{licence}
"""

_SAMPLES = """
## Samples

![Images with their prompts]({file})

Drawn during training with the prompts of `[sampling]`, without selection.
"""
SEED = 'seed = torch.Generator("cpu").manual_seed(0)'
_USUAL_GUIDANCE = f"guidance_scale={DEFAULT_GUIDANCE}"
_GENERATOR = "generator=seed"
SETTINGS = f"{_USUAL_GUIDANCE}, {_GENERATOR}"
"""Arguments of a pipeline's call in an example."""
_UNSTATED = """Not stated. Before you publish, fill in `license`, `license_name` and `license_link` at the top of this
file. The frozen parts (VAE, text encoders, tokenizers) keep the licence of the model they come from."""
_ADAPTER_CARD = """---
{metadata}
---

# {title} trained with SD3-Light

| | |
|---|---|
{table}
{samples}
## Use

{use}

`proof.json` records that a clean process loaded `{file}` on its base model and computed what the trained weights
compute.

## Licence

{licence}
"""
UNSTATED_ADAPTER = """Not stated. Fill in `license` at the top of this file before you publish, or pass `--license`.
The base model keeps its own licence."""

_DIFFUSERS = f"""In diffusers, on its base model:

```python
import torch
from diffusers import {{pipeline}}

pipe = {{pipeline}}.from_pretrained({{base}}, dtype=torch.float32)
pipe.load_lora_weights("this folder")
{{scheduler}}{SEED}
{{call}}
```
"""
_SCHEDULER = """# it was trained with {shift}
pipe.scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config, {settings})
"""
_COMFY = "In ComfyUI: copy `{file}` to `models/loras` and choose it in a `Load LoRA` node, strength 1."
_NO_COMFY = "ComfyUI ignores the magnitudes of a DoRA: merge it into the model to use it there."
_PADDED_COMFY = """In ComfyUI, which reads this model as a single file padded to {blocks} blocks: convert the LoRA with
`sd3-light lora convert {file} comfy.safetensors --padded-for MODEL.safetensors`, copy the result to `models/loras` and
choose it in a `Load LoRA` node, strength 1. Without this, its updates of the last block are lost there."""
_LYCORIS = """In ComfyUI: copy `{file}` to `models/loras` and choose it in a `Load LoRA` node, strength 1. It is a
{kind} in LyCORIS' layout, which diffusers does not read; `sd3-light sample --lora` and `lora merge` do."""
_OTHER_LYCORIS = """`{file}` is a {kind} in LyCORIS' layout, which diffusers does not read; `sd3-light sample --lora`
and `lora merge` do."""
_PADDED_LYCORIS = """ Its last block is number {last}, as in the single file padded to {blocks} blocks. For programs
that use the folder's numbers, convert it with `sd3-light lora convert`."""


def model_card(spec: ExportSpec, facts: Mapping[str, Any], about: Mapping[str, Any]) -> str:
    """Return the card as Markdown. ``facts`` are those of `sd3_light.json`; ``about`` adds data, sizes and scores."""
    licence = licence_of(spec.base)
    texts = spec.family.files.card(spec.transformer_config, spec.text)
    drawing = stated_drawing(facts, Path(FACTS_FILE))
    return _MODEL_CARD.format(
        metadata=_metadata(spec.family, licence, about, ["flow-matching"], library_name="diffusers", **_base(about)),
        media=spec.family.media,
        table="\n".join(f"| {name} | {table_cell(value)} |" for name, value in _rows(spec, texts, facts, about)),
        samples=_samples(spec),
        code=_drawn_as(drawing, texts.code, texts.guidance),
        note=texts.note,
        loader=texts.loader,
        licence=INHERITED.format(licence["license"]) if licence else _UNSTATED,
    )


def _drawn_as(drawing: OwnDrawing, code: str, guidance: str) -> str:
    """Return code whose call has the steps and the guidance that an export states."""
    values = {"num_inference_steps": drawing.steps, guidance: drawing.guidance}
    stated = [f"{name}={value:g}" for name, value in values.items() if value is not None]
    if drawing.guidance is not None:
        code = code.replace(f"{_USUAL_GUIDANCE}, ", "")
    return code.replace(_GENERATOR, ", ".join([*stated, _GENERATOR]))


def _stated_row(drawing: OwnDrawing) -> Iterator[tuple[str, str]]:
    steps = [] if drawing.steps is None else [f"{drawing.steps} steps"]
    guidance = [] if drawing.guidance is None else [f"guidance {drawing.guidance:g}"]
    if steps or guidance:
        yield "sampling", ", ".join([*steps, *guidance])


def _samples(spec: ExportSpec) -> str:
    return _SAMPLES.format(file=SAMPLES_FILE) if SAMPLES_FILE in spec.images else ""


def _metadata(
    family: Family, licence: Mapping[str, str], about: Mapping[str, Any], tags: list[str], **fields: Any
) -> str:
    """Return the YAML front matter; losses, metrics and scores form its `model-index`."""
    results = [
        EvalResult(
            task_type=f"text-to-{family.media}",
            dataset_type=name,  # the hub groups results of one type as one dataset
            dataset_name=name,
            metric_type=metric,
            metric_name=metric,
            metric_value=value,
        )
        for name, metric, value in _results(about)
    ]
    name = about.get("name", "sd3-light") if results else None
    fields = {**fields, **{key: value for key, value in (licence or NO_LICENCE).items() if value}}
    return front_matter(family, [*tags, "sd3-light"], model_name=name, eval_results=results or None, **fields)


def front_matter(family: Family | None, tags: list[str], **fields: Any) -> str:
    """Return the YAML at the top of a card; ``family`` is None where it is not known."""
    names = [] if family is None else [family.name]
    media = "image" if family is None else family.media
    data = ModelCardData(pipeline_tag=f"text-to-{media}", tags=[*names, *tags], **fields)
    return str(data.to_yaml()).strip()


def _results(about: Mapping[str, Any]) -> Iterator[tuple[str, str, float]]:
    """Yield (data, metric, value) of all known results."""
    for name, loss in about.get("losses", {}).items():
        yield name, "flow matching loss", loss
    for name, value in about.get("metrics", {}).items():
        yield "true images", name, value
    for name, rate in about.get("scores", {}).items():
        yield "composition prompts", f"share right: {name}", rate


def _rows(
    spec: ExportSpec, texts: CardTexts, facts: Mapping[str, Any], about: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    yield "denoiser", texts.denoiser
    if "parameters" in about:
        yield "parameters", f"{about['parameters']:,}, saved in {about['save_dtype']}"
    yield "weights", facts.get("weights", "random")
    yield from _data_rows(about)
    yield "optimizer steps", facts.get("step", 0)
    yield "samples seen", facts.get("samples", 0)
    yield "text", texts.text
    yield "schedule", "shift by resolution" if spec.flux_shift else f"shift {spec.shift or 1.0:g}"
    yield from _stated_row(stated_drawing(facts, Path(FACTS_FILE)))
    yield from ((f"{metric}, {data}", f"{value:.4g}") for data, metric, value in _results(about))


def _data_rows(about: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    yield from ((name, about[name]) for name in ("data set", "images", "resolutions", "captions") if about.get(name))


def _base(about: Mapping[str, Any]) -> dict[str, str]:
    """Return the field that links the card with the model on the hub that training started from."""
    return {"base_model": about["base model"]} if about.get("base model") else {}


def table_cell(value: Any) -> str:
    """Return a value as the cell of a Markdown table."""
    return f"{value:,}" if isinstance(value, int) else str(value).replace("|", "\\|").replace("\n", " ")


def adapter_card(spec: AdapterSpec, facts: Mapping[str, Any]) -> str:
    """Return the card of an adapter as Markdown. The hub links it with a base model that is there."""
    library = "diffusers" if spec.adapter.type == "lora" else None  # diffusers does not load LoKr and LoHa
    licence = licence_of(spec.base_folder)
    base = _base({"base model": spec.base_repo})
    return _ADAPTER_CARD.format(
        metadata=_metadata(spec.family, licence, spec.about, [spec.adapter.type], library_name=library, **base),
        title=_title(spec.adapter),
        table="\n".join(f"| {name} | {table_cell(value)} |" for name, value in _adapter_rows(spec, facts)),
        samples=_samples(spec),
        use=_adapter_use(spec),
        file=spec.file,
        licence=INHERITED.format(licence["license"]) if licence else UNSTATED_ADAPTER,
    )


def _title(adapter: AdapterConfig) -> str:
    if adapter.type == "lora":
        return "A DoRA" if adapter.use_dora else "A LoRA"
    return {"lokr": "A LoKr", "loha": "A LoHa"}[adapter.type]


def _adapter_rows(spec: AdapterSpec, facts: Mapping[str, Any]) -> list[tuple[str, Any]]:
    adapter = spec.adapter
    about = spec.about
    rows: list[tuple[str, Any]] = [
        ("base model", spec.base_name),
        ("rank, alpha", f"{adapter.rank}, {adapter.alpha:g}" + (" (rsLoRA)" if adapter.use_rslora else "")),
        ("layers", ", ".join(f"`{name}`" for name in adapter.target_modules)),
        ("weights", facts.get("weights", "raw")),
        ("optimizer steps", facts.get("step", 0)),
        ("samples seen", facts.get("samples", 0)),
    ]
    rows += _data_rows(about)
    if spec.own_shift is not None:
        rows.append(("schedule", "shift by resolution" if spec.flux_shift else f"shift {spec.shift:g}"))
    rows += _stated_row(stated_drawing(facts, Path(FACTS_FILE)))
    rows += [(f"{metric}, {data}", f"{value:.4g}") for data, metric, value in _results(about)]
    return rows


def _scheduler_code(spec: AdapterSpec) -> str:
    """Return the code that gives a pipeline the adapter's own shift and last time; none if they are the base's."""
    changes: dict[str, list[str]] = {}
    if spec.flux_shift:
        changes["a shift by resolution"] = ["use_dynamic_shifting=True"]
    elif spec.shift is not None:
        own = {} if spec.family.files.writes_scheduler else folder_scheduler(spec.encoders or spec.base_folder).config
        key = "flow_shift" if "flow_shift" in own else "shift"
        changes[f"shift {spec.shift:g}"] = [f"{key}={spec.shift}", "use_dynamic_shifting=False"]
    if spec.last_time is not None:
        changes[f"a last call at {spec.last_time:g}"] = [f"shift_terminal={spec.last_time}"]
    if not changes:
        return ""
    settings = ", ".join(setting for change in changes.values() for setting in change)
    return _SCHEDULER.format(shift=" and ".join(changes), settings=settings)


def _adapter_use(spec: AdapterSpec) -> str:
    blocks = spec.padding.num_blocks if spec.padding else 0
    comfyui = spec.family.files.adapters.comfyui
    if spec.adapter.type != "lora":
        padded = _PADDED_LYCORIS.format(last=blocks - 1, blocks=blocks) if blocks else ""
        use = _LYCORIS if comfyui else _OTHER_LYCORIS
        return use.format(file=spec.file, kind=_title(spec.adapter).removeprefix("A ")) + padded
    comfy = (_PADDED_COMFY if blocks else _COMFY).format(file=spec.file, blocks=blocks)
    comfy = _NO_COMFY if spec.adapter.use_dora else comfy
    base = f'"{spec.base_repo}"' if spec.base_repo else f'"path/to/{spec.base_folder.name}"'
    texts = spec.family.files.card(spec.transformer_config, spec.text)
    call = _drawn_as(stated_drawing(spec.facts, Path(FACTS_FILE)), texts.call, texts.guidance)
    use = _DIFFUSERS.format(base=base, pipeline=spec.family.pipeline, call=call, scheduler=_scheduler_code(spec))
    return f"{use}\n{comfy}" if comfyui else use.rstrip()
