"""The inspect stage on a small cache: the contents of the table and the page, and missing or damaged parts."""

import base64
import io
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console

from sd3_light.assets import DEMO
from sd3_light.config.faults import UserError
from sd3_light.data.manifest import Manifest, ShardEntry
from sd3_light.data.shards import Origin, write_shard
from sd3_light.encoding.vae import load_vae, raw_moments
from sd3_light.randomness import sample_id
from sd3_light.report.inspect import verb as inspect
from sd3_light.report.inspect.cache_page import CachePage, group_samples, render_page, write_cache_page
from sd3_light.report.inspect.cache_stats import Inspection, inspect_cache
from sd3_light.report.inspect.line_sample import LineSample
from sd3_light.report.inspect.sample_cards import SampleCard, open_vae
from sd3_light.sources.buckets import Bucket, resize_for
from sd3_light.sources.preprocess import REASONS, decode, fit, fit_mask
from sd3_light.world import write_dataset
from tests.refusals import refused
from tests.shards import sd3_content
from tests.unit.pages.parsed_page import ParsedPage, assert_self_contained

LABEL = "images#0"
HOSTILE = "<script>alert('&\"')</script>[red]"
CHINESE = "一只红色的圆在左边"
LONG = "word " * 400 + "end"
T5_LENGTHS = (5, 9)


