"""The optimizers: one record each. `sd3_light/optim/build.py` has a maker for every record."""

from dataclasses import dataclass
from typing import Literal

INSTALL_BITSANDBYTES = "pip install 'sd3-light[bnb]'"
CHUNK_ELEMENTS = 2**25
"""Elements of a unit of weights that are updated together, except that one weight may have more; bounds the memory of
an update, and the gradients that wait for it."""
SLICE_ELEMENTS = 2**23
"""Elements of a weight that AdamW with 8-bit moments updates together."""


@dataclass(frozen=True)
class StateTerm:
    """Optimizer state of some weights: its label in formulas, and its bytes per parameter."""

    label: str
    bytes_per_parameter: float
    weights: Literal["all", "block matrices", "other"] = "all"


@dataclass(frozen=True)
class OptimizerRecord:
    """Everything that config, check and the memory formula need to know about an optimizer.

    ``fsdp2`` and ``deepspeed``: whether FSDP2, and DeepSpeed with its pipelines, can shard its state. ``step_bytes``:
    memory of one step beside state and gradients, in bytes per squared model width; ``slice_bytes``: for each of the
    elements that are updated together, by an optimizer that updates weights in bfloat16 itself. ``in_chunks``:
    whether it updates weights independently of each other, so that they may be in bfloat16 and their gradients released
    one by one.
    ``package`` is the library it needs, from the extra ``extra``. ``lr`` is the default learning rate.
    """

    description: str
    state: tuple[StateTerm, ...]
    fsdp2: bool = False
    deepspeed: bool = False
    step_bytes: int = 0
    slice_bytes: int = 0
    in_chunks: bool = False
    package: str | None = None
    extra: str | None = None
    lr: float = 1e-4

    @property
    def layouts(self) -> str:
        """The layouts that the optimizer works with, if DeepSpeed is not one of them."""
        return "the torch engine" if self.fsdp2 else "the torch engine without sharding"

    @property
    def install(self) -> str:
        """The command that installs the optimizer's library."""
        return f"pip install 'sd3-light[{self.extra}]'"


OPTIMIZERS = {
    "adamw": OptimizerRecord(
        "AdamW with float32 moments", (StateTerm("AdamW", 8),), fsdp2=True, deepspeed=True, in_chunks=True
    ),
    "adamw8bit": OptimizerRecord(
        "AdamW with 8-bit moments",
        (StateTerm("AdamW in 8 bits", 2 + 2 * 4 / 256),),  # one float32 scale per 256 values
        slice_bytes=2 * 4,  # the draws that round the second moment and the weight
        in_chunks=True,
    ),
    "muon": OptimizerRecord(
        "Muon (momentum 0.95) for the matrices of the blocks, with updates scaled to match AdamW, and AdamW for the "
        "rest",
        (StateTerm("Muon", 4, "block matrices"), StateTerm("AdamW", 8, "other")),
        fsdp2=True,
        step_bytes=16 * 6,  # it orthogonalises one matrix at a time, at most 6 D x D, in bf16
    ),
    "adafactor": OptimizerRecord(
        "Adafactor with factored second moments: almost no state. Its steps are relative to the size of a weight, so "
        "`lr` is larger than AdamW's; `betas` and `eps` are not used",
        (StateTerm("Adafactor", 0),),  # rows and columns alone: 0.005 bytes per parameter of a matrix 1,536 wide
        step_bytes=2 * 4 * 6,  # the update and its estimate, of one matrix at a time
        in_chunks=True,
        lr=1e-2,
    ),
    "prodigy": OptimizerRecord(
        "Prodigy, AdamW that estimates its step size during training; leave `lr` at 1, the factor of that estimate "
        "(`pip install 'sd3-light[prodigy]'`)",
        (StateTerm("Prodigy", 16),),  # two moments, a sum of gradients and the initial weights
        step_bytes=2 * 4 * 6,
        package="prodigyopt",
        extra="prodigy",
        lr=1.0,
    ),
}


def describe_optimizers() -> str:
    """Return the description of `optimizer.type`."""
    descriptions = ". ".join(f"`{name}`: {record.description}" for name, record in OPTIMIZERS.items())
    layouts = (f"`{name}` needs {record.layouts}" for name, record in OPTIMIZERS.items() if not record.deepspeed)
    return f"{descriptions}. {', '.join(layouts)}."
