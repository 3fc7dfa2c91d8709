"""What `kineo import` and `kineo export` do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from kineograph.core.errors import InputError
from kineograph.core.run_folder import RunFolder

SOURCES = ("diffusers", "sat", "sat-config")
TARGETS = ("diffusers", "safetensors")


def import_weights(
    what: Sequence[Path],
    source: str,
    run: Path | None = None,
    link: bool = False,
    lora: Path | None = None,
    note: Callable[[str], None] = lambda line: None,
) -> str:
    """→ the run folder that was made, or the YAML of a config."""
    if source not in SOURCES:
        raise InputError(f"--from {source}: use {', '.join(SOURCES[:-1])} or {SOURCES[-1]}")
    if source == "sat-config":
        if run is not None or link or lora is not None:
            raise InputError("--from sat-config prints a YAML and makes no run: leave --run, --link and --lora out")
        from kineograph.interop.sat_config import translate

        return translate(what)
    if len(what) != 1:
        raise InputError(f"--from {source} takes one folder, not {len(what)}")
    from kineograph.interop.import_run import import_run

    return str(import_run(what[0], source, run, link, lora, note))


def export_weights(
    run: Path,
    out: Path,
    target: str,
    *,
    checkpoint: str = "last",
    online: bool = False,
    lora: bool = False,
    dtype: str | None = None,
    note: Callable[[str], None] = lambda line: None,
) -> list[Path]:
    """→ the files that were written."""
    if target not in TARGETS:
        raise InputError(f"--to {target}: use {' or '.join(TARGETS)}")
    folder = RunFolder.existing(run)
    if target == "safetensors":
        if lora or dtype is not None:
            raise InputError(
                "--lora and --dtype are read with --to diffusers only: --to safetensors writes what is saved"
            )
        from kineograph.interop.export_run import export_safetensors

        return export_safetensors(folder, out, checkpoint, online, note)
    from kineograph.interop.export_run import export_diffusers

    return export_diffusers(folder, out, checkpoint, online, lora, dtype, note)
