"""Sample sources: folders, caption tables, tars and Parquet files, all read as one stream of records.

`scan` walks one directory of a dataset; `signature` changes whenever a scan would yield something different.
"""

from sd3_light.data.sources.captions import caption_variants
from sd3_light.data.sources.locations import location_from_text, location_text
from sd3_light.data.sources.records import Location, Record, Rejected
from sd3_light.data.sources.scan import occurrences, scan
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
    "signature",
]
