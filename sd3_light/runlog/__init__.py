"""The record of a run: `log.jsonl` (the truth), TensorBoard and trackers (its mirrors), messages and progress bars."""

from sd3_light.runlog.bars import LINE_EVERY, Bar, progress
from sd3_light.runlog.console import CONSOLE, info, is_main_process, quiet_libraries, set_main_process, show
from sd3_light.runlog.log import METRIC_GROUPS, RunLog, Tracker, measured, read_log
from sd3_light.runlog.tables import ResultTable, print_table
from sd3_light.runlog.trackers import missing_trackers, open_trackers

__all__ = [
    "CONSOLE",
    "LINE_EVERY",
    "METRIC_GROUPS",
    "Bar",
    "ResultTable",
    "RunLog",
    "Tracker",
    "info",
    "is_main_process",
    "measured",
    "missing_trackers",
    "open_trackers",
    "print_table",
    "progress",
    "quiet_libraries",
    "read_log",
    "set_main_process",
    "show",
]
