"""Engines that run training steps behind one small protocol: one engine per file."""

from sd3_light.engines.launch import Launch
from sd3_light.engines.protocol import Engine, StepResult

__all__ = ["Engine", "Launch", "StepResult"]
