"""Released folders become runs that answer alike, and runs become folders that diffusers' pipelines load and that answer alike."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import CogVideoXImageToVideoPipeline, CogVideoXPipeline
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from kineograph import cli
from kineograph.codec.causal_vae_weights import load_diffusers_vae
from kineograph.core.batch import Batch, Sample, Shape
from kineograph.core.config import parse
from kineograph.core.errors import ConfigError, InputError
from kineograph.core.noise import Noise
from kineograph.core.run_folder import RunFolder
from kineograph.core.task import BuildContext
from kineograph.family.cogvideox import CogVideoX, CogVideoXConfig
from kineograph.interop.export_run import export_diffusers
from kineograph.interop.import_run import import_run
from kineograph.interop.lora_adapters import describe_base
from kineograph.interop.lora_file import read_lora, write_lora
from kineograph.stage.load import StageLoader
from tests.interop.test_lora_file import random_lora, with_lora
from tests.interop.test_sat_weights import as_sat, vae_as_sat
from tests.interop.tiny import TEXT_LENGTH, answer, tiny_pipeline, tiny_transformer, tiny_vae

CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5}


def ours(run: Path) -> Any:
    return StageLoader(RunFolder(run), note=lambda line: None).load("generator")


def our_answer(task: Any) -> torch.Tensor:
    """What `tiny.answer` asks, asked here."""
    source = torch.Generator().manual_seed(4)
    latents = torch.randn(2, 2, task.network.read_channels, 4, 4, generator=source)
    text = torch.randn(2, TEXT_LENGTH, 16, generator=source)
    with torch.no_grad():
        return task.predict(latents, torch.tensor([3, 900]), text)


def everything(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.fixture(scope="module")
def imported(released: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Read only."""
    return import_run(released, "diffusers", tmp_path_factory.mktemp("runs") / "tiny")


# In --------------------------------------------------------------------------------------------------------------


def test_an_imported_run_answers_as_the_folder_does(released: Path, imported: Path) -> None:
    pipeline = CogVideoXPipeline.from_pretrained(released)
    task = ours(imported)
    torch.testing.assert_close(our_answer(task), answer(pipeline.transformer), **CLOSE)
    z = torch.randn(1, 4, 3, 4, 4)
    with torch.no_grad():
        theirs = pipeline.vae.decode(z).sample.clamp(-1, 1) / 2 + 0.5  # B C T H W
    found = task.codec.decode(z.transpose(1, 2) * 0.7)
    torch.testing.assert_close(found.transpose(1, 2), theirs, **CLOSE)
    torch.testing.assert_close(
        torch.tensor(task.diffusion.alpha_bar).double(),
        pipeline.scheduler.alphas_cumprod.double(),
        rtol=1e-5,
        atol=1e-7,
    )
    words = ["a red 3", "", "seven"]
    with torch.no_grad():
        text = pipeline._get_t5_prompt_embeds(words, max_sequence_length=TEXT_LENGTH)
    torch.testing.assert_close(task.texts._encode_captions(words), text, **CLOSE)


def test_an_imported_run_draws(imported: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["sample", str(imported), "a red 3", "--out", str(tmp_path / "out"), "--steps", "2", "--device", "cpu"])  # fmt: skip
    assert end.value.code == 0, capsys.readouterr().err
    assert list((tmp_path / "out").glob("a-red-3*.gif"))


def test_weights_keep_their_precision(folder: Path, tmp_path: Path) -> None:
    for path in (folder / "transformer").glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
        save_file({key: value.bfloat16() for key, value in load_file(path).items()}, path, metadata=metadata)
    run = import_run(folder, "diffusers", tmp_path / "run")
    saved = load_file(run / "generator" / "checkpoints" / "step-00000001" / "model.safetensors")
    assert {value.dtype for value in saved.values()} == {torch.bfloat16}


