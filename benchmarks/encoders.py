"""Speed of each frozen part of SD3, at full size with random weights.

    python benchmarks/encoders.py [--out FOLDER] [--batch_size 32 64] [--caption_tokens 20] [--tiny]

Builds a folder with SD3's shapes (VAE, CLIP-L, CLIP-G, T5-XXL) and random weights, then measures, for `padded` and
`real` text tokens:

    own      inputs and results stay on the device: the speed of the model itself
    parts    as in the cache stage: pixels and token ids come from the host, results go back to it

and prints the share of each part in the time of a sample (one caption per image), and samples per second. Also times
loading and tokenising. `vae_precision.py` compares precisions of the VAE. `--tiny` runs the same code with the demo's
models, also on a CPU. Other benchmarks use `make_folder`.
"""

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from sd3_light.assets import DEMO
from sd3_light.encoding.batching import image_batches
from sd3_light.encoding.vae import raw_moments
from sd3_light.families.sd3.encoders import CaptionTokens, FrozenParts
from sd3_light.families.sd3.text import TEXT_ENCODERS, encode_clip, encode_t5, load_tokenizer

CLIP_LENGTH, CLIP_WORDS, T5_WORDS = 77, 49408, 32128
WORDS = ("red", "green", "blue", "circle", "square", "star", "small", "large", "left", "right")  # one token each
TextTokens = Literal["padded", "real"]

# --- a folder with SD3's shapes --------------------------------------------------------------------


def make_folder(out: Path, device: torch.device, tiny: bool = False) -> Path:
    """Write the frozen parts of SD3 with random weights under ``out`` (text in bf16, VAE in fp32; about 12 GB), with
    the demo's tokenizers; ``tiny`` copies the demo's parts instead. Returns the folder; an existing one is reused."""
    folder = out / ("demo_parts" if tiny else "sd3_parts")
    if (folder / "model_index.json").is_file():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if tiny:
        shutil.copytree(DEMO, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("transformer", "*.md"))
        return folder
    for name in ("tokenizer", "tokenizer_2", "tokenizer_3"):
        _copy_tokenizer(DEMO / name, folder / name, 512 if name == "tokenizer_3" else CLIP_LENGTH)
    shutil.copytree(DEMO / "scheduler", folder / "scheduler")
    _make_vae(device).save_pretrained(folder / "vae")
    for name, build in (("clip_l", _clip_l), ("clip_g", _clip_g), ("t5", _t5_xxl)):
        _save_random(build(load_tokenizer(name, folder, 256).tokenizer), device, folder / TEXT_ENCODERS[name][0])
    shutil.copy(DEMO / "model_index.json", folder)  # last: it marks the folder as complete
    return folder


def _copy_tokenizer(source: Path, target: Path, length: int) -> None:
    shutil.copytree(source, target)
    path = target / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_max_length": length}))


def _make_vae(device: torch.device) -> Any:
    from diffusers import AutoencoderKL

    with device:
        return AutoencoderKL(
            latent_channels=16, block_out_channels=(128, 256, 512, 512), layers_per_block=2, sample_size=1024,
            down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4,
            norm_num_groups=32, use_quant_conv=False, use_post_quant_conv=False,
            scaling_factor=1.5305, shift_factor=0.0609,
        )  # fmt: skip


def _clip_l(tokenizer: Any) -> nn.Module:
    return _clip(tokenizer, 768, 12, 12, "quick_gelu")


def _clip_g(tokenizer: Any) -> nn.Module:
    return _clip(tokenizer, 1280, 32, 20, "gelu")


