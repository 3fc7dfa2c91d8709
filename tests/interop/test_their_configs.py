"""`kineo import FILE --from dalle2-config|phenaki|nuwa|muse`: every key is translated or named; nothing of the file is run."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml

from kineograph import cli
from kineograph.core.config import Tree, merge
from kineograph.core.errors import InputError
from kineograph.interop import dalle2_config, key_translation, trainer_config
from kineograph.interop.import_run import translate_config
from kineograph.interop.key_translation import flatten_lists

DECODER: Tree = {
    "decoder": {
        "unets": [
            {"dim": 32, "image_embed_dim": 768, "cond_dim": 16, "dim_mults": [1, 2, 4], "attn_dim_head": 16, "attn_heads": 4,
             "self_attn": [False, True, True], "cond_on_image_embeds": True},
            {"dim": 16, "dim_mults": [1, 2], "memory_efficient": True, "num_resnet_blocks": 3},
        ],
        "image_sizes": [64, 256], "timesteps": 500, "sample_timesteps": [250, None], "beta_schedule": ["linear", "cosine"],
        "learned_variance": [True, False], "image_cond_drop_prob": 0.2, "p2_loss_weight_gamma": 1.0, "random_crop_sizes": [None, 64],
        "use_dynamic_thres": True, "blur_sigma": 0.7,
    },
    "data": {
        "webdataset_base_url": "shards/{}.tar", "img_embeddings_url": "embeddings", "num_workers": 3, "batch_size": 50,
        "start_shard": 1, "end_shard": 9, "shard_width": 5, "index_width": 3, "splits": {"train": 0.8, "val": 0.15, "test": 0.05},
        "resample_train": True,
        "preprocessing": {"RandomResizedCrop": {"size": [224, 224], "scale": [0.5, 1.0]}, "RandomHorizontalFlip": True, "ToTensor": True},
    },
    "train": {
        "epochs": 4, "epoch_samples": 1000, "lr": [1e-4, 3e-4], "wd": 0.02, "max_grad_norm": 0.3, "save_every_n_samples": 700,
        "n_sample_images": 5, "ema_beta": 0.9, "amp": True, "unet_training_mask": [False, True], "cond_scale": 1.5,
        "save_immediately": True, "find_unused_parameters": False,
    },
    "evaluate": {"n_evaluation_samples": 77, "FID": {"feature": 64}, "KID": {"subset_size": 10}, "IS": {}},
    "tracker": {"log": {"log_type": "wandb", "wandb_project": "p", "wandb_entity": "e"}, "save": [{"save_to": "wandb"}]},
    "seed": 5,
}  # fmt: skip
PHENAKI = """
from phenaki_pytorch import *
STEPS = 300
cvivit = CViViT(dim = 64, codebook_size = 256, image_size = (32, 16), patch_size = 8, temporal_patch_size = 2, spatial_depth = 2,
    temporal_depth = 1, dim_head = 32, heads = 2, use_hinge_loss = False, ff_dropout = 0.1)
CViViTTrainer(cvivit, folder = 'clips', batch_size = 4, grad_accum_every = 3, num_train_steps = STEPS, num_frames = 9,
    discr_max_grad_norm = 0.7, accelerate_kwargs = dict(mixed_precision = 'bf16')).train()
phenaki = Phenaki(cvivit = cvivit, maskgit = MaskGit(dim = 64, depth = 3, heads = 4, num_tokens = 256, max_seq_len = 100),
    self_token_critic = True, critic_noise_anneal_schedule = 'fixed', steps = 12).cuda()
