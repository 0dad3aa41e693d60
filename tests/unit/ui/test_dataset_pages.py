"""The pages of a dataset: what they show, change and refuse."""

import json
import re
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pytest
from PIL import Image

from sd3_light.config import load_dataset
from sd3_light.core.caption_lengths import TextLimit
from sd3_light.sources.catalogue import InputRow, make_sources, write_part
from sd3_light.ui import dataset_jobs, sample_index
from sd3_light.ui.dataset_jobs import read_length, tokens_lost
from sd3_light.ui.dataset_pages import _difference
from sd3_light.ui.datasets import _with_key
from sd3_light.ui.folders import folder_id
from sd3_light.ui.sample_index import Query, SampleIndex
from tests.refusals import refused
from tests.unit.pages.parsed_page import ParsedPage
from tests.unit.ui.client import client_of, site_of
from tests.waiting import wait_until

TOML = '# mine\r\nresolutions = [64]  # px\r\nenable_ar_bucket = true\r\n\r\n[[directory]]\r\npath = "images"\r\n'
HOSTILE = "</script><script>alert(1)</script>"
CAPTIONS = {"a": "red cat, house", "b": "cat", "sub/c": "dog,  house, sunny", "copy": "a copy", "evil<b>": HOSTILE}


@pytest.fixture(autouse=True)
def read_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Images are read in this process; test_other_sources.py reads them in others."""
    monkeypatch.setattr(dataset_jobs, "_WORKERS", 0)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A dataset of five images, one without a caption and one that is broken."""
    rng = np.random.default_rng(0)
    (tmp_path / "images/sub").mkdir(parents=True)
    for number, (name, caption) in enumerate(CAPTIONS.items()):
        size = (64 + 32 * number, 64)
        image = Image.fromarray(rng.integers(0, 255, (4, 4, 3), dtype=np.uint8)).resize(size)
        if name == "copy":
            image = Image.open(tmp_path / "images/a.png").resize((128, 128))
        image.save(tmp_path / f"images/{name}.png")
        (tmp_path / f"images/{name}.txt").write_text(caption + "\n", encoding="utf-8")
    Image.new("RGB", (64, 64)).save(tmp_path / "images/bare.png")
    (tmp_path / "images/broken.png").write_bytes(b"no image")
    (tmp_path / "images/broken.txt").write_text("broken")
    (tmp_path / "data.toml").write_bytes(TOML.encode())
    return tmp_path


class Pages:
    def __init__(self, root: Path, toml: Path | None = None) -> None:
        self.site = site_of(root)
        self.id = folder_id(toml or root / "data.toml")
        self.client = client_of(self.site)

    @property
    def dataset(self) -> Any:
        return self.site.datasets.get(self.id)

    def get(self, **query: str) -> ParsedPage:
        reply = self.client.get(f"/datasets/{self.id}", params=query)
        assert reply.status_code == 200, reply.text
        return ParsedPage(reply.text)

    def post(self, path: str, fields: Sequence[tuple[str, str]] = (), **more: str) -> Any:
        headers = {"Content-Type": "application/x-www-form-urlencoded"}
        body = urlencode([*fields, *more.items()])
        return self.client.post(f"/datasets/{self.id}/{path}", content=body, headers=headers)

    def edit(self, **values: object) -> Any:
        headers = {"Accept": "application/json"}
        return self.client.post(f"/datasets/{self.id}/caption", content=json.dumps(values), headers=headers)

    def list(self, **fields: str) -> "Pages":
        assert self.post("list", **fields).status_code == 303
        wait_until(lambda: not self.dataset.job.is_running)
        assert not self.dataset.job.error
        return self


def names(page: ParsedPage) -> list[str]:
    keys = [each["data-key"] for each in page.attributes("article") if "data-key" in each]
    return [re.sub(r"^images#0/|\.png$", "", key or "") for key in keys]


@pytest.fixture
def pages(root: Path) -> Pages:
    return Pages(root).list()


def test_a_dataset_is_found_and_listed_on_request_only(root: Path) -> None:
    (root / "train.toml").write_text('output_dir = "run"\ndataset = "data.toml"\n')
    unlisted = Pages(root)
    page = ParsedPage(unlisted.client.get("/data").text)
    assert f"/datasets/{unlisted.id}" in {link["href"] for link in page.attributes("a")}
    assert "train.toml" in page.text
    page = unlisted.get()
    assert "The images were not listed yet" in page.text
    assert names(page) == []
    assert unlisted.dataset.index is None
    assert names(unlisted.list().get()) == ["a", "b", "copy", "evil<b>", "sub/c"]
    assert sorted(path.name for path in root.iterdir()) == ["data.toml", "images", "train.toml"]


