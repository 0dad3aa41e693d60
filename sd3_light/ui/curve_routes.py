"""The route of finer curves, which charts ask for when a reader zooms in."""

import math

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from sd3_light.config.faults import UserError
from sd3_light.ui.folders import Folders
from sd3_light.ui.replies import json_reply

_MOST_NAMES = 200  # of curves in one request


def curve_routes(folders: Folders) -> list[Route]:
    """Return the routes."""

    def curves(request: Request) -> Response:
        query = request.query_params
        folder = folders.run(request.path_params["run"])
        steps = _number(query.get("from", "")), _number(query.get("to", ""))
        fine = folders.fine_curves(folder, steps, query.getlist("name")[:_MOST_NAMES])
        return json_reply({"curves": {name: {"mean": c.points, "extremes": c.extremes} for name, c in fine.items()}})

    return [Route("/runs/{run}/curves", curves)]


def _number(text: str) -> float:
    """Return a finite number. Raises UserError for other texts."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise UserError(f"{text[:40]!r} is not a step; use a number")
    return value
