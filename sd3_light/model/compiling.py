"""Whether torch.compile works on a device."""

import torch


def why_not_compiled(device: torch.device) -> str | None:
    """Return why torch.compile does not work on this device, or None; it needs Triton and a C compiler, too."""
    try:
        torch.compile(torch.sin)(torch.ones(16, device=device))
    except RuntimeError as error:  # also all errors of the compiler
        return f"torch.compile does not work here ({type(error).__name__})"
    return None