trainer = PhenakiTrainer(phenaki, folder = open('/etc/passwd').name, sample_texts = ['a', 'b'], train_num_steps = STEPS, num_frames = 9)
raise SystemExit('this script must not run')
"""


def parse_printed(text: str) -> Any:
    return yaml.safe_load(text)


def write_json(folder: Path, tree: Tree) -> Path:
    path = folder / "decoder.json"
    path.write_text(json.dumps(tree))
    return path


def test_a_decoder_config_is_translated(tmp_path: Path) -> None:
    ours = parse_printed(dalle2_config.translate(write_json(tmp_path, DECODER)))
    assert list(ours["stages"]) == ["decoder_64", "decoder_256"] and ours["seed"] == 5
    small, large = ours["stages"].values()
    assert (small["width"], small["multipliers"], small["self_attention"]) == (32, [1, 2, 4], [False, True, True])
    assert (
        small["clip"] == {"kind": "given", "width": 768}
        and small["image_embeds"] == "both"
        and large["image_embeds"] == "none"
    )
    assert small["cross_attention"] == [False, True, True]
    assert small["sample"] == {
        "steps": 250,
        "solver": "ddim",
        "eta": 0.0,
        "guidance": 1.5,
        "clip": "dynamic",
        "clip_quantile": 0.95,
    }
    assert large["sample"]["solver"] == "ddpm" and large["sample"]["steps"] == 500  # as many as were trained
    assert small["diffusion"] == {
        "steps": 500,
        "learned_variance": True,
        "p2_gamma": 1.0,
        "schedule": "linear",
        "weighting": "p2",
    }
    assert (large["low_res"], large["low_res_size"], large["crop"], large["augment"]) == ("decoder_64", 64, 64, {"blur": 0.5, "blur_sigma": 0.7})  # fmt: skip
    assert (
        small["skip"]
        and not large["skip"]
        and large["train"] == {"lr": 3e-4, "weight_decay": 0.02, "warmup": 0, "clip": 0.3}
    )
    data = ours["data"]
    assert data["shards"] == "shards/{}.tar" and data["img_embeddings_folder"] == "embeddings" and data["resample"]
    assert (data["start_shard"], data["end_shard"], data["shard_width"], data["index_width"]) == (1, 9, 5, 3)
    assert (data["crop"], data["crop_area"], data["flip"], data["size"]) == ("resized", [0.5, 1.0], 0.5, 256)
    train = ours["train"]
    assert train["steps"] == 80 and train["epoch_samples"] == 1000 and train["batch_size"] == 50 and train["save_first"]
    assert train["metrics"] == ["fid", "is", "kid"] and train["evaluation_samples"] == 77
    assert train["metric_options"] == {"from_items": True, "fid_features": 64, "kid_subset_size": 10}
    assert train["ema"] == {"start": 100, "every": 10, "decay": 0.9}  # as in ema_pytorch
    assert train["samples"] == 5 and train["grids"] == ["train", "test"]
    assert (
        train["trackers"] == ["tensorboard", "wandb"]
        and train["log_checkpoints"]
        and train["parallel"] == {"find_unused": False}
    )


def test_every_key_of_a_decoder_config_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A word that no key can mean is printed: in its place, or as not translated."""
    monkeypatch.setattr(key_translation, "make_plan", lambda tree: None)  # a strange word makes no valid config
    for key in flatten_lists(DECODER):
        tree: Tree = deepcopy(DECODER)
        place: Any = tree
        *path, last = key.split(".")
        for part in path:
            place = place[int(part)] if isinstance(place, list) else place[part]
        place[last] = "strange-word"
        if key == "decoder.image_sizes":  # without sizes there are no stages
            with pytest.raises(InputError, match="image_sizes"):
                dalle2_config.translate(write_json(tmp_path, tree))
        else:
            assert "strange-word" in dalle2_config.translate(write_json(tmp_path, tree)), key


def test_a_clip_of_openai_is_that_of_transformers(tmp_path: Path) -> None:
    tree = merge(
        DECODER, {"decoder": {"clip": {"make": "openai", "model": "ViT-L/14"}}, "data": {"img_embeddings_url": None}}
    )
    ours = parse_printed(dalle2_config.translate(write_json(tmp_path, tree)))
    expected = {"kind": "transformers", "name": "openai/clip-vit-large-patch14"}
    assert all(stage["clip"] == expected for stage in ours["stages"].values())


