"""`kineo import`, `export`, `weights get` and `weights list`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option, Typer

from kineograph.cli.options import Checkpoint, Run, Trust, print_to_stderr

app = Typer()
weights_app = Typer(
    name="weights", help="Weights of the networks behind metrics and perceptual losses.", no_args_is_help=True
)
app.add_typer(weights_app)


@app.command("import")
def import_(
    what: Annotated[
        list[Path],
        Argument(
            metavar="DIR|FILE …", help="A folder of weights, or a config; sat-config: several, later over earlier."
        ),
    ],
    from_: Annotated[
        str, Option("--from", help="diffusers, sat; or of configs: sat-config, dalle2-config, phenaki, nuwa, muse.")
    ],
    run: Annotated[Path | None, Option(help="Run folder to create.", show_default="runs/<DIR>")] = None,
    link: Annotated[bool, Option("--link", help="diffusers: refer to the folder, copy no weights.")] = False,
    lora: Annotated[
        Path | None, Option(help="diffusers: a LoRA file or folder; the run refers to DIR and holds the adapters.")
    ] = None,
) -> None:
    """Make a run from released weights, to sample from and to fine-tune; or print another project's config as Kineograph YAML.

    Configs: SAT's, DALLE2-pytorch's JSON, and scripts that call the trainers of phenaki-pytorch, nuwa-pytorch or
    muse-maskgit-pytorch; these are parsed, never run.

    Example: kineo import CogVideoX-2b --from diffusers --run runs/cogvideox-2b
    """
    from kineograph.interop.import_run import import_weights

    print(import_weights(what, from_, run, link, lora, print_to_stderr))


@app.command()
def export(
    run: Run,
    out: Annotated[Path, Argument(metavar="DIR", help="A new or empty folder.")],
    to: Annotated[str, Option("--to", help="diffusers or safetensors.")],
    checkpoint: Checkpoint = "last",
    online: Annotated[bool, Option("--online", help="The last step's weights instead of the averaged ones.")] = False,
    lora: Annotated[
        bool, Option("--lora", help="diffusers: only the adapters, as a LoRA file, instead of merged weights.")
    ] = False,
    dtype: Annotated[str | None, Option(help="diffusers: fp32, bf16 or fp16.", show_default="as saved")] = None,
    trust: Trust = False,
) -> None:
    """Write a run's weights for other tools: a diffusers folder (CogVideoX), or plain safetensors (every family)."""
    from kineograph.interop.export_run import export_weights

    for path in export_weights(run, out, to, checkpoint, online, lora, dtype, print_to_stderr):
        print(path)


@weights_app.command("get")
def weights_get(
    names: Annotated[
        list[str] | None, Argument(metavar="NAME …", help="Such as inception-v3; without a name, lists them.")
    ] = None,
    from_: Annotated[
        list[Path] | None, Option("--from", metavar="FILE", help="A file that you already have, instead of a download.")
    ] = None,
    accept_hash: Annotated[
        list[str] | None,
        Option(metavar="SHA256", help="Accept a file of --from with this hash, which is not a known one."),
    ] = None,
) -> None:
    """Download weights (or the kernels flash-attention-3) to the cache ($KINEO_CACHE, or ~/.cache/kineograph) and check their hash."""
    if not names:
        weights_list()
        return
    from kineograph.core.errors import InputError
    from kineograph.evaluate.weights import check_names, get_weights

    check_names(names)  # of all, before the first download
    if from_ and len(names) > 1:
        raise InputError(f"--from is for one name, not {', '.join(names)}: use one command for each")
    for name in names:
        weights = get_weights(name, from_ or [], note=print_to_stderr, accepted=accept_hash or [])
        print(f"{weights.path}  sha256 {weights.sha256}")


@weights_app.command("list")
def weights_list() -> None:
    """List the weights that can be downloaded, and those in the cache."""
    from kineograph.core.console import open_console
    from kineograph.evaluate.weights import weights_table

    open_console().print(weights_table())
