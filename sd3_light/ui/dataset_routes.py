"""The routes of datasets."""

from collections.abc import Callable
from pathlib import Path
from urllib.parse import parse_qs

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from sd3_light.config.faults import UserError
from sd3_light.ui.caption_edits import edited_captions
from sd3_light.ui.dataset_pages import chosen_rows, dataset_page, preview_page, query_of, sample_image
from sd3_light.ui.datasets import Dataset, Datasets
from sd3_light.ui.replies import body_of, form_of, integer, json_reply, object_of, page_reply, text_in

_MOST_KEYS = 1000


def dataset_routes(datasets: Datasets) -> list[Route]:
    """Return the routes."""
    routes = _DatasetRoutes(datasets)
    return [
        Route("/datasets/{dataset}", routes.page),
        Route("/datasets/{dataset}/image", routes.image),
        Route("/datasets/{dataset}/caption", routes.caption),
        Route("/datasets/{dataset}/caption", routes.edit, methods=["POST"]),
        Route("/datasets/{dataset}/change", routes.change, methods=["POST"]),
        Route("/datasets/{dataset}/apply", routes.apply, methods=["POST"]),
        Route("/datasets/{dataset}/undo", routes.undo, methods=["POST"]),
        Route("/datasets/{dataset}/list", routes.list_images, methods=["POST"]),
        Route("/datasets/{dataset}/tokens", routes.count_tokens, methods=["POST"]),
        Route("/datasets/{dataset}/psnr", routes.measure_psnr, methods=["POST"]),
        Route("/datasets/{dataset}/plan", routes.plan, methods=["POST"]),
    ]


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

    async def edit(self, request: Request) -> Response:
        values = await object_of(request)
        number = values.get("number")
        if type(number) is not int:
            raise UserError("number is not an integer")
        key, old, new = (text_in(values, name) for name in ("key", "old", "new"))
        captions = await run_in_threadpool(lambda: self._dataset(request).edit(key, number, old, new))
        return json_reply({"captions": captions})

    async def change(self, request: Request) -> Response:
        form = parse_qs((await body_of(request)).decode(errors="replace"), keep_blank_values=True)
        return await run_in_threadpool(self._change, request, form)

    def _change(self, request: Request, form: dict[str, list[str]]) -> Response:
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

    async def apply(self, request: Request) -> Response:
        return await self._do(request, lambda dataset, form: dataset.apply(form.get("preview", "")))

    async def undo(self, request: Request) -> Response:
        return await self._do(request, lambda dataset, form: dataset.undo())

    async def list_images(self, request: Request) -> Response:
        return await self._do(request, lambda dataset, form: dataset.list_images("compare" in form))

    async def count_tokens(self, request: Request) -> Response:
        return await self._do(request, lambda dataset, form: dataset.count_tokens())

    async def measure_psnr(self, request: Request) -> Response:
        return await self._do(request, lambda dataset, form: dataset.measure_psnr())

    async def plan(self, request: Request) -> Response:
        return await self._do(
            request, lambda dataset, form: dataset.plan_cache(Path(form.get("config", ""))), "#continue"
        )

    def _dataset(self, request: Request) -> Dataset:
        return self.datasets.get(request.path_params["dataset"])

    async def _do(
        self, request: Request, work: Callable[[Dataset, dict[str, str]], object], part: str = ""
    ) -> Response:
        """Do something with a dataset and a form, and return to the page of the dataset."""
        form = await form_of(request)
        await run_in_threadpool(lambda: work(self._dataset(request), form))
        return self._back(request, form.get("query", ""), part)

    def _back(self, request: Request, query: str, part: str = "") -> Response:
        """Return to the page of the dataset, with a query that it sent."""
        known = "&".join(piece for piece in query.split("&") if piece.isascii() and piece.isprintable())
        return RedirectResponse(f"/datasets/{request.path_params['dataset']}?{known}{part}", 303)
