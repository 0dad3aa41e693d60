"""A run resumes on other data: it is refused before anything is encoded."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from sd3_light.cache.local_builder import LocalBuilder
from sd3_light.config.faults import UserError
from sd3_light.train.verb import Resume
from tests.project import Project

pytestmark = pytest.mark.usefixtures("unproven")

ONE_SHARD = ("checkpoint_every_n_steps=1", "sd3_shard_size=512")
"""Each bucket is one shard: the order depends only on the number of samples."""
KEYS = ("max_steps=1", *ONE_SHARD)
MORE = ("max_steps=2", *ONE_SHARD)


@pytest.fixture
def project(fresh_project: Project) -> Project:
    """Twelve images."""
    for path in images(fresh_project)[12:]:
        path.unlink()
    return fresh_project


@pytest.fixture
def encoding(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of units of all builds."""
    built: list[int] = []
    build = LocalBuilder.build

    def count(builder: LocalBuilder, job: Any, units: Any, bar: Any) -> int:
        built.append(len(units))
        return build(builder, job, units, bar)

    monkeypatch.setattr(LocalBuilder, "build", count)
    return built


def images(project: Project) -> list[Path]:
    return sorted(project.images.glob("*.png"))


def refused(project: Project, *keys: str) -> str:
    with pytest.raises(UserError) as raised:
        project.train(*MORE, *keys, resume=Resume())
    return str(raised.value)


def truncate(path: Path) -> None:
    """Cut the file after its header: its size can be read, and decoding fails."""
    path.write_bytes(path.read_bytes()[:-100])


def test_changed_data_is_refused_before_it_is_encoded(project: Project, encoding: list[int]) -> None:
    project.train(*KEYS)
    encoding.clear()
    kept = project.folder / "kept"
    kept.mkdir()
    removed = images(project)[:3]
    for path in removed:
        shutil.move(path, kept)
    message = refused(project)
    assert "was trained on another order of data (samples per epoch of bucket " in message
    assert "; restore the 3 missing samples, or pass --reset-dataloader; the config has max_steps = 2 (" in message
    for path in removed:
        shutil.move(kept / path.name, path)
    (project.images / "new.png").write_bytes(removed[0].read_bytes())
    (project.images / "new.txt").write_text("a star")
    assert "; remove the 1 new sample, or pass --reset-dataloader" in refused(project)
    (project.images / "new.png").unlink()
    message = refused(project, "seed=4")
    assert "(seed 3, now 4); write seed = 3, or pass --reset-dataloader; the config has max_steps = 2 " in message
    assert message.endswith(" (was 1), seed = 4 (was 3)")
    assert encoding == [], "nothing was encoded"
    assert project.train(*MORE, resume=Resume()).step == 2
    removed[0].unlink()
    reset = Resume(reset_dataloader=True)
    assert project.train("max_steps=3", *ONE_SHARD, resume=reset).step == 3
    assert encoding[-1] > 0


def test_images_that_cannot_be_decoded_do_not_count(project: Project, encoding: list[int]) -> None:
    """Planned shards contain them; they are known from the last build, or unknown without one."""
    truncate(images(project)[0])
    project.train(*KEYS)
    assert '"reason": "truncated"' in (project.cache / "rejects.jsonl").read_text()
    encoding.clear()
    project.train("max_steps=2", *ONE_SHARD, "model.t5_max_length=12", resume=Resume())
    assert encoding[-1] > 0, "with another length every shard is encoded again"
    shutil.rmtree(project.cache)
    project.train("max_steps=3", *ONE_SHARD, resume=Resume())
    shutil.rmtree(project.cache)
    images(project)[1].unlink()
    images(project)[1].unlink()
    encoding.clear()
    assert "; restore the 1 missing sample, or pass --reset-dataloader" in refused(project), "one may be the broken one"
    assert encoding == []


def test_a_changed_image_keeps_its_order_and_damaged_lists_of_rejects_do_not_matter(project: Project) -> None:
    project.train(*KEYS)
    path = images(project)[0]
    with Image.open(path) as image:
        image.convert("L").convert("RGB").save(path)
    assert project.train(*MORE, resume=Resume()).step == 2
    shards = project.cache / "shards"
    (shards / "damaged.rejects.jsonl").write_text('{"key": "cut')
    (shards / "other.rejects.jsonl").write_text('[1]\n{"reason": "unreadable"}\n')
    for path in images(project)[:3]:
        path.unlink()
    assert "; restore the 3 missing samples, or pass --reset-dataloader" in refused(project)
