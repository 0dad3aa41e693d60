"""The routes of samples over steps, and of the images of evaluations."""

from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from sd3_light.inputs import read_limited
from sd3_light.ui.evaluation_pages import View, evaluated_image, evaluation_page, evaluations_page
from sd3_light.ui.folders import Folders
from sd3_light.ui.replies import integer, page_reply
from sd3_light.ui.sample_pages import LARGEST_FILE, sample_image, samples_page


def sample_routes(folders: Folders) -> list[Route]:
    """Return the routes."""
    routes = _SampleRoutes(folders)
    return [
        Route("/samples", routes.samples),
        Route("/runs/{run}/sample", routes.sample),
        Route("/evaluations", routes.evaluations),
        Route("/evaluations/{evaluation}", routes.evaluation),
        Route("/evaluations/{evaluation}/image", routes.evaluated),
    ]


@dataclass
class _SampleRoutes:
    """One method per route. Starlette calls them in threads."""

    folders: Folders

    def samples(self, request: Request) -> Response:
        query = request.query_params
        return page_reply(request, samples_page(self.folders, query.getlist("run"), query.get("text", "")))

    def sample(self, request: Request) -> Response:
        folder = self.folders.run(request.path_params["run"])
        query = request.query_params
        image = sample_image(folder, query.get("file", ""), integer(query.get("cell", "")))
        # an address with the version of its file never changes its content
        age = "max-age=31536000, immutable" if "version" in query else "no-cache"
        return Response(image, media_type="image/png", headers={"Cache-Control": f"private, {age}"})

    def evaluations(self, request: Request) -> Response:
        return page_reply(request, evaluations_page(self.folders))

    def evaluation(self, request: Request) -> Response:
        query = request.query_params
        view = View(
            query.get("row", ""),
            query.get("score", ""),
            query.get("order", "best"),
            integer(query.get("seed", "")) or 0,
        )
        number = integer(query.get("page", "")) or 1
        return page_reply(request, evaluation_page(self.folders, request.path_params["evaluation"], view, number))

    def evaluated(self, request: Request) -> Response:
        query = request.query_params
        caption = integer(query.get("caption", ""))
        file = evaluated_image(self.folders, request.path_params["evaluation"], query.get("row", ""), caption)
        image = read_limited(file, LARGEST_FILE)
        return Response(image, media_type="image/png", headers={"Cache-Control": "private, no-cache"})
