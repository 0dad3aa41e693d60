"""What libraries print beside our messages."""

import logging

from sd3_light.runlog import quiet_libraries


def test_warnings_of_deepspeed_are_silenced_before_and_after_its_import() -> None:
    """Its import, which transformers starts when it saves a model, sets the level of its logger."""
    quiet_libraries()
    logger = logging.getLogger("DeepSpeed")
    logger.setLevel(logging.WARNING)
    records = [logging.LogRecord(logger.name, level, "", 0, "text", (), None) for level in (30, 40)]
    assert [bool(logger.filter(record)) for record in records] == [False, True]
