"""The card of a single adapter file, from what the file itself says."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sd3_light.config.faults import UserError
from sd3_light.core.registry import family_of_file
from sd3_light.export.card import UNSTATED_ADAPTER, front_matter, table_cell
from sd3_light.export.licence import NO_LICENCE
from sd3_light.export.lora_file import own_metadata
from sd3_light.tensor_file import METADATA_KEY, open_tensors

_KINDS = {".lokr_": "LoKr", ".hada_": "LoHa", ".lora_magnitude_vector": "DoRA", ".dora_scale": "DoRA", ".lora_": "LoRA"}
_REPO = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*", re.ASCII)
_CARD = """---
{metadata}
---

# {title}

| | |
|---|---|
{table}

## Use

`sd3-light sample MODEL "a prompt" --lora {file}` draws with it on its base model `MODEL`.
{code}
## Licence

{licence}
"""
_DIFFUSERS = """
In diffusers:

```python
pipe = {pipeline}.from_pretrained("{base}")
pipe.load_lora_weights("this folder", weight_name={file!r})
```
"""


def adapter_file_card(file: Path) -> str:
    """Return the card of a LoRA, DoRA, LoKr or LoHa file as Markdown. Raises UserError for other files."""
    tensors, metadata = open_tensors(file)
    own = own_metadata(metadata, file)
    kind = _kind(file, tensors)
    facts = own.get("facts", {})
    base = facts.get("base") if isinstance(facts.get("base"), str) else ""
    repo = base if base and _REPO.fullmatch(base) else ""
    is_ours = METADATA_KEY in metadata
    family = family_of_file(own.get("family"))
    is_diffusers = is_ours and own.get("layout") in ("diffusers", "peft")
    rows = {
        "base model": base,
        **_adapter_rows(facts.get("adapter")),
        "layers": len({name.rpartition(".lora_")[0] for name in tensors}) if kind in ("LoRA", "DoRA") else "",
        "weights": facts.get("weights", ""),
        "optimizer steps": facts.get("step", ""),
        "samples seen": facts.get("samples", ""),
    }
    return _CARD.format(
        metadata=front_matter(
            family if is_ours else None,
            [kind.lower(), *(["sd3-light"] if is_ours else [])],
            library_name="diffusers" if is_diffusers else None,
            base_model=repo or None,
            **NO_LICENCE,
        ),
        title=f"A {kind} trained with SD3-Light" if is_ours else f"A {kind}",
        table="\n".join(f"| {name} | {table_cell(value)} |" for name, value in rows.items() if value != ""),
        code=_DIFFUSERS.format(pipeline=family.pipeline, base=repo or "path/to/base", file=file.name)
        if is_diffusers
        else "",
        file=file.name,
        licence=UNSTATED_ADAPTER,
    )


def _kind(file: Path, names: Iterable[str]) -> str:
    names = list(names)
    for part, kind in _KINDS.items():
        if any(part in name for name in names):
            return kind
    raise UserError(f"{file} is not an adapter's file: it has no LoRA, LoKr or LoHa; upload a model as a folder")


def _adapter_rows(adapter: Any) -> dict[str, Any]:
    """Return the settings of an adapter that its file states."""
    if not isinstance(adapter, dict):
        return {}
    stated = {name: adapter.get(name) for name in ("rank", "alpha")}
    return {name: value for name, value in stated.items() if isinstance(value, int | float)}