def test_samples_are_filtered_sorted_and_counted(pages: Pages) -> None:
    assert names(pages.get(text="CAT")) == ["a", "b"]
    assert names(pages.get(text="sub/")) == ["sub/c"]
    assert names(pages.get(tag="cat")) == ["b"]
    assert names(pages.get(tag="house")) == ["a", "sub/c"]
    assert names(pages.get(where="caption_length < 7 or width > 180")) == ["b", "copy", "evil<b>"]
    assert names(pages.get(sort="caption length"))[0] == "b"
    assert names(pages.get(sort="aspect", order="descending"))[:2] == ["evil<b>", "sub/c"]
    assert names(pages.get(sort="pixels"))[0] == "a"
    assert names(pages.get(show="rejected")) == ["bare", "broken"]
    assert names(pages.get(show="rejected", reason="no_caption")) == ["bare"]
    assert len(names(pages.get(show="all"))) == 7
    page = pages.get(tags="1")
    assert "house 2" in page.text
    assert "page 1 of 1" in page.text
    assert all(len(names(pages.get(sort=each))) == 5 for each in sample_index.SORTS if each != "similarity")


def test_a_query_that_is_not_valid_is_a_note(pages: Pages) -> None:
    for query, note in (
        ({"where": "width >"}, "where: "),
        ({"where": "aesthetic > 5"}, "'aesthetic' is a column of a table, which this page does not keep"),
        ({"sort": "color"}, "samples cannot be sorted by 'color'"),
        ({"sort": "similarity"}, "open `similar` below an image"),
        ({"sort": "similarity", "like": "images#0/a.png"}, "the images were not compared yet"),
        ({"sort": "similarity", "like": "none"}, "there is no sample none"),
    ):
        assert note in pages.get(**query).text


def test_duplicates_are_side_by_side_and_similar_ones_are_found(pages: Pages, root: Path) -> None:
    assert names(pages.get(show="duplicates")) == []
    (root / "images/b2.png").write_bytes((root / "images/b.png").read_bytes())
    (root / "images/b2.txt").write_text("again")
    assert names(pages.list().get(show="duplicates")) == ["b", "b2"]
    pages.list(compare="1")
    assert names(pages.get(show="duplicates")) == ["a", "copy", "b", "b2"]
    assert names(pages.get(sort="similarity", like="images#0/copy.png"))[:2] in (["copy", "a"], ["a", "copy"])


def test_a_caption_is_read_and_changed_in_its_file(pages: Pages, root: Path) -> None:
    key = "images#0/a.png"
    answer = pages.client.get(f"/datasets/{pages.id}/caption", params={"key": key}).json()
    assert answer == {"captions": ["red cat, house"], "file": str(root / "images/a.txt"), "is_new": False}
    reply = pages.edit(key=key, number=0, old="red cat, house", new="blue  cat")
    assert reply.json() == {"captions": ["blue cat"]}
    assert (root / "images/a.txt").read_text() == "blue  cat\n"
    assert names(pages.get(text="blue cat")) == names(pages.get(show="edited")) == ["a"]
    assert pages.post("undo").status_code == 303
    assert (root / "images/a.txt").read_text() == "red cat, house\n"
    assert names(pages.get(text="blue cat")) == []


def test_two_tabs_and_two_servers_cannot_overwrite_each_other(pages: Pages, root: Path) -> None:
    other = Pages(root).list()
    values = {"key": "images#0/a.png", "number": 0, "old": "red cat, house"}
    assert pages.edit(**values, new="first").status_code == 200
    reply = other.edit(**values, new="second")
    assert reply.status_code == 400
    assert "has changed since the page read it" in reply.json()["error"]
    assert (root / "images/a.txt").read_text() == "first\n"


def test_edits_that_are_not_valid_are_refused(pages: Pages, root: Path) -> None:
    valid = {"key": "images#0/a.png", "number": 0, "old": "red cat, house", "new": "x"}
    changes: list[dict[str, object]] = [{"key": "images#0/none.png"}, {"old": "", "number": 5}, {"number": "0"}]
    for values in ({}, *({**valid, **change} for change in (*changes, {"new": "\ud800"}, {"new": 7}))):
        reply = pages.edit(**values)
        assert reply.status_code == 400, values
        assert reply.json()["error"]
    assert (root / "images/a.txt").read_text() == "red cat, house\n"


