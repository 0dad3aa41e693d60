"""Render an estimate as one screen: every number with its formula."""

from collections.abc import Iterable, Sequence
from itertools import pairwise

from rich.console import Group, RenderableType
from rich.text import Text

from sd3_light.check.conclusion import Line, first_line
from sd3_light.check.estimate import DatasetEstimate, RunEstimate
from sd3_light.cost.amount import format_bytes, format_flops
from sd3_light.cost.traffic import sent_per_step
from sd3_light.cost.training_setup import TrainingSetup
from sd3_light.data.manifest import REJECTS_FILE
from sd3_light.formats import plural
from sd3_light.runlog import ResultTable

MAX_ROWS = 12
"""Buckets shown per dataset; one line sums up the rest."""


def render(
    estimate: RunEstimate, conclusion: Sequence[Line] = (), explain: bool = True, on_cpu: bool = False
) -> RenderableType:
    """Return the conclusion and the buckets as tables for a rich console; ``explain`` adds all numbers with formulas.

    ``on_cpu`` leaves out what concerns GPUs.
    """
    parts: list[RenderableType] = [
        Text(first_line(estimate, conclusion), no_wrap=True, overflow="ignore")  # a wrapped path cannot be copied
    ]
    if conclusion:
        parts.append(_table((name, text) for name, text in conclusion))
    if explain:
        parts.append(_table(_lines(estimate, on_cpu)))
    for data in (estimate.data, *estimate.evals):
        parts.append(_buckets(data))
        notes = [f"  {line}" for line in data.rejects.lines()]
        if data.rejects.counts:
            notes.append(f"  `sd3-light cache` lists all rejected inputs in {data.cache_dir}/{REJECTS_FILE}")
        parts += [_table([(note,)]) for note in notes]
    return Group(*parts)


def _table(lines: Iterable[Sequence[str]]) -> ResultTable:
    """Return lines of a name and a sentence, or of a name, a number and its formula, or a sentence."""
    rows = list(lines)
    table = ResultTable(box=None, padding=(0, 1), show_header=False)
    if len(rows[0]) > 1:
        table.add_column(style="bold", no_wrap=True)
    if len(rows[0]) == 3:
        table.add_column(justify="right", no_wrap=True)
    table.add_column()
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _lines(estimate: RunEstimate, on_cpu: bool) -> list[tuple[str, str, str]]:
    setup = estimate.setup
    cost = setup.cost
    text = cost.text
    gpu = estimate.gpu
    data = estimate.data
    images = sorted({row.tokens.image for row in data.rows})
    unit = "pipeline" if setup.stages > 1 else "process" if on_cpu else "GPU"
    batch = f"micro-batch·{setup.accumulation} accumulation·{plural(setup.replicas, unit)}"
    batches = sorted({row.global_batch for row in data.rows})
    fast = ("fast kernels", "if they pass their self-check there, else stock")
    blocks = fast if estimate.why_stock is None else ("stock", f"because {estimate.why_stock}")
    costliest = max(data.rows, key=lambda row: row.step_flops.value, default=None)
    lines = [
        ("weights start", estimate.start.kind, estimate.start.sentence),
        ("parameters", f"{cost.parameters:,}", cost.description),
        *((fact.name, fact.value, fact.meaning) for fact in estimate.facts),
        ("text tokens", f"{text.most}", text.formula),
        ("image tokens", _span(images), f"width/{cost.token_side}·height/{cost.token_side}, by bucket"),
        ("processes", f"{setup.world_size:,}", layout_text(setup)),
        *([] if on_cpu else [("blocks on GPUs", *blocks)]),
        ("samples per step", _span(batches), batch),
        ("steps per epoch", f"{data.steps:,}", "sum over buckets of samples·repeats / samples per step"),
        ("steps", f"{estimate.total_steps:,}", "max_steps or epochs·steps per epoch, whichever is lower"),
    ]
    if setup.adapter is not None:
        share = f"{sum(setup.adapter) / cost.parameters:.2%} of the parameters train; the rest is frozen"
        lines.insert(2, ("adapter", f"{sum(setup.adapter):,}", share))
    if costliest is not None:
        flops = costliest.step_flops
        lines.append(("FLOPs per step", format_flops(flops.value), f"{costliest.bucket}: {flops.formula}"))
    if setup.world_size > 1:
        sent = sent_per_step(setup)
        lines.append(("sent per GPU and step", format_bytes(sent.value), sent.formula))
    lines.append(("FLOPs, all steps", format_flops(estimate.run_flops.value), estimate.run_flops.formula))
    for dataset in (data, *estimate.evals):
        formula = f"{dataset.cache.formula}; in {dataset.cache_dir}"
        lines.append((f"cache {dataset.name}", format_bytes(dataset.cache.value), formula))
    stage = f" on stage {gpu.stage}, which needs most" if setup.stages > 1 else ""
    host = f"{estimate.host.formula}; without interpreters"
    lines.append(("host memory per process", format_bytes(estimate.host.value), host))
    if on_cpu:
        return lines
    return [
        *lines,
        ("GPU memory (estimate)", format_bytes(gpu.total), f"state + step + context, of the costliest bucket{stage}"),
        ("  state", format_bytes(gpu.state.value), gpu.state.formula),
        ("  step", format_bytes(gpu.step.value), f"{text.at_most}{gpu.step.formula}"),
        ("  context", format_bytes(gpu.context.value), gpu.context.formula),
    ]


