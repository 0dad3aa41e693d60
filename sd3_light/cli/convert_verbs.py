"""Verbs that convert models: convert, and lora convert, merge, extract."""

from pathlib import Path
from typing import Annotated

import typer

from sd3_light.cli.app import Command, Group, PadBlocks, WithEncoders, WithVae, app
from sd3_light.cli.process import echo, init_process, suggest, suggest_for_model

_lora = typer.Typer(
    cls=Group, help="Convert LoRA files, merge them into a model, or extract one from two models.", no_args_is_help=True
)
app.add_typer(_lora, name="lora")

NewLora = Annotated[Path, typer.Argument(metavar="OUT", help="New .safetensors file.")]
Layout = Annotated[
    str | None,
    typer.Option(help="`diffusers` (also for ComfyUI; the default), `kohya`, or `peft` (DoRA, diffusers only)."),
]
Dtype = Annotated[str, typer.Option(help="`float32`, `bfloat16` or `float16`.")]
PaddedFor = Annotated[
    Path | None, typer.Option(metavar="FILE", help="The padded single file that the LoRA will be used with.")
]


@app.command(cls=Command)
def convert(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="A diffusers folder, or a single file.")],
    out: Annotated[Path, typer.Argument(help="New single file (.safetensors), or a new folder if SOURCE is a file.")],
    base: Annotated[
        Path | None, typer.Option(help="From a file: diffusers folder that provides the tokenizers and missing parts.")
    ] = None,
    vae: WithVae = True,
    text_encoders: WithEncoders = False,
    pad_blocks: PadBlocks = True,
    keep_pads: Annotated[
        bool, typer.Option("--keep-pads", help="From a file: keep the identity blocks that were added as padding.")
    ] = False,
) -> None:
    """Convert a diffusers folder to the single file that ComfyUI reads, or back, bit for bit."""
    init_process()
    from sd3_light.core.files import Contents
    from sd3_light.export import convert as stage

    written = stage.run(source, out, Contents(vae, text_encoders, pad_blocks), base, keep_pads)
    for note in written.notes:
        echo(f"note: {note}")
    echo(f"wrote {written.path}")
    if written.path.is_dir():
        suggest(("sample", written.path, "a prompt"))


@_lora.command(name="convert", cls=Command)
def lora_convert(
    lora: Annotated[
        Path, typer.Argument(metavar="LORA", help="A LoRA in diffusers, peft, kohya or ComfyUI layout; a LoKr or LoHa.")
    ],
    out: NewLora,
    layout: Layout = None,
    dtype: Dtype = "float32",
    padded_for: PaddedFor = None,
    trained_on: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The padded single file that the LoRA was trained on by another program."),
    ] = None,
) -> None:
    """Convert a LoRA to another layout or dtype; the weight update stays the same."""
    init_process()
    from sd3_light.export import lora as stage

    echo(f"wrote {stage.convert(lora, out, stage.LoraFormat(layout, dtype, padded_for), trained_on)}")


@_lora.command(name="merge", cls=Command)
def lora_merge(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A complete diffusers folder.")],
    out: Annotated[Path, typer.Argument(help="New folder.")],
    loras: Annotated[
        list[str], typer.Argument(metavar="LORA[:STRENGTH]...", help="LoRA, LoKr or LoHa files, added in this order.")
    ],
    dtype: Annotated[
        str | None, typer.Option(help="`float32`, `bfloat16` or `float16`; default: that of MODEL.")
    ] = None,
) -> None:
    """Merge LoRAs into a full model. Writes a diffusers folder, verified like every export."""
    init_process()
    from sd3_light.export import lora as stage
    from sd3_light.export.lora_stack import Lora

    echo(f"wrote and verified {stage.merge(model, list(map(Lora.parse, loras)), out, dtype)}")
    suggest_for_model(out)


@_lora.command(name="extract", cls=Command)
def lora_extract(
    base: Annotated[Path, typer.Argument(metavar="BASE", help="Diffusers folder of the model before fine-tuning.")],
    tuned: Annotated[Path, typer.Argument(metavar="TUNED", help="Diffusers folder of the fine-tuned model.")],
    out: NewLora,
    rank: Annotated[
        int, typer.Option(min=1, help="Rank of the LoRA; a higher rank keeps more of the difference.")
    ] = 32,
    target: Annotated[
        list[str] | None, typer.Option(help="Suffix of layer names, such as attn.to_q; default: every linear layer.")
    ] = None,
    layout: Layout = None,
    dtype: Dtype = "float32",
    padded_for: PaddedFor = None,
) -> None:
    """Extract the LoRA closest to the difference of two models, and report how much of it the LoRA captures."""
    init_process()
    from sd3_light.export import lora as stage

    extracted = stage.extract(base, tuned, out, rank, target, stage.LoraFormat(layout, dtype, padded_for))
    for name, share in sorted(extracted.left_out.items(), key=lambda item: -item[1])[:5]:
        echo(f"note: a LoRA cannot represent {name}: {share:.2%} of the difference")
    echo(f"wrote {out}: {len(extracted.modules)} layers, {extracted.share:.2%} of the squared difference")
    suggest(("sample", base, "a prompt", "--lora", out))
