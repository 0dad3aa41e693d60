"""The verb `families`."""

import json
from typing import Annotated

import typer

from sd3_light.cli.app import Command, app
from sd3_light.cli.process import echo
from sd3_light.runlog import print_table


@app.command(cls=Command)
def families(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the model families and what works for each of them. All of them are resumed exactly and run on every
    engine (docs/reference/families.md)."""
    from sd3_light.core import overview

    facts = overview.families()
    if as_json:
        echo(json.dumps(facts, indent=2))
        return
    from sd3_light.runlog.tables import ResultTable

    table = ResultTable(*(heading.replace("`", "") for heading in overview.HEADINGS.values()))
    for row in facts:
        table.add_row(*overview.cells(row))
    print_table(table)
