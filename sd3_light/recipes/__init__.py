"""Shipped configs. Each says its command, hardware, time and expected numbers."""

from pathlib import Path

FOLDER = Path(__file__).parent
