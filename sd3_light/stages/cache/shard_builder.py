"""Units into shards: pictures decoded ahead by worker processes, encoded on the device, written in the background."""

import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sd3_light.config.faults import UserError
from sd3_light.data.building.cache_plan import CachePlan, Member, Unit
from sd3_light.data.building.catalogue import rotate_to_share, sample_location
from sd3_light.data.building.claims import Claims
from sd3_light.data.building.decode import Decoded, DecodeTask, Probe, crashed_decode, decode_images
from sd3_light.data.building.workers import WorkerPool
from sd3_light.data.manifest import damaged_mark, read_entry
from sd3_light.data.shards import Origin, ShardContent, write_shard
from sd3_light.encoders.frozen_parts import CaptionTokens, FrozenParts
from sd3_light.files import write_atomically
from sd3_light.runlog import Bar

WRITERS = 2
"""Shards that are being written while the device encodes the next: one is hashed while another is flushed to disk."""

_POLL_SECONDS = 0.2


def is_done(shards: Path, unit: Unit) -> bool:
    """Whether a unit's shard stands (or a note that none of its samples could be used), and is not known as damaged."""
    path = shards / unit.file
    if damaged_mark(path).exists():
        return False
    return read_entry(shards, unit.file) is not None or path.with_suffix(".none").is_file()


@dataclass
class _Hand:
    """A unit in hand: what has been decoded and encoded of it."""

    unit: Unit
    members: list[Member]
    tokens: Future[CaptionTokens]
    seen: int = 0
    good: list[Member] = field(default_factory=list)
    moments: list[Tensor] = field(default_factory=list)
    masks: list[NDArray[np.uint8] | None] = field(default_factory=list)
    text: dict[str, Tensor] = field(default_factory=dict)
    rejected: list[dict[str, str]] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        """Whether all its pictures have come."""
        return self.seen == len(self.members)

    def take(self, decoded: Sequence[Decoded], parts: FrozenParts) -> None:
        """The next pictures: encode the good ones, note the others."""
        batch = self.members[self.seen : self.seen + len(decoded)]
        self.seen += len(decoded)
        pixels = []
        for member, picture in zip(batch, decoded, strict=True):
            if picture.pixels is None:
                self.rejected.append(reject_line(member.row.key, picture.reason, picture.detail, member.row.image))
                continue
            self.good.append(member)
            self.masks.append(picture.mask)
            pixels.append(picture.pixels)
        if pixels:
            self.moments.append(parts.encode_images(np.stack(pixels), self.unit.flip))

    def encode_text(self, parts: FrozenParts) -> None:
        """Have the captions of the good ones encoded."""
        distinct = _captions(self.good)[1]
        self.text = parts.encode_captions(parts.tokenize(list(distinct)) if self.rejected else self.tokens.result())

    def content(self) -> ShardContent:
        """The shard's tensors; before this the encoders' results must have arrived."""
        captions, distinct = _captions(self.good)
        return ShardContent(
            torch.tensor([member.identity for member in self.good], dtype=torch.int64),
            torch.cat(self.moments),
            torch.tensor([0, *(len(member.captions) for member in self.good)]).cumsum(0),
            torch.tensor([distinct[caption] for caption in captions], dtype=torch.int64),
            self.text,
            _stack_masks(self.masks),
        )

    def origins(self) -> list[Origin]:
        """Where its samples came from."""
        return [
            Origin(m.row.key, m.fingerprint, m.row.width, m.row.height, m.captions, image=m.row.image, mask=m.row.mask)
            for m in self.good
        ]


def _captions(members: Sequence[Member]) -> tuple[list[str], dict[str, int]]:
    """The captions of samples, one after another, and the number of each distinct one."""
    captions = [caption for member in members for caption in member.captions]
    return captions, {caption: number for number, caption in enumerate(dict.fromkeys(captions))}


def reject_line(key: str, reason: str, detail: str, image: str) -> dict[str, str]:
    """One line of rejects.jsonl."""
    return {"key": key, "reason": reason, "detail": detail, "image": image}


def write_lines(path: Path, lines: Iterable[dict[str, str]]) -> None:
    """A file of JSON lines, atomically."""
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    write_atomically(path, text.encode())


def _stack_masks(masks: Sequence[NDArray[np.uint8] | None]) -> Tensor | None:
    shown = next((mask for mask in masks if mask is not None), None)
    if shown is None:
        return None
    whole = np.full_like(shown, 255)
    return torch.from_numpy(np.stack([whole if mask is None else mask for mask in masks]))


