"""Two processes write one checkpoint in the background and get the same result, also when one of them fails."""

import json
import os
import resource
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from sd3_light.checkpoint import background
from sd3_light.checkpoint.background import CheckpointFailed, CheckpointKeeper
from sd3_light.checkpoint.reading import open_checkpoint
from sd3_light.checkpoint.store import temporary_folder
from sd3_light.engines.protocol import TensorPiece

ROWS, WIDTH = 6, 5
FILE_SIZE_LIMIT = resource.getrlimit(resource.RLIMIT_FSIZE)


# --- the program of each of the two processes (this file) ----------------------------------------


def halves(rank: int, value: float) -> list[TensorPiece]:
    """Return half of one tensor, a replica that rank 1 writes, and a tensor that only rank 0 has."""
    rows = torch.arange(ROWS * WIDTH, dtype=torch.float32) + value
    count = ROWS * WIDTH // 2
    pieces = [TensorPiece("param/rows", rows[rank * count :][:count], rank * count, (ROWS, WIDTH))]
    pieces.append(TensorPiece("step/rows", torch.tensor([value]), 0, (), writes=rank == 1))
    return [*pieces, TensorPiece("ema/rows", rows.bfloat16(), 0, (ROWS * WIDTH,))] if rank == 0 else pieces


class Worker:
    """One of the two processes; every scenario saves on both and returns the results that this one got."""

    def __init__(self, rank: int, folder: Path) -> None:
        self.rank, self.folder = rank, folder
        timeout = timedelta(seconds=240)
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2, timeout=timeout
        )
        self.group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timeout)
        self.keeper = CheckpointKeeper(folder / "saved", rank, 2, self.group, keep_last=2)

    def results(self, keeper: CheckpointKeeper) -> list[dict[str, Any]]:
        results = []
        for save in keeper.wait():
            if isinstance(save, CheckpointFailed):
                results.append({"failed": save.reason})
            else:
                results.append({"file": save.path.name, "bytes": save.bytes, "facts": save.facts})
        return results

    def save(self, step: int, keeper: CheckpointKeeper | None = None) -> list[dict[str, Any]]:
        keeper = keeper or self.keeper
        keeper.save(step, halves(self.rank, step), {"step": step})
        return self.results(keeper)

    def while_training(self) -> list[dict[str, Any]]:
        """Rank 1's part is late: rank 0's thread waits for it in a collective, and both main threads run their own."""
        gate, write = threading.Event(), background.write_part
        if self.rank == 1:
            background.write_part = lambda *args: gate.wait(240) and write(*args)  # type: ignore[assignment]
        self.keeper.save(1, halves(self.rank, 1), {"step": 1})
        total = torch.ones(1)
        for _ in range(50):
            dist.all_reduce(total)
        unfinished = not self.keeper.is_idle()
        dist.barrier()
        gate.set()
        background.write_part = write
        return [{"total": total.item(), "unfinished": unfinished}, *self.results(self.keeper)]

    def full_disk(self) -> list[dict[str, Any]]:
        """Rank 1 cannot write more than a few bytes; then the disk has space again."""
        if self.rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (64, FILE_SIZE_LIMIT[1]))
        results = self.save(2)
        resource.setrlimit(resource.RLIMIT_FSIZE, FILE_SIZE_LIMIT)
        dist.barrier()
        results.append({"left": sorted(path.name for path in (self.folder / "saved").iterdir())})
        dist.barrier()
        return [*results, *self.save(2), *self.save(3)]

    def commit_fails(self) -> list[dict[str, Any]]:
        """Rank 0 fails in the final commit."""
        full = OSError(28, "No space left on device", "index.json")
        with patch.object(background, "commit", side_effect=full):
            return self.save(4)

    def leftovers(self) -> list[dict[str, Any]]:
        """A killed run with more ranks left parts of the same step."""
        temporary = temporary_folder(self.folder / "saved", 5)
        if self.rank == 0:
            temporary.mkdir()
            for name in ("rank-00001.json", "rank-00001.safetensors", "rank-00007.safetensors", "index.json"):
                (temporary / name).write_text("{}")
        dist.barrier()
        return self.save(5)

    def one_writer(self) -> list[dict[str, Any]]:
        """Rank 1 writes nothing but gets the result."""
        keeper = CheckpointKeeper(self.folder / "alone", self.rank, 1, self.group)
        keeper.save(1, halves(0, 1)[2:], {})
        return self.results(keeper)

    def outsider(self) -> list[dict[str, Any]]:
        """Rank 1 is not in the group: it copies nothing and does not wait."""
        group: dist.ProcessGroup = dist.new_group([0], backend="gloo")
        keeper = CheckpointKeeper(self.folder / "outsider", self.rank, 1, group)
        stall = keeper.save(1, halves(0, 1)[2:], {})
        return [{"idle": stall == 0}, *self.results(keeper)]

    def not_shared(self) -> list[dict[str, Any]]:
        """Each machine has its own folder."""
        keeper = CheckpointKeeper(self.folder / f"machine{self.rank}", self.rank, 2, self.group)
        results = self.save(1, keeper)
        return [*results, {"left": [path.name for path in keeper.folder.iterdir()]}]

    def a_rank_dies(self) -> list[dict[str, Any]]:
        """Rank 1 dies during a save."""
        if self.rank == 1:
            background.write_part = lambda *_: os._exit(7)  # type: ignore[assignment]
        return self.save(6)


