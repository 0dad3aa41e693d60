"""Makes a PNG from the page of `sd3-light evaluate --page`: drawn images, each beside the true image of its caption.

    python scripts/results_grid.py PAGE.html OUT.png [--model ROW] [--first 0] [--count 40] [--worst N] [--side 96]
                                    [--columns 5]

The captions come in the page's order; none is chosen. `--worst N` shows the N with the largest distance to the true
image instead. The PNG has 256 colours, so that it stays small.
"""

import argparse
import base64
import io
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from sd3_light.sample.grid import make_grid

TRUE = "true images"
_CARD = re.compile(r'<article class="sample">(.*?)</article>', re.DOTALL)
_IMAGE = re.compile(r'<img src="data:image/\w+;base64,([^"]+)" alt="([^";]+)([^"]*)"')
_DISTANCE = re.compile(r"distance (-?[\d.]+)")
_TAGS = re.compile(r"<figure>.*?</figure>|<[^>]+>", re.DOTALL)


@dataclass(frozen=True)
class Pair:
    """A drawn image and the true one; `distance` is that of the page."""

    caption: str
    drawn: Image.Image
    true: Image.Image
    distance: float

    def side_by_side(self, side: int) -> Image.Image:
        """Return both images, the drawn one first."""
        sheet = Image.new("RGB", (2 * side + 2, side), (232, 232, 236))
        for number, image in enumerate((self.drawn, self.true)):
            sheet.paste(image.resize((side, side), Image.Resampling.LANCZOS), (number * (side + 2), 0))
        return sheet


def read_pairs(page: Path, model: str | None) -> list[Pair]:
    """Return the pairs of a page; `model` names a row, and the last one is the default."""
    pairs = []
    for card in _CARD.findall(page.read_text(encoding="utf-8")):
        images = {label: (data, rest) for data, label, rest in _IMAGE.findall(card)}
        row = model or list(images)[-1]
        if row not in images:
            sys.exit(f"error: {page} has no row {row}; it has {', '.join(images)}")
        data, rest = images[row]
        caption = " ".join(_TAGS.sub(" ", card).split())
        distance = _DISTANCE.search(rest)
        if distance is None:
            sys.exit(f"error: {page} has no distance of {row}; name a row with one by --model")
        pairs.append(Pair(caption, _decode(data), _decode(images[TRUE][0]), float(distance.group(1))))
    return pairs


def _decode(data: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB")


def main() -> None:
    """Write the grid."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", help="the row's name in the page; default: the last one")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--worst", type=int)
    parser.add_argument("--side", type=int, default=96)
    parser.add_argument("--columns", type=int, default=5)
    args = parser.parse_args()
    pairs = read_pairs(args.page, args.model)
    if not pairs:
        sys.exit(f"error: {args.page} shows no images; write it with `sd3-light evaluate --against ... --page`")
    if args.worst:
        chosen = sorted(pairs, key=lambda pair: -pair.distance)[: args.worst]
    else:
        chosen = pairs[args.first :][: args.count]
    captions = [f"{pair.caption} ({pair.distance:.2f})" if args.worst else pair.caption for pair in chosen]
    grid = make_grid([pair.side_by_side(args.side) for pair in chosen], captions, args.columns, scale=1)
    grid.quantize(256, dither=Image.Dither.NONE).save(args.out, optimize=True)
    print(f"wrote {args.out}: {args.out.stat().st_size // 1024} KB")


if __name__ == "__main__":
    main()
