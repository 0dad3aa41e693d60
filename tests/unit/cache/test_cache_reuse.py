"""Updates of a cache encode what changed and copy the rest, with the same bytes from any number of builders.

The encoders are replaced by ones that count, and whose values depend on the whole batch: a value that is encoded in
another batch has other bytes.
"""

import json
import os
import shutil
import signal
from collections.abc import Callable, Collection, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from sd3_light.cache.reuse import ValueCounts
from sd3_light.cache.shard_builder import ShardBuilder
from sd3_light.cache.verb import CacheReport
from sd3_light.core import registry
from sd3_light.core.columns import MASK, SMALLEST, Bucket, Column
from sd3_light.core.encoding import Encoding
from sd3_light.core.registry import family_of
from sd3_light.data.manifest import SHARDS, Manifest, damaged_mark
from sd3_light.data.shards import read_origins
from sd3_light.families.sd3.encoding import SD3Encoding
from tests import fake_ray
from tests.project import Project
from tests.unit.cache.samples import captions_of, change_caption, change_image, harm, readers, shard_of, write_captions
from tests.unit.cache.test_cache_builders import build, join, start

NUM_IMAGES = 40


class BatchEncoders:
    """Encodes images and captions to numbers that follow from them and from their batch; counts both."""

    vae_dtype = torch.float32

    def __init__(self, model: Any, log: Path) -> None:
        self._model, self._log = model, log

    def _columns(self, bucket: Bucket = SMALLEST) -> Sequence[Column]:
        columns: Sequence[Column] = family_of(self._model).columns(self._model, self._model.diffusers_path, bucket)
        return columns

    def tokenize(self, captions: Sequence[str]) -> dict[str, list[str]]:
        return {"texts": list(captions)}

    def encode_captions(
        self, captions: Sequence[str] | Mapping[str, list[str]], columns: Collection[str] | None = None
    ) -> dict[str, Tensor]:
        texts = captions["texts"] if isinstance(captions, Mapping) else list(captions)
        used = [column for column in self._columns() if column.per_caption and column.name in (columns or column.name)]
        self._note(captions=texts, columns=[column.name for column in used])
        values: dict[str, Tensor] = {}
        for column in used:
            lengths = [1 + len(text) % 4 if column.ragged else 1 for text in texts]
            batch = number_of(repr((column.name, dict(column.settings), texts)))
            rows = [number_of(text) + batch for text, length in zip(texts, lengths, strict=True) for _ in range(length)]
            shape = (len(rows), *column.row_shape)
            values[column.tensors[0]] = filled(torch.tensor(rows), shape, column.dtype)
            if column.ragged:
                values[column.tensors[1]] = torch.tensor([0, *lengths]).cumsum(0)
        return values

    def encode_pairs(
        self,
        captions: Sequence[str],
        images: Sequence[Sequence[NDArray[np.uint8]]],
        columns: Collection[str] | None = None,
    ) -> dict[str, Tensor]:
        seen = [number_of(image.tobytes()) for (image,) in images]
        pairs = zip(captions, seen, strict=True)
        return self.encode_captions([f"{text} on {number}" for text, number in pairs], columns)

    def encode_images(self, pixels: NDArray[np.uint8], flip: bool) -> dict[str, Tensor]:
        self._note(images=len(pixels))
        columns = self._columns(Bucket(pixels.shape[2], pixels.shape[1]))
        batch = number_of(repr([number_of(image.tobytes()) for image in pixels]))
        rows = [[number_of(image.tobytes()) + batch, number_of(image[:, ::-1].tobytes())] for image in pixels]
        values = torch.tensor(rows)[:, : 1 + flip]
        images = [column for column in columns if not column.per_caption and column.reads != MASK]
        return {column.name: filled(values, (*values.shape, *column.shape), column.dtype) for column in images}

    def encode_empty(self) -> dict[str, Tensor]:
        return self.encode_captions([""])

    def reconstruct(self, pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
        return pixels

    def _note(self, **facts: Any) -> None:
        with self._log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(facts) + "\n")

    def synchronize(self) -> None:
        pass

    def waiter(self) -> Callable[[], None]:
        return self.synchronize

    close = synchronize

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def filled(numbers: Tensor, shape: tuple[int, ...], dtype: str) -> Tensor:
    """Return a tensor whose first dimensions are those of the numbers."""
    values = numbers.view(*numbers.shape, *[1] * (len(shape) - numbers.dim()))
    return values.expand(shape).to(getattr(torch, dtype))


