"""Does a model that sees a reference image learn to edit it? Judged on held-out instructions and scenes of the world.

    python benchmarks/edit.py OUT --seed N [--family sd3|flux_kontext] [--minutes M | --train-steps S]
                                  [--set KEY=VALUE ...]
    python benchmarks/edit.py OUT --join [MORE.json ...]

The pairs are those of `sd3_light/world/edits.py`: an image with up to three objects, an instruction, and the same
image after one change (add, remove, recolour, resize, move, background). `sd3` continues the demo's base, which draws
captions and never saw an instruction or a reference; `flux_kontext` is a small Flux Kontext with random weights, the
demo's VAE and two of its text encoders. The model trains for the given steps or minutes, with the cache built before,
and its export draws an image for each of the held-out edits: the object that changes has a combination of colour and
shape that training never showed. A judge that knows the layout after the edit counts the images in which all that must
change has changed, in which all that must not change has not, and both. The rows:

    true            the image after the edit, through the VAE: the most that is possible
    unchanged       the reference itself, through the VAE
    trained         the model after training
    no reference    the same weights without a reference
    other reference the same weights with the reference of another edit
    shuffled        the same weights with the instruction of another edit

A seed draws the order of training, all noise and random weights; its rows are in OUT/seed-N.json. `--join` prints means
over seeds with standard errors; with one seed they are those of a share among the images.
"""

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import diffusers
import numpy as np
import torch
from common.basics import device_name, parser_of, percent, steps_that_fit, write_json
from PIL import Image

from sd3_light.assets import DEMO
from sd3_light.config import LoadedConfig, load_config
from sd3_light.core.sampling import ImageRequest
from sd3_light.encoding.vae import load_vae
from sd3_light.engines import Launch
from sd3_light.export.open_pipeline import open_pipeline
from sd3_light.journeys import build_caches
from sd3_light.sample.generate import generate, to_images
from sd3_light.train import verb as train
from sd3_light.world.edits import AFTER, BEFORE, draw_edits, judge_edit, write_edits

SIDE = 64
STEPS = 10
_PAIRS_SEED, _HELD_OUT_SEED = 1, 2
_SPEED_STEPS = (10, 40)
_WIDTH = {"num_layers": 2, "num_single_layers": 2, "num_attention_heads": 2, "attention_head_dim": 64}
_TRAIN = """
dataset = "data.toml"
cache_dir = "cache"
lr_scheduler = "cosine"
num_dataloader_workers = 0
checkpoint_every_n_steps = 1000000
save_every_n_steps = 1000000
eval_every_n_steps = 1000000
logging_steps = 50
save_dtype = "float32"
sd3_shard_size = 1024

[model]
dtype = "float32"
enable_uncond_text_dropout = true
reference_dropout_prob = 0.1

[optimizer]
betas = [0.9, 0.99]
weight_decay = 0.01

[ema]
enable = true
decay = 0.99
update_every = 5
"""
_FAMILY_KEYS = {
    "flux_kontext": ("model.text_max_length=16",),
    "sd3": (
        "model.t5_max_length=16",
        "model.references=1",
        'model.uncond_text_dropout="joint"',
        'model.uncond_text="empty"',
    ),
}
_DATA = f"""
size_buckets = [[{SIDE}, {SIDE}]]

[[directory]]
path = "pairs/{AFTER}"
references = ["pairs/{BEFORE}"]
"""


