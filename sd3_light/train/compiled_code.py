"""Notes beside torch's compiled code: which runs left some, so that short runs of the same kind know that it exists."""

import json
import os
import time
from collections.abc import Callable
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import diffusers
import torch

from sd3_light.config import UserError, batch_size_for
from sd3_light.cost.compile_choice import ENOUGH_PASSES, WARM_PASSES
from sd3_light.data.slot_size import longest_text
from sd3_light.files import write_atomically
from sd3_light.inputs import lines_of, open_regular, parse_json, read_json_file
from sd3_light.runlog import info
from sd3_light.system import COMPILED_CODE
from sd3_light.train.context import RunContext


class Note(NamedTuple):
    """When compiled code was left, and the multiple to which text was padded; None: it serves any shape."""

    time: float
    text_step: int | None


class CompiledCode:
    """The note of runs with the same facts; there is none where torch's folder of compiled code is unknown."""

    def __init__(self, facts: Callable[[], dict[str, Any]]) -> None:
        self._facts = facts

    @cached_property
    def path(self) -> Path | None:
        """The file of the note."""
        folder = os.environ.get(COMPILED_CODE)
        facts = json.dumps(self._facts(), sort_keys=True, default=str)
        return None if folder is None else Path(folder) / f"sd3_light-{blake2b(facts.encode()).hexdigest()[:16]}.json"

    def read(self, before: float) -> Note | None:
        """Return the note if it was left before this time; None also if it cannot be read."""
        try:
            table = None if self.path is None else read_json_file(self.path)
            note = None if table is None else Note(float(table["time"]), table["text_step"])
        except (OSError, ValueError, LookupError, TypeError):
            return None
        return note if note is not None and note.time <= before else None

    def write(self, text_step: int | None) -> None:
        """Leave a note unless there is one; a folder that cannot be written to costs later runs time, nothing else."""
        if self.path is None or self.path.exists():
            return
        try:
            write_atomically(self.path, json.dumps(Note(time.time(), text_step)._asdict()).encode())
        except UserError as error:
            info(f"no note beside the compiled code: {error}")


def code_facts(context: RunContext) -> dict[str, Any]:
    """Return what decides the compiled code of a run: its model, the shapes of its batches, GPU and libraries."""
    config = context.config
    facts = {key: getattr(config, key) for key in ("activation_checkpointing", "swap_blocks", "parallel")}
    facts["adapter"] = None if config.adapter is None else config.adapter.model_dump(mode="json")
    facts["model"] = [config.model.type, config.model.transformer_dtype, context.start.size.transformer_config()]
    micro = config.micro_batch_size_per_gpu
    facts["batches"] = sorted((it.bucket, batch_size_for(micro, it.resolution)) for it in context.data.buckets)
    facts["text"] = longest_text(context.data)
    facts["device"] = torch.cuda.get_device_name(context.device) if context.device.type == "cuda" else "cpu"
    return {**facts, "torch": torch.__version__, "diffusers": diffusers.__version__}


def left_code(context: RunContext, code: CompiledCode, steps: int) -> Note | None:
    """Return the note of an earlier run if compiling pays for this short one because of it; print that.

    A resumed run computes as before: what was left after its start does not count.
    """
    passes = steps * context.config.gradient_accumulation_steps
    if context.config.compile != "auto" or context.device.type != "cuda" or not WARM_PASSES <= passes < ENOUGH_PASSES:
        return None
    note: Note | None = context.groups.decide_on_rank_0(lambda: code.read(_started(context)))
    if note is not None:
        info(f"blocks: an earlier run left compiled code, which pays from about {WARM_PASSES} micro-batches on")
    return note


def _started(context: RunContext) -> float:
    """Return the time of the run's first start."""
    if context.resumed is None:
        return time.time()
    try:
        with open_regular(context.folder.path / "log.jsonl") as file:
            return float(parse_json(next(iter(lines_of(file))))["time"])
    except (OSError, ValueError, LookupError, TypeError, StopIteration):
        return 0.0
