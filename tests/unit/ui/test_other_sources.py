"""The pages of datasets of clips, and of images at URLs."""

from pathlib import Path

import pytest

from sd3_light.sources.video import has_av
from tests.object_store import object_store
from tests.unit.sources.videos import encode, numbered
from tests.unit.ui.test_dataset_pages import Pages


@pytest.mark.skipif(not has_av(), reason="PyAV (av) is not installed")
def test_clips_are_listed_shown_and_their_captions_edited(tmp_path: Path) -> None:
    (tmp_path / "clips").mkdir()
    for name, data in (("a", encode(numbered(20, (64, 32)), 16)), ("cut", encode(numbered(20, (64, 32)), 16)[:150])):
        (tmp_path / f"clips/{name}.mp4").write_bytes(data)
        (tmp_path / f"clips/{name}.txt").write_text(f"a clip {name}")
    (tmp_path / "data.toml").write_text('resolutions = [64]\n[[directory]]\npath = "clips"\nframes = [1, 17]\n')
    pages = Pages(tmp_path).list()
    shown = pages.get().text
    assert "a.mp4" in shown
    assert "cut.mp4" in pages.get(show="rejected").text
    image = pages.client.get(f"/datasets/{pages.id}/image", params={"key": "clips#0/a.mp4"})
    assert image.headers["content-type"] == "image/webp"
    reply = pages.edit(key="clips#0/a.mp4", number=0, old="a clip a", new="a better clip")
    assert reply.status_code == 200, reply.text
    assert (tmp_path / "clips/a.txt").read_text() == "a better clip"


def test_images_at_urls_are_listed_and_shown_and_their_captions_are_not_edited(tmp_path: Path) -> None:
    from PIL import Image

    (tmp_path / "images").mkdir()
    Image.new("RGB", (64, 64)).save(tmp_path / "images/a.png")
    (tmp_path / "images/a.txt").write_text("a caption")
    with object_store("pages") as store:
        url = store.put(tmp_path / "images", "images")
        served = tmp_path / "served"
        served.mkdir()
        (served / "data.toml").write_text(f'resolutions = [64]\n[[directory]]\npath = "{url}"\n')
        pages = Pages(served).list()
        assert "a caption" in pages.get().text
        image = pages.client.get(f"/datasets/{pages.id}/image", params={"key": "images#0/a.png"})
        assert image.headers["content-type"] == "image/webp", image.text
        reply = pages.edit(key="images#0/a.png", number=0, old="a caption", new="other")
        assert reply.status_code == 400
        assert "URL" in reply.text
