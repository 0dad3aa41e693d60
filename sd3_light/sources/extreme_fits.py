"""Images that fit their bucket badly: most of the image is cropped off, or it is enlarged many times. Pure."""

from dataclasses import dataclass

from sd3_light.sources.buckets import ResizePlan

MUCH_CROPPED = 0.5
"""Fraction of an image whose loss is reported."""
MUCH_ENLARGED = 2.0
"""Enlargement in each direction that is reported."""


@dataclass
class ExtremeFits:
    """Counts extreme fits, and keeps the worst of each kind."""

    cropped: int = 0
    enlarged: int = 0
    worst_crop: tuple[float, str] = (0.0, "")
    worst_scale: tuple[float, str] = (0.0, "")

    def add(self, key: str, resize: ResizePlan) -> None:
        """Count one sample in one bucket."""
        self.cropped += resize.cropped_fraction > MUCH_CROPPED
        self.enlarged += resize.scale > MUCH_ENLARGED
        self.worst_crop = max(self.worst_crop, (resize.cropped_fraction, key))
        self.worst_scale = max(self.worst_scale, (resize.scale, key))

    def sentence(self) -> str:
        """Return one line about them; "" if there are none."""
        parts = []
        if self.cropped:
            share, key = self.worst_crop
            verb = "loses" if self.cropped == 1 else "lose"
            text = f"{self.cropped:,} {verb} more than half by cropping, {key} {share:.0%}"
            parts.append(f"{text} (max_crop excludes such images)")
        if self.enlarged:
            scale, key = self.worst_scale
            verb = "is" if self.enlarged == 1 else "are"
            text = f"{self.enlarged:,} {verb} enlarged more than twice, {key} {scale:.1f} times"
            parts.append(f"{text} (min_side or no_upscale exclude such images)")
        return "; ".join(parts)
