"""The command line of `train.py`, for launchers."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sd3_light.cli.process import (
    continued_by,
    enable_tracebacks,
    init_process,
    load_checked,
    quiet_imports,
    run_guarded,
)
from sd3_light.cli.run_verbs import parse_resume, suggest_after_training
from sd3_light.config.faults import UserError

_SWITCHES = {
    "cache-only": "build the cache and exit",
    "trust-cache": "do not compare the cache with its sources",
    "regenerate-cache": "encode everything again",
    "resume": "resume from the newest complete checkpoint of the run",
    "reset-dataloader": "on resume: restart the data",
    "reset-optimizer": "on resume: discard the optimizer state",
    "reset-optimizer-params": "on resume: take lr etc. from the config",
    "restart": "start again; set existing checkpoints aside",
    "deepspeed": "train with the DeepSpeed engine",
    "debug": "show the traceback of errors",
}
_REJECTED = {
    "--dump_dataset": "it has its own command: run `sd3-light inspect CACHE --out page.html`",
    "--i_know_what_i_am_doing": "no check can be skipped; remove it",
    "--master_port": "it belongs to the launcher: `torchrun --master_port PORT` or `deepspeed --master_port PORT`, "
    "before train.py",
    "--test_sample": "it has its own command: run `sd3-light sample MODEL PROMPT`",
    "--deepspeed_config": "the train TOML has these settings; remove it",
}
"""Flags of diffusion-pipe's train.py that are not supported, and what to do instead."""


class _Reject(argparse.Action):
    """Reject a flag, with or without a value; ``const`` says why."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        raise UserError(f"{option_string}: not supported: {self.const}")


def launch(arguments: Sequence[str]) -> int:
    """Run train.py with these arguments; returns the exit code."""
    return run_guarded(lambda: _launch(_flags().parse_args(arguments)))


def _flags() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="train.py", description="Cache, then train. See `sd3-light train --help`.")
    parser.add_argument("--config", type=Path, required=True, help="train TOML (it names the dataset TOML)")
    for name, text in _SWITCHES.items():
        spellings = dict.fromkeys((f"--{name}", f"--{name.replace('-', '_')}"))
        parser.add_argument(*spellings, action="store_true", help=text)
    parser.add_argument("--resume-from", metavar="DIR", type=Path, help="resume from this checkpoint")
    both = ("--resume-from-checkpoint", "--resume_from_checkpoint")
    parser.add_argument(*both, nargs="?", const="", metavar="DIR", help="--resume, or --resume-from DIR")
    parser.add_argument("--local-rank", "--local_rank", type=int, help="set by launchers")
    for name, text in _REJECTED.items():
        parser.add_argument(name, action=_Reject, nargs="?", const=text, help=argparse.SUPPRESS)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="set a key of the train TOML")
    return parser


def _launch(flags: argparse.Namespace) -> None:
    if flags.debug:
        enable_tracebacks()
    quiet_imports()
    loaded = load_checked(flags.config, flags.set, flags.cache_only)
    launch_info = init_process(flags.local_rank)
    from sd3_light.cache.verb import CacheOptions
    from sd3_light.journeys import build_caches, cache_then_train

    options = CacheOptions(flags.trust_cache, flags.regenerate_cache)
    if flags.cache_only:
        build_caches(loaded, launch_info, options)
        return
    named = flags.resume_from_checkpoint
    checkpoint = flags.resume_from or (Path(named) if named else None)
    requested = flags.resume or named is not None or checkpoint is not None
    resets = (flags.reset_dataloader, flags.reset_optimizer, flags.reset_optimizer_params)
    resume = parse_resume(requested, checkpoint, resets, flags.restart)
    again = "the same command with --resume"
    with continued_by(again):
        cache_then_train(loaded, launch_info, options, resume, by_deepspeed=flags.deepspeed)
    suggest_after_training(loaded.train.output_dir, again)
