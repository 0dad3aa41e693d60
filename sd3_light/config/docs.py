"""docs/config.md from the schemas: `python -m sd3_light.config.docs` writes it."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from sd3_light.config.base import Table, annotations, element, table_of, tables, words
from sd3_light.config.schema_dataset import DatasetDefaults, DirectoryConfig
from sd3_light.config.schema_train import EvalDataset, TrainConfig
from sd3_light.config.sizes import SIZES
from sd3_light.config.unsupported import RETIRED
from sd3_light.config.validation import LIST_TABLES, show

PAGE = Path("docs") / "config.md"
_HEAD = """# Configuration

Made from the schemas by `python -m sd3_light.config.docs`; edit those, not this page.

Two TOML files describe a run: the train TOML, and the dataset TOML that it names. Unknown keys are faults, and all
faults of all files come in one report. Relative paths are taken from the folder of the TOML that names them (`..` is
taken off the text of a path, symbolic links are not followed), `~` is the home folder. A key of the train TOML can
be set on the command line by `--set table.key=VALUE`, a TOML value, where a bare word is a text.
"""
_DATASET = """## The dataset TOML

These keys may stand at the top of the file, for all directories, or in a `[[directory]]`, where they win. A directory's
own `size_buckets` puts inherited `resolutions` and ratios out of force, and the other way round.
"""
_RETIRED = """## Keys of other programs that are refused

| file | key | why | instead |
|---|---|---|---|
"""
_SIZES = """## Model sizes

Patch 2, 16 latent channels. `model.num_layers` and `model.qk_norm` override a size's own.

| size | layers | heads x width | text | pooled | sample_size | positions | qk_norm | dual attention | parameters |
|---|---|---|---|---|---|---|---|---|---|
"""


def render() -> str:
    """The whole page."""
    parts = [_HEAD, "## The train TOML\n"]
    for name, table in tables(TrainConfig):
        if table is not EvalDataset:  # its two keys are told with `eval_datasets`
            parts.append(_section(f"`[{name}]`" if name else "Top level", table, name))
    parts += [_DATASET, _key_table(DatasetDefaults), _section("`[[directory]]` only", DirectoryConfig, "directory")]
    parts += [_SIZES + "".join(_size_rows()), _RETIRED + "".join(_retired_rows())]
    return "\n".join(parts)


def _section(title: str, table: type[Table], name: str) -> str:
    title = f"`[[{name}]]`" if table is not DirectoryConfig and name in LIST_TABLES else title
    note = " Absent by default." if name == "adapter" else ""
    about = (table.__doc__ or "").splitlines()[0].removeprefix(f"[{name}]: ").removeprefix(f"[[{name}]]: ")
    return f"### {title}\n\n{about[0].upper()}{about[1:]}{note}\n\n{_key_table(table)}"


def _key_table(table: type[Table]) -> str:
    own = [key for key in annotations(table) if table is not DirectoryConfig or key not in DatasetDefaults.model_fields]
    rows = [_row(key, table) for key in own if _is_leaf(annotations(table)[key])]
    return "| key | type | default | meaning |\n|---|---|---|---|\n" + "".join(rows)


def _is_leaf(annotation: Any) -> bool:
    inner = table_of(annotation) or table_of(element(annotation, 0))
    return inner is None or inner is EvalDataset


def _row(key: str, table: type[Table]) -> str:
    field = table.model_fields[key]
    cells = (f"`{key}`", words(annotations(table)[key]), _default(field), field.description or "")
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "**required**"
    if isinstance(field.json_schema_extra, dict):
        return str(field.json_schema_extra["default"])
    return "absent" if field.default is None else f"`{show(field.default, longest=400)}`"


def _size_rows() -> Iterator[str]:
    for size in SIZES.values():
        dual = (
            f"{size.dual_attention_layers[0]} to {size.dual_attention_layers[-1]}"
            if size.dual_attention_layers
            else "no"
        )
        shape = f"{size.num_layers} | {size.num_heads} x {size.head_dim} = {size.width}"
        text = f"{size.text_width} | {size.pooled_width} | {size.sample_size} | {size.pos_embed_max_size}"
        norm = "yes" if size.qk_norm else "no"
        yield f"| `{size.name}` | {shape} | {text} | {norm} | {dual} | {size.num_parameters():,} |\n"


def _retired_rows() -> Iterator[str]:
    for entry in RETIRED:
        key = entry.where if entry.value is None else f'{entry.where} = "{entry.value}"'
        yield f"| {entry.kind} | `{key}` | {entry.reason} | {entry.instead} |\n"


def main() -> None:
    """Write the page into the checkout that the command is run from."""
    if not PAGE.parent.is_dir():
        sys.exit(f"{PAGE.parent}: no such folder; run this from the root of the checkout")
    PAGE.write_text(render(), encoding="utf-8")
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
