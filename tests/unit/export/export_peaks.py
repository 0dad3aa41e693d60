"""Print how far the memory of a process grows while it writes and proves an adapter, and merges it into its base."""

import gc
import json
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import diffusers
import torch
from safetensors.torch import save_file

from sd3_light.assets import DEMO
from sd3_light.config import AdapterConfig
from sd3_light.core.registry import family_named
from sd3_light.export.adapter_folder import write_adapter
from sd3_light.export.export_spec import AdapterSpec
from sd3_light.export.lora import merge
from sd3_light.export.lora_stack import Lora
from sd3_light.model.loading import empty_model

RANK = 4


def anonymous_bytes() -> int:
    """Return the memory of this process without mapped files."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


@contextmanager
def peak() -> Iterator[Callable[[], int]]:
    """Yield a function that returns how many bytes the process has grown inside the block at most."""
    gc.collect()
    start = anonymous_bytes()
    seen = [start]
    ended = threading.Event()

    def watch() -> None:
        while not ended.is_set():
            seen.append(anonymous_bytes())
            time.sleep(0.01)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield lambda: max(seen) - start
    finally:
        ended.set()
        watcher.join()


def write_base(folder: Path) -> dict[str, tuple[int, ...]]:
    """Write the demo's model with a larger denoiser in bf16; return the shapes of its weights."""
    shutil.copytree(DEMO, folder, ignore=shutil.ignore_patterns("sd3_light.json", "pipeline.py", "*.md", "transformer"))
    config = json.loads((DEMO / "transformer" / "config.json").read_text(encoding="utf-8"))
    config |= {"num_attention_heads": 20, "caption_projection_dim": 20 * config["attention_head_dim"], "num_layers": 5}
    denoiser = empty_model(diffusers.SD3Transformer2DModel, config)
    denoiser.save_config(folder / "transformer")
    weights = {
        name: 0.02 * torch.randn(tensor.shape, dtype=torch.bfloat16) if tensor.is_meta else tensor.bfloat16()
        for name, tensor in denoiser.state_dict().items()
    }
    save_file(weights, folder / "transformer" / "diffusion_pytorch_model.safetensors", {"format": "pt"})
    return {name: tuple(tensor.shape) for name, tensor in weights.items()}


def main(work: Path) -> None:
    """Print the bytes as JSON: of the base's weights, and by which the process has grown."""
    family = family_named("sd3")
    shapes = write_base(work / "base")
    config = json.loads((work / "base" / "transformer" / "config.json").read_text(encoding="utf-8"))
    layer = "transformer_blocks.0.attn.to_q"
    rows, columns = shapes[f"{layer}.weight"]
    state = {f"{layer}.lora_A.default.weight": torch.randn(RANK, columns)}
    state |= {f"{layer}.lora_B.default.weight": torch.randn(rows, RANK)}
    spec = AdapterSpec(
        family=family,
        adapter=AdapterConfig(type="lora", rank=RANK, alpha=RANK),
        base=work / "base" / "transformer",
        transformer_config={key: value for key, value in config.items() if not key.startswith("_")},
        encoders=work / "base",
    )
    peaks = {"weights": 2 * sum(torch.Size(shape).numel() for shape in shapes.values())}
    with peak() as grown:
        out = write_adapter(work / "adapter", state, spec)
    peaks["adapter"] = grown()
    with peak() as grown:
        merge(work / "base", [Lora(out / spec.file)], work / "merged")
    peaks["merge"] = grown()
    print(json.dumps(peaks))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