class SmallCache:
    """A cache of 64x64 and 80x48 images of the demo world, next to its sources."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder, self.sources, self.model = folder / "cache", folder / "images", model
        (self.folder / "shards").mkdir(parents=True)
        write_dataset(self.sources, 12, seed=1)
        self.vae = load_vae(model, torch.device("cpu"), torch.float32)
        square = self.shard("64x64", [0, 2, 4, 6], [HOSTILE, CHINESE, LONG])
        wide = self.shard("80x48", [1, 5, 9], [], mask=True)
        empty = self.shard("16x16", [0], [])
        recipe = {"format": 2, "text_tokens": "real", "t5_max_length": 9, "vae": "0123abcd"}
        counts = {"used": 7, "cropped": 3, "enlarged": 1, "rejected: truncated": 2, "rejected: no_caption": 1}
        places = {"diffusers_path": str(model), f"directory:{LABEL}": str(self.sources)}
        Manifest(recipe, (square, wide), empty, counts, places).save(self.folder)
        self.write_rejects()

    def shard(self, bucket: str, numbers: list[int], first_captions: list[str], mask: bool = False) -> ShardEntry:
        size = Bucket(*map(int, bucket.split("x")))
        files = [self.sources / f"{number:06d}.png" for number in numbers]
        plans = [resize_for(*Image.open(file).size, size) for file in files]
        pixels = np.stack([fit(decode(file.read_bytes()), resize) for file, resize in zip(files, plans, strict=True)])
        firsts = [*first_captions, *["two words"] * (len(numbers) - len(first_captions))]
        captions = [(first, f"and {number}") for first, number in zip(firsts, numbers, strict=True)]
        origins = [
            Origin(f"{LABEL}/{file.name}", "f", *resize.source, texts, json.dumps([file.name]))
            for file, resize, texts in zip(files, plans, captions, strict=True)
        ]
        content = sd3_content(
            torch.tensor([sample_id(origin.key) for origin in origins]),
            raw_moments(self.vae, torch.from_numpy(pixels))[:, None],
            torch.arange(len(files) + 1) * 2,
            torch.arange(2 * len(files)) % 2,
            text_tensors(),
            masks(plans) if mask else None,
        )
        name = f"{bucket}.safetensors"
        entry = ShardEntry(name, bucket, (size.width, size.height), LABEL, 0, 0, "", "f")
        return write_shard(self.folder / "shards", entry, content, origins)

    def write_rejects(self) -> None:
        Image.new("RGB", (300, 200), "teal").save(self.sources / "cut.jpg")
        whole = (self.sources / "cut.jpg").read_bytes()
        (self.sources / "cut.jpg").write_bytes(whole[: len(whole) * 2 // 3])
        shutil.copyfile(self.sources / "000003.png", self.sources / "no_caption.png")
        self.rejects(
            ("cut.jpg", "truncated", HOSTILE, "cut.jpg"),
            ("gone.jpg", "truncated", "OSError", "gone.jpg"),
            ("no_caption.png", "no_caption", "", "no_caption.png"),
        )

    def rejects(self, *lines: tuple[str, str, str, str]) -> None:
        texts = [
            json.dumps({"key": f"{LABEL}/{key}", "reason": reason, "detail": detail, "image": json.dumps([image])})
            for key, reason, detail, image in lines
        ]
        (self.folder / "rejects.jsonl").write_text("\n".join(texts) + "\n", encoding="utf-8")


def text_tensors() -> dict[str, torch.Tensor]:
    """Return features of two captions, 5 and 9 T5 tokens long."""
    start = torch.tensor([0, T5_LENGTHS[0], sum(T5_LENGTHS)])
    tokens = {f"{name}.tokens": torch.zeros(14, 4, dtype=torch.bfloat16) for name in ("clip_l", "clip_g", "t5")}
    starts = {f"{name}.start": start.clone() for name in ("clip_l", "clip_g", "t5")}
    return {**tokens, **starts, **{f"{name}.pooled": torch.zeros(2, 4).bfloat16() for name in ("clip_l", "clip_g")}}


def masks(plans: list[Any]) -> torch.Tensor:
    """Return masks: the left half of the first image is trained on, and all of the others."""
    half = Image.new("L", (80, 48), 0)
    half.paste(255, (0, 0, 40, 48))
    arrays = [fit_mask(half, plans[0]), *(np.full((6, 10), 255, dtype=np.uint8) for _ in plans[1:])]
    return torch.from_numpy(np.stack(arrays))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> SmallCache:
    """A cache that tests must not change."""
    return SmallCache(tmp_path_factory.mktemp("inspect"), DEMO)


@pytest.fixture
def copy_cache(tmp_path: Path, built: SmallCache) -> Callable[..., Path]:
    """Return a function that copies the cache and changes places in its manifest; the sources are shared."""

    def copy(**places: str) -> Path:
        folder = tmp_path / "cache"
        shutil.copytree(built.folder, folder)
        manifest = json.loads((folder / "manifest.json").read_bytes())
        manifest["places"].update({name.replace("__", ":"): value for name, value in places.items()})
        (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
        return folder

    return copy


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, built: SmallCache) -> tuple[Path, CachePage]:
    out = tmp_path_factory.mktemp("page") / "new" / "folder" / "page.html"
    return out, write_cache_page(built.folder, out)


@pytest.fixture(scope="module")
def page(written: tuple[Path, CachePage]) -> ParsedPage:
    return ParsedPage(written[0])


def test_the_page_is_complete_and_runs_nothing(page: ParsedPage) -> None:
    assert page.source.startswith('<!doctype html>\n<html lang="en">')
    assert ("meta", {"charset": "utf-8"}) in page.elements
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert {link["href"] for link in page.attributes("a")} <= {f"#{id}" for id in ids}
    assert len(ids) == len(set(ids))
    assert_self_contained(page)
    assert page.attributes("script") == []
    sources = [image["src"] or "" for image in page.attributes("img")]
    assert len(sources) == 7 * 2 + 1 + 2  # originals and decoded, one mask, two rejects that open
    for source in sources:
        kind, data = re.fullmatch(r"data:image/(png|webp);base64,(.+)", source).groups()  # type: ignore[union-attr]
        image = Image.open(io.BytesIO(base64.b64decode(data)))
        image.load()
        assert image.format == kind.upper()


def test_captions_are_escaped_folded_and_marked(page: ParsedPage) -> None:
    assert page.text.count(HOSTILE) == 2  # a caption, and a detail of a reject
    assert "<script" not in page.source
    assert CHINESE in page.text
    assert [attributes.get("lang") for _, attributes in page.elements].count("zh") == 1
    assert CHINESE in page.source
    assert LONG in page.text
    assert "2,003 characters" in page.text
    assert "Captions are cut: of 14 captions" in page.text
    assert "exceed t5_max_length = 9" in page.text


def test_counts_and_reconstructions_shown(page: ParsedPage, built: SmallCache, written: tuple[Path, CachePage]) -> None:
    text = page.text
    for part in ("7 samples in 2 buckets", "64x64 4 57.1%", "80x48 3 42.9%", "14 captions of all 7 samples: 2 per"):
        assert part in text
    assert "3 cropped: lose part of their border" in text
    assert "3 rejected: inputs that are not used" in text
    assert "50.0% fill all 9 tokens (t5_max_length)" in text
    assert str(built.sources) in text
    assert "0123abcd" in text
    for reason in ("truncated", "no_caption"):
        assert REASONS[reason] in page.text
    shown = {reject.key.split("/")[1]: reject for reject in written[1].rejects.shown}
    assert set(shown) == {"cut.jpg", "gone.jpg", "no_caption.png"}
    assert shown["cut.jpg"].image
    assert shown["no_caption.png"].image
    assert not shown["gone.jpg"].image
    assert shown["gone.jpg"].problem == "not found"
    content = written[1]
    assert len(content.samples) == 7
    assert content.notes == []
    assert all(sample.psnr is not None and sample.psnr > 20 for sample in content.samples)
    assert [bool(sample.masked) for sample in content.samples].count(True) == 1
    assert len({sample.origin.key for sample in content.samples}) == 7
    scores = sorted(sample.psnr or 0.0 for sample in written[1].samples)
    assert f"The median is {scores[3]:.1f} dB, the worst {scores[0]:.1f} dB." in page.text
    groups = group_samples(written[1].samples)
    sizes = {"Worst reconstructions": 3, "Median reconstruction": 1, "Other samples": 3}
    assert [(title, len(cards)) for title, cards in groups] == list(sizes.items())
    assert [card.psnr for _, cards in groups[:2] for card in cards] == scores[:4]
    places = [page.text.index(title) for title, _ in groups]
    assert places == sorted(places)
    low = replace(written[1].samples[0], psnr=12.0)
    assert "Below 20 dB: 1; this VAE does not fit these images." in render_page(replace(written[1], samples=[low]))


def test_a_seed_draws_the_same_samples(tmp_path: Path, built: SmallCache) -> None:
    keys = [
        [sample.origin.key for sample in write_cache_page(built.folder, tmp_path / "page.html", 3, seed).samples]
        for seed in (0, 0, 1, 2, 3)
    ]
    assert len(keys[0]) == 3
    assert keys[0] == keys[1]
    assert len({tuple(drawn) for drawn in keys}) > 1


def test_only_as_many_shards_as_needed_are_read(tmp_path: Path, built: SmallCache) -> None:
    folder = tmp_path / "cache"
    shutil.copytree(built.folder, folder)
    manifest = Manifest.load(folder)
    square = manifest.shards[0]
    entries = tuple(replace(square, file=f"{number:03d}.safetensors") for number in range(50))
    for entry in entries:
        copied, original = (folder / "shards" / name for name in (entry.file, square.file))
        for suffix in (".safetensors", ".arrow"):
            copied.with_suffix(suffix).hardlink_to(original.with_suffix(suffix))
    replace(manifest, shards=entries).save(folder)
    inspection = inspect_cache(folder, 10, seed=0)
    assert (inspection.stats.shards, inspection.stats.samples, inspection.samples) == (3, 12, 200)
    text = render_page(CachePage(inspection, LineSample([]), LineSample([])))
    assert "24 captions of 12 samples in 3 of 50 shards, chosen at random" in text


@pytest.mark.parametrize(
    ("size", "expected"), [((64, 64), ""), ((200, 100), ", 50% cropped"), ((32, 32), ", enlarged")]
)
def test_a_card_says_how_its_image_was_resized(size: tuple[int, int], expected: str) -> None:
    bucket = Bucket(64, 64)
    ref: Any = SimpleNamespace(entry=SimpleNamespace(bucket=str(bucket)))
    origin: Any = None
    card = SampleCard(ref, origin, resize_for(*size, bucket))
    assert card.resize_text == f"{size[0]}x{size[1]} → {bucket}{expected}"


def test_moved_sources_are_noted_and_the_rest_is_shown(tmp_path: Path, copy_cache: Any) -> None:
    folder = copy_cache(**{f"directory__{LABEL}": "/nowhere/images"})
    content = write_cache_page(folder, tmp_path / "page.html")
    assert content.notes == [f"The originals of {LABEL} cannot be shown: /nowhere/images does not exist."]
    assert all(sample.decoded and not sample.original for sample in content.samples)
    assert any(sample.masked for sample in content.samples)
    assert "/nowhere/images does not exist" in ParsedPage(tmp_path / "page.html").text


def test_a_missing_vae_is_noted_and_can_be_passed(tmp_path: Path, copy_cache: Any) -> None:
    folder = copy_cache(diffusers_path="/nowhere/model")
    content = write_cache_page(folder, tmp_path / "page.html")
    assert len(content.notes) == 1
    assert "--vae FOLDER" in content.notes[0]
    assert all(sample.original and not sample.decoded for sample in content.samples)
    assert any(sample.masked for sample in content.samples)
    opened, problem = open_vae({}, None)
    assert opened is None
    assert "--vae FOLDER" in problem
    for vae in (DEMO, DEMO / "vae"):
        content = write_cache_page(folder, tmp_path / "page.html", vae=vae)
        assert content.notes == []
        assert all(sample.decoded for sample in content.samples)


def test_a_damaged_shard_is_noted_and_the_others_are_shown(tmp_path: Path, copy_cache: Any) -> None:
    folder = copy_cache()
    (folder / "shards" / "80x48.safetensors").write_bytes(b"not a shard")
    content = write_cache_page(folder, tmp_path / "page.html")
    assert {sample.ref.entry.bucket for sample in content.samples} == {"64x64"}
    assert len(content.notes) == 2  # its caption lengths, and its samples
    assert all("80x48.safetensors" in note for note in content.notes)


def test_a_changed_source_is_not_shown_as_the_original(tmp_path: Path, built: SmallCache, copy_cache: Any) -> None:
    shutil.copytree(built.sources, tmp_path / "moved")
    Image.new("RGB", (90, 90)).save(tmp_path / "moved" / "000000.png")
    folder = copy_cache(**{f"directory__{LABEL}": str(tmp_path / "moved")})
    content = write_cache_page(folder, tmp_path / "page.html")
    problems = [sample.problem for sample in content.samples if not sample.original]
    assert problems == ["the file has changed: it is 90x90 now and was 64x64"]


def test_a_cache_without_rejects_says_so(tmp_path: Path, copy_cache: Any) -> None:
    folder = copy_cache()
    (folder / "rejects.jsonl").unlink()
    manifest = json.loads((folder / "manifest.json").read_bytes())
    manifest["counts"] = {"used": 7}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    write_cache_page(folder, tmp_path / "page.html", samples=0)
    assert "No input was rejected." in ParsedPage(tmp_path / "page.html").text


def test_half_a_surrogate_pair_does_not_stop_the_page(tmp_path: Path, copy_cache: Any) -> None:
    folder = copy_cache()
    line = '{"key": "images#0/\\ud800.jpg", "reason": "new_reason", "detail": "", "image": ""}\nnot json\n'
    (folder / "rejects.jsonl").write_text(line)
    content = write_cache_page(folder, tmp_path / "page.html", samples=0)
    assert [(group.name, group.total) for group in content.rejects.groups] == [("new_reason", 1)]
    assert content.notes == ["Damaged lines in rejects.jsonl: 1."]
    assert "\\ud800.jpg" in ParsedPage(tmp_path / "page.html").text


def test_user_errors_come_before_the_work(tmp_path: Path, built: SmallCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sd3_light.report.inspect.cache_page.collect_content", lambda *_: pytest.fail("too early"))
    refused(r"train.toml is a config; pass the folder of its cache", inspect.run, Path("train.toml"))
    refused("no cache at", write_cache_page, tmp_path / "nowhere", tmp_path / "page.html")
    refused("is a folder; name the file", write_cache_page, built.folder, tmp_path)


def test_files_that_cannot_be_used_are_user_errors(tmp_path: Path, built: SmallCache) -> None:
    refused(r"--vae: .* has no vae/config.json", write_cache_page, built.folder, tmp_path / "page.html", vae=tmp_path)
    (tmp_path / "vae").mkdir()
    (tmp_path / "vae" / "config.json").write_text("{}")
    refused("cannot be loaded", write_cache_page, built.folder, tmp_path / "page.html", vae=tmp_path)
    assert not (tmp_path / "page.html").exists()
    with pytest.raises(UserError, match=r"cannot write /proc/page\.html"):  # root cannot write there either
        write_cache_page(built.folder, Path("/proc/page.html"), samples=0)


def table_of(inspection: Inspection, styles: bool = False) -> str:
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(inspect.render(inspection))
    return console.export_text(styles=styles)


def test_the_table_shows_counts_and_captions_without_markup(built: SmallCache) -> None:
    table = table_of(inspect.run(built.folder))
    text = " ".join(table.replace("│", " ").split())
    for part in ("used 7", "bucket 64x64 4", "57.1%", "rejected: truncated 2", REASONS["truncated"], "kB"):
        assert part in text
    for part in (
        "words per caption 2",
        "clip_l, clip_g, t5 tokens per caption 5",
        "captions per sample 2",
        "text_tokens = real",
        "captions cut 2 of 14 captions 2 exceed CLIP's 16 tokens, 2 exceed t5_max_length = 9",
        LABEL,
    ):
        assert part in text
    assert 10 < len(table.splitlines()) < 40
    # the manifest's count keeps its older name.
    inspection = inspect.run(built.folder)
    inspection.manifest.counts["pictures"] = 9
    text = " ".join(table_of(inspection).split())
    assert "images 9" in text
    assert "pictures" not in text
    inspection = inspect.run(built.folder)
    inspection.stats.examples[:] = ["[red]not a color[/red] \x1b[31m", "\x07bell"]
    text = table_of(inspection, styles=True)
    assert "[red]not a color[/red]" in text
    assert "\x1b[31m" not in text.replace("\x1b[31m[", "")
    assert "\x07" not in text
