"""The inspect stage on a small cache made by hand: what the screen and the page show, and what may be missing."""

import base64
import io
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console
from sd3_light.stages.inspect.gather import inspect_cache

from sd3_light.config.faults import UserError
from sd3_light.data.buckets import Bucket, plan
from sd3_light.data.manifest import Manifest, ShardEntry
from sd3_light.data.preprocess import REASONS, decode, fit, fit_mask
from sd3_light.data.shards import Origin, ShardContent, write_shard
from sd3_light.encoders.vae import load_vae, raw_moments
from sd3_light.randomness import sample_id
from sd3_light.stages import inspect
from sd3_light.stages.inspect.page import Findings, render_page, write_page
from sd3_light.stages.inspect.rejects import Rejects
from sd3_light.world import write_dataset

LABEL = "pictures#0"
EVIL = "<script>alert('&\"')</script>[red]"
CHINESE = "一只红色的圆在左边"
LONG = "word " * 400 + "end"
T5_LENGTHS = (5, 9)


class Build:
    """A cache of 64x64 and 80x48 pictures of the demo world, beside its sources."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder, self.sources, self.model = folder / "cache", folder / "pictures", model
        (self.folder / "shards").mkdir(parents=True)
        write_dataset(self.sources, 12, seed=1)
        self.vae = load_vae(model, torch.device("cpu"), torch.float32)
        odd = [EVIL, CHINESE, LONG]
        square = self.shard("64x64", [0, 2, 4, 6], odd)
        wide = self.shard("80x48", [1, 5, 9], [], mask=True)
        empty = self.shard("16x16", [0], [])
        recipe = {"format": 2, "text_tokens": "real", "t5_max_length": 9, "vae": "0123abcd"}
        counts = {"used": 7, "cropped": 3, "enlarged": 1, "rejected: truncated": 2, "rejected: no_caption": 1}
        places = {"diffusers_path": str(model), f"directory:{LABEL}": str(self.sources)}
        Manifest(recipe, (square, wide), empty, counts, places).save(self.folder)
        self.write_rejects()

    def shard(self, bucket: str, numbers: list[int], odd: list[str], mask: bool = False) -> ShardEntry:
        size = Bucket(*map(int, bucket.split("x")))
        files = [self.sources / f"{number:06d}.png" for number in numbers]
        plans = [plan(*Image.open(file).size, size) for file in files]
        pixels = np.stack([fit(decode(file.read_bytes()), way) for file, way in zip(files, plans, strict=True)])
        captions = [(odd[at] if at < len(odd) else "two words", f"and {number}") for at, number in enumerate(numbers)]
        origins = [
            Origin(f"{LABEL}/{file.name}", "f", *way.source, texts, json.dumps([file.name]))
            for file, way, texts in zip(files, plans, captions, strict=True)
        ]
        content = ShardContent(
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
        picture = (self.sources / "000003.png").read_bytes()
        Image.new("RGB", (300, 200), "teal").save(self.sources / "cut.jpg")
        whole = (self.sources / "cut.jpg").read_bytes()
        (self.sources / "cut.jpg").write_bytes(whole[: len(whole) * 2 // 3])
        (self.sources / "no_caption.png").write_bytes(picture)
        self.rejects(
            ("cut.jpg", "truncated", EVIL, "cut.jpg"),
            ("gone.jpg", "truncated", "OSError", "gone.jpg"),
            ("no_caption.png", "no_caption", "", "no_caption.png"),
        )

    def rejects(self, *lines: tuple[str, str, str, str]) -> None:
        texts = [
            json.dumps(
                {
                    "key": f"{LABEL}/{key}",
                    "reason": reason,
                    "detail": detail,
                    "image": json.dumps([image]) if image else "",
                }
            )
            for key, reason, detail, image in lines
        ]
        (self.folder / "rejects.jsonl").write_text("\n".join(texts) + "\n", encoding="utf-8")


def text_tensors() -> dict[str, torch.Tensor]:
    """Features of two distinct captions, 5 and 9 T5 tokens long."""
    start = torch.tensor([0, T5_LENGTHS[0], sum(T5_LENGTHS)])
    tokens = {f"{name}.tokens": torch.zeros(14, 4, dtype=torch.bfloat16) for name in ("clip_l", "clip_g", "t5")}
    starts = {f"{name}.start": start.clone() for name in ("clip_l", "clip_g", "t5")}
    return {**tokens, **starts, **{f"{name}.pooled": torch.zeros(2, 4).bfloat16() for name in ("clip_l", "clip_g")}}


def masks(plans: list[Any]) -> torch.Tensor:
    """The left half teaches in the first picture, all in the others."""
    half = Image.new("L", (80, 48), 0)
    half.paste(255, (0, 0, 40, 48))
    found = [fit_mask(half, plans[0]), *(np.full((6, 10), 255, dtype=np.uint8) for _ in plans[1:])]
    return torch.from_numpy(np.stack(found))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, demo_parts: Path) -> Build:
    """Read only."""
    return Build(tmp_path_factory.mktemp("inspect"), demo_parts)


@pytest.fixture
def own(tmp_path: Path, built: Build) -> Callable[..., Path]:
    """A copy of the cache whose manifest may be changed; the sources stay where they are."""

    def copy(**places: str) -> Path:
        folder = tmp_path / "cache"
        shutil.copytree(built.folder, folder)
        found = json.loads((folder / "manifest.json").read_bytes())
        found["places"].update({name.replace("__", ":"): value for name, value in places.items()})
        (folder / "manifest.json").write_text(json.dumps(found), encoding="utf-8")
        return folder

    return copy


class Page(HTMLParser):
    """The page as a parser sees it: every element with its attributes, and the text outside of style."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.raw = path.read_bytes()
        self.feed(self.raw.decode("utf-8"))
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in {"meta", "img"}:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += "" if self.open[-1:] == ["style"] else data + "\n"

    def of(self, tag: str) -> list[dict[str, str | None]]:
        """The attributes of the elements of a tag."""
        return [found for name, found in self.elements if name == tag]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, built: Build) -> tuple[Path, Findings]:
    out = tmp_path_factory.mktemp("page") / "new" / "folder" / "page.html"
    return out, write_page(built.folder, out)