def number_of(content: str | bytes) -> float:
    data = content if isinstance(content, bytes) else content.encode()
    return int.from_bytes(blake2b(data, digest_size=2).digest(), "little") / 1000


@pytest.fixture(autouse=True)
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What was encoded: a JSON object per call."""
    log = tmp_path / "encoded.jsonl"

    def encoders(self: object, model: Any, device: object, batch_size: int, one_at_a_time: object = None) -> Any:
        return BatchEncoders(model, log)

    monkeypatch.setattr(SD3Encoding, "encoders", encoders)
    return log


@pytest.fixture
def project(fresh_project: Project, log: Path) -> Project:
    fresh_project.build_cache()
    log.unlink()
    return fresh_project


class Calls:
    """What the encoders were called with since the last query."""

    def __init__(self, log: Path) -> None:
        lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
        calls = [json.loads(line) for line in lines]
        log.unlink(missing_ok=True)
        texts = [(text, call["columns"]) for call in calls for text in call.get("captions", []) if text]
        self.images = sum(call.get("images", 0) for call in calls)
        self.captions = [text for text, _ in texts]
        self.columns = {name for _, names in texts for name in names}


def update(project: Project, log: Path, *overrides: str, **flags: Any) -> tuple[CacheReport, Calls]:
    """Build the cache; the report counts what the encoders were called with."""
    (report,) = project.build_cache(*overrides, **flags)
    calls = Calls(log)
    assert (report.values.images, report.values.captions) == (calls.images, len(calls.captions))
    assert not list(project.cache.glob("catalogue/reuse-*")), "the index is removed when the manifest is complete"
    return report, calls


def rename(project: Project, old: str, new: str) -> None:
    (project.images / old).rename(project.images / new)
    captions = captions_of(project)
    captions[new] = captions.pop(old)
    write_captions(project, captions)


def shards(project: Project) -> dict[str, bytes]:
    manifest = Manifest.load(project.cache)
    stems = {Path(entry.file).stem for entry in (*manifest.shards, manifest.empty)}
    files = [path for path in sorted((project.cache / SHARDS).iterdir()) if path.name.partition(".")[0] in stems]
    return {path.name: path.read_bytes() for path in files}


def values_of(project: Project, image: str = "moments") -> dict[tuple[str, str], dict[str, Any]]:
    """Return the values of each sample by bucket and file name: its image, and each caption's."""
    values: dict[tuple[str, str], dict[str, Any]] = {}
    for entry, reader in readers(project):
        for row, origin in enumerate(read_origins(reader.path)):
            sample = {image: reader.value(image, row).tolist()}
            if reader.mask is not None:
                sample["mask"] = reader.value("mask", row).tolist()
            for number, caption in enumerate(origin.captions):
                sample[caption] = {name: value.tolist() for name, value in reader.caption(row, number).items()}
            values[entry.bucket, origin.key.rsplit("/", 1)[1]] = sample
    return values


def test_nothing_is_encoded_if_no_value_changed(project: Project, log: Path) -> None:
    report, calls = update(project, log)
    assert (calls.images, calls.captions, report.encoded) == (0, [], 0)
    project.images.rename(project.folder / "other")
    project.data(project.data_toml.read_text().replace('"images"', '"other"'))
    report, calls = update(project, log)
    assert (calls.images, calls.captions, report.encoded) == (0, [], NUM_IMAGES)
    (project.folder / "other" / "000007.png").unlink()
    report, calls = update(project, log)
    assert (calls.images, calls.captions, report.counts["used"]) == (0, [], NUM_IMAGES - 1)


def test_a_changed_caption_encodes_one_caption(project: Project, log: Path) -> None:
    before = values_of(project)
    change_caption(project)
    report, calls = update(project, log)
    assert (calls.images, calls.captions) == (0, ["something else"])
    assert report.values.copied_images == report.encoded > 1
    after = values_of(project)
    (changed,) = (name for name in before if before[name] != after[name])
    assert changed[1] == "000007.png"
    assert after[changed]["moments"] == before[changed]["moments"]


