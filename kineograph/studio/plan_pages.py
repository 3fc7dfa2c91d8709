"""The addresses of Plan: presets, and what one of them takes of a GPU."""

from __future__ import annotations

import time

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from kineograph.run.layers import find_preset, preset_names
from kineograph.run.presets import list_presets, read_preset
from kineograph.studio import pages
from kineograph.studio.memory_plan import GIB, PARTS, SIZES, USUAL, Estimator, make_command

# Presets with a picture in static/, and what it shows.
PICTURES = {
    "cogvideox-digits": "a handwritten yellow 4 slides to the bottom right",
    "dalle2-tiny": "a cyan 1, a blue 5, a red 7 and a blue 9, each at the place that was asked for",
    "muse-digits": "four pictures: a green 6, a red 0, a yellow 5, a magenta 9",
    "nuwa-digits": "a green 4 that slides to the bottom right",
    "phenaki-digits": "a red 3 moves left and a blue 7 moves up",
    "phenaki-tiny": "a 3 moves left",
    "photos-tiny": "a lemon, a donkey, a strawberry and a vulture",
}


class PlanPages:
    """Answers requests below /plan."""

    def __init__(self) -> None:
        self.estimator = Estimator()

    def routes(self) -> list[Route]:
        return [
            Route("/plan", self.show_presets),
            Route("/plan/{preset}", self.show_preset),
            Route("/plan/{preset}/fit", self.show_fit),
        ]

    def show_presets(self, request: Request) -> Response:
        presets = sorted(list_presets(), key=lambda preset: (preset.family, preset.name))
        return HTMLResponse(pages.render("plan.html", presets=presets, pictures=PICTURES))

    def show_preset(self, request: Request) -> Response:
        name = self._find(request)
        self.estimator.estimate(name)  # begins while the page loads
        values = {"preset": read_preset(find_preset(name)), "picture": PICTURES.get(name)}
        return HTMLResponse(pages.render("plan_preset.html", **values, sizes=SIZES, usual=SIZES.index(USUAL)))

    def show_fit(self, request: Request) -> Response:
        """A part of the page: bars and settings for a GPU; 202 while more stages are estimated."""
        name = self._find(request)
        text = request.query_params.get("memory", str(USUAL))
        size = int(text) if text.isdecimal() and len(text) < 5 else USUAL
        memory = max(1, size) * GIB
        estimate = self.estimator.estimate(name)
        chosen = {stage.name: stage.choose(memory) for stage in estimate.stages}
        preset = read_preset(find_preset(name))
        fitting = {name: fit for name, fit in chosen.items() if fit is not None}
        command = make_command(preset, fitting) if estimate.is_done and len(fitting) == len(chosen) else ""
        values = {"preset": preset, "estimate": estimate, "size": max(1, size), "memory": memory, "chosen": chosen}
        html = pages.render("_fit.html", **values, command=command, parts=PARTS, waited=time.time() - estimate.began)
        return HTMLResponse(html, 200 if estimate.is_done else 202)

    @staticmethod
    def _find(request: Request) -> str:
        name: str = request.path_params["preset"]
        if name not in preset_names():
            raise HTTPException(404)
        return name
