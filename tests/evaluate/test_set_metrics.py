"""`kineo metrics A B`: two folders, statistics, the items of a run; and what is wrong with them."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.linalg import sqrtm
from typer.testing import CliRunner

from kineograph.cli import app
from kineograph.core.errors import InputError
from kineograph.core.metric_options import MetricOptions
from kineograph.evaluate import picture_sets
from kineograph.evaluate.picture_sets import open_folder
from kineograph.evaluate.runner import evaluate
from kineograph.evaluate.saved_statistics import read_statistics
from kineograph.evaluate.set_metrics import compare_sets, parse_size
from kineograph.media.clips import write_clip
from tests.evaluate.test_distances import Motion, files  # noqa: F401 (a fixture)
from tests.evaluate.test_extractors import Colours, scripted
from tests.sample.tiny_task import TinyGenerator, make_run

PAIR = ("drawn", "real")


def pictures(folder, count: int, seed: int, size=(24, 20), shift: float = 0.0):
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    for number in range(count):
        colour = rng.random(3) * 0.5 + shift
        array = (np.clip(rng.normal(colour, 0.1, (*size, 3)), 0, 1) * 255).astype(np.uint8)
        Image.fromarray(array).save(folder / f"{number:03d}.png")
    return folder


def clips(folder, count: int, seed: int, frames: int):
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        draw = torch.Generator().manual_seed(seed + number)
        write_clip(folder / f"{number}.gif", torch.rand(frames, 3, 16, 16, generator=draw), 10)
    return folder


@pytest.fixture
def pair(tmp_path):
    return pictures(tmp_path / "drawn", 12, 0), pictures(tmp_path / "real", 15, 1, shift=0.2)


def own(files, **more) -> MetricOptions:  # noqa: F811
    return MetricOptions(extractors={"fid": files.colours, "kid": files.colours, "is": files.colours, **more})


def features(folder) -> np.ndarray:
    arrays = [np.asarray(Image.open(path)) for path in sorted(folder.glob("*.png"))]
    stack = torch.stack([torch.from_numpy(array.copy()).permute(2, 0, 1) / 255 for array in arrays])
    return Colours()(stack).double().numpy()


def frechet(x: np.ndarray, y: np.ndarray) -> float:
    a, b = np.cov(x, rowvar=False), np.cov(y, rowvar=False)
    return float(((x.mean(0) - y.mean(0)) ** 2).sum() + np.trace(a + b - 2 * sqrtm(a @ b).real))


def test_two_folders_of_different_counts(pair, files):  # noqa: F811
    found = compare_sets(*pair, options=own(files), device="cpu", batch=5)
    assert found["fid"] == pytest.approx(frechet(*map(features, pair)), rel=1e-4)
    assert set(found.results) == {"fid", "kid", "is"} and not found.skipped
    labels = found.results["fid"].labels
    assert (labels["count"], labels["real"], labels["size"]) == (12, 15, "24 × 20")
    assert labels["resize"] == "by the network"
    assert found.results["kid"].labels["subsets"] == "100 × 12"
    found.show()


def test_statistics_stand_in_for_a_folder_and_are_read_by_others(pair, files, tmp_path):  # noqa: F811
    path = tmp_path / "real.npz"
    whole = compare_sets(*pair, ["fid", "kid"], options=own(files), save_stats=path, device="cpu")
    with np.load(path) as arrays:  # as pytorch-fid reads them
        real = features(pair[1])
        assert np.allclose(arrays["mu"], real.mean(0), atol=1e-6)
        assert np.allclose(arrays["sigma"], np.cov(real, rowvar=False), atol=1e-6)
        assert arrays["feats"].shape == (15, 6)
    again = compare_sets(pair[0], path, ["fid", "kid"], options=own(files), device="cpu")
    assert again["fid"] == pytest.approx(whole["fid"], rel=1e-6)
    assert again["kid"] == pytest.approx(whole["kid"], rel=1e-5)
    assert again.results["fid"].labels["reference"] == "real.npz"
    assert again.results["fid"].labels["real"] == 15
    alone = tmp_path / "alone.npz"
    assert not compare_sets(pair[0], metrics=["fid"], options=own(files), save_stats=alone, device="cpu").results
    both = compare_sets(alone, path, ["fid"], device="cpu")  # no network at all
    assert both["fid"] == pytest.approx(whole["fid"], rel=1e-6)
    with pytest.raises(InputError, match=r"real.npz exists: give a new name"):
        compare_sets(*pair, ["fid"], options=own(files), save_stats=path, device="cpu")


def test_statistics_of_other_programs_have_no_protocol_and_say_so(pair, files, tmp_path):  # noqa: F811
    real = features(pair[1])
    np.savez(tmp_path / "ref.npz", mu=real.mean(0), sigma=np.cov(real, rowvar=False))
    found = compare_sets(pair[0], tmp_path / "ref.npz", ["fid", "kid"], options=own(files), device="cpu")
    assert found["fid"] == pytest.approx(frechet(features(pair[0]), real), rel=1e-4)
    assert found.results["fid"].labels["reference"] == "ref.npz (how it was computed is not stated)"
    assert found.results["fid"].labels["real"] == "not stated"
    assert "kid needs the features" in found.skipped["kid"] and found.is_incomplete
    np.savez(tmp_path / "kid.npz", feats=real.astype(np.float32))  # clean-fid's file for KID
    assert compare_sets(pair[0], tmp_path / "kid.npz", ["kid"], options=own(files), device="cpu")["kid"]


def test_statistics_of_other_features_are_refused(pair, files, tmp_path):  # noqa: F811
    saved = compare_sets(*pair, ["fid"], options=own(files), save_stats=tmp_path / "a.npz", device="cpu")
    assert saved.files
    wide = np.eye(2048)
    np.savez(tmp_path / "wide.npz", mu=wide[0], sigma=wide)
    np.savez(tmp_path / "torn.npz", mu=wide[0], sigma=wide[:, :5])
    np.savez(tmp_path / "nan.npz", mu=wide[0] * np.nan, sigma=wide)
    np.savez(tmp_path / "empty.npz", arr_0=np.zeros(3))
    np.savez(tmp_path / "objects.npz", mu=np.array([{"a": 1}], dtype=object), sigma=wide)
    (tmp_path / "text.npz").write_text("hello")
    with np.load(tmp_path / "a.npz") as arrays:
        stated = json.loads(str(arrays["protocol"]))
        stated["fid"]["extractor"] = "inception-v3 abc"
        np.savez(tmp_path / "other.npz", mu=arrays["mu"], sigma=arrays["sigma"], protocol=np.array(json.dumps(stated)))
    for name, message in {
        "wide": "holds 2048 features, and colours.pt gives 6 here",
        "torn": r"mu has 2048 entries, and sigma is 2048 × 5",
        "nan": "not finite",
        "empty": "needs mu and sigma, as pytorch-fid and clean-fid write them, and holds arr_0",
        "objects": "is not an .npz file of arrays",
        "text": "is not an .npz file of arrays",
        "other": r"was computed with extractor inception-v3, not colours.pt",
        "missing": "does not exist",
    }.items():
        with pytest.raises(InputError, match=message):
            compare_sets(pair[0], tmp_path / f"{name}.npz", ["fid"], options=own(files), device="cpu")


def test_clips_count_frames_and_whole_clips(tmp_path, files):  # noqa: F811
    drawn, real = clips(tmp_path / "drawn", 5, 0, 12), clips(tmp_path / "real", 6, 50, 14)
    clips(real / "short", 1, 90, 4)
    options = own(files, fvd=files.motion)
    found = compare_sets(drawn, real, options=options, device="cpu")
    fvd, fid = found.results["fvd"].labels, found.results["fid"].labels
    assert (fvd["count"], fvd["real"], fvd["frames"], fvd["real frames"]) == (5, 6, 12, 14)
    assert fvd["too short"] == "1 real"
    assert (fid["count"], fid["real"], fid["of"]) == (60, 88, "frames")
    cut = compare_sets(drawn, real, ["fvd"], options=options.model_copy(update={"fvd_frames": 10}), device="cpu")
    assert cut.results["fvd"].labels["frames"] == 10 and "real frames" not in cut.results["fvd"].labels
    first = torch.stack([read_gif(drawn / f"{n}.gif")[:10] for n in range(5)])
    other = torch.stack([read_gif(real / f"{n}.gif")[:10] for n in range(6)])
    expected = frechet(*(Motion()(x).double().numpy() for x in (first, other)))
    assert cut["fvd"] == pytest.approx(expected, rel=1e-3)
    with pytest.raises(InputError, match=r"6 real and 0 generated .*; 6 clips have fewer than 13 frames"):
        compare_sets(drawn, real, ["fvd"], options=options.model_copy(update={"fvd_frames": 13}), device="cpu")


def read_gif(path) -> torch.Tensor:
    with Image.open(path) as image:
        frames = []
        for number in range(image.n_frames):
            image.seek(number)
            frames.append(torch.from_numpy(np.asarray(image.convert("RGB")).copy()).permute(2, 0, 1) / 255)
    return torch.stack(frames)


def test_mixed_sizes_are_counted_and_size_makes_them_one(tmp_path, files):  # noqa: F811
    drawn, real = pictures(tmp_path / "drawn", 8, 0), pictures(tmp_path / "real", 8, 1)
    pictures(real / "more", 4, 2, size=(40, 40))
    labels = compare_sets(drawn, real, ["fid"], options=own(files), device="cpu").results["fid"].labels
    assert labels["real size"] == "2 sizes, 24 × 20 to 40 × 40" and labels["real"] == 12
    labels = compare_sets(drawn, real, ["fid"], options=own(files), size=(16, 16), device="cpu").results["fid"].labels
    assert (labels["size"], labels["real size"]) == ("16 × 16", "16 × 16")


def test_pairs_are_found_by_name(pair, files, tmp_path):  # noqa: F811
    options = own(files)
    with pytest.raises(InputError, match=r"no file of that name in .*, such as 012.png"):
        compare_sets(pair[1], pair[0], ["paired"], options=options, device="cpu")
    found = compare_sets(*pair, ["paired"], options=options, device="cpu")
    assert found.results["paired"].labels["frames"] == 12
    assert 0 < found["psnr"] < 40 and -1 < found["ssim"] < 1
    same = compare_sets(pair[0], pair[0], ["paired"], options=options, device="cpu")
    assert (same["psnr"], same["ssim"]) == (pytest.approx(100), pytest.approx(1))
    other = pictures(tmp_path / "other", 12, 3, size=(32, 32))
    with pytest.raises(InputError, match=r"24 × 20 × 3 cannot be compared with .*; --size HxW"):
        compare_sets(pair[0], other, ["paired"], options=options, device="cpu")
    assert compare_sets(pair[0], other, ["paired"], options=options, size=(16, 16), device="cpu")["psnr"]


def test_the_training_split_of_a_run_or_a_folder(pair, files, tmp_path):  # noqa: F811
    run = make_run(tmp_path / "run", source="folder", folder=str(pair[1]), validation=0.4, size=16)
    found = compare_sets(pair[0], run.path, ["fid"], options=own(files), device="cpu")
    count = found.results["fid"].labels["real"]
    held_out = compare_sets(pair[0], run.path, ["fid"], options=own(files), split="validation", device="cpu")
    assert 2 <= count < 15 and held_out.results["fid"].labels["real"] == 15 - count
    with pytest.raises(InputError, match="is a run: kineo evaluate"):
        compare_sets(run.path, pair[1], ["fid"], options=own(files), device="cpu")
    for number, path in enumerate(sorted(pair[1].glob("*.png"))):
        (folder := pair[1] / ("test" if number < 5 else "train")).mkdir(exist_ok=True)
        path.rename(folder / path.name)
    tested = compare_sets(pair[0], pair[1], ["fid"], options=own(files), split="test", device="cpu")
    assert tested.results["fid"].labels["real"] == 5
    pair[1].rename(tmp_path / "moved")
    with pytest.raises(InputError, match="does not exist; if the data were moved, give their folder instead of"):
        compare_sets(pair[0], run.path, ["fid"], options=own(files), device="cpu")


def test_bad_folders(pair, files, tmp_path):  # noqa: F811
    options, lines = own(files), []
    (pair[0] / "012.png").write_bytes(b"not a picture")
    found = compare_sets(*pair, ["fid"], options=options, device="cpu", note=lines.append)
    assert found.results["fid"].labels["count"] == 12
    assert lines == [f"1 of 13 files in {pair[0]} cannot be read, such as 012.png (not a PNG, JPEG, WebP, AVIF, "
                     "JPEG 2000, BMP, TIFF or GIF image): they are not counted"]  # fmt: skip
    for number in range(20, 30):
        (pair[0] / f"{number}.png").write_bytes(b"")
    with pytest.raises(InputError, match=r"11 of 23 files .* remove or replace them"):
        compare_sets(*pair, ["fid"], options=options, device="cpu")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "a.txt").write_text("")
    with pytest.raises(InputError, match=r"holds no pictures or clips: .* found 1 .txt"):
        compare_sets(tmp_path / "empty", pair[1], options=options, device="cpu")
    with pytest.raises(InputError, match="does not exist"):
        compare_sets(tmp_path / "nowhere", pair[1], options=options, device="cpu")
    one = pictures(tmp_path / "one", 1, 0)
    with pytest.raises(InputError, match="15 real and 1 generated samples: a covariance needs at least 2"):
        compare_sets(one, pair[1], ["fid"], options=options, device="cpu")
    with pytest.raises(InputError, match="--metrics loss is not a metric of two sets"):
        compare_sets(*pair, ["loss"])
    with pytest.raises(InputError, match="compares two sets"):
        compare_sets(pair[0], metrics=["fid"])
    with pytest.raises(InputError, match="no metric could be computed: fid: the weights inception-v3 are not on this"):
        compare_sets(*pair, ["fid"], device="cpu")


def test_the_command_shows_writes_and_says_what_is_missing(pair, files, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setenv("KINEO_CACHE", str(tmp_path / "cache"))
    words = ["metrics", *map(str, pair), "--extractor", f"fid={files.colours}", "--trust", "--device", "cpu"]
    done = CliRunner().invoke(app, [*words, "--metrics", "fid,kid", "--out", str(tmp_path / "found.json")])
    assert done.exit_code == 4, done.output
    assert "skipped kid: the weights inception-v3 are not on this machine" in done.output
    saved = json.loads((tmp_path / "found.json").read_text())
    assert saved["results"]["fid"]["labels"]["count"] == 12
    assert saved["drawn"]["items"] == 12 and saved["reference"]["sizes"] == "24 × 20"
    assert "kid" in saved["skipped"]
    assert CliRunner().invoke(app, [*words, "--metrics", "fid"]).exit_code == 0
    assert CliRunner().invoke(app, words).exit_code == 0  # nothing was asked for by name


def test_sizes():
    assert parse_size("64") == (64, 64) and parse_size("48x64") == (48, 64) and parse_size(None) is None
    for text in ("0", "x", "1x2x3", "99999", "-4"):
        with pytest.raises(InputError, match="--size"):
            parse_size(text)


# The same in an evaluation -------------------------------------------------------------------------------------------


def test_an_evaluation_compares_with_another_reference(tmp_path, files):  # noqa: F811
    run = make_run(tmp_path / "run", coloured=False)
    options = {"samples": 8, "device": "cpu", "extractors": [files.colours]}
    plain = evaluate(run.path, ["fid", "kid"], save_stats=tmp_path / "held.npz", **options)
    again = evaluate(run.path, ["fid", "kid"], reference=tmp_path / "held.npz", **options)
    assert again["fid"] == pytest.approx(plain["fid"], rel=1e-6)
    assert again["kid"] == pytest.approx(plain["kid"], rel=1e-5)
    assert read_statistics(tmp_path / "held.npz").protocol["fid"]["count"] == 8
    trained = evaluate(run.path, ["fid"], reference="train", reference_items=30, **options)
    labels = trained.stages[-1].results["fid"].labels
    assert (labels["real"], labels["count"], labels["reference"]) == (30, 8, "training split (30 items)")
    assert trained["fid"] != pytest.approx(plain["fid"], rel=1e-3)
    folder = pictures(tmp_path / "photos", 9, 0, size=(50, 70))
    other = evaluate(run.path, ["fid", "loss"], reference=folder, **options).stages[-1].results["fid"].labels
    assert (other["real"], other["reference"]) == (9, str(folder))
    for bad, message in (
        ({"reference": "train", "metrics": ["loss"]}, "--reference has no effect on loss"),
        ({"save_stats": tmp_path / "x.npz", "metrics": ["loss"]}, "--save-stats has no effect on loss"),
        ({"save_stats": tmp_path / "x.txt", "metrics": ["fid"]}, "ends with .npz"),
        ({"reference_items": 3, "metrics": ["fid"]}, "--reference-items has no effect"),
        ({"reference": tmp_path / "nowhere", "metrics": ["fid"]}, "does not exist"),
    ):
        with pytest.raises(InputError, match=message):
            evaluate(run.path, samples=4, device="cpu", extractors=[files.colours], **bad)


class Failing(torch.nn.Module):
    """Of pictures, with a bug."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.flatten(1) @ torch.zeros(5, 5)