def test_an_imported_run_is_finished_and_is_not_trained_on(imported: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:  # fmt: skip
    run = Path(shutil.copytree(imported, tmp_path / "run"))

    def train(*words: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as end:
            cli.main(["train", "--run", str(run), str(run / "config.yaml"), *words])
        return int(end.value.code or 0), capsys.readouterr().err

    code, said = train()
    assert code == 0 and "finished" in said, said
    code, said = train("train.steps=2", "train.workers=0")
    assert code == 2 and "init=" in said, said


def test_a_linked_run_copies_nothing_and_answers_alike(released: Path, tmp_path: Path) -> None:
    run = import_run(released, "diffusers", tmp_path / "run", link=True)
    torch.testing.assert_close(
        our_answer(ours(run)), answer(CogVideoXPipeline.from_pretrained(released).transformer), **CLOSE
    )
    weights = sum(path.stat().st_size for path in run.rglob("*.safetensors"))
    assert weights < 3000 < sum(path.stat().st_size for path in (released / "transformer").glob("*.safetensors"))


def test_a_changed_folder_is_noticed(folder: Path, tmp_path: Path) -> None:
    run = import_run(folder, "diffusers", tmp_path / "run", link=True)
    path = sorted((folder / "transformer").glob("*.safetensors"))[0]
    save_file({key: value + 1 for key, value in load_file(path).items()}, path)
    with pytest.raises(InputError, match="differs from the weights"):
        ours(run)


@pytest.mark.parametrize("mixed", [False, True])
def test_a_lora_of_others_is_brought_in(released: Path, tmp_path: Path, mixed: bool) -> None:
    lora = random_lora(tiny_transformer())
    if mixed:  # ranks and alphas of their own, and not on every layer
        other = random_lora(tiny_transformer(), rank=2, alpha=5.0)
        lora = {name: adapter if "to_q" in name else other[name] for name, adapter in lora.items()}
        del lora["transformer_blocks.1.attn1.to_out.0"]
    write_lora(tmp_path, lora)
    run = import_run(released, "diffusers", tmp_path / "run", lora=tmp_path)
    torch.testing.assert_close(our_answer(ours(run)), with_lora(lora), **CLOSE)


def test_mistakes_leave_nothing(folder: Path, tmp_path: Path) -> None:
    def said(**options: Any) -> str:
        before = everything(tmp_path)
        with pytest.raises(InputError) as error:
            import_run(folder, options.pop("source", "diffusers"), tmp_path / "deep" / "run", **options)
        assert everything(tmp_path) == before
        return str(error.value)

    assert "transformer/latest" in said(source="sat") or "SAT" in said(source="sat")
    assert "--from sat" in said(source="sat", link=True)
    write_lora(tmp_path, random_lora(tiny_transformer(num_attention_heads=4)))
    assert "64 × 64" in said(lora=tmp_path) and "trained on another model" in said(lora=tmp_path)
    write_lora(tmp_path, random_lora(tiny_transformer(num_layers=3)))
    assert "adapts transformer_blocks.2." in said(lora=tmp_path) and "trained on another model" in said(lora=tmp_path)
    config = folder / "vae" / "config.json"
    tree = json.loads(config.read_text())
    config.write_text(json.dumps(tree | {"layers_per_block": 2}))
    assert "vae lacks decoder" in said()
    config.write_text(json.dumps(tree | {"use_quant_conv": True}))
    assert "use_quant_conv" in said()
    config.write_text(json.dumps(tree))
    config = folder / "transformer" / "config.json"
    tree = json.loads(config.read_text())
    config.write_text(json.dumps(tree | {"time_embed_dim": 16}))
    assert "time_embedding" in said()
    config.write_text(json.dumps(tree))
    shard = sorted((folder / "transformer").glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-4])
    assert shard.name in said()
    index = folder / "model_index.json"
    index.write_text(index.read_text().replace("CogVideoXPipeline", "FluxPipeline"))
    assert "FluxPipeline" in said()


def test_an_occupied_run_is_refused(released: Path, imported: Path) -> None:
    before = everything(imported)
    with pytest.raises(InputError, match="--run"):
        import_run(released, "diffusers", imported)
    assert everything(imported) == before


def test_sat_weights_become_a_run(released: Path, tmp_path: Path) -> None:
    """What SAT would have written of the same weights. It says nothing of sizes and scale: the releases' are taken, and said."""
    transformer = CogVideoXPipeline.from_pretrained(released).transformer
    vae = tiny_vae(block_out_channels=(32,) * 4, norm_num_groups=32)
    folder = tmp_path / "sat"
    (folder / "transformer" / "1000").mkdir(parents=True)
    (folder / "transformer" / "latest").write_text("1000")
    (folder / "vae").mkdir()
    torch.save({"module": as_sat(transformer.state_dict())}, folder / "transformer/1000/mp_rank_00_model_states.pt")
    torch.save({"state_dict": vae_as_sat(vae.state_dict())}, folder / "vae" / "3d-vae.pt")
    notes: list[str] = []
    run = RunFolder(import_run(folder, "sat", tmp_path / "run", note=notes.append))
    assert any("1.15258426" in line for line in notes)
    stage = run.config()["stages"]["generator"]
    assert stage["text"]["kind"] == "given" and stage["text"]["width"] == 16  # there is no T5 beside them
    assert stage["diffusion"]["shift"] == 3.0 and stage["data"]["size"] == [480, 720]
    torch.testing.assert_close(our_answer(ours(run.path)), answer(transformer), **CLOSE)
    export_diffusers(run, tmp_path / "out", note=notes.append)
    assert any("prompt_embeds" in line for line in notes)
    back = CogVideoXPipeline.from_pretrained(tmp_path / "out", text_encoder=None, tokenizer=None)
    for theirs, found in ((transformer, back.transformer), (vae, back.vae)):
        state = found.state_dict()
        assert all(torch.equal(state[key], value) for key, value in theirs.state_dict().items())


# Out -------------------------------------------------------------------------------------------------------------


def test_a_run_comes_back_as_the_folder_it_was(released: Path, imported: Path, tmp_path: Path) -> None:
    files = export_diffusers(RunFolder(imported), tmp_path / "out")
    assert tmp_path / "out" / "model_index.json" in files
    one, two = (CogVideoXPipeline.from_pretrained(place) for place in (released, tmp_path / "out"))
    for name in ("transformer", "vae", "text_encoder"):
        theirs, back = getattr(one, name).state_dict(), getattr(two, name).state_dict()
        assert theirs.keys() == back.keys() and all(torch.equal(back[key], value) for key, value in theirs.items())
    for name in ("transformer", "vae", "scheduler"):
        told = {key: value for key, value in dict(getattr(one, name).config).items() if not key.startswith("_")}
        again = getattr(two, name).config
        assert {key: value for key, value in told.items() if again.get(key) != value and key != "force_upcast"} == {}
    options = {"height": 32, "width": 32, "num_frames": 5, "num_inference_steps": 2, "max_sequence_length": TEXT_LENGTH, "output_type": "pt"}  # fmt: skip
    frames = [pipe("a red 3", generator=torch.Generator().manual_seed(0), **options).frames for pipe in (one, two)]
    assert torch.equal(*frames)


def test_adapters_are_merged_or_written_alone(released: Path, tmp_path: Path) -> None:
    lora = random_lora(tiny_transformer())
    write_lora(tmp_path, lora)
    run = RunFolder(import_run(released, "diffusers", tmp_path / "run", lora=tmp_path))
    export_diffusers(run, tmp_path / "merged")
    merged = CogVideoXPipeline.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(answer(merged.transformer), with_lora(lora), **CLOSE)
    files = export_diffusers(run, tmp_path / "alone", lora=True)
    assert [path.name for path in files] == ["pytorch_lora_weights.safetensors"]
    (half,) = export_diffusers(run, tmp_path / "half", lora=True, dtype="bf16")
    assert {value.dtype for value in load_file(half).values()} == {torch.bfloat16}
    pipeline = tiny_pipeline()
    pipeline.load_lora_weights(tmp_path / "alone")
    torch.testing.assert_close(answer(pipeline.transformer), with_lora(lora), **CLOSE)
    assert {adapter.alpha for adapter in read_lora(tmp_path / "alone").values()} == {7.0}


def test_a_lora_knows_its_base(released: Path, tmp_path: Path) -> None:
    write_lora(tmp_path, random_lora(tiny_transformer()))
    run = RunFolder(import_run(released, "diffusers", tmp_path / "run", lora=tmp_path))
    (file,) = export_diffusers(run, tmp_path / "alone", lora=True)
    with safe_open(file, framework="pt") as opened:
        told = json.loads(opened.metadata()["kineograph_base"])
    assert told["shape"]["depth"] == 2 and told["shape"]["heads"] == 2 and told["shape"]["in_channels"] == 4
    assert told["weights"]["name"] == "tiny" and str(tmp_path) not in json.dumps(told)

    def brought(name: str, **shape: Any) -> list[str]:
        if not (tmp_path / name).exists():
            tiny_pipeline(**shape).save_pretrained(tmp_path / name)
        notes: list[str] = []
        import_run(tmp_path / name, "diffusers", tmp_path / f"on-{name}", lora=file, note=notes.append)
        return [line for line in notes if "warning" in line]

    assert brought("same") == []  # the same numbers, elsewhere
    for name, shape, message in (
        ("deep", {"num_layers": 3}, "depth=2 there and 3 here; give the folder"),  # each matrix would fit
        ("image", {"in_channels": 8}, "in_channels=4 there and 8 here"),
        ("wide", {"num_attention_heads": 4}, "heads=2 there and 4 here"),
    ):
        with pytest.raises(InputError, match=rf"trained on another model \(tiny\) than .*{name} holds: {message}"):
            brought(name, **shape)
        assert not (tmp_path / f"on-{name}").exists()
    shutil.copytree(released, tmp_path / "tuned")
    shard = sorted((tmp_path / "tuned" / "transformer").glob("*.safetensors"))[0]
    save_file({key: value + 1 for key, value in load_file(shard).items()}, shard, metadata={"format": "pt"})
    (line,) = brought("tuned")
    assert "was trained on tiny;" in line and "holds other weights of the same shape" in line

    save_file(load_file(file), tmp_path / "bare.safetensors")  # as of others: nothing is told
    file = tmp_path / "bare.safetensors"
    assert brought("deep") == []


def test_weights_without_a_folder_are_known_by_their_numbers(released: Path, imported: Path, tmp_path: Path) -> None:
    """Adapters over `init` stand on weights in their own checkpoint."""
    linked = ours(import_run(released, "diffusers", tmp_path / "run", link=True))
    (one,), (two,) = (describe_base(task).values() for task in (ours(imported), linked))
    one, two = json.loads(one), json.loads(two)
    assert one["weights"] == {"digest": two["weights"]["digest"]} and one["shape"] == two["shape"]


def test_other_precisions(imported: Path, tmp_path: Path) -> None:
    export_diffusers(RunFolder(imported), tmp_path / "out", dtype="bf16")
    for part in ("transformer", "vae"):
        saved = load_file(tmp_path / "out" / part / "diffusion_pytorch_model.safetensors")
        assert {value.dtype for value in saved.values()} == {torch.bfloat16}


IMAGE = {"in_channels": 8, "use_rotary_positional_embeddings": True, "use_learned_positional_embeddings": True}


LATER = {"use_learned_positional_embeddings": False, "patch_size_t": 2, "ofs_embed_dim": 8, "patch_bias": False}


@pytest.mark.parametrize("shape", [IMAGE, IMAGE | LATER], ids=["5b-i2v", "1.5-i2v"])
def test_image_to_video_there_and_back(tmp_path: Path, shape: dict[str, Any]) -> None:
    pipeline = tiny_pipeline(**shape)
    CogVideoXImageToVideoPipeline(**pipeline.components).save_pretrained(tmp_path / "folder")
    run = RunFolder(import_run(tmp_path / "folder", "diffusers", tmp_path / "run"))
    assert run.config()["stages"]["generator"]["first_frame"] is True
    assert run.config()["stages"]["generator"]["data"]["fps"] == (16 if "patch_size_t" in shape else 8)
    export_diffusers(run, tmp_path / "out")
    back = CogVideoXImageToVideoPipeline.from_pretrained(tmp_path / "out").transformer
    state = back.state_dict()
    for key, value in pipeline.transformer.state_dict().items():
        torch.testing.assert_close(
            state[key], value, check_dtype=False
        )  # a table that was not learned is float64 there
    same = ("use_rotary_positional_embeddings", "use_learned_positional_embeddings", "patch_size_t", "ofs_embed_dim", "in_channels")  # fmt: skip
    assert [back.config[key] for key in same] == [pipeline.transformer.config[key] for key in same]


@pytest.mark.parametrize("inverse", [False, True])
def test_first_frames_are_scaled_as_the_pipeline_scales_them(tmp_path: Path, inverse: bool) -> None:
    """Its `prepare_latents` for 1.5: the frame's latents (divided by the scale, where the VAE says so), zeros after. It makes 13 frames of 9 before."""
    pipeline = CogVideoXImageToVideoPipeline(**tiny_pipeline(**(IMAGE | LATER)).components)
    pipeline.vae.register_to_config(invert_scale_latents=inverse)
    with torch.no_grad():  # the posterior's deviation is nothing, so that both draw the same
        pipeline.vae.encoder.conv_out.conv.weight[4:] = 0
        pipeline.vae.encoder.conv_out.conv.bias[4:] = -30
    pipeline.save_pretrained(tmp_path / "folder")
    picture = torch.rand(2, 3, 32, 32)
    with torch.no_grad():
        _, wanted = pipeline.prepare_latents(picture * 2 - 1, 2, 4, 13, 32, 32, torch.float32, torch.device("cpu"))
    task = ours(import_run(tmp_path / "folder", "diffusers", tmp_path / "run"))
    assert task.config.first_frame_inverse_scale is inverse
    noise = Noise.for_rows(0, 0, 2)
    first = task.space.encode_first_frame(picture[:, None], noise, training=False)
    found = task.space.build_condition(first, task.space.padding(3), torch.zeros(2, 4, 4, 4, 4))
    torch.testing.assert_close(found, wanted, **CLOSE)
    assert wanted[:, :1].std() > 0.01 and not wanted[:, 1:].any()


def test_a_stage_that_would_scale_first_frames_otherwise_is_refused(tmp_path: Path) -> None:
    pipeline = CogVideoXImageToVideoPipeline(**tiny_pipeline(**(IMAGE | LATER)).components)
    pipeline.vae.register_to_config(invert_scale_latents=True)
    pipeline.save_pretrained(tmp_path)
    text = {"kind": "t5", "length": TEXT_LENGTH, "padding": "read"}
    small = {"depth": 2, "heads": 2, "head_width": 16, "time_width": 8, "patch_time": 2, "grid": "slice", "ofs": True}
    keys = {"task": "cogvideox", "weights": str(tmp_path), "first_frame": True, "text": text, **small}
    with pytest.raises(
        ConfigError, match=r"invert_scale_latents=true: set stages\.tuned\.first_frame_inverse_scale=true"
    ):
        CogVideoX.build(parse(CogVideoXConfig, keys), BuildContext(Shape(9, 32, 32, 3, 8.0), name="tuned"))


@pytest.mark.parametrize(
    ("theirs", "ours_", "said"),
    [
        ({}, {"positions": "rotary"}, "positions=sincos, and the stage has rotary: set stages.tuned.positions=sincos"),
        ({}, {"space_scale": 1.0}, "space_scale=1.875, and the stage has 1.0"),
        ({"use_rotary_positional_embeddings": True}, {"positions": "sincos"}, "positions=rotary, and the stage has sincos"),
        ({"use_rotary_positional_embeddings": True}, {"positions": "rotary", "base_size": [60, 90]}, "set stages.tuned.base_size=[4,4]"),
        ({"use_rotary_positional_embeddings": True}, {"positions": "rotary", "grid": "slice"}, "grid=resize, and the stage has slice"),
    ],
)  # fmt: skip
def test_positions_that_the_weights_do_not_know_are_refused(
    tmp_path: Path, theirs: dict, ours_: dict, said: str
) -> None:
    tiny_pipeline(**theirs).save_pretrained(tmp_path)
    text = {"kind": "t5", "length": TEXT_LENGTH, "padding": "read"}
    right = {"depth": 2, "heads": 2, "head_width": 16, "time_width": 8, "base_size": [4, 4], "base_frames": 2}
    right |= {
        "task": "cogvideox",
        "weights": str(tmp_path),
        "text": text,
        "positions": "rotary" if theirs else "sincos",
    }
    context = BuildContext(Shape(5, 32, 32, 3, 8.0), name="tuned")
    CogVideoX.build(parse(CogVideoXConfig, right), context)
    with pytest.raises(ConfigError, match=re.escape(said)):
        CogVideoX.build(parse(CogVideoXConfig, right | ours_), context)


def test_a_table_of_another_length_is_told(tmp_path: Path) -> None:
    """diffusers reads it for clips of its own length alone."""
    CogVideoXImageToVideoPipeline(**tiny_pipeline(**IMAGE).components).save_pretrained(tmp_path / "folder")
    run = RunFolder(import_run(tmp_path / "folder", "diffusers", tmp_path / "run"))
    said: list[str] = []
    export_diffusers(run, tmp_path / "one", note=said.append)
    assert not any("learned positions" in line for line in said)
    tree = run.config()
    tree["stages"]["generator"].setdefault("data", {})["frames"] = 1
    run.config_file.write_text(json.dumps(tree), encoding="utf-8")
    export_diffusers(run, tmp_path / "two", note=said.append)
    assert any("learned positions for clips of 5 frames only" in line and "on 1 frames" in line for line in said)


def test_weights_are_found_from_any_folder(released: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {"task": "cogvideox", "text": {"kind": "t5"}}
    monkeypatch.chdir(released.parent)
    config = parse(CogVideoXConfig, keys | {"weights": released.name})
    assert config.weights == str(released) and config.text.name == str(released / "text_encoder")


def test_clips_are_shown_through_the_folders_vae_in_tiles_where_asked(released: Path) -> None:
    keys = {
        "task": "cogvideox", "weights": str(released), "text": {"kind": "t5", "length": TEXT_LENGTH, "padding": "read"}, "depth": 2, "heads": 2,
        "head_width": 16, "time_width": 8, "positions": "sincos", "base_size": [4, 4], "base_frames": 2,
    }  # fmt: skip
    batch = Batch.collate([Sample(pixels=torch.randint(0, 256, (5, 3, 32, 32), dtype=torch.uint8))], range(1))
    shown = []
    for tile in (None, [16, 16]):
        task = CogVideoX.build(parse(CogVideoXConfig, {**keys, "tile": tile}), BuildContext(Shape(5, 32, 32, 3, 8.0)))
        shown.append(task.reconstruct(batch))
        codec = load_diffusers_vae(released, Shape(5, 32, 32, 3, 8.0), tile=tile).eval()
        torch.testing.assert_close(shown[-1], codec.decode(codec.encode(batch.video)))
        assert CogVideoX.cache_facts(task.config)["tile"] == (tuple(tile) if tile else None)
    assert task.can_reconstruct() and (shown[0] - shown[1]).abs().max() > 1e-3
    with pytest.raises(ConfigError, match="tile applies to the VAE of weights only"):
        parse(CogVideoXConfig, {**keys, "codec": "vae", "tile": [16, 16]})
    with pytest.raises(InputError, match=r"tile=\[12, 16\]: use multiples of 8"):
        CogVideoX.build(parse(CogVideoXConfig, {**keys, "tile": [12, 16]}), BuildContext(Shape(5, 32, 32, 3, 8.0)))


def test_what_has_no_counterpart_is_refused_with_nothing_written(imported: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no adapters"):
        export_diffusers(RunFolder(imported), tmp_path / "out", lora=True)
    with pytest.raises(InputError, match="--dtype int8"):
        export_diffusers(RunFolder(imported), tmp_path / "out", dtype="int8")
    run = RunFolder(Path(shutil.copytree(imported, tmp_path / "run")))
    run.config_file.write_text(run.config_file.read_text().replace("norm: chunk", "norm: frame"))
    with pytest.raises(InputError, match="norm=frame"):
        export_diffusers(run, tmp_path / "out")
    run.config_file.write_text(run.config_file.read_text().replace("task: cogvideox", "task: muse"))
    with pytest.raises(InputError, match="no trained stage of task cogvideox"):
        export_diffusers(run, tmp_path / "out")
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".*"))
