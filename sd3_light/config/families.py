"""Model families that a config does not train, each with what trains it instead."""

from collections.abc import Mapping
from typing import Any

from sd3_light.config.faults import Fault
from sd3_light.config.validation import format_value

FAMILY_PROBLEM = "a config does not train this family"
_IMAGE_SCRIPT = "write a script for it (docs/tasks.md, section 8), starting from examples/own_family.py"
_VIDEO_SCRIPT = "write a script for it (docs/tasks.md, sections 7 and 8), starting from examples/own_family.py"
_OTHER_LOSS = "write a script with a custom forward (docs/tasks.md, section 2): its loss is not flow matching"
FAMILIES: dict[str, str] = {
    "anima": _IMAGE_SCRIPT,
    "auraflow": _IMAGE_SCRIPT,
    "chroma": _IMAGE_SCRIPT,
    "cosmos": _OTHER_LOSS,
    "cosmos_predict2": _IMAGE_SCRIPT,
    "ernie_image": _IMAGE_SCRIPT,
    "hidream": _IMAGE_SCRIPT,
    "hunyuan-video": _VIDEO_SCRIPT,
    "hunyuan_image": _IMAGE_SCRIPT,
    "hunyuan_video_15": _VIDEO_SCRIPT,
    "ideogram4": _IMAGE_SCRIPT,
    "ltx-video": _VIDEO_SCRIPT,
    "ltx2": _VIDEO_SCRIPT,
    "lumina_2": _IMAGE_SCRIPT,
    "minimax_h3": _VIDEO_SCRIPT,
    "omnigen2": _IMAGE_SCRIPT,
    "sdxl": _OTHER_LOSS,
}
"""`model.type` in other trainers without a family here, and what to do instead."""


def family_fault(raw: Mapping[str, Any], file: str) -> Fault | None:
    """Return the fault of a train TOML for another family, or None. Its other keys describe that family, so their
    faults would only mislead."""
    model = raw.get("model")
    name = model.get("type") if isinstance(model, dict) else None
    instead = FAMILIES.get(name.lower()) if isinstance(name, str) else None
    if instead is None:
        return None
    return Fault(file, "model.type", FAMILY_PROBLEM, value=format_value(name), hint=instead)
