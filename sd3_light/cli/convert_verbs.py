"""The verbs that change a model's form: convert, and lora convert, merge, extract."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sd3_light.cli.app import PadBlocks, WithEncoders, WithVae, app
from sd3_light.cli.process import echo, prepare

if TYPE_CHECKING:
    from sd3_light.stages.lora import LoraFormat

_lora = typer.Typer(help="LoRA files: to another layout, into a full model, or out of two.", no_args_is_help=True)
app.add_typer(_lora, name="lora")

LoraFile = Annotated[Path, typer.Argument(metavar="LORA", help="A LoRA of diffusers, peft, kohya or ComfyUI.")]
NewLora = Annotated[Path, typer.Argument(metavar="OUT", help="New file; its name ends in .safetensors.")]
Layout = Annotated[
    str,
    typer.Option(help="`diffusers` (for ComfyUI too), `kohya`, or `peft` (DoRA, for diffusers only)."),
]
Dtype = Annotated[str, typer.Option(help="`float32`, `bfloat16` or `float16`.")]
PaddedFor = Annotated[
    Path | None, typer.Option(metavar="FILE", help="The padded single file that this LoRA will be used with.")
]


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="A diffusers folder, or a single file.")],
    out: Annotated[Path, typer.Argument(help="New single file (.safetensors) or, from a file, new folder.")],
    base: Annotated[
        Path | None, typer.Option(help="From a file: the diffusers folder that tokenizers and missing parts come from.")
    ] = None,
    vae: WithVae = True,
    text_encoders: WithEncoders = False,
    pad_blocks: PadBlocks = True,
    keep_pads: Annotated[
        bool, typer.Option("--keep-pads", help="From a file: keep identity blocks that were added as padding.")
    ] = False,
) -> None:
    """A diffusers folder as the single file that ComfyUI reads, or such a file as a folder, bit for bit."""
    prepare()
    from sd3_light.export.single_file import Contents
    from sd3_light.stages import convert as stage

    written = stage.run(source, out, Contents(vae, text_encoders, pad_blocks), base, keep_pads)
    for note in written.notes:
        echo(f"note: {note}")
    echo(f"wrote {written.path}")


@_lora.command(name="convert")
def lora_convert(
    lora: LoraFile,
    out: NewLora,
    layout: Layout = "diffusers",
    dtype: Dtype = "float32",
    padded_for: PaddedFor = None,
    trained_on: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The padded single file that another program trained this LoRA on."),
    ] = None,
) -> None:
    """A LoRA in another layout or type; the update of the weights stays the same."""
    prepare()
    from sd3_light.stages import lora as stage

    echo(f"wrote {stage.convert(lora, out, _form(layout, dtype, padded_for), trained_on)}")


@_lora.command(name="merge")
def lora_merge(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A complete diffusers folder.")],
    out: Annotated[Path, typer.Argument(help="New folder.")],
    loras: Annotated[list[str], typer.Argument(metavar="LORA[:STRENGTH]...", help="LoRA files, added in this order.")],
    dtype: Annotated[str | None, typer.Option(help="`float32`, `bfloat16` or `float16`; default: MODEL's own.")] = None,
) -> None:
    """A full model with LoRAs added to its weights: a diffusers folder, proven as every export is."""
    prepare()
    from sd3_light.sampling.lora_stack import Lora
    from sd3_light.stages import lora as stage

    echo(f"wrote and proved {stage.merged(model, list(map(Lora.parse, loras)), out, dtype)}")


@_lora.command(name="extract")
def lora_extract(
    base: Annotated[Path, typer.Argument(metavar="BASE", help="The diffusers folder that fine-tuning started from.")],
    tuned: Annotated[Path, typer.Argument(metavar="TUNED", help="The diffusers folder of the fine-tuned model.")],
    out: NewLora,
    rank: Annotated[int, typer.Option(min=1, help="Rank of the LoRA; more keeps more.")] = 32,
    target: Annotated[
        list[str] | None, typer.Option(help="End of a layer's name, such as attn.to_q; default: every linear layer.")
    ] = None,
    layout: Layout = "diffusers",
    dtype: Dtype = "float32",
    padded_for: PaddedFor = None,
) -> None:
    """The LoRA that is nearest to the difference of two models, and how much of the difference it holds."""
    prepare()
    from sd3_light.stages import lora as stage

    found = stage.extracted(base, tuned, out, rank, target, _form(layout, dtype, padded_for))
    for name, share in sorted(found.left_out.items(), key=lambda item: -item[1])[:5]:
        echo(f"note: no LoRA can hold {name}: {share:.2%} of the difference")
    echo(f"wrote {out}: {len(found.modules)} layers, {found.share:.2%} of the squared difference")


def _form(layout: str, dtype: str, padded_for: Path | None) -> "LoraFormat":
    from sd3_light.stages.lora import LoraFormat

    return LoraFormat(layout, dtype, padded_for)