def write_model(folder: Path, seed: int) -> None:
    """Write a small Flux Kontext with random weights and the demo's VAE and text encoders."""
    torch.manual_seed(seed)
    clip, t5 = (json.loads((DEMO / name / "config.json").read_text()) for name in ("text_encoder", "text_encoder_3"))
    widths = {"joint_attention_dim": t5["d_model"], "pooled_projection_dim": clip["hidden_size"]}
    denoiser = diffusers.FluxTransformer2DModel(in_channels=64, axes_dims_rope=(16, 24, 24), **_WIDTH, **widths)
    denoiser.save_pretrained(folder / "transformer")
    parts = {"text_encoder": "text_encoder", "tokenizer": "tokenizer", "vae": "vae", "scheduler": "scheduler"}
    parts |= {"text_encoder_2": "text_encoder_3", "tokenizer_2": "tokenizer_3"}
    for name, source in parts.items():
        if not (folder / name).exists():
            (folder / name).symlink_to(DEMO / source)
    classes = {
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "text_encoder": ["transformers", "CLIPTextModel"],
        "text_encoder_2": ["transformers", "T5EncoderModel"],
        "tokenizer": ["transformers", "CLIPTokenizer"],
        "tokenizer_2": ["transformers", "T5TokenizerFast"],
        "transformer": ["diffusers", "FluxTransformer2DModel"],
        "vae": ["diffusers", "AutoencoderKL"],
        "image_encoder": [None, None],
        "feature_extractor": [None, None],
    }
    index = {"_class_name": "FluxKontextPipeline", "_diffusers_version": diffusers.__version__, **classes}
    (folder / "model_index.json").write_text(json.dumps(index, indent=1), encoding="utf-8")


