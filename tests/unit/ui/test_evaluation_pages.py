"""Images of evaluations: ordered by their scores, beside the true ones, whatever the files contain."""

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from sd3_light.ui import evaluation_pages as module
from sd3_light.ui.evaluation_pages import PAGE_SIZE, View, evaluated_image, evaluation_page, read_evaluation
from sd3_light.ui.folders import Folders, folder_id
from tests.refusals import refused
from tests.unit.pages.parsed_page import ParsedPage

CAPTIONS = [f"caption {number}" for number in range(40)]


def write_evaluation(folder: Path, count: int = 40, **more: Any) -> Path:
    """Write what `evaluate --against --save` does; the model's image of caption i has the distance i % 7."""
    for number, place in enumerate(("00", "01")):
        (folder / place).mkdir(parents=True)
        for caption in range(count):
            Image.new("RGB", (8, 8), (number, caption, 0)).save(folder / place / f"{caption}.png")
    scores = {"rows": list(range(count)), "distance": [row % 7 for row in range(count)], "psnr": list(range(count))}
    rows = {"true images": "00", "model": "01"}
    values = {"captions": CAPTIONS[:count], "rows": rows, "true": "true images", "each": {"model": scores}}
    (folder / "images.json").write_text(json.dumps(values | more))
    return folder


def cards(page: str) -> list[tuple[str, list[str]]]:
    """Return captions and addresses of images of the cards of a page."""
    parsed = ParsedPage(page)
    images = [each["src"] for tag, each in parsed.elements if tag == "img" and "src" in each]
    numbers = list(dict.fromkeys(image.rpartition("caption=")[2] for image in images))
    return [(number, [image for image in images if image.endswith(f"caption={number}")]) for number in numbers]


def test_the_best_and_the_worst_images_are_beside_the_true_ones(tmp_path: Path) -> None:
    folder = write_evaluation(tmp_path / "eval")
    folders, key = Folders([tmp_path]), folder_id(folder)
    assert "eval" in module.evaluations_page(folders)
    for score, order, expected in (
        ("distance", "best", ["0", "7", "14"]),
        ("distance", "worst", ["6", "13", "20"]),
        ("psnr", "best", ["39", "38", "37"]),
        ("psnr", "worst", ["0", "1", "2"]),
    ):
        shown = cards(evaluation_page(folders, key, View("model", score, order)))
        assert [number for number, _ in shown[:3]] == expected
        assert len(shown) == PAGE_SIZE
        assert all([("true" in each) for each in images] == [True, False] for _, images in shown)
    second = cards(evaluation_page(folders, key, View("model", "psnr", "worst"), 2))
    assert [number for number, _ in second] == [str(number) for number in range(PAGE_SIZE, 40)]
    drawn = [cards(evaluation_page(folders, key, View(order="random", seed=seed))) for seed in (1, 1, 2)]
    randoms = [[number for number, _ in shown] for shown in drawn]
    assert randoms[0] == randoms[1] != randoms[2]
    with Image.open(evaluated_image(folders, key, "model", 5)) as image:
        assert image.getpixel((0, 0)) == (1, 5, 0)
    folder = write_evaluation(tmp_path / "old", each=None)
    page = evaluation_page(Folders([tmp_path]), folder_id(folder), View())
    assert "kept no scores" in page
    assert len(cards(page)) == PAGE_SIZE


@pytest.mark.parametrize("row", ["../outside", "/etc", "00/../01", "a\0b", "\ud800", 3, None, [], "link"])
def test_images_outside_of_the_folder_are_not_served(tmp_path: Path, row: Any) -> None:
    folder = write_evaluation(tmp_path / "eval", count=2)
    (tmp_path / "outside").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "outside" / "0.png")
    (folder / "link").symlink_to(tmp_path / "outside")
    values = json.loads((folder / "images.json").read_text())
    (folder / "images.json").write_text(json.dumps(values | {"rows": {"true images": "00", "model": row}}))
    folders, key = Folders([tmp_path]), folder_id(folder)
    refused("has no image of caption 0", evaluated_image, folders, key, "model", 0)
    assert "model&amp;caption" not in evaluation_page(folders, key, View("model"))


@pytest.mark.parametrize(
    "scores",
    [
        3,
        {"rows": 3},
        {"rows": [0, 1], "distance": [float("nan"), "x"]},
        {"rows": [0, 10**30, -1, True, None], "distance": [1, 2, 3, 4, 5]},
        {"rows": [0], "\ud800": [1], "<script>alert(1)</script>": [10**400]},
    ],
)
def test_scores_that_are_not_valid_are_left_out(tmp_path: Path, scores: Any) -> None:
    folder = write_evaluation(tmp_path / "eval", count=2, each={"model": scores})
    for scores in read_evaluation(folder).scores.get("model", {}).values():
        assert set(scores) <= {0}
    for order in ("best", "worst", "random", "<script>"):
        page = evaluation_page(Folders([tmp_path]), folder_id(folder), View("model", "distance", order))
        assert "<script>alert" not in page


def test_hostile_captions_are_text_and_a_file_without_a_list_is_a_users_error(tmp_path: Path) -> None:
    folder = write_evaluation(tmp_path / "eval", count=2, captions=["</script><img src=x onerror=alert(1)>", "\ud800"])
    page = evaluation_page(Folders([tmp_path]), folder_id(folder), View())
    assert "<img src=x" not in page
    assert "&lt;img src=x" in page
    for text in ("", "[]", "{}", '{"captions": 1, "rows": {}}', "[" * 2000):
        (folder / "images.json").write_text(text)
        refused(r"images\.json", evaluation_page, Folders([tmp_path]), folder_id(folder), View())
    refused("there is no evaluation x", evaluation_page, Folders([tmp_path]), "x", View())
