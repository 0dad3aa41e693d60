"""The routes of the playground."""

import re
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from sd3_light.config.faults import UserError
from sd3_light.ui.playground import Playground
from sd3_light.ui.replies import given, json_reply, number_in, object_of, page_reply, text_in


def playground_routes(playground: Playground) -> list[Route]:
    """Return the routes."""
    routes = _PlaygroundRoutes(playground)
    return [
        Route("/playground", routes.page),
        Route("/playground/settings", routes.settings, methods=["POST"]),
        Route("/playground/drawings", routes.draw, methods=["POST"]),
        Route("/playground/drawings/{number}", routes.drawing),
        Route("/playground/drawings/{number}/cancel", routes.cancel, methods=["POST"]),
        Route("/playground/images/{name}", routes.image),
    ]


@dataclass
class _PlaygroundRoutes:
    """One method per route. Starlette calls those that are not async in threads."""

    playground: Playground

    def page(self, request: Request) -> Response:
        return page_reply(request, self.playground.page(request.query_params.get("run", "")))

    @given(object_of)
    def settings(self, request: Request, values: dict[str, Any]) -> Response:
        return json_reply(self.playground.settings_of(text_in(values, "settings")))

    @given(object_of)
    def draw(self, request: Request, values: dict[str, Any]) -> Response:
        return json_reply(self.playground.submit(values).as_json())

    def drawing(self, request: Request) -> Response:
        return json_reply(self.playground.drawings.get(number_in(request)).as_json())

    def cancel(self, request: Request) -> Response:
        return json_reply(self.playground.cancel(number_in(request)).as_json())

    def image(self, request: Request) -> Response:
        name = request.path_params["name"]
        path = self.playground.out / name
        if not re.fullmatch(r"(grid-)?\d{5,20}\.png", name) or not path.is_file():
            raise UserError(f"there is no image {name}")
        return FileResponse(path)
