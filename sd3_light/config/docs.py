"""Generates docs/reference/config.md from the schemas: `python -m sd3_light.config.docs`."""

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from sd3_light.config.base import Table, describe_type, element_type, field_types, table_type, walk_tables
from sd3_light.config.family_keys import known_to
from sd3_light.config.schema_dataset import DatasetDefaults, DirectoryConfig
from sd3_light.config.schema_train import EvalDataset, TrainConfig
from sd3_light.config.sizes import SIZES
from sd3_light.config.unsupported import FAMILIES, FAMILY_PROBLEM, UNSUPPORTED_KEYS
from sd3_light.config.validation import LIST_TABLES, format_value

PAGE = Path("docs") / "reference" / "config.md"
_HEAD = """# Configuration

Generated from the schemas by `python -m sd3_light.config.docs`; edit the schemas, not this page.

Two TOML files describe a run: the train TOML, and the dataset TOML that it names. Unknown keys are errors, and all
errors of all files are reported at once. Relative paths start at the folder of the TOML that contains them (`..` is
collapsed, symbolic links are not followed), and `~` is the home folder. `--set table.key=VALUE` sets a key of the train
TOML on the command line; the value is TOML, and a bare word is a string.
"""
_DATASET = """## The dataset TOML

These keys may be at the top of the file, for all directories, or in a `[[directory]]`, which takes precedence. If a
directory sets `size_buckets`, it ignores inherited `resolutions` and ratios, and vice versa.
"""
_UNSUPPORTED = """## Unsupported keys of other trainers

| file | key | reason | instead |
|---|---|---|---|
"""
_SIZES = """## Model sizes

Patch size 2, 16 latent channels. `model.num_layers`, `model.qk_norm` and `model.position_step` override the values of a
size. `step` is the position step in radians. `sample_size` is the default latent side until the model is trained.

| size | layers | heads x width | text | pooled | sample_size | positions | step | qk_norm | dual | parameters |
|---|---|---|---|---|---|---|---|---|---|---|
"""


def render_config_page() -> str:
    """Return the text of docs/reference/config.md."""
    parts = [_HEAD, "## The train TOML\n"]
    for name, table in walk_tables(TrainConfig):
        if table is not EvalDataset:  # described in the row of `eval_datasets`
            parts.append(_section(f"`[{name}]`" if name else "Top level", table, name))
    parts += [_DATASET, _key_table(DatasetDefaults), _section("`[[directory]]` only", DirectoryConfig, "directory")]
    parts += [_SIZES + "".join(_size_rows()), _UNSUPPORTED + "".join(_unsupported_rows())]
    return "\n".join(parts)


def _section(title: str, table: type[Table], name: str) -> str:
    title = f"`[[{name}]]`" if table is not DirectoryConfig and name in LIST_TABLES else title
    is_absent = name in ("adapter", "model.layer_sync", "model.routing") or name.startswith("objective.")
    note = " Absent by default." if is_absent else ""
    about = re.sub(r"^\[+[\w.]+\]+: ", "", (table.__doc__ or "").splitlines()[0])
    keys = f"\n{_key_table(table)}" if any(map(is_leaf, field_types(table).values())) else ""
    return f"### {title}\n\n{about[0].upper()}{about[1:]}{note}\n{keys}"


def _key_table(table: type[Table]) -> str:
    own = [key for key in field_types(table) if table is not DirectoryConfig or key not in DatasetDefaults.model_fields]
    rows = [_row(key, table) for key in own if is_leaf(field_types(table)[key])]
    return "| key | type | default | meaning |\n|---|---|---|---|\n" + "".join(rows)


def is_leaf(annotation: Any) -> bool:
    """Return whether a key has a value, and is not a table."""
    inner = table_type(annotation) or table_type(element_type(annotation, 0))
    return inner is None or inner is EvalDataset


@dataclass(frozen=True)
class KeyText:
    """What the documentation says about a key."""

    type: str
    default: str
    meaning: str


def key_text(key: str, table: type[Table]) -> KeyText:
    """Return what the documentation says about a key of a table."""
    field = table.model_fields[key]
    description = " ".join((field.description or "").split())
    if note := known_to(field_types(table)[key]):
        description += f" ({note})"
    return KeyText(describe_type(field_types(table)[key]), _default(field), description)


def _row(key: str, table: type[Table]) -> str:
    text = key_text(key, table)
    cells = (f"`{key}`", text.type, text.default, text.meaning)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "**required**"
    if isinstance(field.json_schema_extra, dict):
        return str(field.json_schema_extra["default"])
    return "absent" if field.default is None else f"`{format_value(field.default, max_length=400)}`"


def _size_rows() -> Iterator[str]:
    for size in SIZES.values():
        layers = size.dual_attention_layers
        dual = f"{layers[0]} to {layers[-1]}" if layers else "no"
        shape = f"{size.num_layers} | {size.num_heads} x {size.head_dim} = {size.width}"
        text = f"{size.text_width} | {size.pooled_width} | {size.sample_size} | {size.pos_embed_max_size}"
        text += f" | {Fraction(size.position_step).limit_denominator(100)}"
        norm = "yes" if size.qk_norm else "no"
        yield f"| `{size.name}` | {shape} | {text} | {norm} | {dual} | {size.num_parameters():,} |\n"


def _unsupported_rows() -> Iterator[str]:
    for name, instead in FAMILIES.items():
        yield f'| train | `model.type = "{name}"` | {FAMILY_PROBLEM} | {instead} |\n'
    for entry in UNSUPPORTED_KEYS:
        key = entry.dotted_key if entry.value is None else f"{entry.dotted_key} = {format_value(entry.value)}"
        yield f"| {entry.file_kind} | `{key}` | {entry.reason} | {entry.instead} |\n"


def main() -> None:
    """Write docs/reference/config.md in the current checkout."""
    if not PAGE.parent.is_dir():
        sys.exit(f"{PAGE.parent}: no such folder; run this command from the root of the checkout")
    PAGE.write_text(render_config_page(), encoding="utf-8")
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