@pytest.fixture(scope="module")
def page(written: tuple[Path, Findings]) -> Page:
    return Page(written[0])


# --- the page ------------------------------------------------------------------------------------


def test_the_page_is_whole_and_well_nested(page: Page) -> None:
    assert page.raw.startswith(b'<!doctype html>\n<html lang="en">')
    assert page.open == []
    assert ("meta", {"charset": "utf-8"}) in page.elements
    identities = [found["id"] for _, found in page.elements if "id" in found]
    assert {href["href"] for href in page.of("a")} <= {f"#{identity}" for identity in identities}
    assert len(identities) == len(set(identities))


def test_the_page_asks_for_nothing_and_runs_nothing(page: Page) -> None:
    assert not {"script", "link", "iframe", "object", "base", "form"} & {name for name, _ in page.elements}
    for name, found in page.elements:
        assert not [key for key in found if key.startswith("on")]
        for key in ("src", "href", "srcset", "action"):
            assert (found.get(key) or "#").startswith(("#", "data:image/")), (name, found)
        assert "url(" not in (found.get("style") or "")
    style = page.raw.decode().split("<style>")[1].split("</style>")[0]
    assert "url(" not in style
    assert "@import" not in style
    assert any("default-src 'none'" in (found.get("content") or "") for found in page.of("meta"))


def test_text_from_data_is_escaped(page: Page) -> None:
    assert EVIL in page.text  # as a caption and as a detail: read as text
    assert page.text.count(EVIL) == 2
    assert "<script" not in page.raw.decode()


def test_chinese_captions_name_their_language(page: Page) -> None:
    assert CHINESE in page.text
    chinese = [found for name, found in page.elements if found.get("lang") == "zh"]
    assert len(chinese) == 1
    assert CHINESE.encode() in page.raw


def test_a_long_caption_is_folded_but_whole(page: Page) -> None:
    assert LONG in page.text
    assert "2,003 characters" in page.text


def test_every_picture_decodes_and_lies_in_the_page(page: Page) -> None:
    sources = [found["src"] or "" for found in page.of("img")]
    assert len(sources) == 7 * 2 + 1 + 2  # originals and decoded, one mask, two rejects that open
    for source in sources:
        kind, data = re.fullmatch(r"data:image/(png|webp);base64,(.+)", source).groups()  # type: ignore[union-attr]
        image = Image.open(io.BytesIO(base64.b64decode(data)))
        image.load()
        assert image.format == kind.upper()


