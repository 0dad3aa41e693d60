"""The command line of `train.py`, for launchers."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from sd3_light.cli.process import enable_tracebacks, init_process, load_checked, run_guarded
from sd3_light.cli.run_verbs import parse_resume


def launch(arguments: Sequence[str]) -> int:
    """Run train.py with these arguments; returns the exit code."""
    return run_guarded(lambda: _launch(_flags().parse_args(arguments)))


def _flags() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="train.py", description="Cache, then train. See `sd3-light train --help`.")
    parser.add_argument("--config", type=Path, required=True, help="train TOML (it names the dataset TOML)")
    parser.add_argument("--cache_only", action="store_true", help="build the cache and exit")
    parser.add_argument("--trust_cache", action="store_true", help="do not compare the cache with its sources")
    parser.add_argument("--regenerate_cache", action="store_true", help="encode everything again")
    parser.add_argument(
        "--resume_from_checkpoint", nargs="?", const="", metavar="DIR", help="no value: the newest checkpoint"
    )
    parser.add_argument("--reset_dataloader", action="store_true", help="on resume: restart the data")
    parser.add_argument("--reset_optimizer", action="store_true", help="on resume: discard the optimizer state")
    parser.add_argument("--reset_optimizer_params", action="store_true", help="on resume: take lr etc. from the config")
    parser.add_argument("--restart", action="store_true", help="start again; set existing checkpoints aside")
    parser.add_argument("--deepspeed", action="store_true", help="train with the DeepSpeed engine")
    parser.add_argument("--local_rank", "--local-rank", type=int, help="set by launchers")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="set a key of the train TOML")
    parser.add_argument("--debug", action="store_true", help="show the traceback of errors")
    return parser


def _launch(flags: argparse.Namespace) -> None:
    if flags.debug:
        enable_tracebacks()
    loaded, launch_info = load_checked(flags.config, flags.set, flags.cache_only), init_process(flags.local_rank)
    from sd3_light.journeys import build_caches, cache_then_train
    from sd3_light.stages.cache import CacheOptions

    options = CacheOptions(flags.trust_cache, flags.regenerate_cache)
    if flags.cache_only:
        build_caches(loaded, launch_info, options)
        return
    checkpoint = Path(flags.resume_from_checkpoint) if flags.resume_from_checkpoint else None
    resets = (flags.reset_dataloader, flags.reset_optimizer, flags.reset_optimizer_params)
    resume = parse_resume(flags.resume_from_checkpoint is not None, checkpoint, resets, flags.restart)
    cache_then_train(loaded, launch_info, options, resume, by_deepspeed=flags.deepspeed)
