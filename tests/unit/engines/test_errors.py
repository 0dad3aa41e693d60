"""Errors as one line: those of the user's code name it; memory, dead workers and lost processes do not."""

import struct
import zlib

import pytest
import torch

from sd3_light.config.faults import PeerLost, UserError
from sd3_light.engines.errors import as_user_error, explain_runtime_errors

pytestmark = pytest.mark.usefixtures("one_thread")

MEMORY = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8 GiB.\nOf the allocated"


@pytest.mark.parametrize(
    "error", [AssertionError("odd"), EOFError(), RuntimeError("shapes\nand more"), struct.error("odd"), zlib.error("x")]
)
def test_errors_of_user_code_name_it(error: Exception) -> None:
    message = rf"^draw raised {type(error).__name__}.*; fix it$"
    with pytest.raises(UserError, match=message) as raised, as_user_error("draw"):
        raise error
    assert raised.value.__cause__ is error


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (torch.OutOfMemoryError(MEMORY), UserError, "Tried to allocate 2.00 GiB; lower batch_size (and raise"),
        (RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:5] closed"), PeerLost, "lost another"),
    ],
)
def test_errors_of_the_machine_are_not_user_code_errors(error: Exception, kind: type[UserError], message: str) -> None:
    for block in (as_user_error("unit Encode"), explain_runtime_errors()):
        with pytest.raises(kind) as raised, block:
            raise error
        assert message in str(raised.value)
        assert "fix it" not in str(raised.value)
        assert "\n" not in str(raised.value)
