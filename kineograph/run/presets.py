"""`kineo presets`: list the presets, from the header of each file.

A preset begins with comment lines of the form `# Key: text`, each key once, in any order:

    # Summary: what it is, in one line
    # Command: kineo train NAME
    # Hardware: what it was made for
    # Time: how long it takes there
    # Expect: the result to expect

A text continues in comment lines that are indented by two spaces or more after the `#`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kineograph.core.errors import ConfigError
from kineograph.run.layers import find_preset, preset_names, read_file

KEYS = ("Summary", "Command", "Hardware", "Time", "Expect")


@dataclass(frozen=True)
class Preset:
    """One row of the table."""

    name: str
    family: str
    stages: tuple[str, ...]
    summary: str
    command: str
    hardware: str
    time: str
    expect: str


def read_header(path: Path) -> dict[str, str]:
    """The `# Key: text` lines at the head of a file."""
    keys: dict[str, str] = {}
    last = None
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        text = line[1:]
        key, colon, value = text.strip().partition(":")
        if colon and key in KEYS:
            if key in keys:
                raise ConfigError(f"{path}: '# {key}:' is given twice")
            keys[key], last = value.strip(), key
        elif last and text.startswith("  "):
            keys[last] = f"{keys[last]} {text.strip()}"
        else:
            last = None
    return keys


def read_preset(path: Path) -> Preset:
    """Header and stages of one preset."""
    head = read_header(path)
    missing = [key for key in KEYS if not head.get(key)]
    if missing:
        raise ConfigError(f"{path}: the header lacks {', '.join(f'# {key}:' for key in missing)}")
    tree = read_file(path)
    stages = tree.get("stages") or {}
    tasks = [str((stage or {}).get("task", "")) for stage in stages.values()]
    # The family is what the last stages build up to: `muse` of vqgan, muse, muse.critic.
    family = tasks[-1].partition(".")[0] if tasks else ""
    return Preset(path.stem, family, tuple(stages), *(head[key] for key in KEYS))


def list_presets() -> list[Preset]:
    return [read_preset(find_preset(name)) for name in preset_names()]


def print_presets() -> None:
    """Print every preset: what it is, hardware, time and expected result."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 100  # a file or pipe has no width of its own
    family = ""
    for preset in sorted(list_presets(), key=lambda preset: (preset.family, preset.name)):
        if preset.family != family:
            family = preset.family
            console.print(f"\n{family}", style="bold", markup=False)
        rows = Table.grid(padding=(0, 2))
        rows.add_column(width=26)
        rows.add_column(ratio=1)
        rows.add_row(f"  {preset.name}", preset.summary)
        rows.add_row("", f"{' → '.join(preset.stages)} · {preset.hardware} · {preset.time}", style="dim")
        rows.add_row("", f"expect: {preset.expect}", style="dim")
        console.print(rows)
    console.print(
        "\nkineo train PRESET trains one, kineo doctor PRESET estimates what it takes, kineo presets PRESET prints its file.",
        markup=False,
    )


def print_preset(name: str) -> None:
    """Print the file of one preset."""
    print(find_preset(name).read_text(encoding="utf-8"), end="")
