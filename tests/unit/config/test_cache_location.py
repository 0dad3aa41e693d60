"""`cache_dir` is a path or a URL; a URL must not contain secrets."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sd3_light.config import Fault
from sd3_light.config.base import is_url

OnlyFault = Callable[..., Fault]
EVAL = 'eval_datasets = [{name = "held-out", config = "data.toml"}]\n'


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("s3://bucket/folder", "s3://bucket/folder"),
        ("s3://bucket/folder//", "s3://bucket/folder"),
        ("s3://bucket", "s3://bucket"),
        ("s3://bucket/a@b", "s3://bucket/a@b"),
        ("https://host:8000/cache", "https://host:8000/cache"),
        ("http://[::1]:8000/cache", "http://[::1]:8000/cache"),
        ("file:///folder/cache", "file:///folder/cache"),
        ("memory://cache", "memory://cache"),
    ],
)
def test_urls_are_unchanged(files: Any, value: str, expected: str) -> None:
    loaded = files.load(f'{EVAL}cache_dir = "{value}"')
    assert loaded.train.cache_dir == loaded.dataset.cache_dir == expected
    assert loaded.eval_datasets["held-out"].cache_dir == f"{expected}-eval-held-out"


@pytest.mark.parametrize("value", ["cache", "a/b://c", "./s3://bucket", "~/cache"])
def test_paths_are_paths(files: Any, value: str) -> None:
    assert isinstance(files.load(f'cache_dir = "{value}"').dataset.cache_dir, Path)
    assert not is_url(value)


@pytest.mark.parametrize(
    "value",
    [
        "s3://AKIA:hunter2@bucket/folder",
        "s3://hunter2@bucket/folder",
        "s3://AKIA:hun/ter2@bucket/folder",
        "https://me:hunter2@host:80/x?y=1",
        "https://host/x?token=hunter2",
    ],
)
def test_secrets_in_a_url_are_rejected_and_hidden(files: Any, value: str) -> None:
    for faults in (files.faults(f'cache_dir = "{value}"'), files.faults(overrides=(f"cache_dir={value}",))):
        (fault,) = faults
        assert fault.key == "cache_dir"
        assert "must not" in fault.problem
        assert "(hidden)" in str(fault)
        assert not any(secret in str(fault) for secret in ("hunter2", "ter2", "AKIA"))


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("simplecache::s3://bucket/x", "not a URL with a single protocol"),
        ("://bucket/x", "not a URL with a single protocol"),
        ("s3:///", "the URL names no folder"),
        ("s3://bucket/x#part", "must not have a query, a fragment or spaces"),
        ("s3://bucket/my cache", "must not have a query, a fragment or spaces"),
        ("file://folder/cache", "three slashes"),
    ],
)
def test_invalid_urls(only_fault: OnlyFault, value: str, problem: str) -> None:
    fault = only_fault(f'cache_dir = "{value}"')
    assert fault.key == "cache_dir"
    assert problem in fault.problem
    assert fault.value == f'"{value}"'
