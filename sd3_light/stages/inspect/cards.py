"""One sample or one reject of the page."""

from collections.abc import Iterable, Sequence
from itertools import groupby

from sd3_light.runlog.page.html import Html, language, tag
from sd3_light.stages.inspect.gather import explain, sides
from sd3_light.stages.inspect.rejects import NO_PICTURE, Rejects, ShownReject
from sd3_light.stages.inspect.samples import ShownSample

_LONG = 200  # characters of a caption or detail that are shown unasked
_SMALL = 128  # pixels: such pictures are enlarged without blur, so that one sees what is there


def sample_sheet(samples: Iterable[ShownSample]) -> Html:
    """Cards of samples."""
    return tag("div", *map(sample_card, samples), class_="sheet")


def sample_card(sample: ShownSample) -> Html:
    """The original beside what the cache makes of it, its captions, and where it came from."""
    bucket = sample.pick.entry.bucket
    pictures = [
        _figure(sample.original, bucket, "original, cropped", sample.problem),
        _figure(sample.decoded, bucket, "from the cache" + _closeness(sample), "no VAE"),
    ]
    if sample.masked:
        pictures.append(_figure(sample.masked, bucket, "mask: tinted is not taught", ""))
    return tag(
        "article",
        tag("div", *pictures, class_="pictures"),
        *_captions(sample.origin.captions),
        tag("div", tag("div", _fitting(sample)), tag("div", sample.origin.key, class_="key"), class_="foot"),
        class_="sample",
    )


def reject_groups(rejects: Rejects) -> Html:
    """Rejects by reason: how many there are, what the reason means, and some of them."""
    groups = []
    for reason, shown in groupby(rejects.shown, key=lambda reject: reject.reason):
        some, total = list(shown), rejects.counts[reason]
        count = f"{total:,}" if len(some) == total else f"{total:,}, of which {len(some):,} are shown"
        groups.append(tag("h3", tag("code", reason), f": {count}"))
        groups.append(tag("p", explain(reason), class_="soft"))
        groups.append(_reject_group(some))
    return tag("div", *groups)


def _reject_group(rejects: Sequence[ShownReject]) -> Html:
    if any(reject.picture for reject in rejects):
        return tag("div", *map(reject_card, rejects), class_="rejects")
    # nothing to look at: a list is quicker to read than empty frames
    return tag("ul", *(_reject_line(reject) for reject in rejects), class_="plain")


def _reject_line(reject: ShownReject) -> Html:
    words = "; ".join(filter(None, (_cut(reject.detail), reject.problem if reject.problem != NO_PICTURE else "")))
    return tag("li", tag("span", reject.key, class_="key"), " ", tag("span", words, class_="soft"))


def reject_card(reject: ShownReject) -> Html:
    """A thumbnail as far as the file can be opened, its key and what was seen."""
    picture = tag("div", reject.problem, class_="missing")
    if reject.picture:
        picture = tag("img", src=reject.picture, alt="")
    detail = [tag("div", _cut(reject.detail), class_="soft")] if reject.detail else []
    return tag(
        "article",
        tag("div", picture, class_="thumbnail"),
        tag("div", reject.key, class_="key"),
        *detail,
        class_="reject",
    )


def _figure(uri: str, bucket: str, title: str, problem: str) -> Html:
    width, height = sides(bucket)
    if uri:
        small = "small" if max(width, height) <= _SMALL else None
        picture = tag("img", src=uri, alt=title, width=width, height=height, class_=small, style="height:auto")
    else:
        picture = tag("div", _cut(problem), class_="missing", style=f"aspect-ratio:{width}/{height}")
    return tag("figure", picture, tag("figcaption", title))


def _captions(captions: Iterable[str]) -> list[Html]:
    first, *others = list(captions) or [""]
    if not first.strip():
        shown = [tag("p", "the empty caption", class_="caption soft")]
    elif len(first) <= _LONG:
        shown = [_caption("p", first, "caption")]
    else:
        # the summary holds the whole caption; the style shows its first lines while it is closed
        size = tag("span", f"{len(first):,} characters", class_="soft")
        shown = [tag("details", tag("summary", _caption("span", first, "caption"), size), class_="long")]
    if others:
        more = tag("ol", *(_caption("li", other, None) for other in others), start=2)
        title = "1 more caption" if len(others) == 1 else f"{len(others)} more captions"
        shown.append(tag("details", tag("summary", title), more))
    return shown


def _caption(name: str, text: str, kind: str | None) -> Html:
    # by itself each may run from right to left
    return tag(name, text, lang=language(text), dir="auto", class_=kind)


def _fitting(sample: ShownSample) -> str:
    """``640x480 → 288x224, 3% cropped``"""
    fitting = sample.fitting
    words = [f"{fitting.source[0]}x{fitting.source[1]} → {sample.pick.entry.bucket}"]
    if fitting.cropped_fraction > 0:
        words.append(f"{max(fitting.cropped_fraction, 0.01):.0%} cropped")
    if fitting.enlarged:
        words.append("enlarged")
    return ", ".join(words)


def _closeness(sample: ShownSample) -> str:
    return "" if sample.closeness is None else f", {sample.closeness:.0f} dB"


def _cut(text: str) -> str:
    return text if len(text) <= _LONG else f"{text[: _LONG - 1]}…"
