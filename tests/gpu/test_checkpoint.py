"""On a GPU a save captures the state at that moment, through pinned memory, and loads back to the GPU."""

from pathlib import Path

import torch

from sd3_light.checkpoint.background import CheckpointKeeper, CheckpointSaved
from sd3_light.checkpoint.host_buffers import BLOCK_BYTES, HostBuffers
from sd3_light.checkpoint.reading import open_checkpoint
from sd3_light.engines.protocol import TensorPiece


def test_copies_are_pinned_and_exact_across_blocks() -> None:
    live = torch.randn(BLOCK_BYTES // 4 + 1000, device="cuda")
    count = torch.tensor([3.0])  # optimizers may keep their step count on the host
    buffers = HostBuffers()
    copies = buffers.copy([TensorPiece("step/w", count, 0, ()), TensorPiece("param/w", live, 0, tuple(live.shape))])
    assert len(copies) == 3
    assert all(copy.values.is_pinned() for copy in copies)
    assert len(buffers._blocks) == 2
    assert torch.equal(torch.cat([copy.values for copy in copies[1:]]), live.cpu())


def test_training_can_continue_once_save_returns(tmp_path: Path) -> None:
    live = torch.randn(3000, 1000, device="cuda")
    before = live.cpu()
    keeper = CheckpointKeeper(tmp_path, 0)
    keeper.save(1, [TensorPiece("param/w", live.view(-1), 0, (3000, 1000))], {})
    live.zero_()
    (saved,) = keeper.wait()
    assert isinstance(saved, CheckpointSaved)
    open_checkpoint(saved.path).load_into([TensorPiece("param/w", live.view(-1)[1000:], 1000, (3000, 1000))])
    assert torch.equal(live[1:].cpu(), before[1:])
    assert not live[0].any()
