"""SD3's frozen networks: the VAE, two CLIPs and T5."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sd3_light.config import ModelConfig
from sd3_light.core.caption_lengths import TextLimit
from sd3_light.core.encoding import Encoding
from sd3_light.families.sd3.caption_lengths import text_limits
from sd3_light.model.folder import TEXT_ENCODER_FOLDERS, TOKENIZER_FOLDERS

if TYPE_CHECKING:
    import torch

    from sd3_light.families.sd3.encoders import FrozenParts


class SD3Encoding(Encoding):
    """See `Encoding`."""

    folders = ("vae", *TEXT_ENCODER_FOLDERS, *TOKENIZER_FOLDERS)

    @property
    def text_encoders(self) -> tuple[str, ...]:
        """See `Encoding.text_encoders`."""
        from sd3_light.families.sd3.text import TEXT_ENCODERS

        return tuple(TEXT_ENCODERS)

    def text_settings(self, model: ModelConfig) -> dict[str, Any]:
        """See `Encoding.text_settings`."""
        return {"text_tokens": model.text_tokens, "t5_max_length": model.t5_max_length}

    def text_limits(self, folder: Path, settings: Mapping[str, Any]) -> list[TextLimit]:
        """See `Encoding.text_limits`."""
        length = settings.get("t5_max_length")
        return text_limits(folder, length) if isinstance(length, int) else []

    def encoders(
        self, model: ModelConfig, device: "torch.device", batch_size: int, one_at_a_time: bool | None = None
    ) -> "FrozenParts":
        """See `Encoding.encoders`."""
        import torch

        from sd3_light.families.sd3.encoders import FrozenParts

        return FrozenParts(
            model.diffusers_path,
            device,
            text_dtype=getattr(torch, model.dtype),
            t5_max_length=model.t5_max_length,
            text_tokens=model.text_tokens,
            batch_size=batch_size,
            vae_dtype=model.vae_dtype,
            one_at_a_time=one_at_a_time,
        )