def main(rank: int, folder: Path) -> None:
    worker = Worker(rank, folder)
    results = {}
    scenarios = (worker.while_training, worker.full_disk, worker.commit_fails, worker.leftovers, worker.one_writer)
    for scenario in (*scenarios, worker.outsider, worker.not_shared, worker.a_rank_dies):
        results[scenario.__name__] = scenario()
        (folder / f"results{rank}.json").write_text(json.dumps(results))
    os._exit(0)  # destroying the process group would wait for the dead rank


# --- tests of the results ----------------------------------------------------------------------


class Outcome:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.results = [json.loads((folder / f"results{rank}.json").read_text()) for rank in (0, 1)]

    def of_both(self, scenario: str) -> list[dict[str, Any]]:
        """Return the results, which must be the same on both ranks."""
        first, second = (results[scenario] for results in self.results)
        assert first == second
        return list(first)


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    folder = tmp_path_factory.mktemp("ranks")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    processes = [
        subprocess.Popen([sys.executable, __file__, str(rank), str(folder)], env=environment, stderr=subprocess.PIPE)
        for rank in (0, 1)
    ]
    errors = [process.communicate(timeout=240)[1].decode() for process in processes]
    assert [process.returncode for process in processes] == [0, 7], "\n".join(errors)
    return Outcome(folder)


def test_each_rank_writes_its_half_and_one_process_reads_all(outcome: Outcome) -> None:
    saved = open_checkpoint(outcome.folder / "saved" / "step-00000003")
    names = {path.name for path in saved.path.iterdir()}
    assert names == {"index.json", "rank-00000.safetensors", "rank-00001.safetensors"}
    assert saved.facts == {"step": 3}
    expected = torch.arange(ROWS * WIDTH, dtype=torch.float32) + 3
    assert torch.equal(saved.tensor("param/rows"), expected.view(ROWS, WIDTH))
    assert torch.equal(saved.tensor("ema/rows"), expected.bfloat16())
    assert torch.equal(saved.tensor("step/rows"), torch.tensor(3.0))
    assert torch.equal(saved.read("param/rows", 13, 17), expected[13:17])  # across the two files


def test_collectives_of_the_loop_and_of_saving_do_not_mix(outcome: Outcome) -> None:
    during, saved = outcome.of_both("while_training")
    assert during == {"total": 2.0**50, "unfinished": True}
    assert (saved["file"], saved["facts"]) == ("step-00000001", {"step": 1})


def test_a_save_that_fails_on_one_rank_fails_for_all(outcome: Outcome) -> None:
    failed, left, retried, following = outcome.of_both("full_disk")
    temporary = temporary_folder(outcome.folder / "saved", 2)
    assert failed["failed"] == (
        f"rank 1: File too large: {temporary}/rank-00001.safetensors; earlier checkpoints are intact"
    )
    assert left == {"left": ["step-00000001"]}
    assert [save["file"] for save in (retried, following)] == ["step-00000002", "step-00000003"]
    sizes = [path.stat().st_size for path in (outcome.folder / "saved" / "step-00000003").glob("rank-*")]
    assert following["bytes"] == sum(sizes)
    (failed,) = outcome.of_both("commit_fails")
    assert failed["failed"] == "rank 0: No space left on device: index.json; earlier checkpoints are intact"
    failed, left = outcome.of_both("not_shared")
    assert "rank 0: the part of rank 1 is not in" in failed["failed"]
    assert "use a folder that all machines share" in failed["failed"]
    assert left == {"left": []}
    (failed,) = outcome.results[0]["a_rank_dies"]
    assert failed["failed"].startswith("rank 0 lost the other ranks: ")
    assert "\n" not in failed["failed"]
    assert not (outcome.folder / "saved" / "step-00000006").exists()


def test_saves_have_the_parts_of_their_writers_alone(outcome: Outcome) -> None:
    (saved,) = outcome.of_both("leftovers")
    path = outcome.folder / "saved" / saved["file"]
    assert len(list(path.iterdir())) == 3
    assert open_checkpoint(path).tensor("step/rows") == 5
    assert {path.name for path in (outcome.folder / "saved").glob("step-*")} == {"step-00000003", "step-00000005"}
    (saved,) = outcome.of_both("one_writer")
    path = outcome.folder / "alone" / saved["file"]
    assert [file.name for file in path.glob("rank-*")] == ["rank-00000.safetensors"]
    assert saved["bytes"] == (path / "rank-00000.safetensors").stat().st_size
    (_, saved), other = (results["outsider"] for results in outcome.results)
    assert saved["file"] == "step-00000001"
    assert other == [{"idle": True}]


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
