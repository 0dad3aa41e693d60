"""SD3's columns: what the cache stage writes, what decides them, and what a prepared batch holds."""

from pathlib import Path

import pytest

from sd3_light.cache.identity import column_fingerprints
from sd3_light.config import ModelConfig
from sd3_light.core.columns import SMALLEST, TEACHER, Bucket, Column, named_bucket
from sd3_light.core.registry import family_named, starting_weights
from sd3_light.data.manifest import SHARDS, Manifest
from sd3_light.data.reader import ShardReader
from sd3_light.engines import Launch
from sd3_light.engines.feed import make_order, open_cache
from tests.judge_folders import write_vision
from tests.project import Project

SD3 = family_named("sd3")
IMAGES = {"moments", "moments.rejected"}
TEXT = {"clip_l", "clip_g", "t5", "clip_l.pooled", "clip_g.pooled"}


def declared(project: Project, bucket: Bucket, *overrides: str) -> dict[str, Column]:
    model = project.load(*overrides).train.model
    return {column.name: column for column in SD3.columns(model, model.diffusers_path, bucket)}


def test_every_shard_of_a_cache_has_the_declared_columns(cached_project: Project) -> None:
    manifest = Manifest.load(cached_project.cache)
    for entry in (*manifest.shards, manifest.empty):
        reader = ShardReader(cached_project.cache / SHARDS / entry.file, entry)
        columns = declared(cached_project, named_bucket(entry.bucket))
        reader.require(list(columns.values()))
        for column in reader.ragged:
            assert column.shape[0] <= columns[column.name].shape[0]


def test_images_of_a_bucket_have_a_latent_pixel_per_step_of_the_vae(raw_project: Project) -> None:
    wide = declared(raw_project, Bucket(96, 64))
    assert (wide["moments"].shape, wide["mask"].shape) == ((32, 8, 12), (8, 12))
    assert declared(raw_project, SMALLEST)["moments"].shape == (32, 1, 1)
    before, after = (declared(raw_project, Bucket(64, 64), *keys) for keys in ((), ("model.references=2",)))
    added = [after[f"moments.reference.{number}"] for number in range(2)]
    assert [(column.reads, column.shape) for column in added] == [
        ("reference.0", before["moments"].shape),
        ("reference.1", before["moments"].shape),
    ]
    assert {name: column for name, column in after.items() if column not in added} == before


DECIDED = {"dtype": TEXT, "vae_dtype": IMAGES, "t5_max_length": {"t5"}, "text_tokens": TEXT}
"""Key of [model] -> the columns that it decides; all others decide none."""
VALUES = {"dtype": "float16", "vae_dtype": "bfloat16", "t5_max_length": 7, "text_tokens": "real", "references": 1}


@pytest.mark.parametrize("key", sorted(ModelConfig.model_fields.keys() - {"type", "diffusers_path"}))
def test_the_fingerprints_change_with_keys_that_decide_columns(raw_project: Project, key: str, tmp_path: Path) -> None:
    """A key that is new in [model] belongs in the table above if it decides what is encoded."""
    model = raw_project.load().train.model
    value = write_vision(tmp_path) if key == "teacher_path" else VALUES.get(key, object())
    changed = model.model_copy(update={key: value})
    before, after = (fingerprints(each) for each in (model, changed))
    assert {name for name in before if before[name] != after[name]} == DECIDED.get(key, set())


@pytest.mark.parametrize(
    ("folder", "changed"),
    [
        ("vae", IMAGES),
        ("text_encoder", {"clip_l", "clip_l.pooled"}),
        ("text_encoder_2", {"clip_g", "clip_g.pooled"}),
        ("text_encoder_3", {"t5"}),
        ("tokenizer", TEXT - {"t5"}),
        ("tokenizer_2", {"clip_g", "clip_g.pooled"}),
        ("tokenizer_3", {"t5"}),
    ],
)
def test_the_fingerprints_change_with_deciding_folders(raw_project: Project, folder: str, changed: set[str]) -> None:
    model = raw_project.load().train.model
    before, after = fingerprints(model), fingerprints(model, **{folder: "changed"})
    assert {name for name in before if before[name] != after[name]} == changed


def fingerprints(model: ModelConfig, **parts: str) -> dict[str, str]:
    return column_fingerprints(model, dict.fromkeys((*SD3.encoding.folders, TEACHER), "0") | parts)


def test_a_teacher_adds_a_column_that_its_bytes_alone_decide(raw_project: Project, tmp_path: Path) -> None:
    model = raw_project.load().train.model
    taught = model.model_copy(update={"teacher_path": write_vision(tmp_path)})
    first, other = fingerprints(taught), fingerprints(taught, teacher="changed")
    assert first.keys() - fingerprints(model).keys() == {TEACHER}
    assert {name for name in first if first[name] != other[name]} == {TEACHER}


@pytest.mark.parametrize("text_tokens", ["padded", "real"])
def test_a_prepared_batch_has_the_prepared_columns(fresh_project: Project, text_tokens: str) -> None:
    keys = (f'model.text_tokens="{text_tokens}"',)
    fresh_project.build_cache(*keys)
    loaded = fresh_project.load(*keys)
    data = open_cache(loaded.dataset, loaded.train, Launch())
    picks = make_order(data, loaded, Launch()).picks(0)
    rows = data.read(picks, loaded.train.seed)
    preparer = SD3.training.preparer(loaded.train, starting_weights(loaded.train.model), data.empty_text())
    batch = preparer.prepare_inputs(rows)
    reader = data.new_reader(data.buckets[picks.bucket].shards[0])
    for column in SD3.prepared_columns(loaded.train.model, reader.columns):
        if column.name == "mask":
            continue
        value = batch[column.name]
        assert str(value.dtype) == f"torch.{column.dtype}"
        assert tuple(value.shape[2:] if column.ragged else value.shape[1:]) == column.row_shape
        assert (column.name + ".length" in batch.host) == column.ragged