def test_a_prior_config_is_translated(tmp_path: Path) -> None:
    tree = {
        "prior": {"image_embed_dim": 768, "image_size": 224, "net": {"dim": 768, "depth": 12, "heads": 12, "rotary_emb": True}, "timesteps": 100,
                  "sample_timesteps": 64, "cond_drop_prob": 0.1, "condition_on_text_encodings": False,
                  "clip": {"make": "openai", "model": "ViT-L/14"}},
        "data": {"image_url": "img_emb", "meta_url": "metadata", "splits": {"train": 0.8, "val": 0.1, "test": 0.1}, "batch_size": 100,
                 "num_data_points": 5000},
        "train": {"epochs": 2, "lr": 2e-4, "use_ema": False, "warmup_steps": 7},
    }  # fmt: skip
    printed = dalle2_config.translate(write_json(tmp_path, tree))
    ours = parse_printed(printed)
    prior = ours["stages"]["prior"]
    assert prior["clip"] == {"kind": "transformers", "name": "openai/clip-vit-large-patch14"} and prior["heads"] == 12
    assert prior["diffusion"] == {"steps": 100, "objective": "x0"} and prior["sample"] == {
        "steps": 64,
        "eta": 1.0,
        "sphere": False,
        "normalize": False,
    }
    assert ours["data"]["source"] == "clip_retrieval" and ours["data"]["image_embeddings"].endswith("img_emb")
    assert ours["data"]["metadata"].endswith("metadata") and ours["data"]["validation"] == 0.1
    assert ours["train"]["steps"] == 100 and ours["train"]["ema"]["decay"] == 0.0 and ours["train"]["warmup"] == 7
    assert "# not translated: prior.net.rotary_emb = true" in printed


