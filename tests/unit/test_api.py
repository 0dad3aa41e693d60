"""The public names of `sd3_light.tasks`, `sd3_light.core` and the commands: a change of them is seen and meant.

`python tests/unit/test_api.py --write` writes the list again; a removed or renamed name needs a line in CHANGELOG.md.
"""

import importlib
import inspect
import pkgutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LIST = Path(__file__).parents[1] / "golden" / "api.txt"


def names_of_commands() -> Iterator[str]:
    import typer

    from sd3_light.cli import app

    yield from _names_below(typer.main.get_command(app), "sd3-light")


def _names_below(command: Any, path: str) -> Iterator[str]:
    if hasattr(command, "commands"):
        for name, below in command.commands.items():
            yield from _names_below(below, f"{path} {name}")
    if getattr(command, "hidden", False):
        return
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            yield f"{path} {parameter.metavar or parameter.name}"
        else:
            yield from (f"{path} {name}" for name in (*parameter.opts, *parameter.secondary_opts))


def names_of_tasks() -> Iterator[str]:
    import sd3_light.tasks as tasks

    for name in tasks.__all__:
        value = getattr(tasks, name)
        if value.__module__.startswith("sd3_light.core."):
            yield f"tasks.{name} is {value.__module__.removeprefix('sd3_light.')}.{name}"
        else:
            yield from _names_of(f"tasks.{name}", value)


def names_of_core() -> Iterator[str]:
    import sd3_light.core as core

    for module in pkgutil.iter_modules(core.__path__):
        loaded = importlib.import_module(f"sd3_light.core.{module.name}")
        for name, value in vars(loaded).items():
            if not name.startswith("_") and getattr(value, "__module__", None) == loaded.__name__:
                yield from _names_of(f"core.{module.name}.{name}", value)


def _names_of(path: str, value: Any) -> Iterator[str]:
    """Return a function with its parameters, or a class with its public methods and fields."""
    if inspect.isclass(value):
        yield path
        for name, member in vars(value).items():
            if name.startswith("_") and name != "__init__":
                continue
            function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
            yield f"{path}.{name}{_parameters(function)}"
        fields = vars(value).get("__annotations__", {})
        yield from (f"{path}.{name}" for name in fields if not name.startswith("_") and name not in vars(value))
    else:
        yield f"{path}{_parameters(value)}"


def _parameters(value: Any) -> str:
    """Return the names of a function's parameters; those with a default end with `=`."""
    if not inspect.isfunction(value):
        return ""
    shown = []
    for parameter in inspect.signature(value).parameters.values():
        if parameter.name.startswith("_"):
            continue
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        default = "=" if parameter.default is not parameter.empty else ""
        shown.append(f"{stars}{parameter.name}{default}")
    return f"({', '.join(shown)})"


def public_names() -> list[str]:
    return sorted({*names_of_commands(), *names_of_tasks(), *names_of_core()})


def test_the_public_names_are_those_of_the_list() -> None:
    listed = LIST.read_text(encoding="utf-8").splitlines()
    found = public_names()
    removed = sorted(set(listed) - set(found))
    added = sorted(set(found) - set(listed))
    assert removed == [], "scripts and commands of users break; see the top of this file"
    assert added == [], "new names are promised to users; see the top of this file"


if __name__ == "__main__" and "--write" in sys.argv:
    LIST.write_text("\n".join(public_names()) + "\n", encoding="utf-8")
