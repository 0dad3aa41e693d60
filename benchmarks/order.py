"""Time and memory of the training order for 10 million samples on 512 ranks.

Builds the order as a rank does, computes the rank's samples of some steps, and for comparison the size of a table of
all samples. Nothing is read from disk.
"""

import argparse
import resource
import time
import tracemalloc

from sd3_light.data.order import Order, Segment, build_order, rank_slice


def build(samples: int, shard: int, buckets: int, batch: int, window: int) -> Order:
    """Build an order of ``samples`` in shards of ``shard``, distributed evenly over ``buckets``."""
    count = samples // shard // buckets
    return build_order(0, [([Segment(shard)] * count, batch) for _ in range(buckets)], window)


def measure(samples: int, shard: int, buckets: int, ranks: int, micro: int, window: int) -> str:
    """Return one line of the table."""
    tracemalloc.start()
    started = time.perf_counter()
    order = build(samples, shard, buckets, ranks * micro, window)
    order.picks(0, *rank_slice(ranks * micro, ranks // 2, ranks, 0, 1))
    first = time.perf_counter() - started
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    steps = [number * order.steps_per_epoch // 50 for number in range(50)]
    started = time.perf_counter()
    for step in steps:
        order.picks(step, *rank_slice(ranks * micro, ranks // 2, ranks, 0, 1))
    each = (time.perf_counter() - started) / len(steps)
    started = time.perf_counter()
    for step in range(order.steps_per_epoch, 2 * order.steps_per_epoch, max(1, order.steps_per_epoch // 10)):
        order.picks(step, *rank_slice(ranks * micro, ranks // 2, ranks, 0, 1))
    next_epoch = time.perf_counter() - started
    return (
        f"{samples:12,}{shard:8}{buckets:9}{ranks:7}{first * 1e3:13.1f}{each * 1e3:13.2f}{next_epoch * 1e3:15.1f}"
        f"{peak / 1e6:11.1f}{8 * samples / 1e6:11.1f}"
    )


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=10_000_000)
    parser.add_argument("--ranks", type=int, default=512)
    parser.add_argument("--micro", type=int, default=64)
    parser.add_argument("--window", type=int, default=16)
    args = parser.parse_args()
    print(
        f"{'samples':>12}{'shard':>8}{'buckets':>9}{'ranks':>7}{'first ms':>13}{'per step ms':>13}{'new epoch ms':>15}"
        f"{'peak MB':>11}{'table MB':>11}"
    )
    for shard, buckets, ranks in ((512, 1, 1), (512, 1, args.ranks), (512, 20, args.ranks), (128, 20, args.ranks)):
        print(measure(args.samples, shard, buckets, ranks, args.micro, args.window), flush=True)
    print(f"peak memory of the process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3:.0f} MB")


if __name__ == "__main__":
    main()