def test_a_caption_of_another_shard_is_not_encoded(project: Project, log: Path) -> None:
    known = captions_of(project)["000030.png"][0]
    change_caption(project, text=known)
    _, calls = update(project, log)
    assert (calls.images, calls.captions) == (0, [])
    values = {name: sample for (_, name), sample in values_of(project).items()}
    assert values["000007.png"][known] == values["000030.png"][known]


def test_a_new_caption_of_several_samples_is_encoded_once_per_shard(project: Project, log: Path) -> None:
    captions = captions_of(project)
    write_captions(project, {name: ["the same for all", *texts[1:]] for name, texts in captions.items()})
    _, calls = update(project, log)
    assert calls.captions == ["the same for all"] * len(Manifest.load(project.cache).shards)
    assert calls.images == 0


def test_a_renamed_image_and_another_shard_size_encode_nothing(project: Project, log: Path) -> None:
    before = values_of(project)
    rename(project, "000007.png", "another name.png")
    _, calls = update(project, log)
    assert (calls.images, calls.captions) == (0, [])
    after = {name: sample for (_, name), sample in values_of(project).items()}
    assert after["another name.png"] == next(sample for (_, name), sample in before.items() if name == "000007.png")
    before = values_of(project)
    report, calls = update(project, log, "sd3_shard_size=3")
    assert (calls.images, calls.captions) == (0, [])
    assert report.encoded > 0
    assert values_of(project) == before


def test_a_new_resolution_encodes_no_caption(fresh_project: Project, log: Path) -> None:
    data = 'resolutions = {}\n[[directory]]\npath = "images"\n'
    fresh_project.data(data.format("[64]"))
    update(fresh_project, log)
    fresh_project.data(data.format("[64, 96]"))
    report, calls = update(fresh_project, log)
    assert (calls.images, calls.captions, report.values.copied_captions > 0) == (NUM_IMAGES, [], True)
    fresh_project.data(data.format("[96]"))
    report, calls = update(fresh_project, log)
    assert (calls.images, calls.captions, report.encoded) == (0, [], 0)


def test_another_text_length_encodes_only_the_text_encoder_that_it_decides(project: Project, log: Path) -> None:
    before = values_of(project)
    report, calls = update(project, log, "model.t5_max_length=12")
    assert (calls.images, report.values.copied_images) == (0, NUM_IMAGES)
    assert calls.columns == {"t5"}
    after = values_of(project)
    for name, sample in before.items():
        assert after[name]["moments"] == sample["moments"]
        for caption in set(sample) - {"moments"}:
            same = {column for column in sample[caption] if sample[caption][column] == after[name][caption][column]}
            assert same == {"clip_l", "clip_g", "clip_l.pooled", "clip_g.pooled"}


def test_another_text_length_and_a_new_caption(project: Project, log: Path) -> None:
    """New captions lack all columns, and known ones that of the setting."""
    change_caption(project)
    project.build_cache("model.t5_max_length=12")
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    new = [line for line in lines if line.get("captions") == ["something else"]]
    assert [set(line["columns"]) for line in new] == [{"clip_l", "clip_g", "t5", "clip_l.pooled", "clip_g.pooled"}]
    known = [line for line in lines if line.get("captions") not in (None, [""], ["something else"])]
    assert {tuple(line["columns"]) for line in known} == {("t5",)}


@pytest.mark.parametrize(
    ("part", "columns"),
    [
        ("vae", set()),
        ("text_encoder_2", {"clip_g", "clip_g.pooled"}),
        ("tokenizer", {"clip_l", "clip_g", "clip_l.pooled", "clip_g.pooled"}),
        ("dtype", {"clip_l", "clip_g", "t5", "clip_l.pooled", "clip_g.pooled"}),
    ],
)
def test_other_parts_encode_columns(project: Project, log: Path, tmp_path: Path, part: str, columns: set[str]) -> None:
    override = 'model.dtype="bfloat16"'
    if part != "dtype":
        model = Path(shutil.copytree(project.model, tmp_path / "other"))
        (model / part / "changed.json").write_text("{}")
        override = f'model.diffusers_path="{model}"'
    _, calls = update(project, log, override)
    assert (calls.images, calls.columns) == (NUM_IMAGES if part == "vae" else 0, columns)


