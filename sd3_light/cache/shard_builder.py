"""Build shards in this process: worker processes decode ahead, the device encodes, threads write in the background."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from sd3_light.cache.build_folder import BuildFolder
from sd3_light.cache.copies import Copies, OldShards
from sd3_light.cache.reuse import CopiedColumns, ReuseIndex, ShardCopies, ValueCounts
from sd3_light.cache.shard_in_progress import (
    ShardInProgress,
    decode_batches,
    is_done,
    teacher_column,
    text_groups,
    write_finished,
)
from sd3_light.config import TrainConfig
from sd3_light.config.faults import UserError
from sd3_light.core.encoding import Encoders, Tokens
from sd3_light.data.cache_plan import CachePlan, Member, PlannedShard
from sd3_light.data.manifest import SHARDS, damaged_mark
from sd3_light.runlog import Bar
from sd3_light.sources.catalogue import rotate_to_share
from sd3_light.sources.claims import POLL_SECONDS, Claims
from sd3_light.sources.decode import CRASHED_DECODE, Decoded, DecodeTask, decode_images
from sd3_light.sources.workers import WorkerPool

WRITERS = 2
"""Shards that are written while the device encodes the next: one is hashed while another is flushed to disk."""


def wait_for_main(pending_task: Callable[[], str | None], timeout: float) -> None:
    """Wait until the main process has no pending task; ``pending_task`` describes it for the error."""
    deadline = time.monotonic() + timeout
    while (task := pending_task()) is not None:
        if time.monotonic() > deadline:
            hint = "see its output, or raise sd3_manifest_timeout_sec"
            raise UserError(f"timed out waiting for the main process to {task}; {hint}")
        time.sleep(POLL_SECONDS)


@dataclass(frozen=True)
class BuildJob:
    """The cache that shards belong to: its folder, plan, and the ``fingerprints`` of its columns.

    ``reuse`` says what is copied from old shards; None: nothing. ``regenerate``: encode shards again that are built.
    ``beside`` are the images of samples that their captions are encoded with.
    """

    place: BuildFolder
    plan: CachePlan
    claims: Claims
    fingerprints: Mapping[str, str] = field(default_factory=dict)
    reuse: ReuseIndex | None = None
    regenerate: bool = False
    beside: tuple[str, ...] = ()

    def copies(self, members: Sequence[Member]) -> ShardCopies:
        """Return what a shard with these samples copies."""
        if self.reuse is None:
            return ShardCopies(columns=CopiedColumns(beside=self.beside))
        return self.reuse.copies(members)


@dataclass(frozen=True)
class Built:
    """What a command built: the samples of its shards, and how many of their values it encoded and copied."""

    samples: int = 0
    values: ValueCounts = field(default_factory=ValueCounts)

    def __add__(self, other: "Built") -> "Built":
        return Built(self.samples + other.samples, self.values + other.values)


class ShardBuilder:
    """Encodes the shards that no other process does, until all are built."""

    def __init__(self, job: BuildJob, encoders: Encoders, old: OldShards, bar: Bar, train: TrainConfig) -> None:
        self._job = job
        self._encoders = encoders
        self._old = old
        self._bar = bar
        self._train = train
        self._plan = job.plan
        self._claims = job.claims
        self._shards = job.place.folder / SHARDS
        self.built = Built()

    def build(self, planned: Sequence[PlannedShard], share: tuple[int, int]) -> None:
        """Build shards until all are built, here or elsewhere; wait for others as long as there is progress."""
        remaining = rotate_to_share(planned, share)
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

    def _pass(self, planned: Sequence[PlannedShard], pool: WorkerPool[DecodeTask, Decoded]) -> list[PlannedShard]:
        """Encode every unclaimed shard. Return those that other processes have claimed."""
        claimed: list[PlannedShard] = []
        queue: deque[ShardInProgress] = deque()
        with ThreadPoolExecutor(1, "tokens") as tokenizer, ThreadPoolExecutor(WRITERS, "writer") as writer:
            writes: deque[Future[None]] = deque()
            for images in pool.map(self._tasks(planned, queue, claimed, tokenizer)):
                queue[0].add(images, self._encoders)
                if queue[0].is_decoded:
                    current = queue.popleft()
                    current.encode_text(self._encoders)
                    if len(writes) == WRITERS:
                        writes.popleft().result()
                    writes.append(writer.submit(self._write, current, self._encoders.waiter()))
                    self.built += Built(len(current.accepted), current.counts)
                    self._bar.advance(current.shard.count)
            for write in writes:
                write.result()
        return claimed

    def _tasks(
        self,
        planned: Sequence[PlannedShard],
        queue: deque[ShardInProgress],
        claimed: list[PlannedShard],
        tokenizer: ThreadPoolExecutor,
    ) -> Iterator[list[DecodeTask]]:
        """Yield the images of one shard after another; a shard is claimed when its first images are requested."""
        for shard in planned:
            if self._is_built(shard):
                self._bar.advance(shard.count)
            elif not self._claims.take(shard.file):
                claimed.append(shard)
            elif self._is_built(shard):  # built between the check and the claim
                self._claims.release(shard.file)
                self._bar.advance(shard.count)
            else:
                members = self._plan.members(shard)
                root = self._plan.source(shard).root
                copies = Copies(self._job.copies(members), self._old)
                tokens = tokenizer.submit(tokenize_missing, self._encoders, members, copies)
                teacher = teacher_column(self._train.model, shard)
                queue.append(ShardInProgress(shard, members, tokens, copies, teacher))
                yield from decode_batches(members, copies, root, self._train.model, self._train.caching_batch_size)

    def _is_built(self, shard: PlannedShard) -> bool:
        if not self._job.regenerate:
            return is_done(self._shards, shard)
        path = self._shards / shard.file
        return self._claims.is_newer(path) or self._claims.is_newer(path.with_suffix(".none"))

    def _write(self, finished: ShardInProgress, wait: Callable[[], None]) -> None:
        wait()
        root = self._plan.source(finished.shard).root
        write_finished(self._shards, finished, root, self._train.model, self._job.fingerprints)
        self._job.place.push_shard(finished.shard.file)
        damaged_mark(self._shards / finished.shard.file).unlink(missing_ok=True)
        self._claims.release(finished.shard.file)


def tokenize_missing(encoders: Encoders, members: Sequence[Member], copies: Copies) -> list[Tokens]:
    """Return the token ids of the captions that are not copied, by `text_groups`; none if they need their images."""
    if copies.beside:
        return []
    return [encoders.tokenize(group.captions) for group in text_groups(members, copies)]
