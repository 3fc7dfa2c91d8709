"""Renders the pages: one Jinja environment for the server and the report."""

from __future__ import annotations

import base64
import hashlib
import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from kineograph import __version__
from kineograph.core.text_file import replace_surrogates
from kineograph.core.units import format_count, format_size
from kineograph.studio import formats
from kineograph.studio.runs import Run

HERE = Path(__file__).parent
STATIC_TYPES = {".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8", ".webp": "image/webp"}


@lru_cache(maxsize=1)
def read_static() -> dict[str, bytes]:
    """The files that pages load, by name."""
    return {path.name: path.read_bytes() for path in (HERE / "static").iterdir() if path.suffix in STATIC_TYPES}


def static_url(name: str) -> str:
    """An address that changes with the file, so that browsers may keep it."""
    return f"/static/{name}?v={hashlib.sha256(read_static()[name]).hexdigest()[:12]}"


def content_hash(text: str) -> str:
    """How a Content-Security-Policy names an inline script or style."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def to_script_json(value: Any) -> Markup:
    """JSON inside a script element: no text of a run can end the element."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c").replace("\u2028", "\\u2028")
    return Markup(text)


@lru_cache(maxsize=1)
def make_environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "number": formats.format_number,
        "duration": formats.format_duration,
        "date": formats.format_date,
        "bytes": format_size,
        "count": format_count,
        "spark": formats.draw_spark,
        "script_json": to_script_json,
    }
    environment.globals |= {"static": static_url, "version": __version__, "render_row": render_row}
    return environment


def render(template: str, **values: Any) -> str:
    """Render a template. Half characters in names and captions of strangers, which UTF-8 cannot hold, are replaced."""
    return replace_surrogates(make_environment().get_template(template).render(**values))


@lru_cache(maxsize=4_096)
def render_row(run: Run) -> Markup:
    """The row of a run in the list of runs; rendered again when the run has changed."""
    return Markup(render("_run_row.html", run=run))


def render_head(run: Run) -> str:
    """State and progress at the top of a run's page."""
    return render("_run_head.html", run=run)
