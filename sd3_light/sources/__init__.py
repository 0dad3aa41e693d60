"""Sample sources: folders, caption tables, tars and Parquet files, all read as one stream of records.

`scan.scan` walks one directory of a dataset; `signature.signature` changes when a scan would yield something else.
"""