def test_a_script_is_read_and_not_run(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(PHENAKI)
    printed = trainer_config.translate(path, "phenaki")
    ours = parse_printed(printed)
    tokenizer, generator = ours["stages"]["tokenizer"], ours["stages"]["generator"]
    assert ours["data"] == {
        "size": [32, 16],
        "folder": "clips",
        "validation": 0.05,
        "split_seed": 42,
        "frames": 9,
        "source": "folder",
    }
    assert tokenizer["adversarial"] == {"loss": "bce", "weight": 1.0, "width": 16, "penalty_every": 4}
    assert tokenizer["quantizer"] == {"kind": "lfq", "codes": 256} and tokenizer["patch"] == 8
    assert (
        tokenizer["train"]["batch_size"] == 12
        and tokenizer["train"]["accumulate"] == 3
        and tokenizer["train"]["steps"] == 300
    )
    assert tokenizer["train"]["precision"] == "bf16"
    assert tokenizer["players"] == {"generator": {"clip": 0.5}, "discriminator": {"clip": 0.7}}
    assert generator["critic"] == "self" and generator["sample"] == {"steps": 12, "critic_noise_schedule": "constant"}
    assert generator["depth"] == 3 and ours["prompts"] == ["a", "b"]
    assert """# not translated: PhenakiTrainer.folder = "open('/etc/passwd').name\"""" in printed
    assert "# not translated: CViViT.ff_dropout = 0.1" in printed  # attention has none: one dropout here
    assert "# CViViT.patch_size → stages.tokenizer.patch" in printed


def test_what_a_script_names_on_its_own_machine_is_said(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        "phenaki = Phenaki(cvivit=CViViT(dim=64, codebook_size=256), maskgit=MaskGit(dim=64, depth=1), t5_name='my/t5')\n"
        "PhenakiTrainer(phenaki, dataset=mine, num_frames=9, sample_texts_file_path='/data/captions.txt', train_num_steps=10)\n"
    )
    printed = trainer_config.translate(path, "phenaki")
    assert parse_printed(printed)["prompts"] == "/data/captions.txt"
    assert "# prompts=/data/captions.txt: no such file here" in printed
    assert (
        "# the items of PhenakiTrainer.dataset: put them into a folder and set stages.generator.data.folder" in printed
    )
    assert "# Phenaki.t5_name → stages.generator.text.name" in printed


def test_nuwa_learns_its_codec_on_pictures(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        "vae = VQGanVAE(dim=32, image_size=32, num_layers=2)\n"
        "VQGanVAETrainer(vae, folder='pictures', num_train_steps=10, lr=1e-3, batch_size=2, grad_accum_every=1)\n"
        "NUWATrainer(nuwa=NUWA(vae=vae, dim=64, max_video_frames=10, enc_reversible=True), dataset=ds, num_train_steps=10)\n"
    )
    printed = trainer_config.translate(path, "nuwa")
    ours = parse_printed(printed)
    assert ours["data"]["frames"] == 10 and ours["stages"]["tokenizer"]["data"] == {"frames": 1}
    assert ours["stages"]["generator"]["train"]["checkpointing"]
    assert "# NUWA.enc_reversible → stages.generator.train.checkpointing" in printed


def test_checkpoints_for_a_hub_and_shards_at_urls(tmp_path: Path) -> None:
    save = [{"save_to": "huggingface", "huggingface_repo": "me/decoder"}]
    change = {
        "tracker": {"save": save},
        "data": {"webdataset_base_url": "s3://b/{}.tar"},
        "train": {"epoch_samples": None},
    }
    printed = dalle2_config.translate(write_json(tmp_path, merge(DECODER, change)))
    train = parse_printed(printed)["train"]
    assert train["log_checkpoints"] and train["trackers"] == ["tensorboard", "wandb", "hub"]
    assert train["hub"] == {"repo": "me/decoder"}
    assert "# streams have no epochs" in printed


def test_muse_has_two_generators(tmp_path: Path) -> None:
    path = tmp_path / "muse.py"
    path.write_text(
        "vae = VQGanVAE(dim=32, layers=2, codebook_size=256, use_vgg_and_gan=False)\n"
        "big = MaskGit(vae=vae, transformer=MaskGitTransformer(dim=64, depth=1, heads=2, num_tokens=256), image_size=64, cond_image_size=32)\n"
        "base = MaskGit(vae=vae, transformer=MaskGitTransformer(dim=64, depth=5, heads=2, num_tokens=256), image_size=32)\n"
    )
    stages = parse_printed(trainer_config.translate(path, "muse"))["stages"]
    assert list(stages) == ["tokenizer", "generator", "superres"]
    assert stages["tokenizer"]["multipliers"] == [1, 1, 2] and stages["tokenizer"]["blocks"] == [0, 0, 1]
    assert (stages["generator"]["depth"], stages["superres"]["depth"]) == (5, 1)
    assert stages["generator"]["sample"] == {"top_k": 26}  # a tenth of the codes
    assert stages["superres"]["low_res"] == "generator" and stages["superres"]["low_res_size"] == 32


def test_keywords_alone_name_their_trainer(tmp_path: Path) -> None:
    path = tmp_path / "nuwa.yaml"
    path.write_text(
        "{num_train_steps: 50, batch_size: 2, grad_accum_every: 2, num_sampled_frames: 4, wd: 0.1, dataset: mine}"
    )
    printed = trainer_config.translate(path, "nuwa")
    generator = parse_printed(printed)["stages"]["generator"]
    assert generator["train"]["steps"] == 50 and generator["train"]["sample_frames"] == 4
    assert "# not translated: NUWATrainer.dataset" in printed and "the tokenizer is not in the file" in printed


def test_numbers_beyond_reason_make_no_lists(tmp_path: Path) -> None:
    path = tmp_path / "nuwa.json"
    model = {
        "VQGanVAE": {"dim": 32, "num_layers": 10**30},
        "NUWA": {"dim": 64, "dec_heads": 2, "sparse_3dna_dilation": 10**30},
    }
    path.write_text(json.dumps(model))
    printed = trainer_config.translate(path, "nuwa")
    assert f"# not translated: VQGanVAE.num_layers = {10**30}" in printed
    assert f"# not translated: NUWA.sparse_3dna_dilation = {10**30}" in printed


def test_a_cascade_of_thousands_is_refused(tmp_path: Path) -> None:
    """Each U-Net's keys are looked up among those of all."""
    tree = merge(DECODER, {"decoder": {"unets": [{"dim": 8}] * 9999, "image_sizes": list(range(1, 10_000))}})
    with pytest.raises(InputError, match=r"decoder.unets lists 9999 U-Nets: a cascade has at most 16"):
        dalle2_config.translate(write_json(tmp_path, tree))


def test_a_script_of_too_many_calls_is_refused(tmp_path: Path) -> None:
    """Each argument is looked up among all calls before it."""
    path = tmp_path / "train.py"
    path.write_text("\n".join(f"CViViT(dim=x{number})" for number in range(40_000)))
    with pytest.raises(InputError, match="has more than 100 calls of CViViT"):
        trainer_config.translate(path, "phenaki")


def test_an_endless_script_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.symlink_to("/dev/zero")
    with pytest.raises(InputError, match="has more than 1,000,000 bytes"):
        trainer_config.translate(path, "phenaki")


@pytest.mark.parametrize(
    ("name", "text", "source", "message"),
    [
        ("x.py", "a = Trainer(lr = 1)", "phenaki", "calls none of CViViT"),
        ("x.yaml", "{colour: red}", "muse", "calls none of VQGanVAE"),
        ("x.json", '{"VQGanVAE": {"dim": 8}, "Unet": {"dim": 8}}', "muse", "unknown class Unet"),
        ("x.py", "vae = (", "nuwa", "neither a Python script"),
        ("x.py", "x = " + "-" * 100_000 + "1", "nuwa", "nor JSON or YAML: nested too deeply"),
        ("x.json", '{"stages": {}}', "dalle2-config", "no config of DALLE2-pytorch"),
        ("x.json", '{"decoder": {"unets": []}, "data": {}}', "dalle2-config", "decoder.unets must list"),
        ("x.json", '{"decoder": {"unets": [{"dim": 8}], "image_sizes": [64, 128]}, "data": {}}', "dalle2-config", "2 sizes for 1"),
    ],
)  # fmt: skip
def test_another_file_is_refused(
    tmp_path: Path, name: str, text: str, source: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(SystemExit) as stop:
        cli.main(["import", str(tmp_path / name), "--from", source])
    assert stop.value.code == 2 and message in capsys.readouterr().err


def test_a_package_that_nobody_knows_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["import", "x.py", "--from", "imagen"])
    assert stop.value.code == 2 and "dalle2-config, phenaki, nuwa or muse" in capsys.readouterr().err


def test_a_model_without_text_has_no_length_of_text(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(PHENAKI.replace("max_seq_len = 100", "max_seq_len = 100, unconditional = True"))
    assert parse_printed(trainer_config.translate(path, "phenaki"))["stages"]["generator"]["text"] == {"kind": "none"}


def test_settings_of_a_quantizer_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "muse.py"
    path.write_text("vae = VQGanVAE(dim=32, layers=2, codebook_size=256, lfq_kwargs=dict(diversity_gamma=2.0))")
    quantizer = parse_printed(trainer_config.translate(path, "muse"))["stages"]["tokenizer"]["quantizer"]
    assert quantizer == {"kind": "lfq", "codes": 256, "diversity": 2.0}


@pytest.mark.parametrize(("source", "task"), [("phenaki", "cvivit"), ("muse", "vqgan"), ("dalle2-config", "vqgan")])
def test_a_checkpoint_is_refused_with_the_reason(tmp_path: Path, source: str, task: str) -> None:
    with pytest.raises(InputError, match=f"other layers than task {task}"):
        translate_config(tmp_path / "vae.pt", source)


def translate_script(folder: Path, package: str, text: str) -> str:
    path = folder / "train.py"
    path.write_text(text)
    return trainer_config.translate(path, package)


def test_what_their_trainers_do_by_themselves_is_written_down(tmp_path: Path) -> None:
    """No warm-up, no clipping unless it is set, torch's β, no decay of weights in Muse's codec, flipped pictures."""
    call = "VQGanVAETrainer(VQGanVAE(dim=32{}), folder='x', num_train_steps=1, lr=1e-3, batch_size=2, grad_accum_every=1{})\n"
    for package, model, trainer in (
        ("nuwa", ", image_size=32", ""),
        ("muse", "", ", image_size=32, max_grad_norm=0.5"),
    ):
        ours = parse_printed(translate_script(tmp_path, package, call.format(model, trainer)))
        tokenizer = ours["stages"]["tokenizer"]
        assert tokenizer["train"]["warmup"] == 0 and tokenizer["train"]["clip"] is None
        assert tokenizer["train"]["betas"] == [0.9, 0.999] and tokenizer["train"]["weight_decay"] == 0.0
        assert ours["data"]["flip"] == 0.5
        assert tokenizer.get("players") == ({"generator": {"clip": 0.5}} if package == "muse" else None)
        expected = {"loss": "hinge", "weight": 1.0, "width": 32, "levels": 4, "penalty_every": 4}
        assert tokenizer["adversarial"] == expected
    assert tokenizer["quantizer"]["diversity"] == 4.0


def test_a_name_stands_for_its_latest_object(tmp_path: Path) -> None:
    """As in one script of all examples: each model is built from what the name holds there; the codec is built again."""
    printed = translate_script(
        tmp_path,
        "muse",
        "vae = VQGanVAE(dim=32, layers=2, codebook_size=256, use_vgg_and_gan=False)\n"
        "net = MaskGitTransformer(dim=64, depth=8, num_tokens=256)\n"
        "base = MaskGit(vae=vae, transformer=net, image_size=32)\n"
        "vae = VQGanVAE(dim=32, layers=2, codebook_size=256, use_vgg_and_gan=False)\n"
        "net = MaskGitTransformer(dim=64, depth=2, num_tokens=256)\n"
        "large = MaskGit(vae=vae, transformer=net, image_size=64, cond_image_size=32)\n",
    )
    stages = parse_printed(printed)["stages"]
    assert (stages["generator"]["depth"], stages["superres"]["depth"]) == (8, 2)
    assert "not translated" not in printed


def test_each_stage_has_the_data_of_its_trainer(tmp_path: Path) -> None:
    ours = parse_printed(
        translate_script(
            tmp_path,
            "phenaki",
            "vae = CViViT(dim=64, codebook_size=256, image_size=32, use_vgg_and_gan=False)\n"
            "CViViTTrainer(vae, folder='pictures', train_on_images=True, batch_size=2, num_train_steps=9)\n"
            "phenaki = Phenaki(cvivit=vae, maskgit=MaskGit(dim=64, depth=1))\n"
            "PhenakiTrainer(phenaki, folder='clips', num_frames=9, train_num_steps=10, save_and_sample_every=5)\n",
        )
    )
    assert (ours["data"]["folder"], ours["data"]["frames"], ours["data"]["flip"]) == ("pictures", 1, 0.5)
    generator = ours["stages"]["generator"]
    assert generator["data"] == {"frames": 9, "folder": "clips", "flip": 0.0}
    assert (generator["train"]["sample_every"], generator["train"]["save_every"]) == (5, 5)
    assert generator["train"]["clip"] is None


def test_a_batch_that_is_split_is_that_of_all_gpus(tmp_path: Path) -> None:
    call = "PhenakiTrainer(Phenaki(maskgit=MaskGit(dim=64, depth=1)), folder='x', batch_size=4, grad_accum_every=2{})\n"
    assert "4 × 2 of all GPUs" in translate_script(tmp_path, "phenaki", call.format(""))
    printed = translate_script(tmp_path, "phenaki", call.format(", split_batches=False"))
    assert "4 × 2; it is global: multiply it by the number of GPUs" in printed


def test_the_datasets_of_nuwa_are_ours(tmp_path: Path) -> None:
    model = "nuwa = NUWA(vae=VQGanVAE(dim=32, image_size=64, use_vgg_and_gan=False), dim=64)\n"
    gif = "ds = GifVideoDataset(folder='gifs', channels=1)\nNUWATrainer(nuwa=nuwa, dataset=ds, num_train_steps=9)\n"
    data = parse_printed(translate_script(tmp_path, "nuwa", model + gif))["data"]
    assert (data["source"], data["folder"], data["channels"]) == ("folder", "gifs", 1)
    mnist = (
        "ds = MnistDataset(num_videos=40, videos_memmap_path='v.raw', text_memmap_path='t.raw')\n"
        "NUWATrainer(nuwa=nuwa, dataset=ds, num_train_steps=9)\n"
    )
    printed = translate_script(tmp_path, "nuwa", model + mnist)
    data = parse_printed(printed)["data"]
    assert (data["source"], data["folder"], data["labels"]) == ("memmap", "v.raw", "t.raw")
    assert data["array_shape"] == [40, 10, 1, 64, 64] and data["caption"] == "{label[0]} {label[1]}"
    assert "not translated: MnistDataset" not in printed
    images = "VQGanVAETrainer(VQGanVAE(dim=32, image_size=64), images_memmap_path='i.raw', images_memmap_shape=(40, 1, 64, 64))"
    data = parse_printed(translate_script(tmp_path, "nuwa", images))["data"]
    assert (data["source"], data["folder"], data["rotate"]) == ("memmap", "i.raw", True)


def test_every_model_of_nuwa_is_read(tmp_path: Path) -> None:
    vae = "vae = VQGanVAE(dim=32, image_size=64, vq_codebook_size=512, use_vgg_and_gan=False)\n"
    plain = parse_printed(translate_script(tmp_path, "nuwa", f"{vae}NUWA(vae=vae, dim=64)"))["stages"]["generator"]
    assert plain["caption_dropout"] == 0.2 and plain["sample"] == {"guidance": 2.0, "top_k": 51}
    sketch = "other = VQGanVAE(dim=32, image_size=64, num_layers=3, use_vgg_and_gan=False)\n"
    printed = translate_script(
        tmp_path, "nuwa", f"{sketch}{vae}NUWASketch(vae=vae, sketch_vae=other, dim=64, dec_depth=2)"
    )
    stages = parse_printed(printed)["stages"]
    assert list(stages) == ["tokenizer", "sketch_tokenizer", "generator"]
    assert len(stages["sketch_tokenizer"]["multipliers"]) == 4 and len(stages["tokenizer"]["multipliers"]) == 5
    assert stages["generator"]["sketch"] == "sketch_tokenizer" and stages["generator"]["depth"] == 2
    printed = translate_script(
        tmp_path, "nuwa", f"{vae}NUWAVideoAudio(vae=vae, dim=64, num_audio_tokens=2048, cross_modality_attn_every=3)"
    )
    stages = parse_printed(printed)["stages"]
    assert stages["generator"]["sound"] == "sound_tokenizer"
    assert stages["sound_tokenizer"]["quantizer"] == {"kind": "vq", "codes": 2048}
    assert "# not translated: NUWAVideoAudio.cross_modality_attn_every = 3" in printed


def test_settings_of_a_quantizer_that_is_not_used_are_said(tmp_path: Path) -> None:
    printed = translate_script(
        tmp_path, "muse", "VQGanVAE(dim=32, layers=2, codebook_size=256, vq_kwargs=dict(decay=0.9))"
    )
    assert "# not translated: VQGanVAE.vq_kwargs.decay = 0.9" in printed


def test_a_temperature_that_nothing_reads_is_said(tmp_path: Path) -> None:
    printed = translate_script(tmp_path, "phenaki", "Phenaki(maskgit=MaskGit(dim=64, depth=1), sample_temperature=0.0)")
    assert "# not translated: Phenaki.sample_temperature = 0.0" in printed


def test_what_their_scripts_do_by_themselves_is_written_down(tmp_path: Path) -> None:
    """Defaults of DALLE2-pytorch; drawing shards at random needs shuffle_train=false there."""
    tree = deepcopy(DECODER)
    tree["train"] = {"epochs": 1}
    tree["data"] |= {"shuffle_train": False}
    tree["evaluate"] = {"FID": {}}
    ours = parse_printed(dalle2_config.translate(write_json(tmp_path, tree)))
    assert ours["data"]["resample"] and "shuffle" not in ours["data"]
    assert ours["train"]["evaluation_samples"] == 1000 and ours["train"]["save_every_samples"] == 100_000
    assert ours["train"]["samples"] == 6
    assert all(stage["train"]["warmup"] == 0 for stage in ours["stages"].values())
    prior = {
        "prior": {"image_embed_dim": 8, "net": {"dim": 8, "depth": 1, "heads": 2, "dim_head": 4}, "predict_v": True}
    }
    data = {"image_url": "a", "meta_url": "b", "batch_size": 4}
    printed = dalle2_config.translate(
        write_json(tmp_path, prior | {"data": data, "train": {"ema_update_after_step": 50}})
    )
    ours = parse_printed(printed)
    assert ours["train"]["ema"] == {"start": 50, "every": 10, "decay": 0.99} and ours["train"]["eps"] == 1e-6
    assert ours["train"]["warmup"] == 0 and ours["stages"]["prior"]["diffusion"]["objective"] == "v"
    assert "dim_head" not in printed


def test_a_codebook_without_k_means(tmp_path: Path) -> None:
    printed = translate_script(
        tmp_path, "nuwa", "VQGanVAE(dim=32, image_size=64, use_vgg_and_gan=False, vq_kmeans_init=False)"
    )
    assert parse_printed(printed)["stages"]["tokenizer"]["quantizer"]["kmeans"] == 0


def test_thresholds_and_weights_that_differ_are_said(tmp_path: Path) -> None:
    change: Tree = {"decoder": {"use_dynamic_thres": False, "dynamic_thres_percentile": 0.9, "predict_v": True}}
    printed = dalle2_config.translate(write_json(tmp_path, merge(DECODER, change)))
    assert "# not translated: decoder.dynamic_thres_percentile = 0.9" in printed
    assert "diffusion.weighting=p2 weights the error of ε; theirs weights that of v alike" in printed
