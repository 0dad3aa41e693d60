"""Two processes write one checkpoint in the background and agree on how it went, whatever befalls one of them."""

import json
import os
import resource
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sd3_light.checkpoint import background
from sd3_light.checkpoint.background import CheckpointFailed, CheckpointKeeper
from sd3_light.checkpoint.store import open_checkpoint, temporary_folder
from sd3_light.engines.protocol import TensorPiece

ROWS, WIDTH = 6, 5
LONGEST_FILE = resource.getrlimit(resource.RLIMIT_FSIZE)


# --- what each of the two processes does (this file is their program) ---------------------------


def halves(rank: int, value: float) -> list[TensorPiece]:
    """Half of the rows of one tensor, all of a replica that rank 1 writes, and a tensor that rank 0 has alone."""
    rows = torch.arange(ROWS * WIDTH, dtype=torch.float32) + value
    count = ROWS * WIDTH // 2
    pieces = [TensorPiece("param/rows", rows[rank * count :][:count], rank * count, (ROWS, WIDTH))]
    pieces.append(TensorPiece("step/rows", torch.tensor([value]), 0, (), writes=rank == 1))
    return [*pieces, TensorPiece("ema/rows", rows.bfloat16(), 0, (ROWS * WIDTH,))] if rank == 0 else pieces


class Worker:
    """One of the two processes; every story saves on both and returns what this one was told."""

    def __init__(self, rank: int, folder: Path) -> None:
        self.rank, self.folder = rank, folder
        patience = timedelta(seconds=60)
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2, timeout=patience)
        self.group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=patience)
        self.keeper = CheckpointKeeper(folder / "saved", rank, 2, self.group, keep_last=2)

    def tell(self, keeper: CheckpointKeeper) -> list[dict[str, Any]]:
        found = []
        for one in keeper.wait():
            said = (
                {"failed": one.reason}
                if isinstance(one, CheckpointFailed)
                else {"file": one.path.name, "bytes": one.bytes}
            )
            found.append({"step": one.step, **said, "facts": one.facts})
        return found

    def save(self, step: int, keeper: CheckpointKeeper | None = None) -> list[dict[str, Any]]:
        keeper = keeper or self.keeper
        keeper.save(step, halves(self.rank, step), {"step": step})
        return self.tell(keeper)

    def while_training(self) -> list[dict[str, Any]]:
        """Rank 1's part comes late: rank 0's thread waits for it in a collective while both main threads use theirs."""
        go_on, write = threading.Event(), background.write_part
        if self.rank == 1:
            background.write_part = lambda *given: go_on.wait(60) and write(*given)  # type: ignore[assignment]
        self.keeper.save(1, halves(self.rank, 1), {"step": 1})
        total = torch.ones(1)
        for _ in range(50):
            dist.all_reduce(total)
        unfinished = not self.keeper.has_results()
        dist.barrier()
        go_on.set()
        background.write_part = write
        return [{"total": total.item(), "unfinished": unfinished}, *self.tell(self.keeper)]

    def full_disk(self) -> list[dict[str, Any]]:
        """Rank 1 may write no file of more than a few bytes; then there is room again."""
        if self.rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (64, LONGEST_FILE[1]))
        told = self.save(2)
        resource.setrlimit(resource.RLIMIT_FSIZE, LONGEST_FILE)
        dist.barrier()
        told.append({"left": sorted(path.name for path in (self.folder / "saved").iterdir())})
        dist.barrier()
        return [*told, *self.save(2), *self.save(3)]

    def commit_fails(self) -> list[dict[str, Any]]:
        """The rank that has the last word cannot speak it."""
        real = background.commit

        def commit(*_: Any) -> Path:
            raise OSError(28, "No space left on device", "index.json")

        background.commit = commit
        told = self.save(4)
        background.commit = real
        return told

    def leftovers(self) -> list[dict[str, Any]]:
        """A killed run of more ranks left parts of the same step."""
        temporary = temporary_folder(self.folder / "saved", 5)
        if self.rank == 0:
            temporary.mkdir()
            for name in ("rank-00001.json", "rank-00001.safetensors", "rank-00007.safetensors", "index.json"):
                (temporary / name).write_text("{}")
        dist.barrier()
        return self.save(5)

    def one_writer(self) -> list[dict[str, Any]]:
        """Rank 1 writes nothing and is told all the same."""
        keeper = CheckpointKeeper(self.folder / "alone", self.rank, 1, self.group)
        keeper.save(1, halves(0, 1)[2:], {})
        return self.tell(keeper)

    def outsider(self) -> list[dict[str, Any]]:
        """Rank 1 is not in the group: it copies nothing and goes its way."""
        group: dist.ProcessGroup = dist.new_group([0], backend="gloo")
        keeper = CheckpointKeeper(self.folder / "outsider", self.rank, 1, group)
        stall = keeper.save(1, halves(0, 1)[2:], {})
        return [{"still": stall == 0}, *self.tell(keeper)]

    def not_shared(self) -> list[dict[str, Any]]:
        """Each machine has a folder of its own."""
        keeper = CheckpointKeeper(self.folder / f"machine{self.rank}", self.rank, 2, self.group)
        told = self.save(1, keeper)
        return [*told, {"left": [path.name for path in keeper.folder.iterdir()]}]

    def a_rank_dies(self) -> list[dict[str, Any]]:
        """In the middle of a save."""
        if self.rank == 1:
            background.write_part = lambda *_: os._exit(7)  # type: ignore[assignment]
        return self.save(6)


