"""diffusers folders: what is there is read lazily and exactly; what is wrong is named by file and key."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from diffusers import CogVideoXTransformer3DModel
from safetensors.torch import load_file, save_file

from kineograph.core.errors import InputError
from kineograph.core.weight_files import WeightFiles, check_shapes, open_weights, write_weights
from kineograph.interop.diffusers_folder import DIFFUSERS_STEM, read_folder

STEM = DIFFUSERS_STEM


def shards(folder: Path) -> list[Path]:
    return sorted((folder / "transformer").glob("*.safetensors"))


def test_a_folder_is_read_as_it_was_written(released: Path) -> None:
    found = read_folder(released)
    assert found.pipeline == "CogVideoXPipeline"
    assert set(found.components) == {"transformer", "vae", "scheduler", "text_encoder", "tokenizer"}
    assert found.config("transformer", "CogVideoXTransformer3DModel")["num_layers"] == 2
    assert found.component("scheduler").config["snr_shift_scale"] == 1.0
    weights = found.component("transformer").weights()
    expected = CogVideoXTransformer3DModel.from_pretrained(released / "transformer").state_dict()
    assert len(shards(released)) > 1 and set(weights) == set(expected)
    for name, value in expected.items():
        assert weights.shape(name) == tuple(value.shape)
        torch.testing.assert_close(weights[name], value, rtol=0, atol=0)
    check_shapes(weights, {name: value.shape for name, value in expected.items()}, released)
    assert "shared.weight" in found.component("text_encoder").weights()  # transformers' files have another stem


def test_opening_reads_no_tensor(folder: Path) -> None:
    """Headers are read at once, data when asked for: what is written into a file in between is seen."""
    path = shards(folder)[0]
    weights = open_weights(folder / "transformer", STEM)
    name = next(iter(load_file(path)))
    changed = {key: value + 1 for key, value in load_file(path).items()}
    metadata = WeightFiles([path]).metadata()
    expected = changed[name].clone()
    raw = path.read_bytes()
    save_file(changed, path.with_suffix(".new"), metadata=metadata)
    new = path.with_suffix(".new").read_bytes()
    assert len(new) == len(raw)
    with open(path, "r+b") as file:  # the same file, not another in its place
        file.write(new)
    torch.testing.assert_close(weights[name], expected)


@pytest.mark.parametrize("keep", [0.5, 0.999, 0.0])
def test_a_truncated_shard_is_named(folder: Path, keep: float) -> None:
    path = shards(folder)[1]
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * keep)])
    with pytest.raises(InputError, match=path.name):
        read_folder(folder).component("transformer").weights()


def test_a_missing_shard_is_named(folder: Path) -> None:
    path = shards(folder)[1]
    path.unlink()
    with pytest.raises(InputError, match=f"{path.name} does not exist"):
        read_folder(folder).component("transformer").weights()


def test_an_index_that_lies_is_named(folder: Path) -> None:
    index = folder / "transformer" / f"{STEM}.safetensors.index.json"
    tree = json.loads(index.read_text())
    first, second = shards(folder)[:2]
    name = next(key for key, file in tree["weight_map"].items() if file == first.name)

    def said(change: dict[str, str], without: str | None = None) -> str:
        names = {key: file for key, file in (tree["weight_map"] | change).items() if key != without}
        index.write_text(json.dumps({"weight_map": names}))
        with pytest.raises(InputError) as error:
            open_weights(folder / "transformer", STEM)
        return str(error.value)

    assert first.name in said({"ghost.weight": first.name}) and "ghost.weight" in said({"ghost.weight": first.name})
    assert second.name in said({name: second.name}) and name in said({name: second.name})
    assert name in said({}, without=name) and "does not list" in said({}, without=name)
    assert "beside it" in said({name: f"../{first.name}"})


def test_missing_unexpected_and_misshaped_keys_are_named_with_their_file(folder: Path) -> None:
    weights = open_weights(folder / "transformer", STEM)
    expected = {name: weights.shape(name) for name in weights}
    name = sorted(expected)[5]
    with pytest.raises(InputError, match=r"transformer lacks extra.weight$"):
        check_shapes(weights, expected | {"extra.weight": (1,)}, folder / "transformer")
    with pytest.raises(InputError) as error:
        check_shapes(weights, {key: shape for key, shape in expected.items() if key != name}, folder)
    assert name in str(error.value) and weights.file(name).name in str(error.value)
    with pytest.raises(InputError) as error:
        check_shapes(weights, expected | {name: (7, 7)}, folder)
    assert name in str(error.value) and "7 × 7" in str(error.value) and weights.file(name).name in str(error.value)


def test_what_is_no_pipeline_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is not a folder"):
        read_folder(tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"model_index.json"):
        read_folder(folder / "vae")
    with pytest.raises(InputError, match="has no image_encoder"):
        read_folder(folder).component("image_encoder")
    with pytest.raises(InputError, match="is a AutoencoderKLCogVideoX"):
        read_folder(folder).config("vae", "AutoencoderKL")
    (folder / "vae" / "config.json").write_text("{")
    with pytest.raises(InputError, match=r"vae/config.json is not readable JSON"):
        read_folder(folder)
    (folder / "vae" / "config.json").unlink()
    with pytest.raises(InputError, match=r"no config.json"):
        read_folder(folder)
    (folder / "vae").rename(folder / "elsewhere")
    with pytest.raises(InputError, match="vae is missing"):
        read_folder(folder)


def test_pickles_are_not_read(folder: Path) -> None:
    for path in (folder / "vae").glob("*.safetensors*"):
        path.unlink()
    (folder / "vae" / f"{STEM}.bin").write_bytes(b"never opened")
    with pytest.raises(InputError, match="pickles are not read"):
        read_folder(folder).component("vae").weights()


def test_parts_that_a_pipeline_leaves_out_are_no_components(folder: Path) -> None:
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps(index | {"image_encoder": [None, None], "requires": False}))
    assert "image_encoder" not in read_folder(folder).components


@pytest.mark.parametrize("limit", [10**9, 30_000, 1])
def test_what_is_written_is_read_back_by_both(tmp_path: Path, limit: int) -> None:
    model = CogVideoXTransformer3DModel(2, 16, 4, 4, text_embed_dim=16, time_embed_dim=8, num_layers=1)
    state = model.state_dict()
    files = write_weights(tmp_path, STEM, iter(state.items()), shard_bytes=limit)
    assert (len(files) == 1) == (limit == 10**9) and not list(tmp_path.glob(".*"))
    found = open_weights(tmp_path, STEM)
    assert set(found) == set(state) and all(torch.equal(found[name], value) for name, value in state.items())
    model.save_config(tmp_path)
    theirs = CogVideoXTransformer3DModel.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(theirs[name], value) for name, value in state.items())


def test_shards_hold_no_more_than_they_may_and_tied_tensors_are_written_twice(tmp_path: Path) -> None:
    tied = torch.randn(100)
    tensors = [("a", tied), ("b", tied), ("c", tied[:50]), ("d", torch.randn(10, 10).T)]
    write_weights(tmp_path, "model", iter(tensors), shard_bytes=800)
    sizes = [sum(v.numel() * 4 for v in load_file(path).values()) for path in sorted(tmp_path.glob("*.safetensors"))]
    assert max(sizes) <= 800 and sum(sizes) == 400 + 400 + 200 + 400
    found = open_weights(tmp_path, "model")
    assert all(torch.equal(found[name], value) for name, value in tensors)
