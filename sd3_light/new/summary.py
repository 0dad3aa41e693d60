"""A project's plan as lines of text: what `new` prints."""

from collections.abc import Iterator

from sd3_light.cost.amount import format_bytes
from sd3_light.formats import plural
from sd3_light.new.verb import NewProject


def size_line(project: NewProject) -> str:
    """Return the size of the data and the number of steps."""
    kind = "clips and images" if project.has_clips else "images"
    steps = f"{project.steps:,} steps of {plural(project.plan.samples_per_step, 'sample')}"
    return f"{project.images:,} {kind} at {project.resolution} px, {steps}"


def plan_lines(project: NewProject) -> Iterator[str]:
    """Yield what is held out, the time, the notes, and whether it fits."""
    plan = project.plan
    if project.held_out:
        yield f"validation: about {project.held_out:,} of them are held out; --no-validation trains on all"
    yield f"time: {project.time}"
    yield from project.notes
    if plan.needed is None or plan.available is None:
        yield "no GPU is visible: the batch size is for a CPU; --gpu-memory 24 plans for a GPU of 24 GiB elsewhere"
        return
    if plan.needed_by_adamw is not None:
        adamw = f"AdamW with float32 weights and moments needs {format_bytes(plan.needed_by_adamw)}, estimated"
        weights = ", weights are stored in bfloat16" if plan.narrow else ""
        averages = "" if plan.averages else ", and there is no running average"
        yield f"{adamw}: so moments have 8 bits, gradients are released{weights}{averages}"
    memory = f"{format_bytes(plan.needed)} of {format_bytes(plan.available)} of GPU memory, estimated"
    if plan.fits:
        keys = [f"activation_checkpointing = {str(plan.checkpointing).lower()}"]
        keys += [f"base_bits = {plan.base_bits}"] if plan.base_bits < 16 else []
        keys += [f"swap_blocks = {plan.swap_blocks} ({format_bytes(plan.host)} of host memory)"] if plan.host else []
        yield f"fits: {memory}, with micro-batches of {plan.micro_batch} and {', '.join(keys)}"
    else:
        remedy = "give a smaller --resolution or --model, or use several GPUs (docs/reference/multi-node.md)"
        yield f"does not fit: {memory}; {remedy}"
