"""Sizes of the trained parts, one per line."""

from dataclasses import dataclass


@dataclass(frozen=True)
class VaeSize:
    """An AutoencoderKL: channels per level (each level after the first halves the sides), layers, norm groups."""

    channels: tuple[int, ...]
    layers: int
    groups: int


@dataclass(frozen=True)
class TextSize:
    """Widths of the two CLIP encoders and of T5, their layers, and the channels and depths of the image tower.

    The CLIP widths are joined and padded to the width of T5, so their sum may not exceed it. Heads are 64 wide, or 32
    where the width is not a multiple of 64.
    """

    clip_l: int
    clip_g: int
    t5: int
    layers: int
    tower: tuple[int, ...]
    depths: tuple[int, ...]


# fmt: off
VAE_SIZES = {            # channels               layers  groups      parameters
    "tiny":   VaeSize((32,  64,  96, 128),             1, 16),  #          3.4 M
    "small":  VaeSize((64, 128, 192, 256),             1, 32),  #         13.7 M
    "medium": VaeSize((96, 192, 288, 384),             2, 32),  #         40.6 M
}
TEXT_SIZES = {          # CLIP-L CLIP-G   T5  layers   image tower
    "tiny":   TextSize(      96,   128,  256,      3, (32,  64, 128, 256), (1, 1, 2, 1)),
    "small":  TextSize(     192,   256,  512,      4, (64, 128, 256, 512), (2, 2, 4, 2)),
    "medium": TextSize(     384,   512, 1024,      6, (96, 192, 384, 768), (3, 3, 9, 3)),
}
# fmt: on
