"""Rewards of installed packages, found in the packages' sources: nothing is imported, since that runs a module."""

import ast
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from sd3_light.config.faults import UserError

_MARK = "reward"


def require_marked(name: str) -> None:
    """Raise a UserError unless ``package.module:function`` is a function below the mark `sd3_light.tasks.reward`.

    A config can therefore not run any module: only those that define a reward are imported.
    """
    module, _, function = name.partition(":")
    file = next((path for path in _files(module) if path.is_file()), None)
    if file is None:
        raise UserError(
            f"reward.score = {name!r}: no Python file {module} is installed; install the package, or correct the name"
        )
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError) as error:
        raise UserError(
            f"reward.score = {name!r}: {file} cannot be read ({error}); install the package again"
        ) from error
    definitions = [each for each in tree.body if isinstance(each, ast.FunctionDef) and each.name == function]
    if not definitions:
        raise UserError(f"reward.score = {name!r}: {file} defines no function {function}; correct the name")
    if not any(_mark(decorator) == _MARK for decorator in definitions[-1].decorator_list):
        raise UserError(f"reward.score = {name!r} is not marked as a reward; write @sd3_light.tasks.reward above it")


def _mark(decorator: ast.expr) -> str | None:
    """Return the last name of a decorator: `reward` of `@tasks.reward`."""
    if isinstance(decorator, ast.Attribute):
        return decorator.attr
    return decorator.id if isinstance(decorator, ast.Name) else None


def _files(module: str) -> Iterator[Path]:
    """Yield where the source of a module may be."""
    package, *parts = module.split(".")
    try:
        spec = find_spec(package)
    except ValueError:  # `__main__`
        spec = None
    if spec is None:
        return
    if not parts and spec.has_location and spec.origin is not None:
        yield Path(spec.origin)
    for folder in spec.submodule_search_locations or ():
        place = Path(folder, *parts)
        yield place / "__init__.py"
        if parts:
            yield place.with_name(f"{place.name}.py")
