"""The command line: one verb per stage. Parses, calls and exits: code 2 for user errors, 1 for bugs."""

# ruff: noqa: I001 - importing a module registers its verbs, and the help lists them in this order
import sys

from sd3_light.cli import new_verb  # noqa: F401
from sd3_light.cli import run_verbs  # noqa: F401
from sd3_light.cli import dataset_verbs  # noqa: F401
from sd3_light.cli import parts_verb  # noqa: F401
from sd3_light.cli import model_verbs  # noqa: F401
from sd3_light.cli import convert_verbs  # noqa: F401
from sd3_light.cli import report_verbs  # noqa: F401
from sd3_light.cli import families_verb  # noqa: F401
from sd3_light.cli import ui_verb  # noqa: F401
from sd3_light.cli.app import app
from sd3_light.cli.process import run_guarded
from sd3_light.cli.train_py import launch
from sd3_light.config.faults import RESUMABLE

__all__ = ["RESUMABLE", "app", "launch", "main"]


def main() -> None:
    """Run the `sd3-light` command."""
    sys.exit(run_guarded(app))
