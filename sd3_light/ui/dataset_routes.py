"""The routes of datasets."""

from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from sd3_light.config.faults import UserError
from sd3_light.ui.caption_edits import edited_captions
from sd3_light.ui.dataset_pages import chosen_rows, dataset_page, preview_page, query_of, sample_image
from sd3_light.ui.datasets import Dataset, Datasets
from sd3_light.ui.replies import fields_of, form_of, given, integer, json_reply, object_of, page_reply, text_in

_MOST_KEYS = 1000

Endpoint = Callable[[Request], Awaitable[Response]]


def dataset_routes(datasets: Datasets) -> list[Route]:
    """Return the routes."""
    routes = _DatasetRoutes(datasets)
    return [
        Route("/datasets/{dataset}", routes.page),
        Route("/datasets/{dataset}/image", routes.image),
        Route("/datasets/{dataset}/caption", routes.caption),
        Route("/datasets/{dataset}/caption", routes.edit, methods=["POST"]),
        Route("/datasets/{dataset}/change", routes.change, methods=["POST"]),
        *(Route(f"/datasets/{{dataset}}/{name}", routes.doing(work), methods=["POST"]) for name, work in _WORK.items()),
    ]


_WORK: dict[str, Callable[[Dataset, dict[str, str]], object]] = {
    "apply": lambda dataset, form: dataset.apply(form.get("preview", "")),
    "undo": lambda dataset, form: dataset.undo(),
    "list": lambda dataset, form: dataset.list_images("compare" in form),
    "tokens": lambda dataset, form: dataset.count_tokens(),
    "psnr": lambda dataset, form: dataset.measure_psnr(),
    "plan": lambda dataset, form: dataset.plan_cache(Path(form.get("config", ""))),
}
"""What is done with a dataset and a form by the name of its route; then the page of the dataset is shown again."""


class _DatasetRoutes:
    """One method per route. Starlette calls those that are not async in threads."""

    def __init__(self, datasets: Datasets) -> None:
        self.datasets = datasets

    def page(self, request: Request) -> Response:
        values = dict(request.query_params)
        number = integer(values.get("page", "")) or 1
        dataset_id = request.path_params["dataset"]
        text = dataset_page(self._dataset(request), dataset_id, query_of(values), number, "tags" in values)
        return page_reply(request, text)

    def image(self, request: Request) -> Response:
        image = sample_image(self._dataset(request), request.query_params.get("key", ""))
        return Response(image, media_type="image/webp", headers={"Cache-Control": "private, max-age=60"})

    def caption(self, request: Request) -> Response:
        place = self._dataset(request).caption_place(request.query_params.get("key", ""))
        return json_reply({"captions": edited_captions(place), "file": str(place.path), "is_new": place.is_new})

    @given(object_of)
    def edit(self, request: Request, values: dict[str, Any]) -> Response:
        number = values.get("number")
        if type(number) is not int:
            raise UserError("number is not an integer")
        key, old, new = (text_in(values, name) for name in ("key", "old", "new"))
        return json_reply({"captions": self._dataset(request).edit(key, number, old, new)})

    @given(fields_of)
    def change(self, request: Request, form: dict[str, list[str]]) -> Response:
        """Preview a change of captions, or exclude or include samples."""
        dataset = self._dataset(request)
        first = {name: values[0] for name, values in form.items()}
        back = first.get("query", "")
        query = query_of({name: values[0] for name, values in parse_qs(back, keep_blank_values=True).items()})
        scope = first.get("scope", "")
        keys = form.get("key", []) if scope != "all" else None
        if keys is not None and not 0 < len(keys) <= _MOST_KEYS:
            raise UserError("no sample is marked; mark some, or choose all that match")
        rows = chosen_rows(dataset, query, keys)
        match first.get("action", ""):
            case "preview":
                mode, find, put = (first.get(name, "").replace("\r\n", "\n") for name in ("mode", "find", "put"))
                preview = dataset.preview(rows, mode, find, put)
                return page_reply(request, preview_page(dataset, request.path_params["dataset"], preview, back))
            case "exclude" | "include" as action:
                chosen = dataset.require_index().keys(rows) if keys is None else keys
                count = dataset.exclude(chosen, action == "exclude")
                dataset.notes = [f"{count:,} samples are {action}d now. No file was deleted."]
                return self._back(request, back)
        raise UserError("choose what to do")

    def _dataset(self, request: Request) -> Dataset:
        return self.datasets.get(request.path_params["dataset"])

    def doing(self, work: Callable[[Dataset, dict[str, str]], object]) -> Endpoint:
        """Return the method of a route that does something with a dataset and a form."""

        @given(form_of)
        def do(self: "_DatasetRoutes", request: Request, form: dict[str, str]) -> Response:
            work(self._dataset(request), form)
            return self._back(request, form.get("query", ""))

        return partial(do, self)

    def _back(self, request: Request, query: str) -> Response:
        """Return to the page of the dataset, with a query that it sent."""
        part = "#continue" if request.url.path.endswith("/plan") else ""
        known = "&".join(piece for piece in query.split("&") if piece.isascii() and piece.isprintable())
        return RedirectResponse(f"/datasets/{request.path_params['dataset']}?{known}{part}", 303)