def _clip(tokenizer: Any, width: int, layers: int, heads: int, activation: str) -> nn.Module:
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection

    assert len(tokenizer) <= CLIP_WORDS
    config = CLIPTextConfig(
        vocab_size=CLIP_WORDS, hidden_size=width, intermediate_size=4 * width, projection_dim=width,
        num_hidden_layers=layers, num_attention_heads=heads, max_position_embeddings=CLIP_LENGTH,
        hidden_act=activation, bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    with torch.device("meta"):
        return CLIPTextModelWithProjection(config)


def _t5_xxl(tokenizer: Any) -> nn.Module:
    from transformers import T5Config, T5EncoderModel

    assert len(tokenizer) <= T5_WORDS
    config = T5Config(
        vocab_size=T5_WORDS, d_model=4096, d_kv=64, num_heads=64, d_ff=10240, num_layers=24,
        feed_forward_proj="gated-gelu", relative_attention_num_buckets=32, relative_attention_max_distance=128,
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id, dropout_rate=0.0, use_cache=False,
        is_encoder_decoder=False,
    )  # fmt: skip
    with torch.device("meta"):
        return T5EncoderModel(config)


def _save_random(model: Any, device: torch.device, folder: Path) -> None:
    """Fill a meta model with random bf16 weights and write it."""
    model = model.to(torch.bfloat16).to_empty(device=device)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms and biases
                parameter.fill_(1.0)
            else:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    model.tie_weights()
    model.cpu().save_pretrained(folder)


# --- measuring -----------------------------------------------------------------------------------


class Clock:
    """Measures the seconds of work on a device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def wait(self) -> None:
        """Wait until the device is idle."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self, work: Callable[[], object], at_least: float) -> float:
        """Return the seconds per call over at least ``at_least`` seconds, after one warm-up call."""
        work()
        self.wait()
        start, elapsed, calls = time.perf_counter(), 0.0, 0
        while elapsed < at_least:
            work()
            self.wait()
            elapsed, calls = time.perf_counter() - start, calls + 1
        return elapsed / calls


def make_captions(count: int, tokens: int) -> list[str]:
    """Return captions with 0.5 to 1.5 times ``tokens`` T5 tokens, end mark included."""
    draw = np.random.default_rng(0)
    lengths = draw.integers(tokens // 2, tokens + (tokens + 1) // 2 + 1, count)
    return [" ".join(draw.choice(WORDS, max(1, length - 1))) for length in lengths]


def own_text_seconds(parts: FrozenParts, name: str, tokens: CaptionTokens, clock: Clock, at_least: float) -> float:
    """Return the seconds of one encoder for all captions in batches, from ids on the device."""
    ids = tokens[name]
    ready = []
    for batch in parts.caption_batches(name, ids.lengths.tolist()):
        lengths = ids.lengths[list(batch.members)]
        padded = np.zeros((len(lengths), batch.length), np.int64)
        for row, number in zip(padded, batch.members, strict=True):
            row[: ids.lengths[number]] = ids.ids[ids.starts[number] : ids.starts[number + 1]]
        real = None if parts.padded else torch.from_numpy(lengths).to(parts.device)
        ready.append((torch.from_numpy(padded).to(parts.device), real))
    model = parts.part(name)

    @torch.inference_mode()
    def work() -> None:
        for padded, real in ready:
            if name == "t5":
                encode_t5(model, padded, real)
            else:
                encode_clip(model, padded)

    return clock.seconds(work, at_least)


def text_seconds(parts: FrozenParts, name: str, tokens: CaptionTokens, clock: Clock, at_least: float) -> float:
    """Return the seconds of one encoder for all captions, from host to host."""

    def work() -> None:
        parts.encode_text(name, tokens[name])
        parts.synchronize()

    return clock.seconds(work, at_least)


def image_seconds(parts: FrozenParts, pixels: np.ndarray[Any, Any], clock: Clock, at_least: float) -> float:
    """Return the seconds of the VAE for all images, from host to host."""

    def work() -> None:
        parts.encode_images(pixels, flip=False)
        parts.synchronize()

    return clock.seconds(work, at_least)


def own_image_seconds(vae: Any, pixels: torch.Tensor, batch_size: int, clock: Clock, at_least: float) -> float:
    """Return the seconds of the VAE for all images, from pixels on the device."""

    @torch.inference_mode()
    def work() -> None:
        for rows in image_batches(len(pixels), pixels.shape[1], pixels.shape[2], batch_size):
            raw_moments(vae, pixels[rows])

    return clock.seconds(work, at_least)


# --- tables ----------------------------------------------------------------------------------


def measure(folder: Path, device: torch.device, kind: TextTokens, batch_size: int, args: argparse.Namespace) -> None:
    """Print the table for one kind of text tokens and one batch size."""
    clock = Clock(device)
    length = 16 if args.tiny else args.t5_max_length
    begin = time.perf_counter()
    with FrozenParts(
        folder, device, text_dtype=torch.bfloat16, t5_max_length=length, text_tokens=kind, batch_size=batch_size,
        vae_dtype="auto", one_at_a_time=False,
    ) as parts:  # fmt: skip
        for name in ("vae", *TEXT_ENCODERS):
            parts.part(name)
        clock.wait()
        loading = time.perf_counter() - begin
        captions = make_captions(args.samples, args.caption_tokens)
        parts.tokenize(captions[:1])
        begin = time.perf_counter()
        tokens = parts.tokenize(captions)
        tokenising = time.perf_counter() - begin
        pixels = np.random.default_rng(0).integers(0, 256, (args.samples, args.side, args.side, 3), dtype=np.uint8)
        ready = torch.from_numpy(pixels).to(device)
        own = {"vae": own_image_seconds(parts.part("vae"), ready, batch_size, clock, args.seconds)}
        used = {"vae": image_seconds(parts, pixels, clock, args.seconds)}
        for name in TEXT_ENCODERS:
            own[name] = own_text_seconds(parts, name, tokens, clock, args.seconds)
            used[name] = text_seconds(parts, name, tokens, clock, args.seconds)
    mean = tokens["t5"].lengths.mean()
    print(f"\n## {kind}, batch size {batch_size}: {args.side} px, T5 rows {mean:.1f} on average")
    print(f"loaded in {loading:.1f} s, {len(captions) / tokenising:.0f} captions/s tokenised", end="")
    print(f", peak {torch.cuda.max_memory_allocated(device) / 2**30:.1f} GiB\n" if device.type == "cuda" else "\n")
    print("| part | own, samples/s | share of time | parts, samples/s | parts / own |\n|---|---:|---:|---:|---:|")
    for name in own:
        print(_row(name, args.samples, own[name], own[name] / sum(own.values()), used[name]))
    print(_row("all", args.samples, sum(own.values()), 1.0, sum(used.values())), flush=True)


def _row(name: str, count: int, own: float, share: float, used: float) -> str:
    return f"| {name} | {count / own:.1f} | {share:.1%} | {count / used:.1f} | {own / used:.1%} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for the models, reused if it exists; default: a temporary one")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="use the demo's small models and images of 64 px")
    parser.add_argument("--samples", type=int, default=512, help="images, each with a caption")
    parser.add_argument("--batch_size", type=int, nargs="+", default=[32])
    parser.add_argument("--caption_tokens", type=int, default=20, help="mean T5 tokens per caption")
    parser.add_argument("--t5_max_length", type=int, default=256)
    parser.add_argument("--side", type=int, default=256, help="side of the square images in pixels")
    parser.add_argument("--seconds", type=float, default=2.0, help="minimum time of each measurement")
    args = parser.parse_args()
    if args.tiny:
        args.side, args.samples, args.seconds = 64, min(args.samples, 32), min(args.seconds, 0.1)
    device = torch.device(args.device)
    with tempfile.TemporaryDirectory() if args.out is None else nullcontext(args.out) as out:
        begin = time.perf_counter()
        folder = make_folder(Path(out), device, args.tiny)
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
        print(f"{name}, torch {torch.__version__}; parts ready in {time.perf_counter() - begin:.1f} s", flush=True)
        for batch_size in args.batch_size:
            for kind in ("real", "padded"):
                measure(folder, device, kind, batch_size, args)


if __name__ == "__main__":
    main()
