"""Build shards: worker processes decode ahead, the device encodes, threads write in the background."""

import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sd3_light.config import TrainConfig
from sd3_light.config.faults import UserError
from sd3_light.data.building.cache_plan import CachePlan, Member, Unit, decode_task
from sd3_light.data.building.catalogue import rotate_to_share
from sd3_light.data.building.claims import POLL_SECONDS, Claims
from sd3_light.data.building.decode import CRASHED_DECODE, Decoded, DecodeTask, decode_images
from sd3_light.data.building.workers import WorkerPool
from sd3_light.data.manifest import damaged_mark, read_entry
from sd3_light.data.shards import Origin, ShardContent, write_shard
from sd3_light.data.sources.access import exists
from sd3_light.encoders.frozen_parts import CaptionTokens, FrozenParts
from sd3_light.files import write_atomically
from sd3_light.runlog import Bar

WRITERS = 2
"""Shards that are written while the device encodes the next: one is hashed while another is flushed to disk."""


def is_done(shards: Path, unit: Unit) -> bool:
    """Return whether a unit's shard (or the note that all its samples were rejected) exists and is not damaged."""
    path = shards / unit.file
    if damaged_mark(path).exists():
        return False
    return read_entry(shards, unit.file) is not None or path.with_suffix(".none").is_file()


def wait_for_main(pending_task: Callable[[], str | None], timeout: float) -> None:
    """Wait until the main process has no pending task; ``pending_task`` describes it for the error."""
    deadline = time.monotonic() + timeout
    while (task := pending_task()) is not None:
        if time.monotonic() > deadline:
            hint = "see its output, or raise sd3_manifest_timeout_sec"
            raise UserError(f"timed out waiting for the main process to {task}; {hint}")
        time.sleep(POLL_SECONDS)


@dataclass
class _UnitInProgress:
    """The decoded and encoded samples of a unit so far."""

    unit: Unit
    members: list[Member]
    tokens: Future[CaptionTokens]
    num_decoded: int = 0
    accepted: list[Member] = field(default_factory=list)
    moments: list[Tensor] = field(default_factory=list)
    masks: list[NDArray[np.uint8] | None] = field(default_factory=list)
    text: dict[str, Tensor] = field(default_factory=dict)
    rejected: list[dict[str, str]] = field(default_factory=list)

    def add(self, images: Sequence[Decoded], parts: FrozenParts) -> None:
        """Encode the next images; record the rejected ones."""
        batch = self.members[self.num_decoded : self.num_decoded + len(images)]
        self.num_decoded += len(images)
        pixels = []
        for member, image in zip(batch, images, strict=True):
            if image.pixels is None:
                self.rejected.append(reject_line(member.row.key, image.reason, image.detail, member.row.image))
                continue
            self.accepted.append(member)
            self.masks.append(image.mask)
            pixels.append(image.pixels)
        if pixels:
            self.moments.append(parts.encode_images(np.stack(pixels), self.unit.flip))

    def encode_text(self, parts: FrozenParts) -> None:
        """Encode the captions of the samples that were not rejected."""
        distinct = _captions(self.accepted)[1]
        self.text = parts.encode_captions(parts.tokenize(list(distinct)) if self.rejected else self.tokens.result())

    def content(self) -> ShardContent:
        """Return the shard's tensors. The encoders' results must be complete."""
        captions, distinct = _captions(self.accepted)
        return ShardContent(
            torch.tensor([member.identity for member in self.accepted], dtype=torch.int64),
            torch.cat(self.moments),
            torch.tensor([0, *(len(member.captions) for member in self.accepted)]).cumsum(0),
            torch.tensor([distinct[caption] for caption in captions], dtype=torch.int64),
            self.text,
            _stack_masks(self.masks),
        )

    def origins(self) -> list[Origin]:
        """Return the origins of the shard's samples."""
        return [
            Origin(m.row.key, m.fingerprint, m.row.width, m.row.height, m.captions, image=m.row.image, mask=m.row.mask)
            for m in self.accepted
        ]


def _captions(members: Sequence[Member]) -> tuple[list[str], dict[str, int]]:
    """Return all captions of the samples in order, and the number of each distinct caption."""
    captions = [caption for member in members for caption in member.captions]
    return captions, {caption: number for number, caption in enumerate(dict.fromkeys(captions))}


def reject_line(key: str, reason: str, detail: str, image: str) -> dict[str, str]:
    """Return one line of rejects.jsonl."""
    return {"key": key, "reason": reason, "detail": detail, "image": image}


def _stack_masks(masks: Sequence[NDArray[np.uint8] | None]) -> Tensor | None:
    first = next((mask for mask in masks if mask is not None), None)
    if first is None:
        return None
    full = np.full_like(first, 255)
    return torch.from_numpy(np.stack([full if mask is None else mask for mask in masks]))


