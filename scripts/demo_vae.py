"""Trains the demo's small VAE on images of the demo world and writes it as a diffusers folder.

    python scripts/demo_vae.py OUT [--seconds 200] [--images 48000] [--hard]

16 latent channels at 1/8 resolution, as in SD3. After training, each latent channel is normalised to mean 0 and
standard deviation 1 under SD3's scale and shift (1.5305, 0.0609) by folding the change into the last convolution of
the encoder and the first of the decoder, because stock decoding supports only one scale and one shift. The decoder is
then trained a little more: zero padding at the borders does not commute with the folded shift. `--hard` trains on the
harder scenes of the benchmarks, at 128 px; the demo's VAE blurs their textures and mixes their colours.
"""

import argparse
import json
import math
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL

from sd3_light.randomness import stream
from sd3_light.world import draw_scene, draw_square_image, render_scene

SCALE, SHIFT = 1.5305, 0.0609  # the constants of SD3, which other programs assume
IMAGE_SIZES = ((64, 64), (80, 48), (48, 80))
HARD_SIDE = 128
NUM_HELD_OUT = 1000  # the last images of each pool measure the quality


def draw_images(job: tuple[int, int, int, tuple[int, int], bool]) -> np.ndarray:
    seed, start, stop, (width, height), hard = job
    images = []
    for index in range(start, stop):
        if hard:
            images.append(np.asarray(draw_square_image(index, seed, HARD_SIDE, hard=True)[0]))
            continue
        rng = stream(seed, "vae-picture", 0, 0, index)
        images.append(np.asarray(render_scene(draw_scene(rng, held_out=False), width, height, rng)))
    return np.stack(images)


def image_pools(seed: int, count: int, hard: bool) -> list[torch.Tensor]:
    """Return one uint8 tensor [n, 3, h, w] per image size, without held-out compositions."""
    pools = []
    with ProcessPoolExecutor() as pool:
        for width, height in ((HARD_SIDE, HARD_SIDE),) if hard else IMAGE_SIZES:
            share = count if hard else count // 2 if width == height else count // 4
            jobs = [(seed, i, min(i + 500, share), (width, height), hard) for i in range(0, share, 500)]
            pools.append(
                torch.from_numpy(np.concatenate(list(pool.map(draw_images, jobs)))).permute(0, 3, 1, 2).contiguous()
            )
    return pools


def build_vae() -> AutoencoderKL:
    return AutoencoderKL(
        in_channels=3, out_channels=3, latent_channels=16, sample_size=64,
        down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(32, 64, 96, 128), layers_per_block=1, norm_num_groups=16,
        use_quant_conv=False, use_post_quant_conv=False, mid_block_add_attention=True,
        scaling_factor=SCALE, shift_factor=SHIFT,
    )  # fmt: skip


def to_pixels(batch: torch.Tensor) -> torch.Tensor:
    return batch.float() / 127.5 - 1


