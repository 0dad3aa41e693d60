"""A blind sheet: do drawn images show their captions? Two judges answer without knowing where an image comes from.

    python scripts/blind_sheet.py fix HELD_OUT.toml PROMPTS.json [--count 60]      before training
    sd3-light evaluate RUN --against HELD_OUT.toml ... --save IMAGES               after it
    python scripts/blind_sheet.py write IMAGES PROMPTS.json SHEET --model ROW [--other ROW ...]
    python scripts/blind_sheet.py read SHEET answers-1.csv answers-2.csv           the answers of two judges

`fix` takes the first captions in the order of the images' ids, which are hashes of their names, and notes their true
images. `write` mixes, for each caption, the images of the model and of the other rows with the true image, and the true
image of another caption. Each judge has a folder with the same items in another order: numbered pages as PNG, all of
them as `sheet.html`, and `answers.csv`, in which the column `right` gets y or n: does the image show its caption?
SHEET/key.json says what the items are; no judge sees it. `read` prints the share of y with its standard error over the
captions, the agreement of the judges (Cohen's kappa), and the paired differences of the model to the other rows.
"""

import argparse
import base64
import csv
import hashlib
import html
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, stdev

import numpy as np
from PIL import Image

from sd3_light.evaluate.against import IMAGES_FILE, TRUE
from sd3_light.evaluate.truths import load_truths
from sd3_light.files import new_folder
from sd3_light.randomness import stream
from sd3_light.sample.grid import make_grid

WRONG = "true images, wrong captions"
JUDGES = 2
PER_PAGE, COLUMNS = 20, 5
ANSWERS, KEY = "answers.csv", "key.json"
SIDE = 192  # pixels of an image on a page


@dataclass(frozen=True)
class Item:
    """An image beside a caption: whose image of which prompt, and the caption's prompt."""

    row: str
    prompt: int
    caption: str


def digest(pixels: np.ndarray) -> str:
    """Return a hash of an image's pixels."""
    return hashlib.sha256(str(pixels.shape).encode() + np.ascontiguousarray(pixels).tobytes()).hexdigest()