class ShardBuilder:
    """Encodes the units that no other process does, until all are built; ``on_written`` gets each shard's name."""

    def __init__(
        self,
        plan: CachePlan,
        shards: Path,
        claims: Claims,
        parts: FrozenParts,
        bar: Bar,
        train: TrainConfig,
        regenerate: bool = False,
        on_written: Callable[[str], None] = lambda file: None,
    ) -> None:
        self._plan, self._shards, self._claims, self._parts, self._bar = plan, shards, claims, parts, bar
        self._train, self._regenerate, self._on_written = train, regenerate, on_written
        self.encoded = 0

    def build(self, units: Sequence[Unit], share: tuple[int, int]) -> None:
        """Build units until all are built, by this or another process; wait for others as long as there is progress."""
        remaining = rotate_to_share(units, share)
        if not remaining:
            return
        last_progress = time.monotonic()
        # one pool for all passes, forked before other threads start
        with WorkerPool(self._train.caching_num_workers, decode_images, CRASHED_DECODE) as pool:
            while remaining := self._pass(before := remaining, pool):
                if len(remaining) < len(before):
                    last_progress = time.monotonic()
                if time.monotonic() - last_progress > self._train.sd3_manifest_timeout_sec:
                    raise UserError(
                        f"timed out waiting for {len(remaining)} shards of other processes, such as "
                        f"{remaining[0].file}; see their output, or raise sd3_manifest_timeout_sec"
                    )
                time.sleep(POLL_SECONDS)

    def _pass(self, units: Sequence[Unit], pool: WorkerPool[DecodeTask, Decoded]) -> list[Unit]:
        """Encode every unclaimed unit. Return those that other processes have claimed."""
        claimed: list[Unit] = []
        queue: deque[_UnitInProgress] = deque()
        with ThreadPoolExecutor(1, "tokens") as tokenizer, ThreadPoolExecutor(WRITERS, "writer") as writer:
            writes: deque[Future[None]] = deque()
            for images in pool.map(self._tasks(units, queue, claimed, tokenizer)):
                queue[0].add(images, self._parts)
                if queue[0].num_decoded == len(queue[0].members):
                    current = queue.popleft()
                    if current.accepted:
                        current.encode_text(self._parts)
                    if len(writes) == WRITERS:
                        writes.popleft().result()
                    writes.append(writer.submit(self._write, current, self._parts.waiter()))
                    self.encoded += len(current.accepted)
                    self._bar.advance(current.unit.count)
            for write in writes:
                write.result()
        return claimed

    def _tasks(
        self, units: Sequence[Unit], queue: deque[_UnitInProgress], claimed: list[Unit], tokenizer: ThreadPoolExecutor
    ) -> Iterator[list[DecodeTask]]:
        """Yield the images of one unit after another; a unit is claimed when its first images are requested."""
        for unit in units:
            if self._is_built(unit):
                self._bar.advance(unit.count)
            elif not self._claims.take(unit.file):
                claimed.append(unit)
            elif self._is_built(unit):  # built between the check and the claim
                self._claims.release(unit.file)
                self._bar.advance(unit.count)
            else:
                members, root = self._plan.members(unit), self._plan.source(unit).root
                captions = list(_captions(members)[1])
                queue.append(_UnitInProgress(unit, members, tokenizer.submit(self._parts.tokenize, captions)))
                size = self._train.caching_batch_size
                for start in range(0, len(members), size):
                    yield [decode_task(member, root, unit) for member in members[start : start + size]]

    def _is_built(self, unit: Unit) -> bool:
        if not self._regenerate:
            return is_done(self._shards, unit)
        path = self._shards / unit.file
        return self._claims.is_newer(path) or self._claims.is_newer(path.with_suffix(".none"))

    def _write(self, finished: _UnitInProgress, wait: Callable[[], None]) -> None:
        wait()
        path, root = self._shards / finished.unit.file, self._plan.source(finished.unit).root
        if finished.rejected and not exists(root):
            raise UserError(
                f"{root} disappeared while it was being cached; restore it and run again: finished shards are kept"
            )
        rejects = path.with_suffix(".rejects.jsonl")
        if finished.rejected:
            lines = (json.dumps(line, ensure_ascii=False) + "\n" for line in finished.rejected)
            write_atomically(rejects, "".join(lines).encode())
        else:
            rejects.unlink(missing_ok=True)
        if finished.accepted:
            write_shard(self._shards, finished.unit.entry, finished.content(), finished.origins())
            path.with_suffix(".none").unlink(missing_ok=True)
        else:
            write_atomically(path.with_suffix(".none"), b"")
            path.unlink(missing_ok=True)
        self._on_written(finished.unit.file)
        damaged_mark(path).unlink(missing_ok=True)
        self._claims.release(finished.unit.file)


def empty_content(parts: FrozenParts) -> ShardContent:
    """Return the features of the empty caption, stored like a sample with one blank latent pixel."""
    text = parts.encode_captions([""])
    parts.synchronize()
    moments = torch.zeros(1, 1, 2 * parts.latent_channels, 1, 1, dtype=torch.float16)
    return ShardContent(torch.tensor([0]), moments, torch.tensor([0, 1]), torch.tensor([0]), text)
