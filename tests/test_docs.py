"""The docs are true: every config key is listed with its default, every command exists, the examples work."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from kineograph import cli
from kineograph.cache.source import CacheConfig
from kineograph.codec.adversarial import AdversarialConfig
from kineograph.codec.audio_codec import AudioCodecConfig
from kineograph.codec.causal_vae import CausalVAEConfig
from kineograph.codec.cvivit import CViViTConfig
from kineograph.codec.perceptual import PerceptualConfig
from kineograph.codec.vqgan import VQGANConfig
from kineograph.core.config import StageConfig, flatten
from kineograph.core.config_file import read_yaml
from kineograph.core.metric_options import MetricOptions
from kineograph.core.registry import find_source, find_task, source_names
from kineograph.core.safe_media import MediaLimits
from kineograph.data.buckets import BucketsConfig
from kineograph.data.clip_retrieval import ClipRetrievalConfig
from kineograph.data.dataset import DatasetConfig, DatasetSource
from kineograph.data.folder import FolderConfig
from kineograph.data.media_config import MediaConfig
from kineograph.data.memmap import MemmapConfig
from kineograph.data.mix import MixConfig
from kineograph.data.moving_digits import MovingDigitsConfig
from kineograph.data.open_source import DataConfig
from kineograph.data.trim import CutConfig
from kineograph.data.webdataset_samples import WebDatasetConfig
from kineograph.family.cogvideox.config import CogVideoXConfig, CogVideoXSample, FirstFrameConfig, LoraConfig
from kineograph.family.dalle2.config import AugmentConfig, DecoderConfig, DecoderSample, PriorConfig, PriorSample
from kineograph.family.muse.config import CriticConfig, MuseConfig, MuseSample
from kineograph.family.nuwa.config import NuwaConfig, NuwaSample
from kineograph.family.phenaki.config import CriticConfig as PhenakiCriticConfig
from kineograph.family.phenaki.config import PhenakiConfig, PhenakiSample
from kineograph.nn.quantizers import FSQConfig, LFQConfig, VQConfig
from kineograph.process.diffusion import DiffusionConfig
from kineograph.process.solvers import DiffusionSample
from kineograph.run import layers
from kineograph.run.crop_writer import CropConfig
from kineograph.run.plan import RunConfig, make_plan, refuse_changes
from kineograph.stage.spec import BatchConfig, read_stage
from kineograph.text import TextConfig
from kineograph.text.clip import ClipConfig
from kineograph.text.clip_embedding import ClipSource
from kineograph.train.config import EmaConfig, HubConfig, PlayerConfig, TrainConfig, WandbConfig
from kineograph.train.health import SIGNS
from kineograph.train.parallel import ParallelConfig
from tests.run.calling import kineo

ROOT = Path(__file__).parents[1]
DATA, CONFIG = (ROOT / "docs" / name for name in ("data.md", "config.md"))
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


# Keys ------------------------------------------------------------------------------------------------------------

# file, heading, class, prefix of its keys, the class whose keys are listed elsewhere
TABLES: list[tuple[Path, str, type[BaseModel], str, type[BaseModel] | None]] = [
    (DATA, "Keys of every source", DataConfig, "data.", None),
    (DATA, "moving_digits", MovingDigitsConfig, "data.", DataConfig),
    (DATA, "folder", FolderConfig, "data.", DataConfig),
    (DATA, "Parts of videos", CutConfig, "data.cut.", None),
    (DATA, "Limits", MediaLimits, "data.limits.", None),
    (DATA, "Buckets", BucketsConfig, "data.buckets.", None),
    (DATA, "memmap", MemmapConfig, "data.", DataConfig),
    (DATA, "webdataset", WebDatasetConfig, "data.", DataConfig),
    (DATA, "cache", CacheConfig, "data.", DataConfig),
    (DATA, "clip_retrieval", ClipRetrievalConfig, "data.", DataConfig),
    (DATA, "mix", MixConfig, "data.", MediaConfig),
    (DATA, "Your own Dataset", DatasetConfig, "data.", DataConfig),
    (DATA, "Crops", CropConfig, "", None),
    (CONFIG, "The top", RunConfig, "", None),
    (CONFIG, "The top", BatchConfig, "sample.", None),
    (CONFIG, "The top", BatchConfig, "evaluate.", None),
    (CONFIG, "stages.x", StageConfig, "", None),
    (CONFIG, "train.*", TrainConfig, "train.", PlayerConfig),
    (CONFIG, "train.*", PlayerConfig, "train.", None),
    (CONFIG, "train.*", EmaConfig, "train.ema.", None),
    (CONFIG, "train.*", WandbConfig, "train.wandb.", None),
    (CONFIG, "train.*", HubConfig, "train.hub.", None),
    (CONFIG, "train.*", MetricOptions, "train.metric_options.", None),
    (CONFIG, "train.*", ParallelConfig, "train.parallel.", None),
    (CONFIG, "task: vqgan", VQGANConfig, "", StageConfig),
    (CONFIG, "task: vqgan", VQConfig, "quantizer.", None),
    (CONFIG, "task: vqgan", LFQConfig, "quantizer.", None),
    (CONFIG, "task: vqgan", FSQConfig, "quantizer.", None),
    (CONFIG, "task: vqgan", PerceptualConfig, "perceptual.", None),
    (CONFIG, "task: vqgan", AdversarialConfig, "adversarial.", None),
    (CONFIG, "task: audio_codec", AudioCodecConfig, "", StageConfig),
    (CONFIG, "task: cvivit", CViViTConfig, "", StageConfig),
    (CONFIG, "task: causal_vae", CausalVAEConfig, "", StageConfig),
    (CONFIG, "task: muse", MuseConfig, "", StageConfig),
    (CONFIG, "sample.*", MuseSample, "sample.", None),
    (CONFIG, "text.*", TextConfig, "text.", None),
    (CONFIG, "task: muse.critic", CriticConfig, "", StageConfig),
    (CONFIG, "task: phenaki", PhenakiConfig, "", StageConfig),
    (CONFIG, "task: phenaki", PhenakiSample, "sample.", MuseSample),
    (CONFIG, "task: phenaki.critic", PhenakiCriticConfig, "", StageConfig),
    (CONFIG, "task: nuwa", NuwaConfig, "", StageConfig),
    (CONFIG, "task: nuwa", NuwaSample, "sample.", None),
    (CONFIG, "task: dalle2", DecoderConfig, "", StageConfig),
    (CONFIG, "task: dalle2", AugmentConfig, "augment.", None),
    (CONFIG, "task: dalle2", DecoderSample, "sample.", DiffusionSample),
    (CONFIG, "diffusion.*", DiffusionConfig, "diffusion.", None),
    (CONFIG, "sample.* of diffusion", DiffusionSample, "sample.", None),
    (CONFIG, "task: clip", ClipConfig, "", StageConfig),
    (CONFIG, "clip.*", ClipSource, "clip.", None),
    (CONFIG, "task: dalle2.prior", PriorConfig, "", StageConfig),
    (CONFIG, "task: dalle2.prior", PriorSample, "sample.", None),
    (CONFIG, "task: cogvideox", CogVideoXConfig, "", StageConfig),
    (CONFIG, "task: cogvideox", LoraConfig, "lora.", None),
    (CONFIG, "task: cogvideox", FirstFrameConfig, "image.", None),
    (CONFIG, "task: cogvideox", CogVideoXSample, "sample.", DiffusionSample),
]


def section(path: Path, heading: str) -> str:
    """The text under a heading, up to the next one."""
    parts = re.split(r"^#+ (.+)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))[heading]


def key_tables(text: str) -> list[dict[str, str]]:
    """Tables with the columns key, default and meaning: key → default as written there."""
    tables = re.findall(r"^\| key \| default \| meaning \|\n\|[-|]+\|\n((?:\|.*\n)+)", text, re.MULTILINE)
    return [dict(re.findall(r"^\| `([^`]+)` \| ([^|]+) \|", rows, re.MULTILINE)) for rows in tables]


def shown_default(model: type[BaseModel], name: str) -> Any:
    """A field's default as YAML would give it; `required`, or `section` for a config of its own."""
    field = model.model_fields[name]
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return "required"
    if isinstance(value, BaseModel):
        return "section"
    return list(value) if isinstance(value, tuple) else value