class ShardBuilder:
    """Encodes what no other process does, until every unit stands."""

    def __init__(
        self,
        plan: CachePlan,
        shards: Path,
        claims: Claims,
        parts: FrozenParts,
        bar: Bar,
        batch_size: int,
        workers: int,
        patience: float,
        regenerate: bool = False,
    ) -> None:
        self._plan, self._shards, self._claims, self._parts, self._bar = plan, shards, claims, parts, bar
        self._batch_size, self._workers, self._patience, self._regenerate = batch_size, workers, patience, regenerate
        self.encoded = 0

    def build(self, units: Sequence[Unit], share: tuple[int, int]) -> None:
        """Return when all units stand, whoever made them. A dead process's unit is taken over; a living one's is
        waited for as long as there is progress."""
        left = rotate_to_share(units, share)
        if not left:
            return
        moved = time.monotonic()
        # one set of worker processes for all passes, forked before other threads start
        with WorkerPool(self._workers, decode_images, crashed_decode) as pool:
            while left := self._pass(before := left, pool):
                if len(left) < len(before):
                    moved = time.monotonic()
                if time.monotonic() - moved > self._patience:
                    raise UserError(
                        f"gave up waiting for {len(left)} shards of other processes, such as {left[0].file}; see their "
                        "output, or raise sd3_manifest_timeout_sec"
                    )
                time.sleep(_POLL_SECONDS)

    def _pass(self, units: Sequence[Unit], pool: WorkerPool[DecodeTask, Decoded]) -> list[Unit]:
        """Encode every unit that is free; return those that others have in hand."""
        elsewhere: list[Unit] = []
        hands: deque[_Hand] = deque()
        with ThreadPoolExecutor(1, "tokens") as tokenizer, ThreadPoolExecutor(WRITERS, "writer") as writer:
            writing: deque[Future[None]] = deque()
            for decoded in pool.map(self._tasks(units, hands, elsewhere, tokenizer)):
                hands[0].take(decoded, self._parts)
                if hands[0].is_whole:
                    hand = hands.popleft()
                    if hand.good:
                        hand.encode_text(self._parts)
                    if len(writing) == WRITERS:
                        writing.popleft().result()
                    writing.append(writer.submit(self._write, hand, self._parts.waiter()))
                    self.encoded += hand.unit.count
                    self._bar.advance(hand.unit.count)
            for last in writing:
                last.result()
        return elsewhere

    def _tasks(
        self, units: Sequence[Unit], hands: deque[_Hand], elsewhere: list[Unit], tokenizer: ThreadPoolExecutor
    ) -> Iterator[list[DecodeTask]]:
        """The pictures of one unit after another, each unit claimed when its first picture is asked for."""
        for unit in units:
            if self._stands(unit):
                self._bar.advance(unit.count)
            elif not self._claims.take(unit.file):
                elsewhere.append(unit)
            elif self._stands(unit):  # done between the look and the claim
                self._claims.release(unit.file)
                self._bar.advance(unit.count)
            else:
                members, root = self._plan.members(unit), self._plan.source(unit).root
                hands.append(_Hand(unit, members, tokenizer.submit(self._tokenize, members)))
                for start in range(0, len(members), self._batch_size):
                    yield [_task(member, root, unit) for member in members[start : start + self._batch_size]]

    def _tokenize(self, members: Sequence[Member]) -> CaptionTokens:
        return self._parts.tokenize(list(_captions(members)[1]))

    def _stands(self, unit: Unit) -> bool:
        if not self._regenerate:
            return is_done(self._shards, unit)
        path = self._shards / unit.file
        return self._claims.is_newer(path) or self._claims.is_newer(path.with_suffix(".none"))

    def _write(self, hand: _Hand, wait: Callable[[], None]) -> None:
        wait()
        path, root = self._shards / hand.unit.file, self._plan.source(hand.unit).root
        if hand.rejected and not root.exists():
            raise UserError(f"{root} has gone while it was being cached; bring it back and run again: shards stay")
        rejects = path.with_suffix(".rejects.jsonl")
        if hand.rejected:
            write_lines(rejects, hand.rejected)
        else:
            rejects.unlink(missing_ok=True)
        if hand.good:
            write_shard(self._shards, hand.unit.entry, hand.content(), hand.origins())
            path.with_suffix(".none").unlink(missing_ok=True)
        else:
            write_atomically(path.with_suffix(".none"), b"")
            path.unlink(missing_ok=True)
        damaged_mark(path).unlink(missing_ok=True)
        self._claims.release(hand.unit.file)


def _task(member: Member, root: Path, unit: Unit) -> DecodeTask:
    row = member.row
    return DecodeTask(sample_location(row, root), Probe(row.width, row.height, row.digest), unit.bucket)


def empty_content(parts: FrozenParts) -> ShardContent:
    """The empty caption's features, kept like a sample whose picture is one blank latent pixel."""
    text = parts.encode_captions([""])
    parts.synchronize()
    moments = torch.zeros(1, 1, 2 * parts.latent_channels, 1, 1, dtype=torch.float16)
    return ShardContent(torch.tensor([0]), moments, torch.tensor([0, 1]), torch.tensor([0]), text)