def fix(data: Path, out: Path, count: int) -> None:
    """Write the captions and the hashes of their true images."""
    if out.exists():
        raise SystemExit(f"{out} already exists: the prompts are fixed once")
    truths = load_truths(data, count)
    prompts = [{"caption": truth.caption, "sha256": digest(truth.pixels)} for truth in truths]
    out.write_text(json.dumps(prompts, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {out}: {len(prompts)} captions, sha256 {hashlib.sha256(out.read_bytes()).hexdigest()}")


def write(images: Path, prompts: Path, out: Path, model: str, others: Sequence[str]) -> None:
    """Write the sheets of both judges and the key."""
    saved = json.loads((images / IMAGES_FILE).read_text(encoding="utf-8"))
    fixed = json.loads(prompts.read_text(encoding="utf-8"))
    for row in (model, *others):
        if row not in saved["rows"]:
            raise SystemExit(f"{images} has no row {row!r}; it has: {', '.join(saved['rows'])}")
    folders = {row: images / folder for row, folder in saved["rows"].items()}
    for number, prompt in enumerate(fixed):
        same = saved["captions"][number : number + 1] == [prompt["caption"]]
        if not same or digest(_read(folders[TRUE] / f"{number}.png")) != prompt["sha256"]:
            raise SystemExit(f"prompt {number} of {prompts} has another caption or true image in {images}")
    captions = [prompt["caption"] for prompt in fixed]
    items = _items(captions, (model, *others), folders)
    orders = [stream(0, "blind-sheet", 0, 0, judge).permutation(len(items)).tolist() for judge in range(JUDGES)]
    key = {"model": model, "items": [asdict(item) for item in items], "orders": orders}
    with new_folder(out) as folder:
        for judge, order in enumerate(orders, start=1):
            shown = [(items[index], _image(folders, items[index])) for index in order]
            _write_sheet(folder / f"judge-{judge}", shown)
        (folder / KEY).write_text(json.dumps(key, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {out}: {len(items)} items for {JUDGES} judges; keep {KEY} from them")


def _items(captions: Sequence[str], rows: Sequence[str], folders: Mapping[str, Path]) -> list[Item]:
    items = []
    for number, caption in enumerate(captions):
        for row in (*rows, TRUE):
            if (folders[row] / f"{number}.png").is_file():
                items.append(Item(row, number, caption))
        wrong = captions[(number + len(captions) // 2) % len(captions)]
        if wrong != caption:
            items.append(Item(WRONG, number, wrong))
    return items


def _image(folders: Mapping[str, Path], item: Item) -> Image.Image:
    folder = folders[TRUE if item.row == WRONG else item.row]
    return Image.fromarray(_read(folder / f"{item.prompt}.png")).resize((SIDE, SIDE), Image.Resampling.LANCZOS)


def _read(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"))


def _write_sheet(folder: Path, shown: Sequence[tuple[Item, Image.Image]]) -> None:
    folder.mkdir()
    labels = [f"{number}. {item.caption}" for number, (item, _) in enumerate(shown, start=1)]
    images = [image for _, image in shown]
    for page, start in enumerate(range(0, len(shown), PER_PAGE), start=1):
        part = slice(start, start + PER_PAGE)
        make_grid(images[part], labels[part], COLUMNS, scale=1).save(folder / f"page-{page:02}.png")
    figures = (
        f'<figure><img src="{_uri(image)}" alt=""><figcaption>{html.escape(label)}</figcaption></figure>'
        for image, label in zip(images, labels, strict=True)
    )
    style = "figure{display:inline-block;width:14em;vertical-align:top;margin:1em}body{font-family:sans-serif}"
    head = f"<!doctype html><meta charset=utf-8><title>Does the image show its caption?</title><style>{style}</style>"
    (folder / "sheet.html").write_text(head + "\n".join(figures) + "\n", encoding="utf-8")
    rows = "".join(f"{number},\n" for number in range(1, len(shown) + 1))
    (folder / ANSWERS).write_text(f"item,right\n{rows}", encoding="utf-8")


def _uri(image: Image.Image) -> str:
    data = io.BytesIO()
    image.save(data, "PNG")
    return f"data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}"


def read_answers(path: Path, order: Sequence[int]) -> list[bool]:
    """Return a judge's answers in the order of the key's items."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        given = {row["item"].strip(): row["right"].strip().lower() for row in csv.DictReader(file)}
    answers: dict[int, bool] = {}
    for number, index in enumerate(order, start=1):
        answer = given.get(str(number), "")
        if answer not in {"y", "n"}:
            raise SystemExit(f"{path}: item {number} has no y or n")
        answers[index] = answer == "y"
    return [answers[index] for index in range(len(order))]


def kappa(first: Sequence[bool], second: Sequence[bool]) -> float:
    """Return Cohen's kappa: the agreement beyond that of chance; 1 if both always give the same single answer."""
    agreed = mean(one == other for one, other in zip(first, second, strict=True))
    yes, also = mean(first), mean(second)
    chance = yes * also + (1 - yes) * (1 - also)
    return 1.0 if chance == 1 else (agreed - chance) / (1 - chance)


def report(key: Mapping[str, object], judges: Sequence[Sequence[bool]]) -> str:
    """Return the shares by row, the agreement, and the differences of the model, as Markdown."""
    items = [Item(**item) for item in key["items"]]  # type: ignore[attr-defined]
    scores: dict[str, dict[int, list[bool]]] = {}
    for index, item in enumerate(items):
        scores.setdefault(item.row, {})[item.prompt] = [answers[index] for answers in judges]
    lines = ["| | n | judge 1 | judge 2 | both | kappa |", "|---|---:|---:|---:|---:|---:|"]
    for row, prompts in scores.items():
        columns = list(zip(*prompts.values(), strict=True))
        shares = " | ".join(f"{mean(column):.2f}" for column in columns)
        both = _share([mean(answers) for answers in prompts.values()])
        lines.append(f"| {row} | {len(prompts)} | {shares} | {both} | {kappa(*columns):.2f} |")
    lines.append(f"| all | {len(items)} | | | | {kappa(*judges):.2f} |")
    model = scores[str(key["model"])]
    lines += ["", "| model less | n | difference |", "|---|---:|---:|"]
    for row, prompts in scores.items():
        if row != key["model"]:
            pairs = [mean(model[number]) - mean(answers) for number, answers in prompts.items() if number in model]
            lines.append(f"| {row} | {len(pairs)} | {_share(pairs)} |")
    return "\n".join(lines) + "\n"


def _share(values: Sequence[float]) -> str:
    error = stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return f"{mean(values):.3f} ± {error:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    one = verbs.add_parser("fix")
    one.add_argument("data", type=Path)
    one.add_argument("out", type=Path)
    one.add_argument("--count", type=int, default=60)
    two = verbs.add_parser("write")
    two.add_argument("images", type=Path)
    two.add_argument("prompts", type=Path)
    two.add_argument("out", type=Path)
    two.add_argument("--model", required=True, help="the model's row in IMAGES/images.json")
    two.add_argument("--other", nargs="*", default=[], help="rows that are judged beside it")
    three = verbs.add_parser("read")
    three.add_argument("sheet", type=Path)
    three.add_argument("answers", type=Path, nargs=JUDGES)
    args = parser.parse_args()
    if args.verb == "fix":
        fix(args.data, args.out, args.count)
    elif args.verb == "write":
        write(args.images, args.prompts, args.out, args.model, args.other)
    else:
        key = json.loads((args.sheet / KEY).read_text(encoding="utf-8"))
        judges = [read_answers(path, order) for path, order in zip(args.answers, key["orders"], strict=True)]
        print(report(key, judges), end="")


if __name__ == "__main__":
    main()
