"""Where samples come from: folders, caption tables, tars and Parquet, all read as one stream of records.

`scan` walks one directory of a data set; `scan_all` walks all of them.
"""

from sd3_light.data.sources.captions import caption_variants
from sd3_light.data.sources.records import Location, Record, Rejected
from sd3_light.data.sources.scan import occurrences, scan, scan_all

__all__ = ["Location", "Record", "Rejected", "caption_variants", "occurrences", "scan", "scan_all"]