@pytest.mark.parametrize(
    ("path", "heading", "model", "prefix", "base"), TABLES, ids=lambda v: getattr(v, "__name__", "")
)
def test_every_key_is_listed_with_its_default(
    path: Path, heading: str, model: type[BaseModel], prefix: str, base: type[BaseModel] | None
) -> None:
    names = [name for name in model.model_fields if base is None or name not in base.model_fields]
    expected = {prefix + name: shown_default(model, name) for name in names}
    tables = key_tables(section(path, heading))
    table = next((table for table in tables if table.keys() == expected.keys()), None)
    nearest = max(tables, key=lambda table: len(table.keys() & expected.keys()))
    assert table is not None, (
        f"{path.name}, {heading}: {sorted(expected.keys() ^ nearest.keys())} only in code or only in the table"
    )
    plain = {key: text if "`" not in text else read_yaml(text.strip("` "), key) for key, text in table.items()}
    assert plain == expected


def test_every_table_of_keys_is_checked() -> None:
    headings = {(path, heading) for path, heading, *_ in TABLES}
    for path in (DATA, CONFIG):
        counted = sum(len(key_tables(section(file, heading))) for file, heading in headings if file == path)
        assert counted == len(key_tables(path.read_text(encoding="utf-8"))) == sum(file == path for file, *_ in TABLES)