def test_nothing_is_written_through_links_or_outside_of_the_served_folders(root: Path) -> None:
    served = root / "served"
    served.mkdir()
    (served / "images").symlink_to(root / "images")
    (served / "data.toml").write_text('resolutions = [64]\n[[directory]]\npath = "images"\n')
    linked = Pages(served).list()
    reply = linked.edit(key="images#0/a.png", number=0, old="red cat, house", new="x")
    assert "is reached through one" in reply.json()["error"]
    (served / "other.toml").write_text(f'resolutions = [64]\n[[directory]]\npath = "{root}/images"\n')
    outside = Pages(served, served / "other.toml").list()
    reply = outside.edit(key="images#0/a.png", number=0, old="red cat, house", new="x")
    assert "is not below a served folder" in reply.json()["error"]
    preview = outside.post("change", action="preview", scope="all", mode="text", find="cat", put="x").text
    assert "2 samples cannot be changed" in preview
    assert (root / "images/a.txt").read_text() == "red cat, house\n"


def apply(pages: Pages, page: str) -> Any:
    (preview,) = re.findall(r'name="preview" value="(\w+)"', page)
    return pages.post("apply", preview=preview, query="")


def test_a_replacement_is_previewed_applied_once_and_taken_back(pages: Pages, root: Path) -> None:
    fields = {"action": "preview", "scope": "all", "mode": "tag", "find": "house", "put": "<i>home</i>"}
    reply = pages.post("change", query="text=house", **fields)
    page = ParsedPage(reply.text)
    assert "2 captions in 2 files would change, of 2 samples. Nothing is written yet" in page.text
    assert "<i>" not in reply.text
    assert (root / "images/a.txt").read_text() == "red cat, house\n"
    (root / "images/sub/c.txt").write_text("theirs\n")
    assert apply(pages, reply.text).status_code == 303
    assert (root / "images/a.txt").read_text() == "red cat, <i>home</i>\n"
    assert (root / "images/sub/c.txt").read_text() == "theirs\n"
    text = pages.get().text
    assert "1 captions were changed." in text
    assert "1 were not changed, such as images#0/sub/c.png: the caption has changed since" in text
    assert apply(pages, reply.text).status_code == 400
    pages.post("undo")
    assert (root / "images/a.txt").read_text() == "red cat, house\n"


def test_marked_samples_alone_are_changed(pages: Pages, root: Path) -> None:
    keys = [("key", "images#0/b.png"), ("key", "images#0/bare.png")]
    reply = pages.post("change", keys, action="preview", scope="marked", mode="start", find="", put="photo")
    apply(pages, reply.text)
    assert (root / "images/b.txt").read_text() == "photo, cat\n"
    assert (root / "images/a.txt").read_text() == "red cat, house\n"
    for scope in ("marked", ""):
        assert "no sample is marked" in pages.post("change", action="exclude", scope=scope).text


def test_a_missing_caption_is_written_and_the_sample_is_used(pages: Pages, root: Path) -> None:
    assert pages.edit(key="images#0/bare.png", number=0, old="", new="nothing").status_code == 200
    assert (root / "images/bare.txt").read_text() == "nothing\n"
    assert "bare" in names(pages.get())
    assert names(pages.get(show="rejected")) == ["broken"]
    assert "bare" in names(pages.list().get())
    Image.new("RGB", (64, 64)).save(root / "images/broken.png")
    assert "broken" in names(pages.list().get())
    cache = root / "data.cache"
    cache.mkdir()
    rejects = [{"key": f"images#0/{name}.png", "reason": "truncated", "detail": "x"} for name in ("a", "b")]
    (cache / "rejects.jsonl").write_text("".join(json.dumps(line) + "\n" for line in rejects))
    (root / "images/b.png").write_bytes((root / "images/b.png").read_bytes()[:60])
    pages.list()
    assert "b" in names(pages.get(show="rejected"))
    assert "a" in names(pages.get())  # it can be decoded now


