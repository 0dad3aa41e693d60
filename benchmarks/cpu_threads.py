"""How fast is a CPU training step with 1, 2, ... threads and each wait policy, alone and beside other busy processes?

One process per variant is started with its environment; then the variants take turns, a few steps each, so that load
from outside hits all of them alike. Only ratios within one run are comparable: the table shows them relative to the
first variant, by the median over the rounds. Busy processes (`--busy`) are stopped and continued between the phases.

    python benchmarks/cpu_threads.py --rounds 15 --busy 2 --size tiny2 --batch 16
"""

import argparse
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

VARIANTS: dict[str, dict[str, str]] = {  # name -> environment
    "{n} threads, libgomp's default": {"OMP_NUM_THREADS": "{n}"},
    "{n} threads, GOMP_SPINCOUNT=20000": {"OMP_NUM_THREADS": "{n}", "GOMP_SPINCOUNT": "20000"},
    "{n} threads, GOMP_SPINCOUNT=1000": {"OMP_NUM_THREADS": "{n}", "GOMP_SPINCOUNT": "1000"},
    "{n} threads, OMP_WAIT_POLICY=passive": {"OMP_NUM_THREADS": "{n}", "OMP_WAIT_POLICY": "passive"},
    "1 thread": {"OMP_NUM_THREADS": "1"},
}


def work(size: str, batch: int) -> None:
    """Train on random batches of the demo's shape: read a number of steps per line, print wall and CPU seconds."""
    import torch

    from sd3_light.config import SIZES, TrainConfig
    from sd3_light.core.batch import Batch
    from sd3_light.engines import Launch
    from sd3_light.engines.torch import TorchEngine
    from sd3_light.families.sd3.module import SD3TrainingModule
    from sd3_light.families.sd3.random_weights import new_transformer

    model = {"train_type": "sd3_light_pretrain", "diffusers_path": "model", "size": size, "dtype": "float32"}
    settings = {"output_dir": "run", "dataset": "data.toml", "max_steps": 1, "model": model}
    config = TrainConfig.model_validate(settings, context={"base": Path.cwd()})
    transformer = new_transformer(SIZES[size].transformer_config(), 0)
    engine = TorchEngine(SD3TrainingModule(transformer, config), config, Launch(), torch.device("cpu"))
    shape = transformer.config
    generator = torch.Generator().manual_seed(0)
    noisy, target = torch.randn(2, batch, shape.in_channels, 8, 8, generator=generator)
    prompt = torch.randn(batch, 93, shape.joint_attention_dim, generator=generator)
    pooled = torch.randn(batch, shape.pooled_projection_dim, generator=generator)
    values = {"noisy": noisy, "t": torch.rand(batch, generator=generator), "prompt": prompt, "pooled": pooled}
    micro_batch = Batch(batch, {**values, "target": target})
    for line in sys.stdin:
        started, used = time.perf_counter(), time.process_time()
        for _ in range(int(line)):
            engine.train_step([micro_batch], 1e-3).read()
        print(time.perf_counter() - started, time.process_time() - used, flush=True)


def start(environment: dict[str, str], args: argparse.Namespace) -> "subprocess.Popen[str]":
    command = [sys.executable, __file__, "--work", "--size", args.size, "--batch", str(args.batch)]
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_", "KMP_"))}
    return subprocess.Popen(command, env=clean | environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def turn(process: "subprocess.Popen[str]", steps: int) -> tuple[float, float]:
    """Let a process make some steps and return wall and CPU seconds per step."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{steps}\n")
    process.stdin.flush()
    wall, used = map(float, process.stdout.readline().split())
    return wall / steps, used / steps


def measure(workers: "dict[str, subprocess.Popen[str]]", args: argparse.Namespace) -> None:
    """Let the variants take turns and print a table."""
    turns: dict[str, list[tuple[float, float]]] = {name: [] for name in workers}
    for _ in range(args.rounds):
        for name, worker in workers.items():
            turns[name].append(turn(worker, args.steps))
    first = next(iter(turns.values()))
    print(f"  {'':40} {'wall ms: quartile':>18} {'median':>8} {'ratio':>6} {'CPU ms':>8}")
    for name, values in turns.items():
        ratio = statistics.median(mine[0] / base[0] for mine, base in zip(values, first, strict=True))
        walls, used = (
            sorted(1000 * value[0] for value in values),
            statistics.median(1000 * value[1] for value in values),
        )
        low, median = walls[len(walls) // 4], statistics.median(walls)
        print(f"  {name:40} {low:18.1f} {median:8.1f} {ratio:6.2f} {used:8.1f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--size", default="tiny2")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=5, help="steps per turn")
    parser.add_argument("--busy", type=int, default=2, help="competing processes in the second phase")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(args.size, args.batch)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no process is left behind
    n = str(args.threads)
    workers = {
        name.format(n=n): start({key: value.format(n=n) for key, value in environment.items()}, args)
        for name, environment in VARIANTS.items()
    }
    for worker in workers.values():
        turn(worker, 2)
    busy = [subprocess.Popen([sys.executable, "-P", "-c", "while True: pass"]) for _ in range(args.busy)]
    try:
        for process in busy:
            process.send_signal(signal.SIGSTOP)
        print(f"{args.size}, batch {args.batch}; load average before: {os.getloadavg()[0]:.1f}\nalone")
        measure(workers, args)
        for process in busy:
            process.send_signal(signal.SIGCONT)
        print(f"beside {args.busy} busy processes")
        measure(workers, args)
    finally:
        for process in (*workers.values(), *busy):
            process.kill()


if __name__ == "__main__":
    main()
