"""Where samples come from: folders, caption tables, tars and Parquet, all read as one stream of records.

`scan` walks one directory of a data set; `scan_all` walks all of them; `signature` tells whether a scan would yield
what the last one did.
"""

from sd3_light.data.sources.captions import caption_variants
from sd3_light.data.sources.locations import location_from_text, location_text
from sd3_light.data.sources.records import Location, Record, Rejected
from sd3_light.data.sources.scan import occurrences, scan, scan_all
from sd3_light.data.sources.signature import signature

__all__ = [
    "Location",
    "Record",
    "Rejected",
    "caption_variants",
    "location_from_text",
    "location_text",
    "occurrences",
    "scan",
    "scan_all",
    "signature",
]