class Bench:
    """One seed in a folder."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.out: Path = args.out.absolute()
        self.work = self.out / f"seed-{args.seed}"
        self.edits = draw_edits(args.edits, _HELD_OUT_SEED, held_out=True)

    def config(self, steps: int) -> LoadedConfig:
        """Return the config of a run of these steps; the pairs and the model are written first."""
        args = self.args
        if not (self.out / "pairs").is_dir():
            write_edits(self.out / "pairs", draw_edits(args.pairs, _PAIRS_SEED, held_out=False), SIDE)
        self.work.mkdir(parents=True, exist_ok=True)
        path = self.out / f"train-{args.seed}.toml"
        path.write_text(f'output_dir = "seed-{args.seed}/run-{steps}"\n{_TRAIN}', encoding="utf-8")
        (self.out / "data.toml").write_text(_DATA, encoding="utf-8")
        own = (f"seed={args.seed}", f"max_steps={steps}", f"warmup_steps={max(1, steps // 20)}")
        batch = (f"micro_batch_size_per_gpu={args.batch}", f"optimizer.lr={args.lr}")
        model = f'model.diffusers_path="{self.start()}"'
        return load_config(path, [*own, *batch, model, *_FAMILY_KEYS[args.family], *args.set])

    def start(self) -> Path:
        """Return the model before training."""
        model = self.work / "model"
        if self.args.family == "sd3":
            return DEMO
        if not (model / "model_index.json").is_file():
            write_model(model, self.args.seed)
        return model

    def trained(self, steps: int) -> tuple[Path, float]:
        """Train and return the export and the seconds."""
        loaded = self.config(steps)
        build_caches(loaded, Launch())
        began = time.monotonic()
        train.run(loaded, resume=train.Resume(restart=True))
        exports = sorted((loaded.train.output_dir / "exports").glob("step-*"))
        return exports[-1], time.monotonic() - began

    def steps(self) -> int:
        """Return the steps of the run: as given, or as many as fit into the minutes by two short runs."""
        if self.args.minutes is None:
            return int(self.args.train_steps)
        return steps_that_fit(lambda steps: self.trained(steps)[1], _SPEED_STEPS, self.args.minutes)

    def run(self) -> None:
        """Train and score all rows, unless they are there."""
        result = self.out / f"seed-{self.args.seed}.json"
        if result.is_file():
            return
        steps = self.steps()
        model, seconds = self.trained(steps)
        names = [edit.instruction for edit in self.edits]
        references = self.references()
        shifted = [*references[1:], references[0]]
        rows = {
            "true": self.score(self.decoded([edit.after.render(SIDE) for edit in self.edits])),
            "unchanged": self.score(self.decoded([edit.before.render(SIDE) for edit in self.edits])),
            "trained": self.score(self.drawn(model, names, references)),
            "no reference": self.score(self.drawn(model, names, None)),
            "other reference": self.score(self.drawn(model, names, shifted)),
            "shuffled": self.score(self.drawn(model, [*names[1:], names[0]], references)),
        }
        device = device_name()
        facts = {name: getattr(self.args, name) for name in ("seed", "family", "pairs", "batch", "lr", "edits", "set")}
        record = {**facts, "steps": steps, "seconds": round(seconds, 1), "device": device, "rows": rows}
        write_json(result, record)

    def references(self) -> list[Path]:
        """Return the files of the images before the held-out edits."""
        folder = write_edits(self.out / "held_out", self.edits, SIDE) / BEFORE
        return [folder / f"{number:06d}.png" for number in range(len(self.edits))]

    def drawn(self, model: Path, instructions: Sequence[str], references: Sequence[Path] | None) -> list[Image.Image]:
        """Return an image for every edit."""
        pipe, policy = open_pipeline(model, Launch().device())
        first = 100_000 * self.args.seed
        requests = [
            ImageRequest(text, first + number, SIDE, SIDE, references=(references[number],) if references else ())
            for number, text in enumerate(instructions)
        ]
        return generate(pipe, requests, policy, (STEPS, 1.0))

    def decoded(self, images: Sequence[Image.Image]) -> list[Image.Image]:
        """Return images as the VAE shows them."""
        vae: Any = load_vae(DEMO, torch.device("cpu"), torch.float32)
        pixels = torch.from_numpy(np.stack([np.asarray(image) for image in images])).permute(0, 3, 1, 2) / 127.5 - 1
        with torch.no_grad():
            batches = [vae.decode(vae.encode(batch).latent_dist.mode()).sample for batch in pixels.split(64)]
        return to_images((torch.cat(batches).clamp(-1, 1) + 1) / 2)

    def score(self, images: Sequence[Image.Image]) -> dict[str, float]:
        """Return the shares of images: changed, kept and both, and both by kind of edit."""
        verdicts = [judge_edit(image, edit) for image, edit in zip(images, self.edits, strict=True)]
        shares = {name: mean(getattr(verdict, name) for verdict in verdicts) for name in ("changed", "kept", "all")}
        by_kind: dict[str, list[bool]] = defaultdict(list)
        for edit, verdict in zip(self.edits, verdicts, strict=True):
            by_kind[edit.kind].append(verdict.all)
        return shares | {kind: mean(values) for kind, values in by_kind.items()}


def table_of(files: Iterable[Path]) -> str:
    """Return the table of all seeds: means with standard errors, in percent."""
    records = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    columns = list(records[0]["rows"]["true"])
    lines = [f"| row | {' | '.join(columns)} |", f"|---|{'---:|' * len(columns)}"]
    for row in records[0]["rows"]:
        cells = []
        for column in columns:
            shares = [record["rows"][row][column] for record in records]
            count = records[0]["edits"] if column in ("changed", "kept", "all") else records[0]["edits"] / 6
            cells.append(percent(shares, count))
        lines.append(f"| {row} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", f"{len(records)} seed(s), {[record['steps'] for record in records]} steps"])


def main() -> None:
    """Run a seed, or join the results of several."""
    parser = parser_of(__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--family", choices=sorted(_FAMILY_KEYS), default="sd3")
    parser.add_argument("--minutes", type=float, help="of training, in place of --train-steps")
    parser.add_argument("--train-steps", type=int, default=4000)
    parser.add_argument("--pairs", type=int, default=12000)
    parser.add_argument("--edits", type=int, default=384, help="held-out edits that are judged")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--join", type=Path, nargs="*", metavar="MORE")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.join is None:
        Bench(args).run()
    print(table_of([*sorted(args.out.glob("seed-*.json")), *(args.join or ())]))


if __name__ == "__main__":
    main()
