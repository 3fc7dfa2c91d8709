"""Metrics beside the tools of the field: `python -m benchmarks.metric_parity A B [--clips A B]`

A and B are folders of RGB pictures. Both sides see the same files and the same weights, those of `kineo weights get`. The weights of
InceptionV3 have no classes, so the Inception Score gets random ones. Each tool resizes and scores by itself; LPIPS gets pairs of equal
names at 64 × 64, and FVD the first 16 frames of clips. The tools need not be installed beside kineograph:

    pip install --target peers --no-deps torch-fidelity clean-fid pytorch-fid lpips cd-fvd      # and torchvision, if it is missing
    PYTHONPATH=peers python -m benchmarks.metric_parity A B
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from kineograph.core import weight_cache
from kineograph.core.metric_options import MetricOptions
from kineograph.evaluate.extractor import i3d, inception
from kineograph.evaluate.extractor.layers import Unit
from kineograph.evaluate.picture_sets import MediaFolder, open_folder
from kineograph.evaluate.set_metrics import compare_sets

CPU = torch.device("cpu")
LPIPS_SIZE, FVD_FRAMES = (64, 64), 16
Row = tuple[str, str, float, float]  # metric, tool, ours, theirs


def compare_inception(a: Path, b: Path, place: Path) -> Iterator[Row]:
    """FID and KID as three tools define them, and the Inception Score."""
    import pytorch_fid.fid_score
    import pytorch_fid.inception
    import torch_fidelity
    from cleanfid import fid as clean

    classes = torch.randn(1008, inception.WIDTH, generator=torch.Generator().manual_seed(0)) / 10
    ours = load_file(weight_cache.find("inception-v3").path)
    save_file({**ours, "fc": classes}, place / "classes.safetensors")
    state = convert_units(inception.InceptionV3(), inception._torch_names(), ours, "conv", "bn")
    state |= {"fc.weight": classes, "fc.bias": torch.zeros(1008)}
    torch.save(state, place / "inception.pth")
    smaller = min(len(open_folder(path).files) for path in (a, b))
    extractors = {"is": str(place / "classes.safetensors")}

    def measure(mode: Any) -> Any:
        options = MetricOptions(fid_mode=mode, kid_subset_size=smaller, is_splits=1, extractors=extractors)
        return compare_sets(a, b, ["fid", "kid", "is"], options=options, device="cpu")

    found = measure("tensorflow")
    theirs = torch_fidelity.calculate_metrics(
        **{"input1": str(a), "input2": str(b), "fid": True, "kid": True, "isc": True, "isc_splits": 1},
        **{"kid_subset_size": smaller, "kid_subsets": 1, "batch_size": 1, "cuda": False, "cache": False},
        feature_extractor_weights_path=str(place / "inception.pth"),
        verbose=False,
    )
    tool = name_tool("torch-fidelity")
    yield "fid, tensorflow", tool, found["fid"], theirs["frechet_inception_distance"]
    yield "kid, tensorflow", tool, found["kid"], theirs["kernel_inception_distance_mean"]
    yield "is", tool, found["is"], theirs["inception_score_mean"]

    found = measure("clean")
    pytorch_fid.inception.load_state_dict_from_url = lambda *_, **__: state
    network = pytorch_fid.inception.InceptionV3(resize_input=False, normalize_input=False).eval()
    features = [
        clean.get_folder_features(
            str(path),
            lambda x: network((x - 128) / 128)[0].flatten(1),  # as clean-fid's own network, which cannot be downloaded
            **{"num_workers": 0, "batch_size": 1, "device": CPU, "mode": "clean", "verbose": False},
        )
        for path in (a, b)
    ]
    tool = name_tool("clean-fid")
    yield "fid, clean", tool, found["fid"], float(clean.fid_from_feats(*features))
    yield "kid, clean", tool, found["kid"], clean.kernel_distance(*features, num_subsets=1, max_subset_size=smaller)

    paths = [str(a), str(b)]
    theirs = pytorch_fid.fid_score.calculate_fid_given_paths(paths, 1, CPU, inception.WIDTH, num_workers=0)
    yield "fid, pytorch", name_tool("pytorch-fid"), measure("pytorch")["fid"], float(theirs)


def compare_lpips(a: Path, b: Path) -> Iterator[Row]:
    """The heads are those of the tool, the trunks ours."""
    import lpips

    for name, net in (("lpips-vgg16", "vgg"), ("lpips-alexnet", "alex")):
        network = lpips.LPIPS(net=net, pnet_rand=True, verbose=False)
        ours = load_file(weight_cache.find(name).path)
        layers = {key.split(".")[1]: layer for key, layer in network.net.named_modules() if "." in key}
        for index, layer in layers.items():
            if isinstance(layer, nn.Conv2d):
                layer.load_state_dict({part: ours[f"features.{index}.{part}"] for part in ("weight", "bias")})
        folders = [open_folder(path, size=LPIPS_SIZE) for path in (a, b)]
        with torch.no_grad():
            pairs = [[folder.read(file) for folder in folders] for file in folders[0].files]
            theirs = np.mean([network(x, y, normalize=True).item() for x, y in pairs])
        options = MetricOptions(extractors={"paired_lpips": name})
        found = compare_sets(a, b, ["paired_lpips"], options=options, size=LPIPS_SIZE, device="cpu")
        yield name, name_tool("lpips"), found["paired_lpips"], float(theirs)


def compare_fvd(a: Path, b: Path, place: Path) -> Iterator[Row]:
    from cdfvd.fvd import cdfvd

    ours = load_file(weight_cache.find("i3d-kinetics400").path)
    branches = ("b0", "b1a", "b1b", "b2a", "b2b", "b3b")
    stem = ("Conv3d_1a_7x7", "Conv3d_2b_1x1", "Conv3d_2c_3x3")
    names = [*stem, *(f"{mixed}.{branch}" for mixed in i3d._MIXED for branch in branches)]
    state = convert_units(i3d.I3D(), names, ours, "conv3d", "bn")
    state |= {f"logits.conv3d.{part}": ours[f"fc.{part}"] for part in ("weight", "bias")}
    torch.save(state, place / "i3d.pt")
    options = MetricOptions(fvd_mode="pytorch", fvd_frames=FVD_FRAMES)
    found = compare_sets(a, b, ["fvd"], options=options, frames=FVD_FRAMES, device="cpu", batch=4)
    theirs = cdfvd("i3d", ckpt_path=str(place / "i3d.pt"), n_fake="full", device="cpu")  # type: ignore[arg-type]
    clips = [read_clips(open_folder(path, frames=FVD_FRAMES)) for path in (b, a)]
    yield "fvd, pytorch", name_tool("cd-fvd"), found["fvd"], float(theirs.compute_fvd(*clips))


def convert_units(
    network: nn.Module, names: list[str], weights: dict[str, Tensor], convolution: str, norm: str
) -> dict[str, Tensor]:
    """Our weights under the names of another implementation."""
    parts = {"weight": f"{convolution}.weight", "bias": f"{norm}.bias"}
    parts |= {"mean": f"{norm}.running_mean", "var": f"{norm}.running_var"}
    units = [name for name, part in network.named_modules() if isinstance(part, Unit)]
    state: dict[str, Tensor] = {}
    for unit, name in zip(units, names, strict=True):
        state |= {f"{name}.{theirs}": weights[f"{unit}.{ours}"] for ours, theirs in parts.items()}
        state[f"{name}.{norm}.weight"] = torch.ones_like(weights[f"{unit}.bias"])
    return state


def read_clips(folder: MediaFolder) -> np.ndarray:
    """Those that are long enough, B T H W C"""
    clips = [clip for name in folder.files if len(clip := folder.read(name)) == FVD_FRAMES]
    return (torch.stack(clips) * 255).round().byte().permute(0, 1, 3, 4, 2).numpy()


def name_tool(package: str) -> str:
    return f"{package} {version(package)}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.metric_parity", description=__doc__)
    parser.add_argument("pictures", type=Path, nargs=2, metavar="FOLDER")
    parser.add_argument("--clips", type=Path, nargs=2, metavar="FOLDER", help="also compare FVD on these clips")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        a, b = options.pictures
        rows = chain(
            compare_fvd(options.clips[0], options.clips[1], place) if options.clips else (),
            compare_lpips(a, b),
            compare_inception(a, b, place),
        )
        print("| metric | tool | ours | theirs | relative difference |\n|---|---|---|---|---|")
        for metric, tool, ours, theirs in rows:
            difference = abs(ours - theirs) / abs(theirs)
            print(f"| {metric} | {tool} | {ours:.6f} | {theirs:.6f} | {difference:.0e} |", flush=True)


if __name__ == "__main__":
    main()
