"""A survey as one screen for people: every number with its formula beside it."""

from collections.abc import Mapping
from itertools import pairwise

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from sd3_light.budget.training_setup import TrainingSetup
from sd3_light.data.preprocess import REASONS
from sd3_light.model.text_shape import TextShape
from sd3_light.stages.check.estimate import DatasetEstimate, RunEstimate

MAX_ROWS = 12
"""Buckets shown of a data set; the rest are summed up in one line."""


def render(estimate: RunEstimate) -> RenderableType:
    """The survey as tables for a rich console."""
    parts: list[RenderableType] = [Text(f"{estimate.path}: no faults. This is what will happen."), _numbers(estimate)]
    for data in (estimate.data, *estimate.evals):
        parts.append(_buckets(data))
        parts += [Text(f"  rejected {line}") for line in _rejects(data.rejects)]
    return Group(*parts)


def size_text(count: int) -> str:
    """Bytes in the unit that gives three or four digits."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.3g} {unit}" if unit != "B" else f"{count} B"
        value /= 1024
    return f"{value:,.3g} TiB" if value < 1000 else f"{value:,.0f} TiB"


def flops_text(count: int) -> str:
    """FLOPs in the unit that gives three or four digits."""
    value = float(count)
    for unit in ("", "k", "M", "G", "T", "P", "E"):
        if value < 1000:
            return f"{value:.3g} {unit}FLOP"
        value /= 1000
    return f"{value:,.3g} ZFLOP"


def _numbers(estimate: RunEstimate) -> Table:
    table = Table(box=None, padding=(0, 1), show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    for name, number, formula in _lines(estimate):
        table.add_row(Text(name), Text(number), Text(formula))
    return table


def _lines(estimate: RunEstimate) -> list[tuple[str, str, str]]:
    size, text, gpu, data = estimate.start.size, estimate.text, estimate.gpu, estimate.data
    images = sorted({row.tokens.image for row in data.rows})
    shape = f"{size.name}: {size.num_layers} layers, {size.num_heads} heads·{size.head_dim}"
    case, replicas = estimate.case, estimate.case.replicas
    who = "pipeline" if case.stages > 1 else "GPU"
    batch = f"micro-batch·{estimate.accumulation} accumulation·{replicas} {who}{'s' if replicas > 1 else ''}"
    batches = sorted({row.global_batch for row in data.rows})
    flops = max(data.rows, key=lambda row: row.step_flops.value, default=None)
    lines = [
        ("weights start", estimate.start.kind, estimate.start.sentence),
        ("parameters", f"{estimate.parameters:,}", shape),
        ("text tokens", f"{text.tokens}", _text_tokens(text)),
        ("image tokens", _span(images), "width/16·height/16, by bucket"),
        ("processes", f"{case.world:,}", layout_text(case)),
        ("blocks on GPUs", *_blocks(estimate.stock)),
        ("samples a step", _span(batches), batch),
        ("steps an epoch", f"{estimate.steps_per_epoch:,}", "sum over buckets of samples·repeats / samples a step, up"),
        ("steps", f"{estimate.total_steps:,}", "max_steps or epochs·steps an epoch, whichever ends first"),
    ]
    if estimate.adapter is not None:
        share = f"{estimate.adapter / estimate.parameters:.2%} of the parameters train; the rest is frozen"
        lines.insert(2, ("adapter", f"{estimate.adapter:,}", share))
    if flops is not None:
        lines.append(
            ("FLOPs a step", flops_text(flops.step_flops.value), f"{flops.bucket}: {flops.step_flops.formula}")
        )
    lines.append(("FLOPs, all steps", flops_text(estimate.run_flops.value), estimate.run_flops.formula))
    for one in (data, *estimate.evals):
        lines.append((f"cache {one.name}", size_text(one.cache.value), f"{one.cache.formula}; in {one.cache_dir}"))
    stage = f" on stage {gpu.stage}, which takes most" if case.stages > 1 else ""
    return [
        *lines,
        ("host memory a GPU", size_text(estimate.host.value), f"{estimate.host.formula}; interpreters not counted"),
        ("GPU memory (estimate)", size_text(gpu.total), f"state + step + context, of the costliest bucket{stage}"),
        ("  state", size_text(gpu.state.value), gpu.state.formula),
        ("  step", size_text(gpu.step.value), f"{text.at_most}{gpu.step.formula}"),
        ("  context", size_text(gpu.context.value), gpu.context.formula),
    ]


def layout_text(case: TrainingSetup) -> str:
    """Engine and layout in words, with the command's own."""
    if not case.deepspeed:
        if case.world == 1:
            return "torch's engine; --processes N and --deepspeed show other launches"
        cut = "weights and all state cut over all" if case.shards > 1 else "all weights on each"
        return f'torch\'s engine, parallel = "{case.parallel}": {cut}'
    words = f"DeepSpeed (--deepspeed), ZeRO-{case.zero_stage}"
    if case.zero_stage != case.zero:
        words += f" (zero_stage = {case.zero} has nobody to share with)"
    if case.stages == 1:
        return words
    parts = ", ".join(f"{start} to {stop - 1}" for start, stop in pairwise(case.layer_bounds))
    pipelines = f"{case.replicas} pipelines" if case.replicas > 1 else "one pipeline"
    return f"{words}, {pipelines} of {case.stages} stages: layers {parts}"


def _blocks(stock: str | None) -> tuple[str, str]:
    if stock is None:
        return "fast kernels", "where Triton is installed, else stock"
    return "stock", f"because {stock}"


def _text_tokens(text: TextShape) -> str:
    tokens = f"{text.at_most}CLIP {text.clip_tokens} + T5 {text.t5_tokens}"
    if text.real:
        return f"{tokens}; real tokens: memory, cache and FLOPs below are those of the longest captions"
    return f"{tokens}, padded"


def _span(numbers: list[int]) -> str:
    if not numbers:
        return "none"
    return f"{numbers[0]:,}" if len(numbers) == 1 else f"{numbers[0]:,} to {numbers[-1]:,}"


def _buckets(data: DatasetEstimate) -> Table:
    table = Table(box=None, padding=(0, 1), title_justify="left")
    table.title = Text(f"{data.name}: {data.samples:,} samples, {data.path}")
    for name in ("bucket", "resolution", "samples", "micro-batch", "steps", "padded", "enlarged", "cropped"):
        table.add_column(name, justify="right", no_wrap=True)
    rows = sorted(data.rows, key=lambda row: -row.samples)
    for row in rows[:MAX_ROWS]:
        cells = (f"{row.samples:,}", f"{row.micro_batch}", f"{row.steps:,}", f"{row.padding}", f"{row.enlarged:,}")
        resolution = f"{row.resolution[0]}x{row.resolution[1]}"
        table.add_row(str(row.bucket), resolution, *cells, f"{row.cropped:.0%}")
    if rest := rows[MAX_ROWS:]:
        samples, steps = sum(row.samples for row in rest), sum(row.steps for row in rest)
        table.add_row(f"{len(rest)} more", "", f"{samples:,}", "", f"{steps:,}", "", "", "")
    return table


def _rejects(rejects: Mapping[str, int]) -> list[str]:
    most = sorted(rejects.items(), key=lambda item: (-item[1], item[0]))
    return [f"{number:,}: {reason} ({REASONS[reason]})" for reason, number in most]