def nested(model: type[BaseModel]) -> set[type[BaseModel]]:
    """The config classes inside a config class."""

    def inside(annotation: Any) -> set[type[BaseModel]]:
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            return {annotation} | nested(annotation)
        return set().union(*map(inside, getattr(annotation, "__args__", ())))

    return set().union(*(inside(field.annotation) for field in model.model_fields.values()))


def test_nested_classes_have_tables_too() -> None:
    documented = {model for _, _, model, *_ in TABLES}
    for model in list(documented):
        assert nested(model) <= documented, model


def test_the_docs_list_the_keys_that_may_change_on_resume() -> None:
    documented = set(re.findall(r"`(train\.[a-z_*]+|prompts)`", section(CONFIG, "Resume").split("may differ")[0]))
    known = {f"train.{name}" for name in TrainConfig.model_fields} | {"prompts"}
    for key in known:
        base = {"prompts": 1, "train": dict.fromkeys(TrainConfig.model_fields, 1)}
        changed = {"prompts": 2} if key == "prompts" else {"train": base["train"] | {key.removeprefix("train."): 2}}  # type: ignore[operator]
        allowed = key in documented or (key.endswith("_every") and "train.*_every" in documented)
        if allowed:
            refuse_changes(base, base | changed)
        else:
            with pytest.raises(Exception, match=re.escape(key)):
                refuse_changes(base, base | changed)


# Commands --------------------------------------------------------------------------------------------------------


def commands() -> dict[str, set[str]]:
    """Name of each command (`train`, `data make`) → its options."""
    top = typer.main.get_command(cli.app)
    options_of: dict[str, set[str]] = {}

    def walk(command: Any, name: str) -> None:
        if hasattr(command, "commands"):
            for child, inner in command.commands.items():
                walk(inner, f"{name} {child}".strip())
        else:
            options_of[name] = {
                text for option in command.params for text in (*option.opts, *option.secondary_opts)
            } | {"--help"}

    walk(top, "")
    return options_of


