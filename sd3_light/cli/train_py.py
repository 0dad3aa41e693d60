"""What `train.py` takes: the flags that launchers and the seed's users know."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from sd3_light.cli.process import enable_tracebacks, guarded, load, prepare
from sd3_light.cli.run_verbs import asked_resume


def launch(arguments: Sequence[str]) -> int:
    """What train.py does with its flags; returns the exit code."""
    return guarded(lambda: _launch(_flags().parse_args(arguments)))


def _flags() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="train.py", description="Cache, then train. See `sd3-light train --help`.")
    parser.add_argument("--config", type=Path, required=True, help="train TOML (it names the dataset TOML)")
    parser.add_argument("--cache_only", action="store_true", help="build the cache and quit")
    parser.add_argument("--trust_cache", action="store_true", help="do not check sources against the cache")
    parser.add_argument("--regenerate_cache", action="store_true", help="encode everything anew")
    parser.add_argument("--resume_from_checkpoint", nargs="?", const="", metavar="DIR", help="no value: the newest")
    parser.add_argument("--reset_dataloader", action="store_true", help="on resume: start the data anew")
    parser.add_argument("--reset_optimizer", action="store_true", help="on resume: drop the optimizer's state")
    parser.add_argument("--reset_optimizer_params", action="store_true", help="on resume: lr etc. from the config")
    parser.add_argument("--deepspeed", action="store_true", help="train with the DeepSpeed engine")
    parser.add_argument("--local_rank", "--local-rank", type=int, help="set by launchers")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="set a key of the train TOML")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def _launch(flags: argparse.Namespace) -> None:
    if flags.debug:
        enable_tracebacks()
    loaded, launched = load(flags.config, flags.set, flags.cache_only), prepare(flags.local_rank)
    from sd3_light.journeys import build_caches, cache_then_train
    from sd3_light.stages.cache import CacheOptions

    options = CacheOptions(flags.trust_cache, flags.regenerate_cache)
    if flags.cache_only:
        build_caches(loaded, launched, options)
        return
    place = Path(flags.resume_from_checkpoint) if flags.resume_from_checkpoint else None
    resets = (flags.reset_dataloader, flags.reset_optimizer, flags.reset_optimizer_params)
    resume = asked_resume(flags.resume_from_checkpoint is not None, place, resets)
    cache_then_train(loaded, launched, options, resume, by_deepspeed=flags.deepspeed)