def layout_text(setup: TrainingSetup) -> str:
    """Describe engine and layout, with the options of the command line."""
    if not setup.deepspeed:
        if setup.world_size == 1:
            return "torch engine; see other launches with --processes N and --deepspeed"
        sharding = "weights and state sharded over all GPUs" if setup.shards > 1 else "all weights on every GPU"
        return f'torch engine, parallel = "{setup.parallel}": {sharding}'
    text = f"DeepSpeed (--deepspeed), ZeRO-{setup.zero_stage}"
    if setup.zero_stage != setup.zero:
        text += f" (zero_stage = {setup.zero} has nothing to shard on one GPU)"
    if setup.stages == 1:
        return text
    layers = ", ".join(f"{start} to {stop - 1}" for start, stop in pairwise(setup.layer_bounds))
    pipelines = f"{setup.replicas} pipelines" if setup.replicas > 1 else "one pipeline"
    return f"{text}, {pipelines} of {setup.stages} stages: layers {layers}"


def _span(numbers: list[int]) -> str:
    if not numbers:
        return "none"
    return f"{numbers[0]:,}" if len(numbers) == 1 else f"{numbers[0]:,} to {numbers[-1]:,}"


def _buckets(data: DatasetEstimate) -> ResultTable:
    table = ResultTable(box=None, padding=(0, 1), pad_edge=False, title_justify="left")
    table.title = Text(f"{data.name}: {data.samples:,} samples, {data.path}")
    for name in ("bucket", "resolution", "samples", "micro-batch", "steps", "padded", "enlarged", "cropped"):
        table.add_column(name, justify="right")
    rows = sorted(data.rows, key=lambda row: -row.samples)
    for row in rows[:MAX_ROWS]:
        cells = (f"{row.samples:,}", f"{row.micro_batch}", f"{row.steps:,}", f"{row.padding}", f"{row.enlarged:,}")
        resolution = f"{row.resolution[0]}x{row.resolution[1]}"
        table.add_row(str(row.bucket), resolution, *cells, f"{row.cropped:.0%}")
    if rest := rows[MAX_ROWS:]:
        samples = sum(row.samples for row in rest)
        steps = sum(row.steps for row in rest)
        table.add_row(f"{len(rest)} more", "", f"{samples:,}", "", f"{steps:,}", "", "", "")
    return table
