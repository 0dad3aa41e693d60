"""Verbs for trained models: export, sample, evaluate."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sd3_light.cli.app import Command, ModelFolder, Overrides, PadBlocks, WithEncoders, WithVae, app
from sd3_light.cli.process import echo, given_options, init_process, load_checked, suggest, suggest_for_model
from sd3_light.config import DEFAULT_GUIDANCE
from sd3_light.config.faults import UserError
from sd3_light.config.hub_ids import require_model_path
from sd3_light.runlog import ResultTable, print_table

if TYPE_CHECKING:
    from sd3_light.engines import Launch
    from sd3_light.export.hub import Target


Licence = Annotated[
    str,
    typer.Option("--license", metavar="ID", help="Licence for the card, such as mit; default: that of the base model."),
]


@app.command(cls=Command)
def export(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="The run folder (output_dir); without OUT: an export to upload.")
    ],
    out: Annotated[
        Path | None, typer.Argument(help="New folder, or a new single file if the name ends in .safetensors.")
    ] = None,
    checkpoint: Annotated[Path | None, typer.Option(help="Checkpoint to export; default: the newest.")] = None,
    weights: Annotated[
        str | None, typer.Option(help="`raw`, `ema` or the name of a track; default: `ema` if there is one.")
    ] = None,
    push_to_hub: Annotated[
        str | None,
        typer.Option(
            help="Upload to this Hugging Face repository, USER/NAME, which is created as private if it does not exist."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="With --push-to-hub: show every file and the card, and upload nothing.")
    ] = False,
    public: Annotated[bool, typer.Option("--public", help="Create the repository as public, not private.")] = False,
    licence: Licence = "",
    ema_length: Annotated[
        float | None,
        typer.Option(
            help="Rebuild an average of this length (a fraction of the training) from the power-function tracks."
        ),
    ] = None,
    vae: WithVae = True,
    text_encoders: WithEncoders = False,
    pad_blocks: PadBlocks = True,
) -> None:
    """Export a checkpoint as a diffusers folder or a single file, verified by reloading it."""
    if push_to_hub is None and (dry_run or public or licence):
        raise UserError("--dry-run, --public and --license belong to --push-to-hub; give it, or leave them out")
    if out is None and push_to_hub is None:
        raise UserError("OUT is missing; give the name of a new folder: sd3-light export RUN OUT")
    init_process()
    from sd3_light.core.files import Contents
    from sd3_light.export import verb as stage
    from sd3_light.export.hub import Target, check_push

    target = None if push_to_hub is None else Target(push_to_hub, licence, public)
    if out is not None:
        contents = Contents(vae, text_encoders, pad_blocks)
        checked = None if dry_run else target
        echo(f"wrote and verified {stage.run(run, out, checkpoint, weights, ema_length, checked, contents)}")
        _suggest_drawing(out)
    elif target is not None and not dry_run:
        check_push(target)
    if target is not None:
        _upload(out or run, target, dry_run)


def _upload(source: Path, target: "Target", dry_run: bool) -> None:
    """Upload an export, or only print what an upload does."""
    from sd3_light.export.hub import prepare_upload, push

    upload = prepare_upload(source.resolve(), target)
    if not dry_run:
        echo(f"pushed to {push(upload)}")
        return
    print_table(_table("upload", ("", ""), upload.facts))
    print_table(_table("files", ("file", "size", "on the hub"), upload.rows))
    echo(f"not uploaded: {', '.join(upload.left_out) or 'nothing'}\n\n{upload.card}")
    licence = ("--license", target.licence) if target.licence else ()
    suggest(("export", source, "--push-to-hub", target.repo, *licence, *(("--public",) if target.public else ())))


def _table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> ResultTable:
    table = ResultTable(*headings, title=title, show_header=any(headings))
    for row in rows:
        table.add_row(*row)
    return table


def _suggest_drawing(out: Path) -> None:
    """Print how to draw with an export."""
    if (out / "model_index.json").is_file():
        suggest_for_model(out)
    elif out.is_dir():  # an adapter
        suggest(("sample", out, "a prompt"))


_WITH_FROM = ("again", "lora", "out", "grid", "best", "batch")  # what may be given with an image


@app.command(cls=Command)
def sample(
    context: typer.Context,
    model: ModelFolder,
    prompt: Annotated[list[str] | None, typer.Argument(help="One or more prompts.")] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            help="Text file with one prompt per line, or a .csv with the columns prompt, seed, negative_prompt, width, "
            "height, steps, guidance (all but prompt are optional)."
        ),
    ] = None,
    seed: Annotated[
        list[int] | None, typer.Option(min=0, max=2**63 - 1, help="Seeds; every prompt is drawn with every seed.")
    ] = None,
    out: Annotated[
        Path, typer.Option(help="Folder for 00000.png, ... and grid.png; in a folder with images the numbers continue.")
    ] = Path("samples"),
    steps: Annotated[
        int | None, typer.Option(min=1, max=1000, help="Sampler steps; default: 28, or the model's own (schnell: 4).")
    ] = None,
    guidance: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Guidance scale; 1 or less (Krea 2, Z-Image: 0) disables it. "
            f"Default: {DEFAULT_GUIDANCE:g}, or the model's own (Flux: 3.5, schnell: 1).",
        ),
    ] = None,
    width: Annotated[int, typer.Option(min=0, help="Pixels; 0: the default of the model.")] = 0,
    height: Annotated[int, typer.Option(min=0, help="Pixels; 0: the default of the model.")] = 0,
    batch: Annotated[int, typer.Option(min=1, help="Images per batch; on a CPU, drawn in parallel on its cores.")] = 8,
    negative_prompt: Annotated[str, typer.Option(help="What to steer away from.")] = "",
    sampler: Annotated[str, typer.Option(help="`euler`, `heun` (two model calls per step) or `dpm++`.")] = "euler",
    dtype: Annotated[
        str,
        typer.Option(help="`float32`, or `bfloat16` for the denoiser and text encoders on GPUs; the VAE uses float32."),
    ] = "float32",
    lora: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE[:STRENGTH]", help="A LoRA to apply, or the folder of its export; may be repeated."),
    ] = None,
    grid: Annotated[bool, typer.Option("--grid/--no-grid", help="Also write all images as one grid.")] = True,
    threads: Annotated[
        int, typer.Option(min=1, help="CPU threads per image. Values other than 1 change the last bits of an image.")
    ] = 1,
    best: Annotated[
        bool, typer.Option("--best", help="Of a run: the best export by [metrics] or validation loss, not the newest.")
    ] = False,
    frames: Annotated[
        int, typer.Option(min=0, help="Frames of a clip; 0: the default of the model. Clips are written as 00000.mp4.")
    ] = 0,
    reference: Annotated[
        list[Path] | None, typer.Option(metavar="IMAGE", help="An image that the model sees beside the prompts.")
    ] = None,
    shift: Annotated[
        float | None, typer.Option(help="Constant shift of the times, above 0; default: that of the model's scheduler.")
    ] = None,
    again: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="IMAGE",
            help="Draw a PNG of this command again, with its prompt, seed and settings; pass its LoRAs with --lora.",
        ),
    ] = None,
) -> None:
    """Draw images. The same prompt and seed give the same image as stock diffusers. Under torchrun the processes share
    the work."""
    if file is None:  # simple mistakes are reported before seconds of imports
        if not prompt and again is None:
            raise UserError("no prompt; pass one, or a prompt file with --file")
        require_model_path(model)
    if shift is not None and not 0 < shift < float("inf"):
        raise UserError(f"--shift {shift}: pass a number above 0")
    if again is not None:
        others = [str(part) for part in given_options(context, *_WITH_FROM) if str(part).startswith("--")]
        if prompt or others:
            raise UserError(f"--from has the prompt and the settings; leave {', '.join(others or ['the prompt'])} out")
    launch = init_process()
    from sd3_light.export.chosen import choose_model
    from sd3_light.export.lora_stack import Lora
    from sd3_light.sample import verb as stage
    from sd3_light.sample.again import options_again, read_drawn_image
    from sd3_light.sample.image_requests import PromptRow, read_prompt_rows

    rows = [*map(PromptRow, prompt or []), *(read_prompt_rows(file) if file is not None else [])]
    loras = tuple(map(Lora.parse, lora or []))
    options = stage.SampleOptions(
        steps,
        guidance,
        width,
        height,
        batch,
        negative_prompt,
        sampler,
        dtype,
        loras,
        grid,
        threads,
        best,
        frames,
        shift,
    )
    if again is not None:
        drawn = read_drawn_image(again)
        rows = [drawn.row]
        options = replace(options_again(drawn, choose_model(model, best), loras), grid=grid, best=best)
    if len(options.references) > len(reference or []):
        names = ", ".join(map(str, options.references))
        raise UserError(f"--from {again}: it was drawn with {names}; pass it with --reference")
    options = replace(options, references=tuple(reference or []))
    path = stage.run(model, rows, seed or [0], out, options, launch)
    if launch.is_main:
        echo(f"wrote {path}")
        if any(row.seed is None for row in rows):  # otherwise a new seed changes nothing
            other = ("--seed", str(max(seed or [0]) + 1), "--out", out)
            suggest(("sample", model, *(prompt or ()), *given_options(context, "seed", "out"), *other))


Training = Annotated[
    Path | None,
    typer.Option(
        help="With --against: dataset TOML of the training images, for the rows of those that answer the captions best."
    ),
]


@app.command(cls=Command)
def evaluate(
    models: Annotated[
        list[Path], typer.Argument(metavar="MODEL...", help="Diffusers folders, or run folders: their newest exports.")
    ],
    against: Annotated[
        Path | None, typer.Option(metavar="DATA", help="Dataset TOML of true images to measure the models against.")
    ] = None,
    features: Annotated[
        Path | None,
        typer.Option(
            help="With --against: the folder of `sd3-light parts` (its judge), or a CLIP or vision model in "
            "safetensors, by whose features images are compared."
        ),
    ] = None,
    training: Training = None,
    page: Annotated[
        Path | None, typer.Option(help="With --against: write a page with images beside the true ones to this file.")
    ] = None,
    save: Annotated[
        Path | None, typer.Option(help="With --against: write the images of every row as PNG to this new folder.")
    ] = None,
    prompts: Annotated[
        int | None,
        typer.Option(min=1, help="Number of prompts to draw; default: 96, with --against at most 1000 of DATA."),
    ] = None,
    seen: Annotated[
        bool, typer.Option("--seen", help="Use combinations from training instead of held-out ones.")
    ] = False,
    language: Annotated[str, typer.Option(help="`en`, `zh` or `mixed`.")] = "mixed",
    steps: Annotated[
        int | None, typer.Option(min=1, help="Sampler steps; default: 20, or the model's own, as in `sample`.")
    ] = None,
    guidance: Annotated[
        float | None,
        typer.Option(help=f"Guidance scale; default: {DEFAULT_GUIDANCE:g}, or the model's own, as in `sample`."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of prompts and noise.")] = 0,
    batch: Annotated[int, typer.Option(min=1, help="Images per batch.")] = 16,
    out: Annotated[Path | None, typer.Option(help="Write the scores to this JSON file.")] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="Train TOML: compute the validation loss of its eval_datasets, without drawing images."),
    ] = None,
    lora: Annotated[
        list[str] | None, typer.Option(metavar="FILE[:STRENGTH]", help="A LoRA to score with; may be repeated.")
    ] = None,
    demo: Annotated[
        bool, typer.Option("--demo", help="Score the demo's prompts even if the model was not trained on its images.")
    ] = False,
    set_: Overrides = None,
) -> None:
    """Measure models against true images (--against), compute the validation loss of a config's evaluation sets
    (--config), or score a model of the demo world: do its images show the requested objects, colours, counts and
    relations?"""
    launch = init_process()
    from sd3_light.evaluate import against as measure
    from sd3_light.evaluate import verb as stage
    from sd3_light.evaluate.composition import ScoreOptions
    from sd3_light.export.lora_stack import Lora
    from sd3_light.journeys import score_table

    loras = tuple(map(Lora.parse, lora or []))
    _require_one_measure(models, against, features, config, against_only=(features, training, page, save))
    if against is not None and features is not None:
        options = measure.AgainstOptions(prompts or 1000, steps, guidance, seed, batch, training, loras)
        print_table(measure.run(models, against, features, options, out, page, save).table())
        _report_written(out, page, save)
    elif config is not None:
        if lora:
            raise UserError("--lora does not work with --config; merge it first: sd3-light lora merge")
        _validate(config, set_, models[0], launch, out)
    else:
        if not demo:
            stage.require_demo_world(models[0])
        drawn = ScoreOptions(steps, guidance, seed, batch)
        scores = stage.run(models[0], prompts or 96, not seen, language, drawn, out, loras)
        combinations = "of combinations seen in training" if seen else "of held-out combinations"
        print_table(score_table({str(models[0]): scores}, combinations))
        _report_written(out)


def _require_one_measure(
    models: list[Path],
    against: Path | None,
    features: Path | None,
    config: Path | None,
    against_only: tuple[Path | None, ...],
) -> None:
    """Raise a UserError unless the options of `evaluate` belong to one of its three measures."""
    if against is not None:
        if config is not None:
            raise UserError("--against and --config measure different things; give one of them")
        if features is None:
            raise UserError("--against needs --features: the folder of `sd3-light parts`, or of a CLIP or vision model")
    elif any(against_only):
        raise UserError(
            "--features, --training, --page and --save belong to --against DATA; give it, or leave them out"
        )
    elif len(models) > 1:
        raise UserError("several models are compared with --against DATA; otherwise give one")


def _validate(config: Path, overrides: list[str] | None, model: Path, launch: "Launch", out: Path | None) -> None:
    from sd3_light.journeys import cache_then_validate

    table = cache_then_validate(load_checked(config, overrides), model, launch, out)
    if launch.is_main:
        print_table(table)
        _report_written(out)


def _report_written(*paths: Path | None) -> None:
    for path in filter(None, paths):
        echo(f"wrote {path}")
