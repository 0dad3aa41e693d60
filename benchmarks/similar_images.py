"""CPU time to find similar images (`duplicates = "drop_similar"`), among synthetic ones or those of a folder.

    python benchmarks/similar_images.py --images 6000
    python benchmarks/similar_images.py --images 2000 --folder icons/train

Kinds: discs on white, thin lines on white, pages of grey words, smooth photos. With a folder, a quarter of its images
are also added as JPEGs of quality 75, and the share that is found is printed.
"""

import argparse
import io
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from sd3_light.config import DirectoryConfig
from sd3_light.sources.catalogue import InputRow
from sd3_light.sources.earlier_images import EarlierImages, open_earlier_images
from sd3_light.sources.preprocess import make_thumbnail

DIRECTORY = DirectoryConfig(path=Path("images"), resolutions=[64], duplicates="drop_similar")


def draw(kind: str, rng: np.random.Generator) -> Image.Image:
    """Return a synthetic image of a kind."""
    if kind == "photos":
        coarse = rng.integers(0, 256, (4, 4, 3), dtype=np.uint8)
        return Image.fromarray(coarse).resize((128, 128), Image.Resampling.BICUBIC)
    image = Image.new("RGB", (128, 128), "white")
    canvas = ImageDraw.Draw(image)
    if kind == "discs":
        x, y = rng.integers(0, 112, 2).tolist()
        canvas.ellipse((x, y, x + 16, y + 16), tuple(rng.integers(0, 200, 3).tolist()))
    elif kind == "lines":
        for ends in rng.integers(8, 120, (3, 4)).tolist():
            canvas.line(ends, "black", 2)
    else:
        for y in range(8, 120, 6):
            x = 10
            while x < 118:
                width = int(rng.integers(3, 14))
                canvas.rectangle((x, y, min(x + width, 118), y + 2), (60, 60, 60))
                x += width + 3
    return image


def encode(image: Image.Image, suffix: str = "png", **options: int) -> bytes:
    """Return the bytes of an image file."""
    buffer = io.BytesIO()
    image.save(buffer, suffix, **options)
    return buffer.getvalue()


def folder_images(folder: Path, count: int) -> Iterator[bytes]:
    """Yield the files of a random sample of a folder's PNGs, seed 0."""
    paths = sorted(folder.rglob("*.png"))
    for number in np.random.default_rng(0).permutation(len(paths))[:count].tolist():
        yield paths[number].read_bytes()


def add_all(images: EarlierImages, thumbnails: Iterable[bytes], prefix: str) -> list[str]:
    """Add thumbnails; return the key of the earlier image of each, "" where there is none."""
    firsts = []
    for number, thumbnail in enumerate(thumbnails):
        row = InputRow(f"{prefix}{number}", "", digest=f"{prefix}{number}", thumbnail=thumbnail)
        duplicate = images.add(row, DIRECTORY)
        firsts.append("" if duplicate is None else duplicate.first)
    return firsts


def measure(name: str, files: list[bytes], with_copies: bool) -> None:
    """Print the time per image, of all and of the last tenth, and what is found."""
    thumbnails = [make_thumbnail(file, None) for file in files]
    head = len(thumbnails) * 9 // 10
    with open_earlier_images() as images:
        started = time.process_time()
        firsts = add_all(images, thumbnails[:head], "a")
        middle = time.process_time()
        firsts += add_all(images, thumbnails[head:], "b")
        ended = time.process_time()
        copies = []
        if with_copies:
            jpegs = (encode(Image.open(io.BytesIO(file)).convert("RGB"), "jpeg", quality=75) for file in files[::4])
            copies = add_all(images, (make_thumbnail(jpeg, None) for jpeg in jpegs), "c")
    each, last = 1e3 * (ended - started) / len(files), 1e3 * (ended - middle) / (len(files) - head)
    copied = f"; {sum(map(bool, copies))} of {len(copies)} JPEG copies found" if copies else ""
    print(
        f"{name}: {each:.2f} ms per image, last tenth {last:.2f} ms; {sum(map(bool, firsts))} similar{copied}",
        flush=True,
    )


def main() -> None:
    """Measure the kinds, or a folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=6000)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--kinds", nargs="*", default=["discs", "lines", "pages", "photos"])
    args = parser.parse_args()
    if args.folder:
        measure(str(args.folder), list(folder_images(args.folder, args.images)), with_copies=True)
        return
    for kind in args.kinds:
        rng = np.random.default_rng(0)
        measure(kind, [encode(draw(kind, rng)) for _ in range(args.images)], with_copies=False)


if __name__ == "__main__":
    main()
