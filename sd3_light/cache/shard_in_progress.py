"""Build one shard: copy what old shards have, decode and encode the rest, and write its files."""

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sd3_light.cache.copies import Copies
from sd3_light.cache.identity import stored_columns
from sd3_light.cache.reuse import PIXELS, ValueCounts, distinct_texts
from sd3_light.config import ModelConfig
from sd3_light.config.base import DataLocation
from sd3_light.config.faults import UserError
from sd3_light.core.columns import IMAGE, MASK, OPTIONAL, REFERENCE, TEACHER, Column, entry_of, mask_factor
from sd3_light.core.encoding import Encoders, PairEncoders, Tokens
from sd3_light.core.registry import family_of
from sd3_light.data.cache_plan import Member, PlannedShard, Text, decode_task, texts_of
from sd3_light.data.manifest import damaged_mark, read_entry
from sd3_light.data.shards import Origin, ShardContent, write_shard
from sd3_light.files import write_atomically
from sd3_light.sources.access import exists
from sd3_light.sources.decode import Decoded, DecodeTask
from sd3_light.sources.preprocess import Pixels
from sd3_light.sources.records import reject_line


def is_done(shards: Path, shard: PlannedShard) -> bool:
    """Return whether a shard's file (or the note that all its samples were rejected) exists and is not damaged."""
    path = shards / shard.file
    if damaged_mark(path).exists():
        return False
    return read_entry(shards, shard.file) is not None or path.with_suffix(".none").is_file()


@dataclass(frozen=True)
class TextGroup:
    """Captions that lack the same columns; None: all."""

    texts: list[Text]
    columns: tuple[str, ...] | None = None

    @property
    def captions(self) -> list[str]:
        """The captions themselves."""
        return [text.caption for text in self.texts]