def test_excluded_samples_are_listed_in_a_file_that_the_dataset_names(pages: Pages, root: Path) -> None:
    keys = [("key", "images#0/a.png"), ("key", "images#0/evil<b>.png")]
    assert pages.post("change", keys, action="exclude", scope="marked").status_code == 303
    named = TOML.replace("# mine\r\n", '# mine\r\nexclude = "data.exclude.txt"\r\n')
    assert (root / "data.toml").read_bytes() == named.encode()
    assert (root / "data.exclude.txt").read_text() == "images#0/a.png\nimages#0/evil<b>.png\n"
    assert load_dataset(root / "data.toml").directories[0].exclude == root / "data.exclude.txt"
    assert names(pages.get()) == ["b", "copy", "sub/c"]
    assert names(pages.get(show="excluded")) == ["a", "evil<b>"]
    with (root / "data.exclude.txt").open("a") as file:
        file.write("# manual\nimages#0/b.png\n")
    assert names(pages.list().get(show="excluded")) == ["a", "b", "evil<b>"]
    pages.post("change", action="include", scope="all", query="show=excluded&text=a.png")
    assert (root / "data.exclude.txt").read_text() == "images#0/evil<b>.png\n# manual\nimages#0/b.png\n"
    assert (root / "images/a.png").exists()


def test_a_list_that_the_toml_names_is_used_and_a_toml_that_changed_meanwhile_is_kept(pages: Pages, root: Path) -> None:
    text = 'resolutions = [64]\n[[directory]]\npath = "images"\nexclude = "sub/list.txt"\n'
    (root / "data.toml").write_text(text)
    (root / "sub").mkdir()
    pages.post("change", [("key", "images#0/a.png")], action="exclude", scope="marked")
    assert (root / "data.toml").read_text() == text
    assert (root / "sub/list.txt").read_text() == "images#0/a.png\n"
    for keys in ("other#0/a.png", "images", "images#0/"):
        reply = pages.post("change", [("key", keys)], action="exclude", scope="marked")
        assert reply.status_code == 303 if keys.endswith("/") else "is not a key of this dataset" in reply.text


def test_markup_is_text_and_a_faulty_toml_an_error_page(pages: Pages, root: Path) -> None:
    for query in ({}, {"show": "all", "tags": "1"}, {"text": HOSTILE}, {"tag": HOSTILE}, {"where": HOSTILE}):
        source = pages.client.get(f"/datasets/{pages.id}", params=query).text
        assert "<script>alert" not in source
        assert "evil<b>" not in source
        ParsedPage(source)
    (root / "data.toml").write_text("resolutions = 'x'\n[[directory]]\n")
    reply = pages.client.get(f"/datasets/{pages.id}")
    assert reply.status_code == 404
    assert "resolutions" in ParsedPage(reply.text).text


def test_the_cache_is_compared_in_another_process(root: Path, fake_python: Any) -> None:
    config = root / "train.toml"
    config.write_text('output_dir = "run"\ndataset = "data.toml"\n')
    fake_python('echo "$3 $5: 3 <b>captions</b>"')
    again = Pages(root).list()
    assert again.post("plan", config=str(root / "other.toml")).status_code == 400
    assert again.post("plan", config=str(config)).status_code == 303
    wait_until(lambda: not again.dataset.plan.is_running)
    page = again.get()
    assert "cache --dry-run: 3 <b>captions</b>" in page.text


def limit(tokens: int) -> TextLimit:
    return TextLimit("words", tokens, "words", "", "", lambda text: len(text.split()))


def test_the_part_of_a_caption_that_is_not_read_is_marked(pages: Pages) -> None:
    assert tokens_lost("a b c d", [limit(3), limit(2)]) == 2
    assert "a b c d"[: read_length("a b c d", [limit(3), limit(2)])].strip() == "a b"
    pages.dataset.limits = [limit(1)]
    pages.dataset.lost = {"images#0/a.png": 2, "images#0/sub/c.png": 3}
    page = pages.get(sort="tokens cut", order="descending")
    assert names(page) == ["sub/c", "a"]
    assert "2 tokens cut" in page.text
    pages.dataset.psnr = {"images#0/a.png": 20.0, "images#0/b.png": 9.96}
    page = pages.get(sort="PSNR")
    assert names(page) == ["b", "a"]
    assert page.source.count("<mark") == 1, "the caption of b is read as a whole"
    assert "10.0 dB" in page.text
    assert names(pages.get(sort="PSNR", text="red")) == ["a"]
    assert '<mark title="text encoders do not read this part">cat, house</mark>' in page.source.replace("> ", ">")


def test_a_caption_that_is_a_link_out_of_the_folder_is_not_shown(root: Path, tmp_path_factory: Any) -> None:
    private = tmp_path_factory.mktemp("elsewhere") / "private"
    private.write_text("PRIVATE")
    (root / "images/inside.txt").write_text("linked inside")
    for name, target in (("a", private), ("b", root / "images/inside.txt"), ("copy", root / "images/copy.txt")):
        (root / f"images/{name}.txt").unlink()
        (root / f"images/{name}.txt").symlink_to(target)
    pages = Pages(root).list()
    text = pages.get(show="all").text
    assert "linked inside" in text
    assert "PRIVATE" not in text
    assert "leads out of the folder" in pages.get(show="rejected").text
    reply = pages.client.get(f"/datasets/{pages.id}/caption", params={"key": "images#0/a.png"})
    assert reply.status_code == 404
    assert "PRIVATE" not in reply.text
    assert pages.client.get(f"/datasets/{pages.id}/caption", params={"key": "images#0/copy.png"}).status_code == 404


