"""The index of what an update copies: exact, the same however it is written, and small in memory (law 10)."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather

from sd3_light.cache.reuse import CopiedColumns, ReuseIndex, Update, ValueCounts, open_reuse
from sd3_light.cache.sorted_array import SortedArray
from sd3_light.core.columns import Bucket, Column
from sd3_light.data.cache_plan import Member, Text, digest_of
from sd3_light.data.manifest import Manifest, ShardEntry
from sd3_light.sources.catalogue import InputRow
from sd3_light.sources.claims import Claims

ROWS = 512
IMAGE = Column("moments", "image", "float16", (2, 1, 1), ("vae",))
MASK = Column("mask", "mask", "uint8", (1, 1), ())
WORDS = Column("words", "caption", "bfloat16", (4, 2), ("encoder",))
SCORE = Column("score", "caption", "bfloat16", (), ("judge",))
COLUMNS = (IMAGE, MASK, WORDS, SCORE)
SAME = {column.name: "same" for column in COLUMNS}


def member(number: int, mask: bool = False) -> Member:
    row = InputRow(f"{number}.png", digest=digest_of(str(number)), mask_digest=digest_of("m") if mask else "")
    return Member(row, number, (f"caption {number // 2}", "shared by all"), Bucket(8, 8), flip=False)


def write_shards(folder: Path, counts: Iterable[Sequence[int]]) -> list[ShardEntry]:
    """Write the tables of shards with these samples, beside files of one byte."""
    entries = []
    for number, samples in enumerate(counts):
        entry = ShardEntry(f"{number:06}.safetensors", "8x8", (8, 8), "a#0", len(samples), 1, f"{number:064x}", "f")
        members = [member(sample) for sample in samples]
        table = pa.table(
            {
                **{
                    f"{entry}_fingerprint": [each.fingerprints.get(entry, "") for each in members]
                    for entry in ("image", "mask", "rejected")
                },
                "captions": [list(each.captions) for each in members],
            },
            metadata={"sha256": entry.sha256},
        )
        feather.write_feather(table, str(folder / f"{number:06}.arrow"), compression="uncompressed")
        (folder / entry.file).write_bytes(b"x")
        entries.append(entry)
    return entries


def make_update(folder: Path, old: Sequence[ShardEntry], planned: Sequence[Any], columns: CopiedColumns) -> Update:
    plan: Any = SimpleNamespace(path=folder / "plan-0.arrow", members=lambda shard: shard.members)
    return Update(plan, planned, Manifest({}, tuple(old), old[0]), "0", columns, folder)


def shard(*samples: int, file: str = "new.safetensors", mask: bool = False) -> Any:
    return SimpleNamespace(file=file, members=[member(sample, mask) for sample in samples])


def open_index(update: Update) -> ReuseIndex:
    with Claims(update.shards / "claims") as claims:
        return open_reuse(update, claims, lambda files: None)


def test_columns_with_equal_fingerprints_are_copied() -> None:
    copied = CopiedColumns.of(COLUMNS, SAME, {**SAME, "words": "other", "gone": "same"})
    assert (copied.entries, copied.captions, copied.encoded) == (("image", "mask"), ("score",), ("words",))
    assert set(copied.fingerprints) == {"moments", "mask", "score"}
    both = (*COLUMNS, Column("features", "image", "float16", (3,), ("vae",)))
    copied = CopiedColumns.of(both, {**SAME, "features": "new"}, SAME)
    assert copied.entries == ("mask",), "an image is encoded for all of its columns"
    edit = (*COLUMNS, Column("both", "caption+reference", "float16", (3,), ("encoder",)))
    copied = CopiedColumns.of(edit, {**SAME, "both": "same"}, {**SAME, "both": "same"})
    assert (copied.captions, copied.encoded) == (("words", "score", "both"), ())
    assert copied.beside == ("reference",), "a caption alone does not decide the values"
    assert not CopiedColumns.of(COLUMNS, SAME, {})


def test_rows_are_found_in_the_first_old_shard_that_has_them(tmp_path: Path) -> None:
    old = write_shards(tmp_path, [[0, 1, 2], [2, 3, 4], [9]])
    columns = CopiedColumns.of(COLUMNS, SAME, SAME)
    index = open_index(make_update(tmp_path, old, [shard(4, 2, 7)], columns))
    copies = index.copies(shard(4, 2, 7).members)
    assert [entry.file for entry in copies.shards] == ["000000.safetensors", "000001.safetensors"]
    assert copies.entries == {"image": {0: (1, 2), 1: (0, 2)}, "mask": {}}
    # the distinct captions of the shards are 0, shared, 1 and 1, shared, 2
    assert copies.captions == {Text("caption 2"): (1, 2), Text("shared by all"): (0, 1), Text("caption 1"): (0, 2)}
    assert index.counts == ValueCounts(1, 2, 1, 3)
    assert index.copies(shard(9).members).entries["image"] == {}, "no shard of the update has it"


def test_only_complete_shards_that_are_not_replaced_are_used(tmp_path: Path) -> None:
    old = write_shards(tmp_path, [[0], [1], [2], [3]])
    (tmp_path / "000001.safetensors").unlink()
    (tmp_path / "000002.safetensors").write_bytes(b"longer")
    (tmp_path / "000003.safetensors.damaged").touch()
    planned = [shard(0, 1, 2, 3, file="000000.safetensors")]
    index = open_index(make_update(tmp_path, old, planned, CopiedColumns.of(COLUMNS, SAME, SAME)))
    assert index.copies(planned[0].members).shards == ()
    assert index.counts == ValueCounts(4, 0, 3, 0)


def test_the_index_of_the_first_process_is_kept(tmp_path: Path) -> None:
    old = write_shards(tmp_path, [[0, 1], [2, 3]])
    columns = CopiedColumns.of(COLUMNS, SAME, SAME)
    first = open_index(make_update(tmp_path, old, [shard(0, 2), shard(1)], columns))
    (tmp_path / "000001.safetensors.damaged").touch()
    later = open_index(make_update(tmp_path, old, [shard(1)], columns))
    assert later.counts == first.counts
    assert later.copies(shard(0, 2).members) == first.copies(shard(0, 2).members)


def test_masks_are_found_by_their_own_fingerprint(tmp_path: Path) -> None:
    old = write_shards(tmp_path, [[0, 1]])
    columns = CopiedColumns.of(COLUMNS, SAME, SAME)
    copies = open_index(make_update(tmp_path, old, [shard(0, mask=True)], columns)).copies(shard(0, mask=True).members)
    assert copies.entries == {"image": {0: (0, 0)}, "mask": {}}


def test_bytes_at_the_end_of_fingerprints_count() -> None:
    values = SortedArray("S4")
    values.add(np.array([b"ab\0\0", b"ab\0\1", b"\xff\0\0\0"], "S4"))
    assert values.contains([b"ab", b"ab\0\1", b"ab\0\2", b"\xff"]).tolist() == [True, True, False, True]