@dataclass
class ShardInProgress:
    """The copied, decoded and encoded samples of a shard so far. Samples have the numbers of their members.

    Batches are made of the samples that are not copied, in order. ``tokens`` are those of the `text_groups` of all
    members. ``teacher`` is the column of a teacher's features, None without one.
    """

    shard: PlannedShard
    members: list[Member]
    tokens: Future[list[Tokens]]
    copies: Copies = field(default_factory=Copies)
    teacher: Column | None = None
    num_decoded: int = 0
    encoded: dict[str, list[int]] = field(default_factory=dict)
    images: dict[str, list[Tensor]] = field(default_factory=dict)
    masks: dict[int, NDArray[np.uint8]] = field(default_factory=dict)
    texts: list[tuple[TextGroup, dict[str, Tensor]]] = field(default_factory=list)
    rejected: dict[int, dict[str, str]] = field(default_factory=dict)
    vae_dtypes: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._to_decode = to_decode(self.members, self.copies, self.teacher is not None)

    def add(self, images: Sequence[Decoded], parts: Encoders) -> None:
        """Encode the next decoded images; record the rejected ones."""
        numbers = self._to_decode[self.num_decoded : self.num_decoded + len(images)]
        self.num_decoded += len(images)
        pixels: dict[str, list[Pixels]] = {}
        seen: dict[int, list[Pixels]] = {}
        for number, image in zip(numbers, images, strict=True):
            if image.reason:
                member = self.members[number]
                line = reject_line(member.row.key, image.reason, image.detail, member.row.image)
                self.rejected[number] = {**line, PIXELS: member.pixels_fingerprint}
                continue
            if image.mask is not None:
                # a copy: the mask of a Ray task refers to memory that also holds the pixels
                self.masks[number] = image.mask.copy()
            decoded_entries = image.entries()
            if set(self.copies.beside) <= decoded_entries.keys():
                seen[number] = [decoded_entries[entry] for entry in self.copies.beside]
            if self.teacher is not None and image.pixels is not None:
                decoded_entries[TEACHER] = image.pixels
            for entry, decoded in decoded_entries.items():
                if entry not in self.copies.of_sample(number):
                    self.encoded.setdefault(entry, []).append(number)
                    pixels.setdefault(entry, []).append(decoded)
        for entry, batch in sorted(pixels.items()):  # the image's own before others
            if self.teacher is not None and entry == TEACHER:
                features = parts.encode_features(np.stack(batch), self.shard.flip, self.teacher)
                self.images.setdefault(TEACHER, []).append(features)
                continue
            for name, values in parts.encode_images(np.stack(batch), self.shard.flip).items():
                self.images.setdefault(name if entry == IMAGE else f"{name}.{entry}", []).append(values)
            self.vae_dtypes.add(str(parts.vae_dtype).removeprefix("torch."))
        if self.copies.beside:
            self._encode_with_images(seen, cast(PairEncoders, parts))

    def _encode_with_images(self, pixels: Mapping[int, list[Pixels]], parts: PairEncoders) -> None:
        """Encode the captions of images that no earlier batch had."""
        members = [self.members[number] for number in pixels]
        pairs = zip(members, pixels.values(), strict=True)
        images = {text: seen for member, seen in pairs for text in texts_of(member, self.copies.beside)}
        known = {text for group, _ in self.texts for text in group.texts}
        for group in text_groups(members, self.copies):
            texts = [text for text in group.texts if text not in known]
            if texts:
                new = TextGroup(texts, group.columns)
                encoded = parts.encode_pairs(new.captions, [images[text] for text in texts], new.columns)
                self.texts.append((new, encoded))

    @property
    def is_decoded(self) -> bool:
        """Whether all images were added."""
        return self.num_decoded == len(self._to_decode)

    @property
    def accepted(self) -> dict[int, Member]:
        """The samples that were not rejected, by number."""
        return {number: member for number, member in enumerate(self.members) if number not in self.rejected}

    def encode_text(self, parts: Encoders) -> None:
        """Encode the captions of the samples that were not rejected, unless `add` did so with their images."""
        if self.copies.beside:
            return
        groups = text_groups(list(self.accepted.values()), self.copies)
        tokens = [parts.tokenize(group.captions) for group in groups] if self.rejected else self.tokens.result()
        for group, ids in zip(groups, tokens, strict=True):
            self.texts.append((group, parts.encode_captions(ids, group.columns)))

    @property
    def counts(self) -> ValueCounts:
        """The images and distinct captions that were encoded and copied."""
        accepted = list(self.accepted.values())
        by_entry = {entry: set(numbers) for entry, numbers in self.encoded.items()}
        seen = by_entry.pop(TEACHER, set()) | by_entry.pop(IMAGE, set())
        images = len(seen) + sum(map(len, by_entry.values()))
        total = sum(len(member.fingerprints) - (MASK in member.fingerprints) for member in accepted)
        captions = sum(len(group.texts) for group, _ in self.texts)
        distinct = distinct_texts(accepted, self.copies.beside)
        return ValueCounts(images, total - images, captions, len(distinct) - captions)

    # --- the shard ------------------------------------------------------------------------------

    def content(self, columns: Sequence[Column], fingerprints: Mapping[str, str]) -> ShardContent:
        """Return the shard's tensors, which must be those of the columns. The encoders' results must be complete."""
        accepted = list(self.accepted.values())
        distinct = distinct_texts(accepted, self.copies.beside)
        texts = [text for member in accepted for text in texts_of(member, self.copies.beside)]
        values: dict[str, Tensor] = {}
        for column in columns:
            if column.reads == MASK:
                values |= self._mask_tensor(column)
            elif column.per_caption:
                values |= self._caption_tensors(column, list(distinct))
            else:
                values |= self._image_tensor(column)
        return ShardContent(
            columns,
            torch.tensor([member.identity for member in accepted], dtype=torch.int64),
            torch.tensor([0, *(len(member.captions) for member in accepted)]).cumsum(0),
            torch.tensor([distinct[text] for text in texts], dtype=torch.int64),
            values,
            fingerprints,
        )

    def _image_tensor(self, column: Column) -> dict[str, Tensor]:
        """Return the values of images; nothing if no sample has such an image."""
        accepted = self.accepted
        batches = self.images.get(column.name, [])
        numbers = self.encoded.get(entry_of(column), [])
        copied = self.copies.entries.get(entry_of(column), {})
        if not numbers and not copied:
            return {}
        if len(numbers) == len(accepted):
            return {column.name: torch.cat(batches)}
        encoded = dict(zip(numbers, (row for batch in batches for row in batch), strict=True))
        rows = (
            encoded[number] if number in encoded else self.copies.read(column.name, copied[number])
            for number in accepted
        )
        return {column.name: torch.stack(list(rows))}

    def _mask_tensor(self, column: Column) -> dict[str, Tensor]:
        """Return the masks, 255 for samples without; nothing if no sample has one."""
        copied = self.copies.entries.get(MASK, {})
        accepted = self.accepted
        if not any(number in copied or number in self.masks for number in accepted):
            return {}
        full = torch.full(column.shape, 255, dtype=torch.uint8)
        rows = []
        for number in accepted:
            if number in self.masks:
                rows.append(torch.from_numpy(self.masks[number]))
            else:
                rows.append(self.copies.read(column.name, copied[number]) if number in copied else full)
        return {column.name: torch.stack(rows)}

    def _caption_tensors(self, column: Column, captions: Sequence[Text]) -> dict[str, Tensor]:
        name = column.tensors[0]
        groups = [
            (group.texts, tensors)
            for group, tensors in self.texts
            if group.columns is None or column.name in group.columns
        ]
        if [list(captions)] == [texts for texts, _ in groups]:  # none is copied
            return {name: groups[0][1][name] for name in column.tensors}
        values: dict[Text, Tensor] = {}
        for texts, tensors in groups:
            values |= zip(texts, _values(column, tensors), strict=True)
        for caption in captions:
            if caption not in values:
                values[caption] = self.copies.read(column.name, self.copies.captions[caption])
        ordered = [values[caption] for caption in captions]
        if not column.ragged:
            return {name: torch.stack(ordered)}
        starts = torch.tensor([0, *map(len, ordered)]).cumsum(0)
        return dict(zip(column.tensors, (torch.cat(ordered), starts), strict=True))

    def origins(self) -> list[Origin]:
        """Return the origins of the shard's samples."""
        return [_origin(member) for member in self.accepted.values()]

    @property
    def vae_dtype(self) -> str:
        """The precision in which the images were encoded; several if copied ones have another."""
        return ", ".join(sorted(self.vae_dtypes | self.copies.vae_dtypes())) or "float32"


