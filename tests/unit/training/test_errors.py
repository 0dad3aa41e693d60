"""Whose a fault is: what people's own code raises is theirs; memory, workers and other processes are not."""

import struct
import zlib

import pytest
import torch

from sd3_light.config.faults import PeerLost, UserError
from sd3_light.training.errors import as_user_error, explain_runtime_errors

MEMORY = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8 GiB.\nOf the allocated"


@pytest.mark.parametrize(
    "error", [AssertionError("odd"), EOFError(), RuntimeError("shapes\nand more"), struct.error("odd"), zlib.error("x")]
)
def test_what_people_s_code_raises_is_theirs(error: Exception) -> None:
    with (
        pytest.raises(UserError, match=rf"^draw raised {type(error).__name__}.*; mend it$") as told,
        as_user_error("draw"),
    ):
        raise error
    assert told.value.__cause__ is error


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (torch.OutOfMemoryError(MEMORY), UserError, "Tried to allocate 2.00 GiB; lower batch_size (and raise"),
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. "), UserError, "free memory"),
        (RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:5] closed"), PeerLost, "lost another"),
    ],
)
def test_what_may_show_in_any_code_is_nobody_s(error: Exception, kind: type[UserError], words: str) -> None:
    for block in (as_user_error("unit Encode"), explain_runtime_errors()):
        with pytest.raises(kind) as told, block:
            raise error
        assert words in str(told.value)
        assert "mend it" not in str(told.value)
        assert "\n" not in str(told.value)


def test_other_errors_are_not_put_into_words() -> None:
    with pytest.raises(RuntimeError, match="a defect"), explain_runtime_errors():
        raise RuntimeError("a defect")