STORIES = [
    "while_training",
    "full_disk",
    "commit_fails",
    "leftovers",
    "one_writer",
    "outsider",
    "not_shared",
    "a_rank_dies",
]


def main(rank: int, folder: Path) -> None:
    worker = Worker(rank, folder)
    told = {}
    for story in STORIES:
        told[story] = getattr(worker, story)()
        (folder / f"told{rank}.json").write_text(json.dumps(told))
    os._exit(0)  # the process group's own end would wait for the dead rank


# --- what came of it ---------------------------------------------------------------------------


class Outcome:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.told = [json.loads((folder / f"told{rank}.json").read_text()) for rank in (0, 1)]

    def both(self, story: str) -> list[dict[str, Any]]:
        """What both ranks were told, which is the same."""
        ours, theirs = (told[story] for told in self.told)
        assert ours == theirs
        return list(ours)


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    folder = tmp_path_factory.mktemp("ranks")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    processes = [
        subprocess.Popen([sys.executable, __file__, str(rank), str(folder)], env=environment, stderr=subprocess.PIPE)
        for rank in (0, 1)
    ]
    said = [process.communicate(timeout=120)[1].decode() for process in processes]
    assert [process.returncode for process in processes] == [0, 7], "\n".join(said)
    return Outcome(folder)


def test_each_writes_its_half_and_one_process_reads_all(outcome: Outcome) -> None:
    saved = open_checkpoint(outcome.folder / "saved" / "step-00000003")
    assert sorted(path.name for path in saved.path.iterdir()) == [
        "index.json",
        "rank-00000.safetensors",
        "rank-00001.safetensors",
    ]
    assert saved.facts == {"step": 3}
    whole = torch.arange(ROWS * WIDTH, dtype=torch.float32) + 3
    assert torch.equal(saved.tensor("param/rows"), whole.view(ROWS, WIDTH))
    assert torch.equal(saved.tensor("ema/rows"), whole.bfloat16())
    assert torch.equal(saved.tensor("step/rows"), torch.tensor(3.0))
    assert torch.equal(saved.read("param/rows", 13, 17), whole[13:17])  # across the two files


def test_collectives_of_the_loop_and_of_saving_do_not_meet(outcome: Outcome) -> None:
    during, saved = outcome.both("while_training")
    assert during == {"total": 2.0**50, "unfinished": True}
    assert (saved["file"], saved["facts"]) == ("step-00000001", {"step": 1})


def test_a_rank_without_room_fails_the_save_for_all_and_the_next_works(outcome: Outcome) -> None:
    failed, left, again, next_one = outcome.both("full_disk")
    temporary = temporary_folder(outcome.folder / "saved", 2)
    assert failed["failed"] == (
        f"rank 1: File too large: {temporary}/rank-00001.safetensors; earlier checkpoints are intact"
    )
    assert left == {"left": ["step-00000001"]}
    assert [one["file"] for one in (again, next_one)] == ["step-00000002", "step-00000003"]
    sizes = [path.stat().st_size for path in (outcome.folder / "saved" / "step-00000003").glob("rank-*")]
    assert next_one["bytes"] == sum(sizes)


def test_a_failing_commit_is_told_to_all(outcome: Outcome) -> None:
    (failed,) = outcome.both("commit_fails")
    assert failed["failed"] == "rank 0: No space left on device: index.json; earlier checkpoints are intact"


def test_leftovers_of_a_killed_run_do_not_get_into_the_checkpoint(outcome: Outcome) -> None:
    (saved,) = outcome.both("leftovers")
    path = outcome.folder / "saved" / saved["file"]
    assert len(list(path.iterdir())) == 3
    assert open_checkpoint(path).tensor("step/rows") == 5


def test_only_the_newest_are_kept(outcome: Outcome) -> None:
    assert {path.name for path in (outcome.folder / "saved").glob("step-*")} == {"step-00000003", "step-00000005"}


def test_a_rank_that_writes_nothing_is_told(outcome: Outcome) -> None:
    (saved,) = outcome.both("one_writer")
    path = outcome.folder / "alone" / saved["file"]
    assert [file.name for file in path.glob("rank-*")] == ["rank-00000.safetensors"]
    assert saved["bytes"] == (path / "rank-00000.safetensors").stat().st_size


def test_a_rank_outside_the_group_has_nothing_to_do(outcome: Outcome) -> None:
    (_, saved), theirs = (told["outsider"] for told in outcome.told)
    assert saved["file"] == "step-00000001"
    assert theirs == [{"still": True}]


def test_a_folder_that_machines_do_not_share_is_named(outcome: Outcome) -> None:
    failed, left = outcome.both("not_shared")
    assert "rank 0: rank 1's part is not in" in failed["failed"]
    assert "one that all machines share" in failed["failed"]
    assert left == {"left": []}


def test_a_rank_that_dies_fails_the_save_of_the_other(outcome: Outcome) -> None:
    (failed,) = outcome.told[0]["a_rank_dies"]
    assert failed["failed"].startswith("rank 0 lost the other ranks: ")
    assert "\n" not in failed["failed"]
    assert not (outcome.folder / "saved" / "step-00000006").exists()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