def test_regenerate_encodes_everything(project: Project, log: Path) -> None:
    before = shards(project)
    change_caption(project)
    update(project, log)
    _, calls = update(project, log, regenerate=True)
    assert (calls.images, len(calls.captions) >= NUM_IMAGES) == (NUM_IMAGES, True)
    updated = shards(project)
    shutil.rmtree(project.cache)
    update(project, log)
    assert shards(project) == updated, "as if it had been built from the beginning"
    assert updated != before


@pytest.fixture
def masked(fresh_project: Project, log: Path) -> Project:
    """A project with mirrored images, of which some have masks, and its cache."""
    (fresh_project.folder / "masks").mkdir()
    for number in range(0, NUM_IMAGES, 3):
        write_mask(fresh_project, number, 40)
    keys = 'mask_path = "masks"\nflip = true\n'
    fresh_project.data(fresh_project.data_toml.read_text() + keys)
    fresh_project.build_cache()
    log.unlink()
    return fresh_project


def write_mask(project: Project, number: int, value: int) -> None:
    Image.new("L", (64, 64), value).save(project.folder / "masks" / f"{number:06d}.png")


def mask_of(project: Project, name: str) -> set[int]:
    (sample,) = (sample for (_, other), sample in values_of(project).items() if other == name)
    return set(np.ravel(sample["mask"]).tolist())


def test_masks_and_mirrored_images_are_copied(masked: Project, log: Path) -> None:
    before = values_of(masked)
    for number in (6, 7):
        change_caption(masked, f"{number:06d}.png")
    _, calls = update(masked, log)
    assert (calls.images, set(calls.captions)) == (0, {"something else"})
    after = values_of(masked)
    for name, sample in before.items():
        for key in ("moments", "mask"):
            assert after[name].get(key) == sample.get(key)
        assert len(after[name]["moments"]) == 2


def test_a_changed_or_new_mask_encodes_nothing(masked: Project, log: Path) -> None:
    assert mask_of(masked, "000006.png") == {40}
    write_mask(masked, 6, 90)
    write_mask(masked, 7, 200)
    report, calls = update(masked, log)
    assert (calls.images, calls.captions, report.counts["used"]) == (0, [], NUM_IMAGES)
    assert mask_of(masked, "000006.png") == {90}
    assert mask_of(masked, "000007.png") == {200}


def test_an_empty_mask_rejects_a_sample_whose_image_is_known(masked: Project, log: Path) -> None:
    write_mask(masked, 7, 0)
    report, calls = update(masked, log)
    assert (calls.images, calls.captions) == (0, [])
    assert report.counts["rejected: empty_mask"] == 1
    write_mask(masked, 7, 1)
    report, calls = update(masked, log)
    # it is not in the old manifest
    assert (calls.images, len(calls.captions), report.counts["used"]) == (1, 2, NUM_IMAGES)


def test_flip_encodes_images_only(project: Project, log: Path) -> None:
    project.data(project.data_toml.read_text() + "flip = true\n")
    _, calls = update(project, log)
    assert (calls.images, calls.captions) == (NUM_IMAGES, [])


def test_each_image_of_a_pair_is_encoded_for_itself(fresh_project: Project, log: Path) -> None:
    worse = Path(shutil.copytree(fresh_project.images, fresh_project.folder / "worse"))
    (worse / "captions.json").unlink()
    for number in range(NUM_IMAGES):
        Image.new("RGB", (70, 60), (number, 0, 0)).save(worse / f"{number:06d}.png")
    fresh_project.data(fresh_project.data_toml.read_text() + 'rejected = "worse"\n')
    _, calls = update(fresh_project, log)
    assert calls.images == 2 * NUM_IMAGES
    Image.new("RGB", (70, 60), "white").save(worse / "000007.png")
    change_image(fresh_project, "000030.png")
    change_caption(fresh_project)
    before = rejected_of(fresh_project)
    report, calls = update(fresh_project, log)
    assert (calls.images, calls.captions) == (2, ["something else"])
    assert report.values.copied_images == 2 * report.encoded - 2
    after = rejected_of(fresh_project)
    assert {name for name in before if before[name] != after[name]} == {"000007.png"}


