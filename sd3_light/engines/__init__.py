"""What runs a step: one small protocol, one engine a file."""

from sd3_light.engines.launch import Launch
from sd3_light.engines.protocol import Engine, StepResult

__all__ = ["Engine", "Launch", "StepResult"]
