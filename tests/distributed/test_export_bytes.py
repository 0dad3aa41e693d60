"""Exports do not depend on the layout: one process, two replicas, or two shards."""

from pathlib import Path

import torch
from safetensors.torch import load_file

from sd3_light.config import SIZES
from sd3_light.families.sd3.random_weights import new_transformer
from tests.distributed.layouts import run_ranks

SAVE_SCRIPT = """
import sys
from pathlib import Path
import torch, torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.fsdp import fully_shard
from torch.distributed.device_mesh import init_device_mesh
from sd3_light.config import SIZES, TrainConfig
from sd3_light.families.sd3.random_weights import new_transformer
from sd3_light.export import of_run as module

out = Path(sys.argv[1])
dist.init_process_group("gloo")
model = {"diffusers_path": "folder", "train_type": "sd3_light_pretrain", "size": "tiny2"}
table = {"output_dir": "out", "dataset": "data.toml", "max_steps": 1, "model": model}
transformer = new_transformer(SIZES["tiny2"].transformer_config(), 5)
saver = module.Saver.of(TrainConfig.model_validate(table, context={"base": out}), transformer, out / "exports")
mesh = init_device_mesh("cpu", (2,))
for block in transformer.transformer_blocks:
    fully_shard(block, mesh=mesh)
fully_shard(transformer, mesh=mesh)
module.write_folder = lambda path, state, spec, **_: save_file(dict(state), out / f"rank-{dist.get_rank()}.safetensors")
saver.save_full_model("x")
dist.destroy_process_group()
"""


def test_save_full_model_gathers_sharded_weights(tmp_path: Path) -> None:
    """`Saver.save_full_model(name)` on both ranks: rank 0 writes full weights under stock names."""
    (tmp_path / "save.py").write_text(SAVE_SCRIPT)
    run_ranks(2, tmp_path / "save.py", tmp_path)
    assert [path.name for path in tmp_path.glob("rank-*")] == ["rank-0.safetensors"]
    saved, expected = (
        load_file(tmp_path / "rank-0.safetensors"),
        new_transformer(SIZES["tiny2"].transformer_config(), 5),
    )
    assert set(saved) == set(expected.state_dict())
    assert all(torch.equal(saved[name], tensor) for name, tensor in expected.state_dict().items())