@torch.no_grad()
def channel_statistics(vae: AutoencoderKL, pools: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    means = [vae.encode(to_pixels(part)).latent_dist.mean for pool in pools for part in pool[:2000].split(250)]
    values = torch.cat([mean.transpose(0, 1).flatten(1) for mean in means], dim=1)
    return values.mean(1), values.std(1)


@torch.no_grad()
def fold_normalisation(vae: AutoencoderKL, pools: list[torch.Tensor]) -> None:
    """Give (latent - SHIFT) * SCALE mean 0 and standard deviation 1 in every channel, with unchanged decoded images."""
    mean, std = channel_statistics(vae, pools)
    gain = 1 / (std * SCALE)
    encoder, decoder = vae.encoder.conv_out, vae.decoder.conv_in
    encoder.weight[:16] *= gain[:, None, None, None]
    encoder.bias[:16] = (encoder.bias[:16] - mean) * gain + SHIFT
    encoder.bias[16:] += 2 * gain.log()
    shift_out = (decoder.weight * (mean - SHIFT / gain)[None, :, None, None]).sum((1, 2, 3))
    decoder.bias += shift_out
    decoder.weight /= gain[None, :, None, None]


def psnr(vae: AutoencoderKL, pools: list[torch.Tensor]) -> float:
    errors = []
    with torch.no_grad():
        for pool in pools:
            for part in pool[-NUM_HELD_OUT:].split(250):
                x = to_pixels(part)
                y = vae.decode(vae.encode(x).latent_dist.mean).sample.clamp(-1, 1)
                errors.append((((x - y) / 2) ** 2).mean().item())
    return -10 * math.log10(sum(errors) / len(errors))


def train(
    vae: AutoencoderKL, pools: list[torch.Tensor], seconds: float, batch: int, lr: float, kl_weight: float
) -> int:
    """Train the unfrozen parameters for the given time, with warm-up and a cosine schedule to zero."""
    device = pools[0].device
    parameters = [p for p in vae.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.99), weight_decay=0.0, fused=device.type == "cuda")
    start, step = time.monotonic(), 0
    while (done := (time.monotonic() - start) / seconds) < 1:
        rate = lr * min(1.0, (step + 1) / 200) * 0.5 * (1 + math.cos(math.pi * done))
        for group in optimizer.param_groups:
            group["lr"] = rate
        pool = pools[(0, 1, 0, 2)[step % 4] if len(pools) > 1 else 0]
        index = torch.randint(0, len(pool) - NUM_HELD_OUT, (batch,), device=device)
        x = to_pixels(pool[index])
        if step % 2:
            x = x.flip(3)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            posterior = vae.encode(x).latent_dist
            y = vae.decode(posterior.sample()).sample.float()
        rec = F.l1_loss(y, x) + 2 * F.mse_loss(y, x)
        kl = 0.5 * (posterior.mean.float() ** 2 + posterior.logvar.float().exp() - 1 - posterior.logvar.float()).mean()
        loss = rec + kl_weight * kl
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        step += 1
        if step % 500 == 0:
            print(f"step {step} rec {rec.item():.5f} kl {kl.item():.3f} std {posterior.std.float().mean().item():.3f}")
    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=200)
    parser.add_argument("--images", "--pictures", type=int, default=48000)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--kl", type=float, default=2e-4)
    parser.add_argument("--hard", action="store_true", help="train on harder scenes at 128 px")
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    pools = [pool.to(device) for pool in image_pools(7, args.images, args.hard)]
    vae = build_vae().to(device, memory_format=torch.channels_last)
    print(f"{sum(p.numel() for p in vae.parameters()) / 1e6:.2f} M parameters on {device}")
    steps = train(vae, pools, args.seconds * 0.8, args.batch, 1.5e-3, args.kl)
    print(f"before folding: {psnr(vae, pools):.2f} dB")
    fold_normalisation(vae, pools)
    print(f"after folding: {psnr(vae, pools):.2f} dB")
    vae.encoder.requires_grad_(False)
    steps += train(vae, pools, args.seconds * 0.2, args.batch, 4e-4, 0.0)
    vae = vae.half().float()  # measure the weights as shipped
    mean, std = channel_statistics(vae, pools)
    quality = psnr(vae, pools)
    note = {
        "command": f"python scripts/demo_vae.py OUT --seconds {args.seconds:g} --images {args.images} "
        f"--batch {args.batch} --kl {args.kl:g}{' --hard' if args.hard else ''}",
        "steps": steps,
        "psnr_db": round(quality, 2),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "normalised_mean": [round(((m - SHIFT) * SCALE).item(), 4) for m in mean],
        "normalised_std": [round((s * SCALE).item(), 4) for s in std],
    }  # fmt: skip
    print(json.dumps(note))
    vae.half().save_pretrained(args.out)
    (args.out / "made.json").write_text(json.dumps(note, indent=1) + "\n")


if __name__ == "__main__":
    main()