def named_commands(text: str) -> list[tuple[str, list[str]]]:
    """Commands in a document with their options: (`data make moving-digits`, [`--out`])."""
    calls = re.findall(r"(?<![\w/.-])kineo\s+(?:--debug\s+)?([a-z][^`#\n]*)", text)
    return [(call, re.findall(r"(?<![\w-])--[a-z][a-z-]*", call)) for call in calls]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_every_documented_command_exists(path: Path) -> None:
    known = commands()
    for call, options in named_commands(path.read_text(encoding="utf-8")):
        words = call.split()
        name = next((name for name in (words[0], " ".join(words[:2])) if name in known), None)
        assert name is not None, f"{path.name} names `kineo {call}`"
        assert set(options) <= known[name], f"{path.name} names `kineo {call}`: {set(options) - known[name]}"


def test_every_command_is_documented() -> None:
    calls = [call for path in DOCUMENTS for call, _ in named_commands(path.read_text(encoding="utf-8"))]
    for name in commands():
        assert any(f"{call} ".startswith(f"{name} ") for call in calls), name


# Examples --------------------------------------------------------------------------------------------------------


def test_the_yaml_examples_are_plans(tmp_path: Path) -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", section(CONFIG, "An example"), re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        path = tmp_path / "photos.yaml"
        path.write_text(block, encoding="utf-8")
        plan = make_plan(layers.read_config([str(path)]))
        assert [stage.name for stage in plan.stages] == ["tokenizer", "generator"]
        written = {
            key: value for key, value in flatten(read_yaml(block, "block")["stages"]).items() if ".train." in key
        }
        saved = flatten(plan.tree()["stages"])
        assert written == {key: saved[key] for key in written}


def test_a_section_takes_another_kind() -> None:
    command = re.search(r"kineo train (muse-tiny .*text\.kind=none)", CONFIG.read_text(encoding="utf-8"))
    assert command is not None
    plan = make_plan(layers.read_config(command[1].split()))
    assert plan.stages[-1].spec.config.text.kind == "none"  # type: ignore[attr-defined]


def test_the_example_dataset_is_a_source() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", DATA.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {}
    exec(block, names)
    import numpy as np

    source = DatasetSource(names["Squares"](12), DataConfig(size=(16, 16), validation=0.25), "train")
    sample = source.read(0, np.random.default_rng(0))
    assert sample.pixels is not None and sample.pixels.shape == (1, 3, 16, 16)
    assert sample.caption == source.caption(0)
    assert source.list_missing_captions() == []


def test_the_python_example_of_the_readme_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    short = '"train.steps": 2, "train.batch_size": 4, "train.validation_samples": 4, "train.samples": 2, "train.device": "cpu"'
    assert '"train.steps": 500' in block
    monkeypatch.chdir(tmp_path)
    (squares,) = re.findall(r"```python\n(.*?)```", DATA.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {}
    exec(squares, names)
    names["my_torch_dataset"] = names["Squares"]()
    exec(block.replace('"train.steps": 500', short), names)
    assert names["samples"].pixels.shape == (1, 1, 3, 40, 40)
    assert names["tokens"].shape == (1, 1, 5, 5)
    assert "generator: trains without a cache" in capsys.readouterr().err


def test_the_python_examples_of_python_md_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    script = "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    short = '"train.steps": 2, "train.batch_size": 4, "train.validation_samples": 4, "train.samples": 2, "data.count": 80, "train.log_every": 1'
    assert '"train.steps": 500' in script and "samples=64" in script
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(script.replace('"train.steps": 500', short).replace("samples=64", "samples=4"), names)
    assert names["pixels"].shape == names["reconstructed"].shape == (8, 1, 3, 40, 40)
    assert names["careful"].options.temperature == 0.5
    assert [step for step, _ in names["losses"]] == [1, 2]
    assert "generator 2 " in capsys.readouterr().out
    assert (tmp_path / "drawn" / "sheet-0001.png").is_file()


def test_the_python_example_of_health_md_runs() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "health.md").read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {}
    exec(block, names)
    (limit,) = names["MyTask"].health_limits(None)
    assert limit.check({"loudness": 0.001}) is not None and limit.check({"loudness": 1.0}) is None