def test_what_was_decoded_resembles_the_originals(written: tuple[Path, Findings]) -> None:
    found = written[1]
    assert len(found.samples) == 7
    assert found.notes == []
    assert all(sample.closeness is not None and sample.closeness > 20 for sample in found.samples)
    assert [bool(sample.masked) for sample in found.samples].count(True) == 1
    assert len({sample.origin.key for sample in found.samples}) == 7


def test_counts_buckets_and_lengths_are_told(page: Page, built: Build) -> None:
    text = " ".join(page.text.split())
    for words in ("7 samples in 2 buckets", "64x64 4 57.1%", "80x48 3 42.9%", "14 captions of all 7 samples"):
        assert words in text
    assert "3 cropped: lose some of their border" in text
    assert "3 rejected: inputs that are not used" in text
    assert "50.0% fill all 9 (t5_max_length)" in text
    assert str(built.sources) in text
    assert "0123abcd" in text


def test_rejects_come_with_their_reasons(page: Page, written: tuple[Path, Findings]) -> None:
    for reason in ("truncated", "no_caption"):
        assert REASONS[reason] in page.text
    shown = {reject.key.split("/")[1]: reject for reject in written[1].rejects.shown}
    assert set(shown) == {"cut.jpg", "gone.jpg", "no_caption.png"}
    assert shown["cut.jpg"].picture
    assert shown["no_caption.png"].picture
    assert not shown["gone.jpg"].picture
    assert shown["gone.jpg"].problem == "not found"


def test_half_files_are_allowed_for_thumbnails_only(written: tuple[Path, Findings], built: Build) -> None:
    with pytest.raises(Exception, match="truncated"):
        decode((built.sources / "cut.jpg").read_bytes())


def test_a_seed_draws_the_same_samples(tmp_path: Path, built: Build) -> None:
    keys = [
        [sample.origin.key for sample in write_page(built.folder, tmp_path / "page.html", 3, seed).samples]
        for seed in (0, 0, 1, 2, 3)
    ]
    assert len(keys[0]) == 3
    assert keys[0] == keys[1]
    assert len({tuple(drawn) for drawn in keys}) > 1


def test_a_large_cache_is_looked_into_as_far_as_is_needed(tmp_path: Path, built: Build) -> None:
    """Of 50 shards only as many as the wanted samples need are read, and the page says so."""
    folder = tmp_path / "cache"
    shutil.copytree(built.folder, folder)
    manifest = Manifest.load(folder)
    square = manifest.shards[0]
    entries = tuple(replace(square, file=f"{number:03d}.safetensors") for number in range(50))
    for entry in entries:
        for suffix in (".safetensors", ".arrow"):
            (folder / "shards" / entry.file).with_suffix(suffix).hardlink_to(
                (folder / "shards" / square.file).with_suffix(suffix)
            )
    replace(manifest, shards=entries).save(folder)
    found = inspect_cache(folder, 10, seed=0)
    assert (found.survey.shards, found.survey.samples, found.samples) == (3, 12, 200)
    text = render_page(Findings(found, Rejects()))
    assert "24 captions of 12 samples in 3 of 50 shards, chosen at random" in text


# --- what may be missing -------------------------------------------------------------------------


def test_moved_sources_are_told_and_the_rest_is_shown(tmp_path: Path, own: Callable[..., Path]) -> None:
    folder = own(**{f"directory__{LABEL}": "/nowhere/pictures"})
    found = write_page(folder, tmp_path / "page.html")
    assert found.notes == [f"The originals of {LABEL} cannot be shown: /nowhere/pictures does not exist."]
    assert all(sample.decoded and not sample.original for sample in found.samples)
    assert "/nowhere/pictures does not exist" in Page(tmp_path / "page.html").text


def test_a_missing_vae_is_told_and_can_be_named(tmp_path: Path, own: Callable[..., Path], demo_parts: Path) -> None:
    folder = own(diffusers_path="/nowhere/model")
    found = write_page(folder, tmp_path / "page.html")
    assert len(found.notes) == 1
    assert "--vae FOLDER" in found.notes[0]
    assert all(sample.original and not sample.decoded for sample in found.samples)
    for vae in (demo_parts, demo_parts / "vae"):
        found = write_page(folder, tmp_path / "page.html", vae=vae)
        assert found.notes == []
        assert all(sample.decoded for sample in found.samples)


