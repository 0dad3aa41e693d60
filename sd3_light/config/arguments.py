"""Tables of the config that a script gives as arguments of a call: the same schema, the first fault in one line."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from sd3_light.config.base import Table
from sd3_light.config.cross_checks import adapter_findings
from sd3_light.config.faults import Fault, UserError
from sd3_light.config.schema_tables import AdapterConfig
from sd3_light.config.validation import check_table

Kind = TypeVar("Kind", bound=Table)


def table_from_arguments(schema: type[Kind], keys: Mapping[str, Any], caller: str, table: str) -> Kind:
    """The table ``table`` with these keys; paths are taken from the working folder."""
    checked = check_table(schema, keys, kind="train", file=caller, base=Path.cwd(), table=table)
    if checked.faults:
        raise UserError(str(checked.faults[0]))
    return schema.model_validate(dict(keys), context={"base": Path.cwd()})


def adapter_from_arguments(keys: Mapping[str, Any], caller: str) -> AdapterConfig:
    """`[adapter]` by the arguments of a call; what its keys say against each other is a fault too."""
    adapter = table_from_arguments(AdapterConfig, keys, caller, "adapter")
    for one in adapter_findings(adapter):
        key = one.key.removeprefix("adapter.")
        raise UserError(str(Fault(caller, key, one.problem, one.given, one.allowed, one.hint)))
    return adapter