def test_one_broken_metric_does_not_lose_the_others(tmp_path, files):  # noqa: F811
    run = make_run(tmp_path / "run")
    broken = scripted(Failing(), tmp_path / "broken.pt")
    words = ["evaluate", str(run.path), "--metrics", "fid,loss,kid", "--samples", "4", "--device", "cpu", "--trust"]
    words += ["--extractor", f"fid={broken}", "--extractor", f"kid={files.colours}"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 4, done.output
    assert "skipped fid: the extractor failed on pixels of shape" in done.output
    saved = json.loads((run.path / "evaluation.json").read_text())["results"]["validation"]["generator/step-00000020"]
    assert set(saved) == {"loss", "kid"}
    sheet = Image.open(run.path / "evaluation" / "validation-generator-step-00000020.png")
    evaluate(run.path, ["caption_accuracy"], samples=4, device="cpu")
    other = Image.open(run.path / "evaluation" / "validation-generator-step-00000020.png")
    assert sheet.size != other.size or sheet.tobytes() != other.tobytes()  # the figures of each are below its samples


def test_pairs_apply_by_themselves_only_where_samples_start_from_real_items(tmp_path, monkeypatch):
    run = make_run(tmp_path / "run", coloured=False)
    assert "paired" not in evaluate(run.path, samples=4, device="cpu").stages[-1].results
    named = evaluate(run.path, ["paired"], samples=4, device="cpu").stages[-1].results["paired"]
    assert named.labels["frames"] == 4 and named.values["psnr"] > 0
    with pytest.raises(InputError, match=r"--from-items has no effect on stage generator"):
        evaluate(run.path, ["paired"], samples=4, device="cpu", options=MetricOptions(from_items=True))
    monkeypatch.setattr(
        TinyGenerator, "describe_start", lambda self, prompts: "the real pictures' embeddings", raising=False
    )
    found = evaluate(run.path, samples=4, device="cpu").stages[-1].results["paired"]
    assert found.labels["drawn from"] == "the real pictures' embeddings"
    assert found.values == named.values
    monkeypatch.setattr(TinyGenerator, "describe_start", lambda self, prompts: "captions, through prior=x")
    assert "paired" not in evaluate(run.path, samples=4, device="cpu").stages[-1].results


def test_sheets_of_drawn_files_are_not_counted(tmp_path):
    for name in ("a-0001.png", "b-0001.gif", "b-0001.png", "sheet-0001.png", "photos/sheet-0001.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    for name in ("a-0001.json", "b-0001.json"):
        (tmp_path / name).write_text("{}")
    notes = []
    assert open_folder(tmp_path, note=notes.append).files == ["a-0001.png", "b-0001.gif", "photos/sheet-0001.png"]
    assert notes == [f"{tmp_path}: 2 contact sheets of drawn files are left out"]


def test_grids_and_film_strips_of_training_are_not_counted(tmp_path):
    """In RUN/STAGE/samples/step-N, prompts.json lists what was drawn."""
    step = tmp_path / "step-00000060"
    (step / "online").mkdir(parents=True)
    written = ("a-0000.gif", "b-0001.gif", "a-0000.strip.png", "grid.png", "online-beside-ema.gif", "train-grid.png")
    for name in (*written, "online/a-0000.gif"):
        (step / name).write_bytes(b"")
    rows = [{"file": "a-0000.gif", "prompt": "a"}, {"file": "b-0001.gif", "prompt": "b"}]
    (step / "prompts.json").write_text(json.dumps(rows))
    notes = []
    assert open_folder(step, note=notes.append).files == ["a-0000.gif", "b-0001.gif"]
    assert notes == [f"{step}: 5 contact sheets of drawn files are left out"]
    assert open_folder(tmp_path).files == ["step-00000060/a-0000.gif", "step-00000060/b-0001.gif"]
    (step / "prompts.json").write_text('["my own list"]')
    assert len(open_folder(step).files) == 7


def test_an_item_that_fills_the_memory_is_refused(tmp_path):
    frames = [Image.new("P", (2000, 2000), number) for number in range(40)]
    for name in PAIR:
        (tmp_path / name).mkdir()
        frames[0].save(tmp_path / name / "a.gif", save_all=True, append_images=frames[1:])
    with pytest.raises(InputError, match=r"40 frames of 2000 × 2000 pixels, .* give --size, or a smaller --frames"):
        compare_sets(tmp_path / "drawn", tmp_path / "real", ["paired"])


def test_a_batch_of_large_items_is_split(tmp_path, monkeypatch):
    for name in "abcde":
        Image.new("RGB", (16, 16)).save(tmp_path / f"{name}.png")
    monkeypatch.setattr(picture_sets, "MAX_VALUES", 2 * 3 * 16 * 16)
    assert [len(clips.pixels) for clips in open_folder(tmp_path).batches(32)] == [2, 2, 1]
