"""The routes and pages of uploads to the hub: a form, a plan that shows every file, and the upload itself."""

from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from sd3_light.pages import render_template
from sd3_light.ui.folders import Folders
from sd3_light.ui.playground import Playground
from sd3_light.ui.replies import form_of, given, number_in, page_reply
from sd3_light.ui.sharing import Share, Sharing


def share_routes(folders: Folders, playground: Playground) -> list[Route]:
    """Return the routes."""
    routes = _ShareRoutes(Sharing(folders, playground.prepare))
    return [
        Route("/share", routes.form),
        Route("/share/plans", routes.plan, methods=["POST"]),
        Route("/share/plans/{number}", routes.planned),
        Route("/share/plans/{number}/upload", routes.upload, methods=["POST"]),
    ]


@dataclass
class _ShareRoutes:
    """One method per route. Starlette calls those that are not async in threads."""

    sharing: Sharing

    def form(self, request: Request) -> Response:
        run_id = request.query_params.get("run", "")
        run = self.sharing.folders.run(run_id) if run_id else None
        return page_reply(request, render_template("share.html", exports=self.sharing.exports(run), served="/"))

    @given(form_of)
    def plan(self, request: Request, form: dict[str, str]) -> Response:
        share = self.sharing.submit(form)
        return RedirectResponse(f"/share/plans/{share.id}", 303)

    def planned(self, request: Request) -> Response:
        return page_reply(request, share_page(self.sharing.shares.get(number_in(request))))

    def upload(self, request: Request) -> Response:
        share = self.sharing.upload(number_in(request))
        return RedirectResponse(f"/share/plans/{share.id}", 303)


def share_page(share: Share) -> str:
    """Return the page of an upload, which updates itself while a thread works on it."""
    problem = _problem(share)
    notes = [share.error] if share.error else [problem] if problem else []
    return render_template(
        "share_plan.html", share=share, notes=notes, served="/", live=not share.is_done, problem=problem
    )


def _problem(share: Share) -> str:
    """Return why a plan cannot be carried out now; "" if it can."""
    if share.plan is None:
        return ""
    if share.plan.problem:
        return share.plan.problem
    if share.public and not share.plan.licence:
        return "A public repository needs a licence: go back and state one."
    return ""
