"""Time and host memory of exports at a model's published size, without a GPU.

    python benchmarks/export.py FAMILY OUT [--depth third] [--rows all convert adapter merge] [--work FOLDER] [--toy]

FAMILY, its shape, its random weights in bf16 and `--depth` are those of `real_size.py`. Writes the model, and runs with
a checkpoint that has float32 weights: of all weights (`all`, and `convert` to a single file for SD3), or of a LoRA of
rank 16 (`adapter`, and `merge`). Then runs the commands, each in its own process, and prints a row for each: seconds;
bytes written; `host`, the peak memory of the process and its children without mapped files; `rss`, the peak resident
memory of the largest of these processes, with the pages of mapped files, which the kernel drops when it needs them;
`weights`, those of the denoiser in the dtype in which they are saved; seconds of the proof; and what `check` estimates
of host memory and the proof. OUT/export.json has the rows as soon as they are known. The disk needs eight bytes per
weight, the preparation a gigabyte of memory.
"""

import json
import resource
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from common.basics import parser_of, write_json
from common.models import FAMILIES, SD3, Model, write_model
from common.peaks import run_command
from real_size import PROMPT, captions, write_images

from sd3_light.checkpoint.progress import Progress
from sd3_light.checkpoint.store import commit, reset_folder, temporary_folder, write_part
from sd3_light.config import load_config
from sd3_light.core.registry import family_of, starting_weights
from sd3_light.cost.amount import GIB
from sd3_light.engines.protocol import TensorPiece
from sd3_light.export.model_facts import ModelFacts
from sd3_light.export.trainable import put_adapter
from sd3_light.model.loading import assign_weights

STEP = 10
PART_BYTES = 1 << 30
ROWS = ("all", "convert", "adapter", "merge")
CONFIG = """
output_dir = "{run}"
dataset = "{work}/data.toml"
max_steps = {step}
save_every_n_steps = {step}
[model]
diffusers_path = "{work}/model"
dtype = "bfloat16"
transformer_dtype = "bfloat16"
[ema]
enable = false
"""


@dataclass(frozen=True)
class Row:
    """What a command cost; memory in GiB."""

    name: str
    seconds: float
    written_gb: float
    host: float
    rss: float
    weights: float
    proof_seconds: float | None
    estimated_host: float | None
    estimated_proof_seconds: float | None


def write_run(work: Path, name: str) -> None:
    """Write a run with one checkpoint: of all weights, or of an adapter."""
    run = work / name
    run.mkdir()
    adapter = "" if name == "all" else '[adapter]\ntype = "lora"\nrank = 16\nalpha = 16\n'
    (run / "config.toml").write_text(CONFIG.format(run=run, work=work, step=STEP) + adapter, encoding="utf-8")
    shapes = trained_shapes(run / "config.toml")
    temporary = temporary_folder(run / "checkpoints", STEP)
    reset_folder(temporary)
    groups = list(_groups(shapes))
    for rank, names in enumerate(groups):  # a rank's part is in memory as a whole
        write_part(temporary, rank, [_piece(each, shapes[each]) for each in names])
    facts = {"progress": Progress(step=STEP, samples=64 * STEP).as_dict(), "model": ModelFacts().as_dict()}
    commit(run / "checkpoints", STEP, range(len(groups)), facts)


def trained_shapes(path: Path) -> dict[str, torch.Size]:
    """Return the shapes of the parameters that train by name, without their memory."""
    config = load_config(path).train
    denoiser, _ = family_of(config.model).weights.unread(starting_weights(config.model))
    if config.adapter is not None:
        stand_in = torch.zeros(())
        assign_weights(denoiser, lambda _, weight: stand_in.expand(weight.shape) if weight.is_meta else weight)
        put_adapter(denoiser, config.adapter, config.seed)
    return {key: weight.shape for key, weight in denoiser.named_parameters() if weight.requires_grad}


def _groups(shapes: Mapping[str, torch.Size]) -> Iterator[list[str]]:
    group: list[str] = []
    for name in shapes:
        if group and 4 * sum(shapes[each].numel() for each in [*group, name]) > PART_BYTES:
            yield group
            group = []
        group.append(name)
    yield group


