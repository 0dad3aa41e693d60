"""Fetch shards in the background before they are read."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from sd3_light.config.faults import UserError
from sd3_light.data.manifest import ShardEntry


class ShardPrefetcher:
    """Calls ``fetch`` for requested shards in up to ``num_threads`` threads, which end when nothing is left to do.

    One thread requests shards. No lock is used, because a process that is forked meanwhile would inherit it: a shard
    may be fetched twice, so ``fetch`` skips shards that are present. Its errors are dropped; the reader of the shard
    finds them again.
    """

    def __init__(self, fetch: Callable[[ShardEntry], None], num_threads: int) -> None:
        self._fetch = fetch
        self._num_threads = num_threads
        self._waiting: deque[ShardEntry] = deque()
        self.threads: list[threading.Thread] = []

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "threads": []}

    def request(self, entries: Sequence[ShardEntry], first: bool = False) -> None:
        """Add shards in the order in which they will be read; ``first``: before those that already wait."""
        waiting = list(self._waiting)
        names = {entry.file for entry in (entries if first else waiting)}
        if first:
            waiting = [*entries, *(entry for entry in waiting if entry.file not in names)]
        else:
            waiting += [entry for entry in entries if entry.file not in names]
        self._waiting = deque(waiting)
        self.threads = [thread for thread in self.threads if thread.is_alive()]
        for _ in range(min(self._num_threads - len(self.threads), len(waiting))):
            thread = threading.Thread(target=self._run, daemon=True)
            self.threads.append(thread)
            thread.start()

    def _run(self) -> None:
        while True:
            try:
                entry = self._waiting.popleft()
            except IndexError:
                return
            try:
                self._fetch(entry)
            except (UserError, OSError):
                continue  # reported when the shard is read