def test_every_python_example_is_run_by_a_test() -> None:
    """Here, in tests/test_contributing.py, or in tests/family/cogvideox/test_cogvideox.py."""
    counts = {path.name: path.read_text(encoding="utf-8").count("```python") for path in DOCUMENTS}
    found = {name: count for name, count in counts.items() if count}
    assert found == {"README.md": 1, "data.md": 1, "health.md": 1, "cogvideox.md": 2, "python.md": 5}


@pytest.mark.parametrize("page", ["vqgan.md", "muse.md", "phenaki.md"])
def test_the_stages_of_a_family_page_are_plans(page: str) -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / page).read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    for block in blocks:
        tree = read_yaml(block, page)
        assert len(make_plan(tree).stages) == len(tree["stages"])


ORIGINALS = {  # heading → the task of each stage that its table names
    "nuwa-pytorch": {"tokenizer": "vqgan", "generator": "nuwa"},
    "phenaki-pytorch": {"tokenizer": "cvivit", "generator": "phenaki", "critic": "phenaki.critic"},
    "muse-maskgit-pytorch": {"tokenizer": "vqgan", "generator": "muse", "superres": "muse"},
    "DALLE2-pytorch": {"decoder": "dalle2", "prior": "dalle2.prior"},
    "CogVideoX, SAT": {"generator": "cogvideox"},
}


def has_key(model: type[BaseModel], key: str) -> bool:
    """Whether a dotted key exists in a config class, or in a class inside it."""
    first, _, rest = key.partition(".")
    if first not in model.model_fields:
        return False
    inner = (
        nested(type("holder", (BaseModel,), {"__annotations__": {"x": model.model_fields[first].annotation}}))
        if rest
        else set()
    )
    return not rest or any(has_key(other, rest) for other in inner)


@pytest.mark.parametrize("heading", ORIGINALS)
def test_the_keys_beside_those_of_the_originals_exist(heading: str) -> None:
    text = section(ROOT / "docs" / "from-the-originals.md", heading)
    rows = [row.rpartition(" | ")[2] for row in re.findall(r"^\| (?!there)(.+ \| .+) \|$", text, re.MULTILINE)]
    keys = [key for row in rows for key in re.findall(r"`((?:data|train|stages)\.[\w.]+)`", row)]
    sources = [find_source(name).Config for name in source_names()]
    assert len(rows) > 10 and len(keys) > 10
    for key in keys:
        root, _, rest = key.partition(".")
        if root == "data":
            assert any(has_key(source, rest) for source in sources), key
        elif root == "train":
            assert has_key(TrainConfig, rest), key
        else:
            stage, _, rest = rest.partition(".")
            config = find_task(ORIGINALS[heading][stage]).Config
            player = re.fullmatch(r"players\.(\w+)\.(\w+)", rest)
            if player is not None:
                assert player[2] in PlayerConfig.model_fields, key
            else:
                assert has_key(config, rest), key


def test_every_finding_is_explained() -> None:
    sources = (ROOT / "kineograph").rglob("*.py")
    text = "\n".join(path.read_text(encoding="utf-8") for path in sources)
    found = {*SIGNS, *re.findall(r'\bLimit\(\s*(?:name=)?"(\w+)"', text)}
    page = (ROOT / "docs" / "health.md").read_text(encoding="utf-8")
    assert len(found) > 15
    assert found == set(re.findall(r"^- `(\w+)` \((?:fatal|warning)\): ", page, re.MULTILINE))


@pytest.mark.parametrize("path", [DATA, CONFIG], ids=lambda path: path.name)
def test_lines_fit(path: Path) -> None:
    assert [line for line in path.read_text(encoding="utf-8").splitlines() if len(line) > 130] == []