def test_a_damaged_shard_is_named_and_the_others_are_shown(tmp_path: Path, own: Callable[..., Path]) -> None:
    folder = own()
    (folder / "shards" / "80x48.safetensors").write_bytes(b"no shard")
    found = write_page(folder, tmp_path / "page.html")
    assert {sample.pick.entry.bucket for sample in found.samples} == {"64x64"}
    assert len(found.notes) == 2  # its captions' lengths, and its samples
    assert all("80x48.safetensors" in note for note in found.notes)


def test_a_changed_source_is_not_shown_as_the_original(tmp_path: Path, built: Build, own: Callable[..., Path]) -> None:
    shutil.copytree(built.sources, tmp_path / "moved")
    Image.new("RGB", (90, 90)).save(tmp_path / "moved" / "000000.png")
    folder = own(**{f"directory__{LABEL}": str(tmp_path / "moved")})
    found = write_page(folder, tmp_path / "page.html")
    problems = [sample.problem for sample in found.samples if not sample.original]
    assert problems == ["the file has changed: it is 90x90 now and was 64x64"]


def test_a_cache_without_rejects_says_so(tmp_path: Path, own: Callable[..., Path]) -> None:
    folder = own()
    (folder / "rejects.jsonl").unlink()
    text = json.loads((folder / "manifest.json").read_bytes())
    text["counts"] = {"used": 7}
    (folder / "manifest.json").write_text(json.dumps(text))
    write_page(folder, tmp_path / "page.html", samples=0)
    assert "Every input was used." in Page(tmp_path / "page.html").text


def test_half_a_surrogate_pair_does_not_cost_the_page(tmp_path: Path, own: Callable[..., Path]) -> None:
    folder = own()
    line = '{"key": "pictures#0/\\ud800.jpg", "reason": "new_reason", "detail": "", "image": ""}\nnot json\n'
    (folder / "rejects.jsonl").write_text(line)
    found = write_page(folder, tmp_path / "page.html", samples=0)
    assert found.rejects.counts == {"new_reason": 1}
    assert found.notes == ["1 lines of rejects.jsonl are damaged."]
    assert "\\ud800.jpg" in Page(tmp_path / "page.html").text


def test_faults_of_the_user_are_told_before_the_work(
    tmp_path: Path, built: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sd3_light.stages.inspect.page.gather_findings", lambda *_: pytest.fail("it worked first"))
    with pytest.raises(UserError, match="no cache at"):
        write_page(tmp_path / "nowhere", tmp_path / "page.html")
    with pytest.raises(UserError, match="is a folder; name the file"):
        write_page(built.folder, tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot make the folder"):
        write_page(built.folder, tmp_path / "file" / "page.html")


def test_a_vae_that_cannot_be_used_is_the_users_fault(tmp_path: Path, built: Build) -> None:
    with pytest.raises(UserError, match=r"--vae: .* has no vae/config.json"):
        write_page(built.folder, tmp_path / "page.html", vae=tmp_path)
    (tmp_path / "vae").mkdir()
    (tmp_path / "vae" / "config.json").write_text("{}")
    with pytest.raises(UserError, match="cannot be loaded"):
        write_page(built.folder, tmp_path / "page.html", vae=tmp_path)
    assert not (tmp_path / "page.html").exists()


def test_a_place_that_cannot_be_written_is_one_line(built: Build) -> None:
    with pytest.raises(UserError, match=r"cannot write /proc/page\.html"):  # where root cannot write either
        write_page(built.folder, Path("/proc/page.html"), samples=0)


# --- the screen ----------------------------------------------------------------------------------


def test_the_screen_tells_all_in_one_table(built: Build) -> None:
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(inspect.render(inspect.run(built.folder)))
    text = " ".join(console.export_text().replace("│", " ").split())
    for words in ("used 7", "bucket 64x64 4", "57.1%", "rejected: truncated 2", REASONS["truncated"], "kB"):
        assert words in text
    for words in ("words a caption 2", "T5 tokens a caption 5", "captions a sample 2", "text_tokens = real", LABEL):
        assert words in text
    assert len(console.export_text().splitlines()) < 40


def test_the_screen_takes_captions_for_text(built: Build) -> None:
    found = inspect.run(built.folder)
    found.survey.examples[:] = ["[red]not a colour[/red] \x1b[31m", "\x07bell"]
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(inspect.render(found))
    text = console.export_text(styles=True)
    assert "[red]not a colour[/red]" in text
    assert "\x1b[31m" not in text.replace("\x1b[31m[", "")
    assert "\x07" not in text
