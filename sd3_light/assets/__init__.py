"""Weights for the demo; `demo/NOTE.md` documents how they were made."""

from pathlib import Path

DEMO = Path(__file__).parent / "demo"
