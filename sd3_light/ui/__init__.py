"""`sd3-light ui`: a local web page over the templates of `report` and `inspect`, with a playground.

Only `server`, `guard`, `connections`, `replies` and modules of routes import Starlette and uvicorn, the extra `ui`. The
other modules return pages and data, and know nothing of HTTP.
"""
