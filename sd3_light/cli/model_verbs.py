"""The verbs of a finished model: export, sample, evaluate."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from sd3_light.cli.app import ModelFolder, Overrides, PadBlocks, WithEncoders, WithVae, app
from sd3_light.cli.process import echo, load, prepare
from sd3_light.config.faults import UserError


@app.command()
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run's folder (its output_dir).")],
    out: Annotated[Path, typer.Argument(help="New folder, or a new single file where it ends in .safetensors.")],
    checkpoint: Annotated[Path | None, typer.Option(help="Another checkpoint than the newest.")] = None,
    weights: Annotated[
        str | None, typer.Option(help="`raw`, `ema` or a track's name; default: `ema` where there is one.")
    ] = None,
    push_to_hub: Annotated[str | None, typer.Option(help="Upload to this Hugging Face repository, USER/NAME.")] = None,
    ema_length: Annotated[
        float | None,
        typer.Option(help="Rebuild an average of this length (a share of the training) from the power tracks."),
    ] = None,
    vae: WithVae = True,
    text_encoders: WithEncoders = False,
    pad_blocks: PadBlocks = True,
) -> None:
    """A diffusers folder from a checkpoint, reloaded and compared before it is announced; or a single file of it."""
    prepare()
    from sd3_light.export.single_file import Contents
    from sd3_light.stages import export as stage

    contents = Contents(vae, text_encoders, pad_blocks)
    echo(f"wrote and proved {stage.run(run, out, checkpoint, weights, ema_length, push_to_hub, contents)}")


@app.command()
def sample(
    model: ModelFolder,
    prompt: Annotated[list[str] | None, typer.Argument(help="One or more prompts.")] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            help="A text file with a prompt a line, or a .csv with the columns prompt, seed, negative_prompt, width, "
            "height, steps, guidance (all but prompt may be left out)."
        ),
    ] = None,
    seed: Annotated[
        list[int] | None, typer.Option(min=0, max=2**63 - 1, help="Seeds; each prompt is drawn with each.")
    ] = None,
    out: Annotated[
        Path, typer.Option(help="Folder for 00000.png, ... and grid.png; none of them may be there yet.")
    ] = Path("samples"),
    steps: Annotated[int, typer.Option(min=1, max=1000, help="Sampler steps.")] = 28,
    guidance: Annotated[float, typer.Option(min=0, help="Guidance scale; 1 or less turns it off.")] = 4.0,
    width: Annotated[int, typer.Option(min=0, help="Pixels; 0: the model's own.")] = 0,
    height: Annotated[int, typer.Option(min=0, help="Pixels; 0: the model's own.")] = 0,
    batch: Annotated[int, typer.Option(min=1, help="Pictures at a time; on a CPU, side by side on its cores.")] = 8,
    negative_prompt: Annotated[str, typer.Option(help="What to steer away from.")] = "",
    sampler: Annotated[str, typer.Option(help="`euler`, `heun` (two model calls a step) or `dpm++`.")] = "euler",
    dtype: Annotated[
        str, typer.Option(help="`float32`, or `bfloat16` for denoiser and text encoders on GPUs; the VAE is float32.")
    ] = "float32",
    lora: Annotated[
        list[str] | None, typer.Option(metavar="FILE[:STRENGTH]", help="A LoRA; several act together.")
    ] = None,
    grid: Annotated[bool, typer.Option("--grid/--no-grid", help="All pictures on one sheet, too.")] = True,
    threads: Annotated[
        int, typer.Option(min=1, help="CPU threads for one picture. Other numbers than 1 change its last bits.")
    ] = 1,
) -> None:
    """Draw pictures; the same prompt and seed give the picture that stock diffusers gives. Under torchrun the
    processes share the work."""
    launched = prepare()
    from sd3_light.sampling.image_requests import PromptRow, read_prompt_rows
    from sd3_light.sampling.lora_stack import Lora
    from sd3_light.stages import sample as stage

    rows = [*map(PromptRow, prompt or []), *(read_prompt_rows(file) if file is not None else [])]
    loras = tuple(map(Lora.parse, lora or []))
    wishes = stage.SampleOptions(
        steps, guidance, width, height, batch, negative_prompt, sampler, dtype, loras, grid, threads
    )
    look = stage.run(model, rows, seed or [0], out, wishes, launched)
    if launched.is_main:
        echo(f"look at {look}")


@app.command()
def evaluate(
    model: ModelFolder,
    prompts: Annotated[int, typer.Option(min=1, help="How many prompts to draw and judge.")] = 96,
    seen: Annotated[bool, typer.Option("--seen", help="Combinations that training saw, not held-out ones.")] = False,
    language: Annotated[str, typer.Option(help="`en`, `zh` or `mixed`.")] = "mixed",
    steps: Annotated[int, typer.Option(min=1, help="Sampler steps.")] = 20,
    guidance: Annotated[float, typer.Option(help="Guidance scale.")] = 3.0,
    seed: Annotated[int, typer.Option(help="Seed of prompts and noise.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Write the numbers to this JSON file.")] = None,
    config: Annotated[
        Path | None, typer.Option(help="A train TOML: the validation loss of its eval_datasets, and no pictures.")
    ] = None,
    lora: Annotated[
        list[str] | None, typer.Option(metavar="FILE[:STRENGTH]", help="A LoRA to score with; may be repeated.")
    ] = None,
    set_: Overrides = None,
) -> None:
    """The validation loss of a config's evaluation sets (--config), or a judgement of a model of the demo world: does
    the picture show the objects, colours, counts and relations asked for?"""
    launched = prepare()
    from sd3_light.stages import evaluate as stage

    if config is not None:
        if lora:
            raise UserError("--lora is for pictures; with --config merge it first: sd3-light lora merge")
        from sd3_light.journeys import cache_then_validate

        table = cache_then_validate(load(config, set_), model, launched, out)
        if launched.is_main:
            Console().print(table)
        return
    from sd3_light.journeys import score_table
    from sd3_light.sampling.lora_stack import Lora

    loras = tuple(map(Lora.parse, lora or []))
    result = stage.run(model, prompts, not seen, language, steps, guidance, seed, out=out, loras=loras)
    of = "of combinations seen in training" if seen else "of held-out combinations"
    Console().print(score_table({str(model): result}, of))
