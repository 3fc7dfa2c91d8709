"""Numbers, times and sizes as people read them."""

from __future__ import annotations

import time
from collections.abc import Sequence


def format_number(value: float | None) -> str:
    """Four significant digits, thousands separated."""
    if value is None:
        return "–"
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    if 1e-3 <= abs(value) < 1e6:
        digits = f"{value:,.{max(0, 4 - len(str(int(abs(value)))))}f}"
        return digits if abs(value) >= 1 else f"{value:.4g}"
    return f"{value:.3g}"


def format_duration(seconds: float | None) -> str:
    """Two units: 3 d 4 h, 2 h 05 min, 3 min 20 s, 12 s."""
    if seconds is None:
        return "–"
    whole = round(seconds)
    if whole >= 86_400:
        return f"{whole // 86_400} d {whole % 86_400 // 3_600} h"
    if whole >= 3_600:
        return f"{whole // 3_600} h {whole % 3_600 // 60:02d} min"
    return f"{whole // 60} min {whole % 60:02d} s" if whole >= 60 else f"{whole} s"


def format_date(seconds: float) -> str:
    """The local date and time of seconds since the epoch."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def draw_spark(values: Sequence[float], width: int = 96, height: int = 24) -> str:
    """Points of an SVG polyline; empty without two values."""
    if len(values) < 2:
        return ""
    low, high = min(values), max(values)
    scale = (height - 4) / (high - low) if high > low else 0.0
    points = (
        (2 + number * (width - 4) / (len(values) - 1), height - 2 - (value - low) * scale)
        for number, value in enumerate(values)
    )
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
