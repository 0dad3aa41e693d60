"""Engines that run training steps behind one small protocol: one engine per file."""

from sd3_light.engines.protocol import Engine, StepResult
from sd3_light.launch import Launch

__all__ = ["Engine", "Launch", "StepResult"]