def _piece(name: str, shape: torch.Size) -> TensorPiece:
    scale = shape[-1] ** -0.5 if len(shape) > 1 else 0.02
    return TensorPiece(f"param/{name}", scale * torch.randn(shape.numel()), 0, tuple(shape))


def measure(name: str, words: Sequence[object], out: Path, estimate: Mapping[str, Any], weights: int) -> Row:
    """Run ``sd3-light words``, which writes ``out``; return what it cost."""
    output = out.with_suffix(".txt")
    ran = run_command([str(word) for word in words], output, 3600)
    if ran.exit_code:
        raise SystemExit(f"{name} failed: {output.read_text(encoding='utf-8')}")
    sizes = [path.stat() for path in ([out] if out.is_file() else out.rglob("*")) if path.is_file()]
    written = sum(status.st_size for status in sizes if status.st_nlink == 1)  # hard links take no space
    proof = out / "proof.json"
    return Row(
        name,
        ran.seconds,
        round(written / 1e9, 2),
        round(ran.host / GIB, 2),
        round(ran.resident / GIB, 2),
        round(weights / GIB, 2),
        json.loads(proof.read_text(encoding="utf-8"))["seconds"] if proof.is_file() else None,
        round(estimate["host_bytes"] / GIB, 2) if "host_bytes" in estimate else None,
        estimate.get("seconds"),
    )


def commands(work: Path, family: str, rows: Sequence[str]) -> Iterator[tuple[str, list[object], Path]]:
    """Yield each row with its command and what that writes; what no later command needs is removed by the caller."""
    export, file, lora = work / "export", work / "m.safetensors", work / "lora"
    if "all" in rows:
        yield "all", ["export", work / "all", export], export
        if "convert" in rows and family in SD3:
            yield "convert to a file", ["convert", export, file], file
            yield "convert back", ["convert", file, work / "back", "--base", work / "model"], work / "back"
    if "adapter" in rows:
        yield "adapter", ["export", work / "adapter", lora], lora
        if "merge" in rows:
            yield "merge", ["lora", "merge", work / "model", work / "merged", lora], work / "merged"


def estimated(work: Path, run: str) -> dict[str, Any]:
    """Return what `check` estimates of a run's export."""
    output = work / f"{run}_check.txt"
    run_command(["check", str(work / run / "config.toml"), "--json"], output, 600)
    text = output.read_text(encoding="utf-8")
    figures: dict[str, Any] = json.loads(text[text.index("{") : text.rindex("}") + 1])["export"]
    return figures


def main() -> None:
    """Run the benchmark."""
    parser = parser_of(__doc__)
    parser.add_argument("family", choices=FAMILIES, metavar="FAMILY", help=", ".join(FAMILIES))
    parser.add_argument("out", type=Path, help="folder of the results")
    parser.add_argument("--depth", default="full", help="blocks of the denoiser: full, third, or their number")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--work", type=Path, help="folder for the model and its runs; default: a temporary one")
    parser.add_argument("--toy", action="store_true", help="a tiny model")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    results = []
    with tempfile.TemporaryDirectory(dir=args.work) as name:
        work = Path(name)
        write_images(work / "images", 128)
        (work / "data.toml").write_text('resolutions = [128]\n[[directory]]\npath = "images"\n', encoding="utf-8")
        model = Model(args.family, args.depth, toy=args.toy)
        parameters = write_model(model, work / "model", [*captions(), PROMPT], torch.device("cpu"))
        for run in ("all", "adapter"):
            if run in args.rows:
                write_run(work, run)
        print(f"{parameters:,} parameters; preparation: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10} MiB")
        estimates = {run: estimated(work, run) for run in ("all", "adapter") if run in args.rows}
        for row, words, out in commands(work, args.family, args.rows):
            results.append(measure(row, words, out, estimates.get(row, {}), 2 * parameters))
            print(json.dumps(asdict(results[-1])), flush=True)
            content = {"model": asdict(model), "parameters": parameters, "rows": [asdict(each) for each in results]}
            write_json(args.out / "export.json", content)


if __name__ == "__main__":
    main()