def rejected_of(project: Project) -> dict[str, Any]:
    return {
        origin.key.rsplit("/", 1)[1]: reader.value("moments.rejected", row).tolist()
        for _, reader in readers(project)
        for row, origin in enumerate(read_origins(reader.path))
    }


def test_a_dry_run_reports_what_is_encoded(project: Project, log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change_caption(project)
    change_image(project, "000030.png")
    shown = []
    for _ in range(2):
        project.build_cache(dry_run=True)
        shown.append(capsys.readouterr().err)
    assert not log.exists()
    lines = {line.split()[1]: line for line in shown[1].splitlines() if "copied from old shards" in line}
    report, _ = update(project, log)
    values = report.values
    assert values == ValueCounts(1, report.encoded - 1, 1, values.copied_captions)
    counts = {"images": (values.images, values.copied_images), "captions": (values.captions, values.copied_captions)}
    for name, (encoded, copied) in counts.items():
        assert f" {encoded} " in lines[name], shown[1]
        assert f"encoded; {copied} are copied" in lines[name]
    copied = f"{values.copied_images} images and {values.copied_captions} captions copied from old shards"
    end = f"cache: 1 image and 1 caption encoded, {copied}"
    assert end in " ".join(capsys.readouterr().err.split())


def test_an_unchanged_reject_is_no_work(project: Project, log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def counted(name: str) -> str:
        (line,) = (line for line in shown.splitlines() if "copied from old shards" in line and f" {name} " in line)
        return " ".join(line.split())

    whole = (project.images / "000030.png").read_bytes()
    (project.images / "000030.png").write_bytes(whole[: len(whole) // 2])
    update(project, log)
    change_caption(project)
    change_caption(project, "000030.png", "of a reject, in a shard that is written again")
    capsys.readouterr()
    for _ in range(2):
        project.build_cache(dry_run=True)
        shown = capsys.readouterr().err
        assert " 0 " in counted("images"), shown
        assert " 1 " in counted("captions"), "the changed one"
    report, calls = update(project, log)
    assert (report.values.images, report.values.captions, calls.images) == (0, 1, 0)
    (project.images / "000030.png").write_bytes(whole)
    capsys.readouterr()
    project.build_cache(dry_run=True)
    shown = capsys.readouterr().err
    assert " 1 " in counted("images"), shown
    report, calls = update(project, log)
    assert (report.values.images, calls.images) == (1, 1)


def changed(project: Project, target: Path) -> Project:
    """Copy a project and change some of its samples, so that most shards are rebuilt in part."""
    copy = project.copy(target)
    for number in (3, 11, 19, 27):
        change_caption(copy, f"{number:06d}.png", f"number {number}")
        change_image(copy, f"{number + 1:06d}.png")
    rename(copy, "000035.png", "000001a.png")
    (copy.images / "000038.png").unlink()
    return copy


@pytest.fixture
def expected(project: Project, tmp_path: Path) -> dict[str, bytes]:
    """The shards of the update by one process."""
    alone = changed(project, tmp_path / "alone")
    alone.build_cache()
    return shards(alone)


def test_builders_make_the_same_shards(project: Project, tmp_path: Path, expected: dict[str, bytes], log: Path) -> None:
    several = changed(project, tmp_path / "several")
    join([start(build, several, rank, 3) for rank in range(3)])
    assert shards(several) == expected
    parts = changed(project, tmp_path / "parts")
    for part in (2, 0, 1):
        parts.build_cache(part=(part, 3))  # type: ignore[arg-type]
    parts.build_cache(finish=True)
    assert shards(parts) == expected
    cluster = changed(project, tmp_path / "cluster")
    log.unlink()
    with fake_ray.installed_ray(CPU=3.0):
        update(cluster, log, "caching_num_workers=0", ray="", ray_actors=2)
    assert shards(cluster) == expected


def test_a_killed_update_ends_with_the_same_bytes(project: Project, tmp_path: Path, expected: dict[str, bytes]) -> None:
    killed = changed(project, tmp_path / "killed")
    before = set((killed.cache / SHARDS).glob("*.safetensors"))

    def build_two() -> None:
        write, written = ShardBuilder._write, []

        def write_and_die(self: ShardBuilder, *args: Any) -> None:
            write(self, *args)
            written.append(args)
            if len(written) == 2:
                os.kill(os.getpid(), signal.SIGKILL)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ShardBuilder, "_write", write_and_die)
            build(killed)

    for _ in range(2):
        process = start(build_two)
        process.join()
        assert process.exitcode == -signal.SIGKILL
    assert len(set((killed.cache / SHARDS).glob("*.safetensors")) - before) >= 4
    assert Manifest.load(killed.cache).counts["used"] == NUM_IMAGES, "the old one"
    killed.build_cache()
    assert shards(killed) == expected


def test_a_build_with_other_shards_copies_alike(project: Project, tmp_path: Path, expected: dict[str, bytes]) -> None:
    """Shards that exist but are not in the old manifest are not copied from: another process may build them later."""
    other = changed(project, tmp_path / "other")
    for path in (tmp_path / "alone" / "cache" / SHARDS).iterdir():
        if (Manifest.load(tmp_path / "alone" / "cache").shards[0].file).startswith(path.name.split(".")[0]):
            shutil.copy(path, other.cache / SHARDS / path.name)
    other.build_cache()
    assert shards(other) == expected


def test_a_damaged_index_is_rewritten(project: Project, tmp_path: Path, expected: dict[str, bytes], log: Path) -> None:
    for suffix, content in ((".cells", b"x" * 48), (".json", b"{}"), (".arrow", b"")):
        other = changed(project, tmp_path / f"other{suffix}")
        other.build_cache(dry_run=True)
        (path,) = other.cache.glob(f"catalogue/reuse-*{suffix}")
        path.write_bytes(content)
        log.unlink(missing_ok=True)
        update(other, log)
        assert shards(other) == expected


def test_a_damaged_old_shard(project: Project, log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = shard_of(project, "000007.png")
    count = len(read_origins(old))
    change_caption(project)
    harm(old)
    several = project.copy(tmp_path / "several")
    _, calls = update(project, log)
    assert calls.images == count
    assert "something else" in calls.captions
    warning = f"warning: the old shard {old.name} is missing or damaged; its samples are encoded again"
    assert " ".join(capsys.readouterr().err.split()).count(warning) == 1
    join([start(build, several, rank, 2) for rank in range(2)])
    assert shards(several) == shards(project)


def test_a_damaged_shard_of_the_new_cache_is_marked(project: Project, log: Path) -> None:
    """A shard that stays and that captions are copied from is encoded again by the next build."""
    known = captions_of(project)["000030.png"][0]
    source = shard_of(project, "000030.png")
    harm(source)
    change_caption(project, text=known)
    _, calls = update(project, log)
    assert calls.captions == [known]
    assert damaged_mark(source).exists()
    report, _ = update(project, log)
    assert report.encoded > 0
    assert not damaged_mark(source).exists()


def of_another_build(path: Path) -> None:
    """A build that was killed while it replaced a shard leaves its table beside the old shard."""
    table = feather.read_table(path, memory_map=False)
    reversed_rows = table.take(pa.array(range(table.num_rows))[::-1]).replace_schema_metadata({"sha256": "0" * 64})
    feather.write_feather(reversed_rows, str(path), compression="uncompressed")


@pytest.mark.parametrize(
    "spoil", [lambda path: path.write_bytes(b""), lambda path: path.write_bytes(b"\xff" * 100), of_another_build]
)
def test_a_shard_with_a_wrong_table_is_not_copied_from(project: Project, log: Path, spoil: Any) -> None:
    old = shard_of(project, "000007.png")
    count = len(read_origins(old))
    change_caption(project)
    spoil(old.with_suffix(".arrow"))
    _, calls = update(project, log)
    assert calls.images == count


def test_a_repaired_shard_copies_captions_of_others_only(project: Project, log: Path) -> None:
    path = shard_of(project, "000007.png")
    count = len(read_origins(path))
    harm(path)
    report, calls = update(project, log, verify=True)
    assert (calls.images, report.encoded) == (count, count)


def test_an_image_that_cannot_be_decoded_takes_its_caption_with_it(project: Project, log: Path) -> None:
    path = project.images / "000007.png"
    path.write_bytes(path.read_bytes()[:-40])
    change_caption(project)
    report, calls = update(project, log)
    assert (calls.images, calls.captions, report.counts["used"]) == (0, [], NUM_IMAGES - 1)


class EditEncoding(Encoding):
    """One text encoder, which sees the image, and two networks for images."""

    folders = ("vae", "text_encoder", "tokenizer")
    text_encoders = ("words",)

    def __init__(self, log: Path) -> None:
        self.log, self.length = log, 5

    def text_settings(self, model: Any) -> dict[str, Any]:
        return {"words": self.length}

    def text_limits(self, folder: Path, settings: Mapping[str, Any]) -> list[Any]:
        return []

    def encoders(self, model: Any, device: object, batch_size: int, one_at_a_time: object = None) -> Any:
        return BatchEncoders(model, self.log)

    def columns(self, model: Any, folder: Path, bucket: Bucket) -> tuple[Column, ...]:
        latent = (-(-bucket.height // 8), -(-bucket.width // 8))
        text = ("text_encoder", "tokenizer")
        return (
            Column("latents", "image", "float32", (4, *latent), ("vae",)),
            Column("features", "image", "float16", (6,), ("vae",)),
            Column("mask", "mask", "uint8", latent, ()),
            Column("words", "caption+image", "float32", (self.length, 3), text, settings={"words": self.length}),
            Column("score", "caption", "float16", (), ("text_encoder",)),
        )


def stand_in(encoding: EditEncoding) -> Any:
    return SimpleNamespace(
        encoding=encoding,
        columns=encoding.columns,
        prepared_columns=lambda model, columns: (),
        reference_bucket=lambda bucket: bucket,
        texts_see_references=False,
    )


def test_captions_of_images(log: Path, fresh_project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pair is copied if neither of the two changed; a caption that several images have is encoded for each."""
    encoding = EditEncoding(log)
    monkeypatch.setattr(registry, "family_named", lambda name: stand_in(encoding))
    write_captions(fresh_project, {name: ["a star", "a thing"] for name in captions_of(fresh_project)})
    _, calls = update(fresh_project, log)
    assert (calls.images, len(set(calls.captions))) == (NUM_IMAGES, 2 * NUM_IMAGES)
    before = values_of(fresh_project, "latents")
    assert len({repr(sample["a star"]["words"]) for sample in before.values()}) == NUM_IMAGES
    assert update(fresh_project, log)[1].captions == []

    change_caption(fresh_project)
    change_image(fresh_project, "000030.png")
    several = fresh_project.copy(tmp_path / "several")
    cluster = fresh_project.copy(tmp_path / "cluster")
    _, calls = update(fresh_project, log)
    assert calls.images == 1
    assert sorted(text.rpartition(" on ")[0] for text in calls.captions) == ["a star", "a thing", "something else"]
    after = values_of(fresh_project, "latents")
    assert {name for _, name in before if before[_, name] != after[_, name]} == {"000007.png", "000030.png"}
    join([start(build, several, rank, 2) for rank in range(2)])
    log.unlink()
    with fake_ray.installed_ray(CPU=3.0):
        update(cluster, log, "caching_num_workers=0", ray="", ray_actors=2)
    assert shards(several) == shards(cluster) == shards(fresh_project)
    manifest = Manifest.load(fresh_project.cache)
    _, reader = next(readers(fresh_project))
    assert [column.name for column in reader.columns] == ["latents", "features", "words", "score"]
    assert reader.fingerprints == {name: manifest.recipe["columns"][name] for name in reader.fingerprints}

    encoding.length = 4
    _, calls = update(fresh_project, log)
    assert (calls.images, calls.columns, len(calls.captions)) == (0, {"words"}, 2 * NUM_IMAGES)
    model = Path(shutil.copytree(fresh_project.model, tmp_path / "other"))
    (model / "vae" / "changed.json").write_text("{}")
    _, calls = update(fresh_project, log, f'model.diffusers_path="{model}"')
    assert (calls.images, calls.captions) == (NUM_IMAGES, [])
    rename(fresh_project, "000007.png", "new.png")
    _, calls = update(fresh_project, log, f'model.diffusers_path="{model}"')
    assert (calls.images, calls.captions) == (0, [])