def _origin(member: Member) -> Origin:
    row = member.row
    own = member.fingerprints
    fingerprints = {f"{entry}_fingerprint": own[entry] for entry in (IMAGE, *OPTIONAL) if entry in own}
    return Origin(
        row.key,
        width=row.width,
        height=row.height,
        captions=member.captions,
        image=row.image,
        mask=row.mask,
        reference_fingerprints=tuple(own[entry] for entry in own if entry.startswith(REFERENCE)),
        **fingerprints,
    )


def text_groups(members: Sequence[Member], copies: Copies) -> list[TextGroup]:
    """Return the captions of samples that are encoded: those that no old shard has, then those that lack a column."""
    new = list[Text]()
    known = list[Text]()
    for text in distinct_texts(members, copies.beside):
        (known if text in copies.captions else new).append(text)
    groups = [TextGroup(new), TextGroup(known if copies.encoded_columns else [], copies.encoded_columns)]
    return [group for group in groups if group.texts]


def to_decode(members: Sequence[Member], copies: Copies, with_teacher: bool = False) -> list[int]:
    """Return the numbers of the samples that have an image or a mask to read, with a teacher that sees images."""
    numbers = []
    for number, member in enumerate(members):
        if not set(member.fingerprints) <= set(_unread(member, number, copies, with_teacher)):
            numbers.append(number)
    return numbers


