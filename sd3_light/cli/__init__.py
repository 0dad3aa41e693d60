"""The command line: one verb a stage. It parses, calls and exits: 2 for a fault in what was given, 1 for ours."""

# ruff: noqa: I001 - importing a file registers its verbs, and the help shows them in this order
import sys

from sd3_light.cli import run_verbs  # noqa: F401
from sd3_light.cli import model_verbs  # noqa: F401
from sd3_light.cli import convert_verbs  # noqa: F401
from sd3_light.cli import report_verbs  # noqa: F401
from sd3_light.cli.app import app
from sd3_light.cli.process import RESUMABLE, guarded
from sd3_light.cli.train_py import launch

__all__ = ["RESUMABLE", "app", "launch", "main"]


def main() -> None:
    """The `sd3-light` command."""
    sys.exit(guarded(app))
