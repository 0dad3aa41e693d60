"""Config tables given as arguments of a Python call: validated by the same schema, the first fault raised."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from sd3_light.config.base import Table
from sd3_light.config.cross_checks import adapter_faults
from sd3_light.config.faults import UserError
from sd3_light.config.schema_tables import AdapterConfig
from sd3_light.config.validation import check_table

TableT = TypeVar("TableT", bound=Table)


def table_from_arguments(schema: type[TableT], values: Mapping[str, Any], caller: str, table: str) -> TableT:
    """Validate ``values`` as the table named ``table``. Relative paths start at the working directory."""
    checked = check_table(schema, values, file_kind="train", file=caller, base=Path.cwd(), table=table)
    if checked.faults:
        raise UserError(str(checked.faults[0]))
    return schema.model_validate(dict(values), context={"base": Path.cwd()})


def adapter_from_arguments(values: Mapping[str, Any], caller: str) -> AdapterConfig:
    """Validate ``values`` as the `[adapter]` table, contradicting keys included."""
    adapter = table_from_arguments(AdapterConfig, values, caller, "adapter")
    for fault in adapter_faults(adapter):
        raise UserError(str(replace(fault, file=caller, key=fault.key.removeprefix("adapter."))))
    return adapter
