"""The verb `new`, which asks for what is missing on a terminal."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sd3_light.cli.app import Command, app
from sd3_light.cli.process import command_line, echo, suggest, torchrun_line
from sd3_light.config.base import is_url
from sd3_light.config.faults import UserError
from sd3_light.runlog import info
from sd3_light.system import Gpu, visible_gpus

if TYPE_CHECKING:
    from sd3_light.new.verb import NewProject


@app.command(cls=Command)
def new(
    kind: Annotated[
        str | None,
        typer.Argument(
            metavar="KIND",
            help="`lora`, `edit`, `finetune`, `reward`, `pretrain`, `icons` or `distill`.",
            show_default=False,
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="Captioned images; also s3://BUCKET/FOLDER or hf://datasets/OWNER/NAME."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER_OR_ID",
            help="Model folder, or a model on the Hugging Face hub (default: SD3.5 medium, which is downloaded; for "
            "`pretrain` the encoders of SD3 medium; `icons` needs one: the folder of `sd3-light parts`).",
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of the new files.")] = Path(),
    resolution: Annotated[
        int | None, typer.Option(min=16, help="Side of the training images in pixels (default: by kind and model).")
    ] = None,
    gpu_memory: Annotated[
        float | None,
        typer.Option(metavar="GIB", min=1, help="Plan for one GPU of this memory (default: the GPUs of this machine)."),
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Plan for this many GPUs: they share the batch (default: all of this machine)."
        ),
    ] = None,
    validation: Annotated[
        bool,
        typer.Option("--validation/--no-validation", help="Hold out a part of the images for the validation loss."),
    ] = True,
) -> None:
    """Write the train and dataset TOMLs of a project, with a batch size that fits the GPU. Asks for KIND and data on a
    terminal."""
    from sd3_light.new import verb as stage

    kind, data, model = _ask(kind, data, model)
    project = stage.run(kind, data, model, out, resolution, _planned_gpus(gpus, gpu_memory), validation)
    _report(project)
    train = ("train", project.train_toml)
    suggest(("check", project.train_toml), train, ("sample", project.run, "a prompt"))
    if project.memory.processes > 1:
        count = project.memory.processes
        info(f"on all {count} GPUs: {torchrun_line(count, project.train_toml)}")


def _planned_gpus(count: int | None, gib: float | None) -> tuple[Gpu, ...]:
    """Return the GPUs to plan for: ``count`` of ``gib``, or like those of this machine."""
    visible = [Gpu("the GPU", int(gib * 2**30))] if gib is not None else visible_gpus()
    if count is None:
        return tuple(visible)
    if not visible:
        raise UserError(f"--gpus {count}: no GPU is visible; give the memory of each with --gpu-memory GIB")
    smallest = min(visible, key=lambda gpu: gpu.total_bytes or 0)
    return (smallest,) * count


def is_terminal() -> bool:
    """Return whether questions can be answered."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def _ask(kind: str | None, data: str | None, model: str | None) -> tuple[str, str, str | None]:
    """Return the three values; asks for those that are missing on a terminal."""
    from sd3_light.new.kinds import KINDS

    if kind is not None and (problem := _kind_problem(kind)):
        raise UserError(problem)
    if kind is not None and data is not None:
        return kind, data, model
    if not is_terminal():
        missing = "KIND" if kind is None else "--data FOLDER"
        example = command_line("new", kind or "lora", "--data", "images")
        raise UserError(f"{missing} is missing (not a terminal, so it cannot be asked for); for example: {example}")
    if kind is None:
        for name, record in KINDS.items():
            typer.echo(f"  {name:<9} {record.description}")
        kind = _prompt("What do you want to train?", _kind_problem, default="lora")
    data = data or _prompt("Folder of captioned images", _data_problem)
    default = None if kind == "icons" else KINDS[kind].model  # icons need trained parts
    return kind, data, model or typer.prompt("Model folder, or a model on the hub", default=default)


def _prompt(question: str, problem_of: Callable[[str], str | None], default: str | None = None) -> str:
    """Ask until the answer has no problem."""

    def accept(answer: str) -> str:
        if problem := problem_of(answer):
            raise typer.BadParameter(problem)
        return answer

    answer: str = typer.prompt(question, default=default, value_proc=accept)
    return answer


def _kind_problem(kind: str) -> str | None:
    from sd3_light.new.kinds import KINDS

    return None if kind in KINDS else f"unknown kind {kind!r}; the kinds are {', '.join(KINDS)}"


def _data_problem(data: str) -> str | None:
    exists = is_url(data) or Path(data).expanduser().exists()
    return None if exists else f"no such file or folder: {data}"


def _report(project: "NewProject") -> None:
    from sd3_light.new.summary import project_lines, size_line

    echo(f"wrote {project.train_toml} and {project.data_toml}: {size_line(project)}")
    for line in project_lines(project):
        info(line)