def test_the_stages_in_dalle2_md_are_valid():
    text = (Path(__file__).parents[1] / "docs" / "dalle2.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    assert blocks
    for block in blocks:
        tree = {"data": {"source": "moving_digits"}, **read_yaml(block, "dalle2.md")}
        for name in tree["stages"]:
            read_stage(tree, name)


# The README ------------------------------------------------------------------------------------------------------

README = ROOT / "README.md"
SHORT = [
    "train.steps=2", "train.batch_size=2", "train.validation_samples=2", "train.sample_every=0", "train.trackers=[]",
    "train.device=cpu",
]  # fmt: skip


def write_items(folder: Path, ending: str, frames: int) -> None:
    """Eight small pictures or clips with captions."""
    import torch

    from kineograph.media.clips import write_clip

    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    for number in range(8):
        clip = torch.randint(256, (frames, 3, 48, 48), dtype=torch.uint8, generator=generator)
        write_clip(folder / f"{number}.{ending}", clip, 8)
        (folder / f"{number}.txt").write_text(f"a cat on chair {number}", encoding="utf-8")


def test_every_command_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As typed, in order, one after the other; training is cut short."""
    lines = re.findall(r"^    (kineo .+)$", README.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(lines) >= 8
    monkeypatch.chdir(tmp_path)
    write_items(tmp_path / "photos", "png", frames=1)
    write_items(tmp_path / "clips", "gif", frames=12)
    for line in lines:
        words = shlex.split(line)[1:]
        assert kineo(*words, *(SHORT if words[0] == "train" else [])) == 0, line
    assert len(list((tmp_path / "runs/photos/drawn").glob("*.png"))) >= 4
    assert len(list((tmp_path / "runs/clips/drawn").glob("*.gif"))) == 4


def test_the_readme_is_short() -> None:
    lines = README.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 150
    assert [line for line in lines if len(line) > 110] == []


# Names -----------------------------------------------------------------------------------------------------------

PAGES = [*DOCUMENTS, ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", ROOT / "CHANGELOG.md"]


def anchors(path: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8")):
        if re.match(r"https?:", target):
            continue
        name, _, anchor = target.partition("#")
        page = (path.parent / name).resolve() if name else path
        assert page.exists(), f"{path.name} links {target}"
        assert not anchor or anchor in anchors(page), f"{path.name} links {target}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_documented_presets_keys_and_targets_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(re.findall(r"(?:^    |`)make ([a-z-]+)", text, re.MULTILINE)) <= targets
    for call, _ in named_commands(text.replace("\\\n", " ")):
        command, *words = call.replace('"', "").replace("'", "").split()
        if command not in ("train", "doctor") or not words or words[0] not in layers.preset_names():
            presets = [word for word in words[:1] if command == "train" and re.fullmatch(r"[a-z][\w.]*-[\w.-]+", word)]
            assert presets == [], f"{path.name} names the preset {presets} in `kineo {call}`"
            continue
        keys = [word.partition("=")[0] for word in words[1:] if re.match(r"[a-z_]+[\w.]*=", word)]
        tree = layers.read_config(words[:1])
        for key in keys:
            assert is_key(key, tree), f"{path.name} names {key} in `kineo {call}`"


def is_key(key: str, tree: dict[str, Any]) -> bool:
    """Whether a preset's config may have this key; sections inside a stage are checked by their first name."""
    section, _, rest = key.partition(".")
    if section == "train":
        return rest.split(".")[0] in TrainConfig.model_fields
    if section == "data":
        sources = [find_source(name).Config for name in source_names()]
        return any(rest.split(".")[0] in source.model_fields for source in sources)
    if section == "stages":
        name, _, rest = rest.partition(".")
        stage = tree["stages"].get(name)
        first = rest.split(".")[0]
        return stage is not None and (
            first in ("data", "train", "players") or first in find_task(stage["task"]).Config.model_fields
        )
    return section in RunConfig.model_fields
