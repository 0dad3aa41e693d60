"""The routes of projects: configs that are found, edited and checked, and new ones that are planned and created."""

from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from sd3_light.config.faults import UserError
from sd3_light.config.toml_text import with_value
from sd3_light.ui.folders import Folders, folder_id
from sd3_light.ui.playground import Playground
from sd3_light.ui.project_pages import editor_page, plan_page, projects_page, review_resume, review_text
from sd3_light.ui.projects import Planner, Projects
from sd3_light.ui.replies import form_of, given, json_reply, number_in, object_of, page_reply, text_in
from sd3_light.ui.run_queue import RunQueue
from sd3_light.ui.served_files import LARGEST_TEXT


def project_routes(folders: Folders, queue: RunQueue, playground: Playground) -> list[Route]:
    """Return the routes."""
    routes = _ProjectRoutes(folders, queue, playground, Projects(folders), Planner(folders, playground.prepare))
    return [
        Route("/projects", routes.projects),
        Route("/projects/plans", routes.plan, methods=["POST"]),
        Route("/projects/plans/{number}", routes.planned),
        Route("/projects/plans/{number}/create", routes.create, methods=["POST"]),
        Route("/projects/{config}", routes.editor),
        Route("/projects/{config}/review", routes.review, methods=["POST"]),
        Route("/projects/{config}/value", routes.value, methods=["POST"]),
        Route("/projects/{config}/save", routes.save, methods=["POST"]),
        Route("/projects/{config}/resume", routes.resume, methods=["POST"]),
    ]


@dataclass
class _ProjectRoutes:
    """One method per route. Starlette calls those that are not async in threads."""

    folders: Folders
    queue: RunQueue
    playground: Playground
    configs: Projects
    planner: Planner

    def projects(self, request: Request) -> Response:
        return page_reply(request, projects_page(self.folders, self.configs, self.playground))

    @given(form_of)
    def plan(self, request: Request, form: dict[str, str]) -> Response:
        plan = self.planner.submit(form)
        return RedirectResponse(f"/projects/plans/{plan.id}", 303)

    def planned(self, request: Request) -> Response:
        return page_reply(request, plan_page(self.planner.plans.get(number_in(request))))

    def create(self, request: Request) -> Response:
        config = self.planner.create(number_in(request))
        self.configs.listed.forget()
        return RedirectResponse(f"/projects/{folder_id(config)}", 303)

    def editor(self, request: Request) -> Response:
        return page_reply(request, editor_page(self.folders, self.configs, self.queue, request.path_params["config"]))

    @given(object_of)
    def review(self, request: Request, values: dict[str, Any]) -> Response:
        return self._review(request.path_params["config"], _text(values))

    @given(object_of)
    def value(self, request: Request, values: dict[str, Any]) -> Response:
        text = with_value(_text(values), text_in(values, "key"), text_in(values, "value"))
        return self._review(request.path_params["config"], text)

    @given(object_of)
    def save(self, request: Request, values: dict[str, Any]) -> Response:
        path, _ = self.configs.config(request.path_params["config"])
        version = self.configs.files.save_config(path, _text(values), text_in(values, "version"))
        self.configs.listed.forget()
        return json_reply({"version": version})

    def resume(self, request: Request) -> Response:
        path, _ = self.configs.config(request.path_params["config"])
        self.playground.prepare()
        return json_reply(review_resume(path))

    def _review(self, config_id: str, text: str) -> Response:
        if self.configs.config(config_id)[1] == "train":
            self.playground.prepare()
        return json_reply({"text": text, **review_text(self.configs, config_id, text)})


def _text(values: dict[str, Any]) -> str:
    text = text_in(values, "text")
    if len(text) > LARGEST_TEXT:
        raise UserError(f"the text is longer than {LARGEST_TEXT >> 10} KiB; shorten it")
    return text
