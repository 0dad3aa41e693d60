"""The verb `parts`."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sd3_light.cli.app import Command, app
from sd3_light.cli.process import command_line, continued_by, echo, given_options, init_process, suggest
from sd3_light.config.load import FOLDER_RESOLUTION
from sd3_light.runlog import info

if TYPE_CHECKING:
    from sd3_light.config.base import DataLocation
    from sd3_light.parts.verb import PartsResult


@app.command(cls=Command)
def parts(
    context: typer.Context,
    data: Annotated[
        Path, typer.Argument(metavar="DATA", help="Folder of captioned images (used at 128 px), or a dataset TOML.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder for the parts; an unfinished one is continued.")],
    only: Annotated[str | None, typer.Option(help="Train one part: `vae`, `text` or `judge`.")] = None,
    vae_size: Annotated[str, typer.Option(help="`tiny`, `small` or `medium`.")] = "small",
    text_size: Annotated[str, typer.Option(help="`tiny`, `small` or `medium`.")] = "small",
    vae_minutes: Annotated[float, typer.Option(min=0.01, help="Training time of the VAE, over all runs.")] = 5,
    text_minutes: Annotated[float, typer.Option(min=0.01, help="Training time of the text encoders.")] = 3,
    vae_steps: Annotated[int | None, typer.Option(min=1, help="Steps of the VAE, instead of a time.")] = None,
    text_steps: Annotated[int | None, typer.Option(min=1, help="Steps of the text encoders, instead.")] = None,
    judge_share: Annotated[
        float,
        typer.Option(
            min=0, max=0.9, help="Train the judge apart, on this share of the captions, which the encoders do not see."
        ),
    ] = 0.0,
    judge_minutes: Annotated[float, typer.Option(min=0.01, help="Training time of such a judge.")] = 3,
    judge_steps: Annotated[int | None, typer.Option(min=1, help="Steps of such a judge, instead.")] = None,
    stop_after: Annotated[
        float | None, typer.Option(min=0.01, help="Save and exit after this many minutes; run again to continue.")
    ] = None,
    init: Annotated[
        Path | None, typer.Option(help="Continue from this VAE (its folder, or a diffusers folder) instead of random.")
    ] = None,
    decoder_only: Annotated[
        bool, typer.Option("--decoder-only", help="With --init: keep the encoder, so that the latents stay the same.")
    ] = False,
    channels: Annotated[int, typer.Option(min=1, max=64, help="Latent channels of a new VAE.")] = 16,
    vae_batch: Annotated[
        int | None, typer.Option(min=2, help="Images per step of the VAE (default: 128, on a CPU what it can do).")
    ] = None,
    text_batch: Annotated[
        int | None, typer.Option(min=2, help="Pairs per step of the text encoders (default: 512, on a CPU 64).")
    ] = None,
    vae_lr: Annotated[float, typer.Option(min=0, help="Learning rate of the VAE.")] = 1e-3,
    text_lr: Annotated[float, typer.Option(min=0, help="Learning rate of the text encoders.")] = 5e-4,
    kl: Annotated[float, typer.Option(min=0, help="Weight of the KL term: more gives smoother latents.")] = 2e-4,
    adversarial: Annotated[float, typer.Option(min=0, help="Weight of the adversarial term; 0: none.")] = 0.0,
    equivariance: Annotated[
        float, typer.Option(min=0, help="Weight of the error of scaled and turned latents (EQ-VAE); 0: none.")
    ] = 0.0,
    random_text: Annotated[
        bool, typer.Option("--random-text", help="Leave the text encoders random; no judge is written.")
    ] = False,
    vocabulary: Annotated[int, typer.Option(min=600, help="Tokens of each tokenizer, at most.")] = 8192,
    max_images: Annotated[int, typer.Option(min=1, help="Images to load at most; they are held in memory.")] = 200_000,
    evaluate_every: Annotated[int, typer.Option(min=1, help="Steps between measurements.")] = 500,
    plateau: Annotated[int, typer.Option(min=0, help="End when this many measurements bring no gain; 0: never.")] = 6,
    workers: Annotated[int | None, typer.Option(min=0, help="Processes that decode images.")] = None,
    compile_: Annotated[bool, typer.Option("--compile/--no-compile", help="Use torch.compile on GPUs.")] = True,
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights and batches.")] = 0,
) -> None:
    """Train a VAE, tokenizers and text encoders on your own images, and write an SD3 folder for `diffusers_path`."""
    init_process()
    from sd3_light.parts import verb as stage
    from sd3_light.parts.contrastive import TextOptions
    from sd3_light.parts.fit import FitOptions
    from sd3_light.parts.vae import VaeOptions

    common = {"evaluate_every": evaluate_every, "plateau": plateau}
    text_fit = FitOptions(text_steps, text_minutes, text_lr, weight_decay=0.05, min_gain=0.005, **common)
    options = stage.PartsOptions(
        only=only,  # type: ignore[arg-type]  # checked below
        vae_size=vae_size,
        text_size=text_size,
        channels=channels,
        random_text=random_text,
        init=init,
        vae=VaeOptions(
            vae_batch,
            seed,
            kl=kl,
            adversarial=adversarial,
            equivariance=equivariance,
            decoder_only=decoder_only,
            compile=compile_,
        ),
        text=TextOptions(text_batch, seed, compile_),
        vae_fit=FitOptions(vae_steps, vae_minutes, vae_lr, **common),
        text_fit=text_fit,
        judge_share=judge_share,
        judge_fit=replace(text_fit, steps=judge_steps, minutes=judge_minutes),
        vocabulary=vocabulary,
        max_images=max_images,
        workers=workers,
        stop_after=stop_after,
    )
    stage.check_options(options)
    with continued_by(command_line("parts", data, out, *given_options(context))):
        result = stage.run(data, out, options)
    if result.trained:
        echo(f"wrote {out}: {' and '.join(result.trained)}")
    else:
        subject = out if only is None else f"the {only} part of {out}"
        further = command_line("parts", data, "NEW", "--init", out)
        info(f"{subject} is complete: nothing was trained; its VAE is trained further by: {further}")
    if result.missing:
        missing = ("--only", result.missing[0])
        suggest(("parts", data, out, *given_options(context, "only"), *missing))
        return
    _suggest_training(data, out, result)


def _suggest_training(data: Path, out: Path, result: "PartsResult") -> None:
    """Print how to train a denoiser on the parts."""
    from sd3_light.model.folder import tokenizer_length

    paths = [directory.path for directory in result.dataset.directories]
    first, *others = _joined(paths)
    size = [] if result.resolution == FOLDER_RESOLUTION else ["--resolution", str(result.resolution)]
    suggest(("new", "icons", "--data", first, "--model", out, *size))
    if others:
        info(f"  then add the other directories of {data} to icons_data.toml")
    keys = f'train_type = "sd3_light_pretrain", diffusers_path = "{out}"'
    length = tokenizer_length(out / "tokenizer_3")
    info(f"or in another train TOML: [model] {keys}, t5_max_length = {length}, and [model.shape]")


def _joined(paths: "list[DataLocation]") -> "list[DataLocation]":
    """Return the parent folder in place of all its subfolders."""
    parent = Path(paths[0]).parent
    subfolders = [str(child) for child in parent.iterdir() if child.is_dir()] if parent.is_dir() else []
    return [parent] if len(paths) > 1 and sorted(map(str, paths)) == sorted(subfolders) else paths
