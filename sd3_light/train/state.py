"""The state of a run that training changes: model, engine, averages."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from torch import nn

from sd3_light.config import AdapterConfig, UserError
from sd3_light.core.compiling import CompileTime, compile_blocks
from sd3_light.core.cost import Cost, Layout
from sd3_light.core.model import TrainedModel, of_denoiser
from sd3_light.core.objective import Objective
from sd3_light.core.registry import family_of
from sd3_light.core.start import WeightsStart
from sd3_light.core.training import Preparer
from sd3_light.cost.compile_choice import compiled_text_step
from sd3_light.cost.graph_choice import why_no_graphs
from sd3_light.data.prepare import with_columns
from sd3_light.data.slot_size import longest_text
from sd3_light.data.stream import CachedDataset
from sd3_light.engines import Engine, deepspeed
from sd3_light.engines.blocks import choose_blocks
from sd3_light.engines.processes import apply_timeout
from sd3_light.engines.torch import TorchEngine
from sd3_light.evaluate.rewards import Reward
from sd3_light.export.of_run import Saver
from sd3_light.export.trainable import load_what_trains, put_training_adapter
from sd3_light.model.adapter_layers import AdapterDropout
from sd3_light.optim.ema import Averages
from sd3_light.runlog import info
from sd3_light.train.compiled_code import CompiledCode, code_facts, left_code
from sd3_light.train.context import RunContext
from sd3_light.train.rollouts import draw_rewards
from sd3_light.train.teacher import load_teacher, teach_by_average, text_of_guidance

MakeObjective = Callable[[nn.Module], Objective]
"""Denoiser -> what it is trained for."""


@dataclass(frozen=True)
class TrainState:
    """The parts of a run that hold or use weights. ``saver`` exports them, ``preparer`` makes the batches.

    ``compile_time`` is that of compiled blocks.
    """

    preparer: Preparer
    model: TrainedModel
    engine: Engine
    averages: Averages
    saver: Saver
    compile_time: CompileTime | None = None

    def begin_step(self, step: int) -> None:
        """Start the step after ``step`` ones."""
        self.model.begin(step)
        if self.compile_time is not None:
            self.compile_time.report()


def make_train_state(
    context: RunContext, objective: MakeObjective | None = None, reward: Reward | None = None
) -> TrainState:
    """Build the model with its starting weights and wrap it in the engine; all processes call it together.

    ``objective`` and ``reward`` replace those of the config.
    """
    config = context.config
    launch = context.launch
    device = context.device
    start = context.start
    family = family_of(config.model)
    denoiser = load_what_trains(config, start, device)
    training_adapter = put_training_adapter(denoiser, config, device)
    saver = Saver.of(config, denoiser, context.folder.path / "exports", start, context.model_facts)
    layout = Layout(launch.world_size, context.by_deepspeed)
    steps = config.length(context.order.steps_per_epoch)
    code = CompiledCode(partial(code_facts, context))
    note = left_code(context, code, steps)
    counted_steps = steps if note is None else None
    blocks = choose_blocks(config, context.cost, denoiser, layout, device, context.groups, counted_steps)
    module = family.training.model(denoiser, config, blocks.kind == "fast")
    module.steps = steps
    if objective is not None:
        module.use(objective(denoiser))
    if training_adapter is not None:
        if module.objective.teacher is not None:
            raise UserError("model.training_adapter has no use with an objective that follows a teacher; remove it")
        module.as_exported = training_adapter.off
    load_teacher(module, config, device)
    module.empty_text = text_of_guidance(config, context.data.empty_text())
    compile_time = None
    if blocks.kind == "compiled":
        module.text_step = _text_step(context, steps) if note is None else note.text_step
        compile_time = CompileTime(partial(code.write, module.text_step))
        compile_blocks(denoiser, module.text_step is not None, lenient=config.compile == "auto")
    if config.adapter is not None and config.adapter.dropout > 0:
        module.dropout = AdapterDropout(denoiser, config.seed, launch.rank)
    make = deepspeed.make_engine if context.by_deepspeed else TorchEngine
    engine: Engine = make(module, config, launch, device, context.groups.writers)
    if isinstance(engine, TorchEngine) and device.type == "cuda":
        _choose_graphs(engine, context)
    apply_timeout(context.groups, config.dist_timeout_sec)
    saver.live = lambda: engine.gather(of_denoiser(engine.weights))
    require_columns(context.data, module.objective.reads)
    preparer = family.training.preparer(config, start, context.data.empty_text())
    if config.reward is not None:
        draw_rewards(module, context, preparer, reward)
    averages = Averages(of_denoiser(engine.weights), config.ema)
    teach_by_average(module, engine, averages)
    return TrainState(with_columns(preparer, module.objective.reads), module, engine, averages, saver, compile_time)


def require_columns(data: CachedDataset, reads: Sequence[str]) -> None:
    """Raise a UserError unless the cache has the columns that an objective reads."""
    if not (wanted := [name for name in reads if name != "words"]):
        return
    names = [column.name for column in data.new_reader(data.manifest.shards[0]).columns]
    for name in wanted:
        if name not in names:
            raise UserError(
                f"the objective reads the column {name!r}, and the cache has {', '.join(names)}; build it with a "
                "dataset that provides it"
            )


def _text_step(context: RunContext, steps: int) -> int | None:
    """Return the multiple to which the text of compiled blocks is padded, None if they take any shape; print it."""
    text = context.cost.text
    longest = min(text.most, longest_text(context.data) or text.most)
    step = compiled_text_step(context.config, context.cost, len(context.order.buckets), steps, longest)
    if step is not None and not text.is_padded:
        info(f"blocks: text is padded to multiples of {step} tokens, so that they are compiled for few shapes")
    return step


def _choose_graphs(engine: TorchEngine, context: RunContext) -> None:
    """Let the engine replay CUDA graphs if the config allows it and they may help; print it."""
    config = context.config
    layout = Layout(context.launch.world_size, context.by_deepspeed)
    reason = why_no_graphs(config, context.cost, context.largest_flops, layout)
    if reason is None:
        engine.use_graphs()
        info("CUDA graphs: forward and backward passes are recorded once per bucket shape, then replayed")
    elif config.cuda_graphs is True:
        info(f"cuda_graphs = true is not available: {reason}; kernels are launched one by one")


def describe_start(start: WeightsStart, cost: Cost, adapter: AdapterConfig | None) -> str:
    """Describe the weights to start from and what trains."""
    if adapter is None:
        return start.sentence
    kind = {"lora": "LoRA", "lokr": "LoKr", "loha": "LoHa"}[adapter.type]
    count = sum(cost.adapter_parameters(adapter))
    return f"a {kind} of rank {adapter.rank} ({count:,} weights) on the {start.sentence}"
