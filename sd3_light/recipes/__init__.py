"""Shipped configs. Each states its command, hardware, time and expected results."""

from pathlib import Path

FOLDER = Path(__file__).parent