def test_a_bug_in_a_thread_is_named_on_the_page(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = Pages(root)
    monkeypatch.setattr(type(pages.dataset), "_list", lambda *_: 1 / 0)
    pages.post("list")
    wait_until(lambda: not pages.dataset.job.is_running)
    assert "a bug in sd3-light" in pages.get().text


def test_listed_samples_are_not_copied_into_memory(root: Path) -> None:
    (source,) = make_sources(load_dataset(root / "data.toml").directories)
    folder = root / "data.cache/catalogue"
    (folder / "parts").mkdir(parents=True)
    part = folder / "parts/x.arrow"
    write_part(part, [InputRow(f"images#0/{number}.png", captions=("word" * 1000,)) for number in range(2000)])
    (folder / f"{source.name}.json").write_text('{"parts": ["x"]}')
    before = pa.total_allocated_bytes()
    index = SampleIndex.of_cache(root / "data.cache", [source])
    assert len(index.samples(index.find(Query())[-24:])) == 24
    assert pa.total_allocated_bytes() - before < part.stat().st_size / 4


def test_a_damaged_or_foreign_catalogue_is_not_used(root: Path) -> None:
    sources = make_sources(load_dataset(root / "data.toml").directories)
    folder = root / "data.cache/catalogue"
    (folder / "parts").mkdir(parents=True)
    listing = folder / f"{sources[0].name}.json"
    for content in ("{", '{"parts": ["../../x"]}', '{"parts": [7]}', '{"parts": 7}', '{"parts": ["none"]}', "[]"):
        listing.write_text(content)
        assert SampleIndex.of_cache(root / "data.cache", sources) is None
    rows = [InputRow(f"images#0/{number}.png", captions=("a",)) for number in range(3)]
    part = folder / "parts/x.arrow"
    write_part(part, rows)
    listing.write_text('{"parts": ["x"]}')
    assert len(SampleIndex.of_cache(root / "data.cache", sources) or ()) == 3
    table = feather.read_table(part)
    for name in ("key", "captions", "width"):
        position = table.schema.get_field_index(name)
        column = pa.array([None, *table[name].to_pylist()[1:]], table[name].type)
        feather.write_feather(table.set_column(position, name, column), str(part), "uncompressed")
        assert SampleIndex.of_cache(root / "data.cache", sources) is None
    part.write_bytes(part.read_bytes()[:500])
    assert SampleIndex.of_cache(root / "data.cache", sources) is None
    listing.write_text('{"parts": []}')
    index = SampleIndex.of_cache(root / "data.cache", sources)
    assert index is not None
    queries = (Query(), Query("all", text="x", tag="y", where="width > 1"), Query("duplicates"), Query(sort="pixels"))
    for query in queries:
        assert len(index.with_misfits().find(query)) == 0


def test_images_that_fit_no_bucket_are_rejected(root: Path) -> None:
    (root / "data.toml").write_text('resolutions = [64]\nmin_side = 65\n[[directory]]\npath = "images"\n')
    rejected = names(Pages(root).list().get(show="rejected", reason="too_small"))
    assert rejected == ["a", "b", "evil<b>", "sub/c"]


@pytest.mark.parametrize(("old", "new"), [("a" * 2000, "ab" * 1000), ("a " * 1000, "a b " * 500)])
def test_captions_that_repeat_themselves_are_compared_soon(old: str, new: str) -> None:
    started = time.process_time()
    pieces = list(_difference(old, new))
    assert time.process_time() - started < 2
    assert "".join(text for kind, text in pieces if kind != "added") == old
    assert "".join(text for kind, text in pieces if kind != "removed") == new


@pytest.mark.parametrize("name", ["a\x7fb", 'a"b\n', "中"])
def test_a_list_of_any_name_is_named_in_the_toml(name: str) -> None:
    assert tomllib.loads(_with_key(b"# x\n[[directory]]\n", "exclude", name).decode())["exclude"] == name
    refused("cannot be added to the dataset TOML", _with_key, b"[[directory]]\n", "exclude", "a\udcff")