def _unread(member: Member, number: int, copies: Copies, with_teacher: bool) -> tuple[str, ...]:
    """Return the entries of a sample that are copied and that nothing else is encoded with."""
    copied = copies.of_sample(number)
    seen = copies.beside if copies.beside and text_groups([member], copies) else ()
    if with_teacher and TEACHER not in copied:
        seen = (*seen, IMAGE)
    return tuple(entry for entry in copied if entry not in seen)


def decode_batches(
    members: Sequence[Member], copies: Copies, root: DataLocation, model: ModelConfig, size: int
) -> Iterator[list[DecodeTask]]:
    """Yield the tasks of decoding what is not copied, in batches of ``size`` frames, at least one sample.

    If everything is copied, there is one batch without tasks.
    """
    with_teacher = model.teacher_path is not None
    numbers = to_decode(members, copies, with_teacher)
    size = max(1, size // members[0].bucket.frames)
    seen_at = family_of(model).reference_bucket(members[0].bucket)
    factor = mask_factor(stored_columns(model))
    for start in range(0, max(1, len(numbers)), size):
        batch = numbers[start : start + size]
        tasks = []
        for at in batch:
            unread = _unread(members[at], at, copies, with_teacher)
            tasks.append(decode_task(members[at], root, unread, factor, seen_at))
        yield tasks


def _values(column: Column, tensors: Mapping[str, Tensor]) -> list[Tensor]:
    """Return the value of each caption in the tensors of a column."""
    rows = tensors[column.tensors[0]]
    if not column.ragged:
        return list(rows)
    starts = tensors[column.tensors[1]].tolist()
    return [rows[start:end] for start, end in pairwise(starts)]


def write_finished(
    shards: Path, finished: ShardInProgress, root: DataLocation, model: ModelConfig, fingerprints: Mapping[str, str]
) -> None:
    """Write the file of a shard whose results are complete, and its rejects.

    ``root`` is the folder of its source, ``fingerprints`` are those of the columns.
    """
    if finished.rejected and not exists(root):
        raise UserError(
            f"{root} disappeared while it was being cached; restore it and run again: finished shards are kept"
        )
    write_rejects(shards, finished.shard, list(finished.rejected.values()))
    if finished.accepted:
        content = finished.content(stored_columns(model, finished.shard.bucket), fingerprints)
        write_shard(shards, finished.shard.entry, content, finished.origins(), finished.vae_dtype)
        (shards / finished.shard.file).with_suffix(".none").unlink(missing_ok=True)
    else:
        write_empty_note(shards, finished.shard)


def teacher_column(model: ModelConfig, shard: PlannedShard) -> Column | None:
    """Return the column of a teacher's features in a shard; None without a teacher."""
    return next((column for column in stored_columns(model, shard.bucket) if column.reads == TEACHER), None)


def write_rejects(shards: Path, shard: PlannedShard, rejected: Sequence[Mapping[str, str]]) -> None:
    """Write the rejects of a shard; without any, remove those of an earlier build."""
    path = (shards / shard.file).with_suffix(".rejects.jsonl")
    if rejected:
        lines = (json.dumps(line, ensure_ascii=False) + "\n" for line in rejected)
        write_atomically(path, "".join(lines).encode())
    else:
        path.unlink(missing_ok=True)


def write_empty_note(shards: Path, shard: PlannedShard) -> None:
    """Write the note that all samples of a shard were rejected."""
    write_atomically((shards / shard.file).with_suffix(".none"), b"")
    (shards / shard.file).unlink(missing_ok=True)


def empty_content(parts: Encoders, model: ModelConfig) -> ShardContent:
    """Return the features of the empty caption, stored like a sample with one blank latent pixel."""
    text = parts.encode_empty()
    parts.synchronize()
    columns = stored_columns(model)
    images = [column for column in columns if not column.per_caption and column.reads not in OPTIONAL]
    blank = {column.name: torch.zeros(1, 1, *column.shape, dtype=getattr(torch, column.dtype)) for column in images}
    return ShardContent(columns, torch.tensor([0]), torch.tensor([0, 1]), torch.tensor([0]), blank | text)
