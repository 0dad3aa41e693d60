"""Weights that the package ships for the demo; `demo/NOTE.md` says how they were made."""

from pathlib import Path

DEMO = Path(__file__).parent / "demo"
