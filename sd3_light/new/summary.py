"""A project as lines of text: what `new` prints."""

from collections.abc import Iterator

from sd3_light.cost.amount import format_bytes
from sd3_light.formats import plural
from sd3_light.new.verb import NewProject


def size_line(project: NewProject) -> str:
    """Return the size of the data and the number of steps."""
    kind = "clips and images" if project.has_clips else "images"
    steps = f"{project.steps:,} steps of {plural(project.memory.samples_per_step, 'sample')}"
    return f"{project.images:,} {kind} at {project.resolution} px, {steps}"


def project_lines(project: NewProject) -> Iterator[str]:
    """Yield what is held out, the time, the notes, and whether it fits."""
    memory = project.memory
    if project.held_out:
        yield f"validation: about {project.held_out:,} of them are held out; --no-validation trains on all"
    yield f"time: {project.time}"
    yield from project.notes
    if memory.needed is None or memory.available is None:
        yield "no GPU is visible: the batch size is for a CPU; --gpu-memory 24 plans for a GPU of 24 GiB elsewhere"
        return
    if memory.needed_by_adamw is not None:
        adamw = f"AdamW with float32 weights and moments needs {format_bytes(memory.needed_by_adamw)}, estimated"
        weights = ", weights are stored in bfloat16" if memory.narrow else ""
        averages = "" if memory.averages else ", and there is no running average"
        yield f"{adamw}: so moments have 8 bits, gradients are released{weights}{averages}"
    used = f"{format_bytes(memory.needed)} of {format_bytes(memory.available)} of GPU memory, estimated"
    if memory.fits:
        keys = [f"activation_checkpointing = {str(memory.checkpointing).lower()}"]
        keys += [f"base_bits = {memory.base_bits}"] if memory.base_bits < 16 else []
        keys += (
            [f"swap_blocks = {memory.swap_blocks} ({format_bytes(memory.host)} of host memory)"] if memory.host else []
        )
        yield f"fits: {used}, with micro-batches of {memory.micro_batch} and {', '.join(keys)}"
    else:
        remedy = "give a smaller --resolution or --model, or use several GPUs (docs/reference/multi-node.md)"
        yield f"does not fit: {used}; {remedy}"
