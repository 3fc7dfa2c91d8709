"""Files of prompts: one reader for all commands, mistakes named by line, rows drawn as if alone."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path

import pytest
import torch

from kineograph import cli
from kineograph.core.batch import Prompts
from kineograph.core.capabilities import SupportsInpainting
from kineograph.core.errors import InputError
from kineograph.core.prompt import Prompt
from kineograph.media.clips import write_clip
from kineograph.sample import prompt_file
from kineograph.sample.command import write_samples
from kineograph.sample.prompt_file import read_prompts
from kineograph.sample.sampler import Sampler
from tests.media.reading import read_clip
from tests.sample import tiny_task
from tests.sample.tiny_task import make_run


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "clips", frames=4).path


@pytest.fixture(scope="module")
def sampler(run) -> Sampler:
    return Sampler.open(run, device="cpu")


def write_lines(path: Path, *lines: str | dict) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def grey(path: Path, level: float, frames: int = 1) -> Path:
    return write_clip(path, torch.full((frames, 3, 32, 32), level), 8)


def test_lines_of_text(tmp_path):
    (tmp_path / "pictures").mkdir()
    grey(tmp_path / "pictures" / "a b.png", 0.5)
    path = write_lines(
        tmp_path / "p.txt", "# mine", "", "  a 3 ", "a 4 @@ pictures/a b.png", "mail me@@home@@pictures/a b.png"
    )
    prompts = read_prompts(path)
    assert [prompt.prompt for prompt in prompts] == ["a 3", "a 4", "mail me@@home"]
    assert [prompt.image for prompt in prompts] == [None, *[str(tmp_path / "pictures" / "a b.png")] * 2]
    assert prompts[1].where == f"{path}, line 4"


def test_objects_per_line(tmp_path):
    grey(tmp_path / "a.png", 0.5)
    everything = {
        "prompt": "a 3\n moves",
        "negative": "blur",
        "image": "a.png",
        "mask": "a.png",
        "seed": 7,
        "frames": 3,
    }
    (prompt,) = read_prompts(write_lines(tmp_path / "p.jsonl", everything))
    assert prompt.to_json() == everything | {
        "prompt": "a 3 moves",
        "image": str(tmp_path / "a.png"),
        "mask": str(tmp_path / "a.png"),
    }
    again = tmp_path / "again.jsonl"
    prompt_file.write_prompts(again, [prompt])
    assert read_prompts(again)[0].to_json() == prompt.to_json()


@pytest.mark.parametrize(
    ("name", "line", "why"),
    [
        ("p.jsonl", {"prompt": "a", "negativ": "b"}, "unknown key negativ: did you mean negative?"),
        ("p.jsonl", {"prompt": 3}, "prompt=3: input should be a valid string"),
        ("p.jsonl", {"prompt": "a", "seed": "3"}, "seed='3': input should be a valid integer"),
        ("p.jsonl", {"prompt": "a", "seed": True}, "seed=True: input should be a valid integer"),
        ("p.jsonl", {"prompt": "a", "seed": -1}, "seed=-1: input should be greater than or equal to 0"),
        ("p.jsonl", {"prompt": "a", "frames": 0}, "frames=0: input should be greater than or equal to 1"),
        ("p.jsonl", {"prompt": "a", "frames": 10**12}, "frames=1000000000000: use a number up to"),
        ("p.jsonl", {"seed": 3}, "there is nothing to draw: add a prompt"),
        ("p.jsonl", {"prompt": "a", "mask": "m.png"}, "mask needs the picture to inpaint: add image"),
        ("p.jsonl", {"prompt": "a", "image": "gone.png"}, "gone.png does not exist: give a picture"),
        ("p.jsonl", {"prompt": "a", "image": "p.jsonl"}, "cannot be read"),
        ("p.jsonl", {"prompt": "a", "scene": 2}, "scene=2 continues no scene"),
        ("p.jsonl", '["a"]', "a list instead of an object: write {"),
        ("p.jsonl", '{"prompt": "a", "prompt": "b"}', "the key prompt is given twice"),
        ("p.jsonl", '{"prompt": "\\ud83d"}', "half a character"),
        ("p.jsonl", "a 3", "not JSON that can be read"),
        ("p.jsonl", "[" * 100_000, "nested too deeply"),
        ("p.txt", '{"prompt": "a"}', "looks like JSON: let the name of the file end in .jsonl"),
        ("p.txt", "a 3@@gone.png", "gone.png does not exist: give a picture"),
        ("p.txt", "a 3@@", "no picture is named after @@: write prompt@@picture.png"),
    ],
)
def test_mistakes_name_the_file_the_line_and_the_remedy(tmp_path, name, line, why):
    path = write_lines(tmp_path / name, {"prompt": "fine"} if name == "p.jsonl" else "fine", line)
    with pytest.raises(InputError) as error:
        read_prompts(path)
    assert str(error.value).startswith(f"{path}, line 2: ") and why in str(error.value)


@pytest.mark.parametrize("name", ["p.csv", "p.TSV", "p.json", "p.yaml"])
def test_tables_and_documents_are_no_lists_of_prompts(tmp_path, name):
    """Their header, braces and columns would be drawn."""
    with pytest.raises(InputError, match=r"prompts are read from text, one per line, or from \.jsonl"):
        read_prompts(write_lines(tmp_path / name, "prompt,seed", "a 3,7"))


def test_files_without_prompts_are_refused(tmp_path, monkeypatch):
    with pytest.raises(InputError, match=r"p\.jsonl holds no prompts: write one per line"):
        read_prompts(write_lines(tmp_path / "p.jsonl", "", " "))
    with pytest.raises(InputError, match=r"gone\.txt does not exist: give a text file with one prompt per line"):
        read_prompts(tmp_path / "gone.txt")
    monkeypatch.setattr(prompt_file, "MAX_BYTES", 10)
    with pytest.raises(InputError, match=r"p\.txt has more than 10 bytes"):
        read_prompts(write_lines(tmp_path / "p.txt", "a 3 moves left"))


def test_a_file_of_endless_prompts_is_refused_before_it_fills_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(prompt_file, "MAX_PROMPTS", 2)
    assert len(read_prompts(write_lines(tmp_path / "p.txt", "a", "", "# c", "b"))) == 2
    with pytest.raises(InputError, match=r"p\.txt, line 4: more than 2 prompts in a file: split it into several"):
        read_prompts(write_lines(tmp_path / "p.txt", "a", "", "b", "c"))


def test_fields_that_the_family_cannot_use_are_refused_before_it_is_loaded(tmp_path, monkeypatch):
    run = make_run(tmp_path / "run").path
    monkeypatch.setattr("kineograph.stage.load.load_weights", lambda *_: pytest.fail("the model was loaded"))
    grey(tmp_path / "a.png", 0.5)
    for fields, why in (
        ({"prompt": "a", "image": "a.png", "mask": "a.png"}, "mask has no effect: .* cannot inpaint"),
        ({"image": "a.png"}, "there is no prompt, and .* draws captions: add one"),
        ({"prompt": "a", "frames": 9}, "frames=9 cannot be drawn: .* was trained on pictures; remove it"),
    ):
        path = write_lines(tmp_path / "p.jsonl", {"prompt": "fine"}, fields)
        with pytest.raises(InputError, match=rf"p\.jsonl, line 2: {why}"):
            write_samples(run, None, prompts_file=path, device="cpu")
    with pytest.raises(InputError, match=r"--prompts .*p\.jsonl and the prompt 'a 3': give one or the other"):
        write_samples(run, ["a 3"], prompts_file=path, device="cpu")


def test_what_depends_on_the_stage_names_the_line_too(sampler, tmp_path):
    path = write_lines(tmp_path / "p.jsonl", {"prompt": "a"}, {"prompt": "a", "negative": "b"})
    with pytest.raises(InputError, match=r"line 2: negative has no effect at guidance=1: raise --guidance"):
        sampler.sample(read_prompts(path))
    clip = grey(tmp_path / "long.gif", 0.5, frames=3)
    with pytest.raises(InputError, match=r"line 1: image: .* draws 1 frame at a time, too few to continue a clip"):
        sampler.sample(read_prompts(write_lines(path, {"prompt": "a", "frames": 1, "image": str(clip)})))
    with pytest.raises(InputError, match="overlap=1 has an effect in a story only"):
        sampler.sample([Prompt(prompt="a", overlap=1)])


def test_rows_are_drawn_as_if_alone(sampler, tmp_path):
    """Rows of different frames, seeds, pictures and negatives; row i is what its own request draws."""
    light, dark = (str(grey(tmp_path / f"{name}.png", level)) for name, level in (("light", 0.9), ("dark", 0.1)))
    rows = [
        {"prompt": "a 3"},
        {"prompt": "a 4", "seed": 7},
        {"prompt": "a 5", "seed": 8, "frames": 6},
        {"prompt": "a 6", "seed": 9, "image": light},
        {"prompt": "a 7", "seed": 9, "image": dark, "negative": "an 8"},
        {"prompt": "a 4", "seed": 7},
    ]
    prompts = [Prompt(**row) for row in rows]
    drawn = sampler.sample(prompts, count=2, seed=5, guidance=2.0)
    assert [len(clip) for clip in drawn.clips] == [4, 4, 4, 4, 6, 6, 4, 4, 4, 4, 4, 4]
    with pytest.raises(InputError, match=r"different lengths \(4, 6 frames\): use \.clips"):
        _ = drawn.pixels
    for index, row in enumerate(rows):
        own = {"prime": row.get("image"), "negative": row.get("negative"), "frames": row.get("frames")}
        alone = sampler.sample(row["prompt"], count=2, seed=row.get("seed", 5), guidance=2.0, **own)
        torch.testing.assert_close(torch.stack(drawn.clips[2 * index : 2 * index + 2]), alone.pixels, rtol=0, atol=1e-6)
    assert not torch.equal(drawn.clips[2], drawn.clips[3])  # two of one seed still differ
    assert (drawn.clips[6][0] > 0.85).all() and (drawn.clips[8][0] < 0.15).all()


def test_a_file_of_captions_draws_what_the_command_line_draws(run, tmp_path):
    path = write_lines(tmp_path / "p.txt", "a 3", "a 4")
    ours = write_samples(run, None, prompts_file=path, out=tmp_path / "file", count=2, device="cpu")
    theirs = write_samples(run, ["a 3", "a 4"], out=tmp_path / "words", count=2, device="cpu")
    assert [path.name for path in ours] == [path.name for path in theirs]
    assert [path.read_bytes() for path in ours] == [path.read_bytes() for path in theirs]


def test_the_sidecar_repeats_each_drawing(run, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    grey(tmp_path / "light.png", 0.9)
    path = write_lines(
        tmp_path / "p.jsonl",
        {"prompt": "a 3", "frames": 3, "seed": 4},
        {"prompt": "a 4", "image": "light.png"},
        {"prompt": "a 3"},
    )
    with pytest.raises(SystemExit) as end:
        cli.main(["sample", str(run), "--prompts", "p.jsonl", "--seed", "9", "--out", "out", "--device", "cpu"])
    assert end.value.code == 0
    written = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert [path.name for path in written] == ["a-3-0001.gif", "a-4-0001.gif", "a-3-0002.gif", "sheet-0001.png"]
    assert [len(read_clip(path)[0]) for path in written[:3]] == [3, 4, 4]
    first, second = (json.loads(path.with_suffix(".json").read_text()) for path in written[:2])
    assert (first["row"], first["seed"], first["frames"], first["drawn"]["frames"]) == (0, 4, 3, 3)
    assert (second["row"], second["seed"], second["captions"], second["caption"]) == (1, 9, ["a 4"], "a 4")
    assert second["prompt"] == {"prompt": "a 4", "image": str(tmp_path / "light.png")}
    assert len(second["prime"]["sha256"]) == 64 and first["prime"] is None
    path.unlink()  # the sidecar needs none but its own files
    with pytest.raises(SystemExit) as end:
        cli.main([*shlex.split(second["command"])[1:], "--device", "cpu"])
    assert end.value.code == 0
    again = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert not set(again) & set(written)
    assert [path.read_bytes() for path in again] == [path.read_bytes() for path in written]


def test_media_are_written_as_they_are_drawn(run, tmp_path, monkeypatch):
    inner, seen = tiny_task.TinyGenerator.sample, []

    def watched(self, prompts: Prompts, options) -> torch.Tensor:
        seen.append(len(list((tmp_path / "out").glob("*.gif"))))
        return inner(self, prompts, options)

    monkeypatch.setattr(tiny_task.TinyGenerator, "sample", watched)
    path = write_lines(tmp_path / "p.txt", *[f"a {n}" for n in range(5)])
    write_samples(run, None, prompts_file=path, out=tmp_path / "out", batch=2, device="cpu")
    assert seen == [0, 2, 4]


class Inpainter(tiny_task.TinyGenerator, SupportsInpainting):
    def can_inpaint(self) -> bool:
        return True

    def can_continue(self) -> bool:
        return False

    def sample(self, prompts: Prompts, options) -> torch.Tensor:
        pixels = super().sample(Prompts(prompts.noise, prompts.captions), options)
        assert prompts.mask is not None and prompts.prime is not None
        return torch.where(prompts.mask[:, None, None], pixels, prompts.prime)


def test_a_mask_per_prompt(tmp_path, monkeypatch):
    monkeypatch.setattr(tiny_task, "Inpainter", Inpainter, raising=False)
    monkeypatch.setattr(Inpainter, "__module__", tiny_task.__name__)
    run = make_run(tmp_path / "run", generator="Inpainter")
    left = torch.zeros(1, 3, 32, 32)
    left[..., :16] = 1
    grey(tmp_path / "picture.png", 0.5)
    for name, mask in (("left", left), ("right", 1 - left)):
        write_clip(tmp_path / f"{name}.png", mask, 8)
    lines = [{"prompt": "a 3", "image": "picture.png", "mask": f"{side}.png", "seed": 1} for side in ("left", "right")]
    prompts = read_prompts(write_lines(tmp_path / "p.jsonl", *lines))
    first, second = Sampler.open(run.path, device="cpu").sample(prompts).clips
    torch.testing.assert_close(first[..., 16:], torch.full((1, 3, 32, 16), 0.5), rtol=0, atol=0.003)
    torch.testing.assert_close(second[..., :16], first[..., 16:])
    assert (first[..., :16] - 0.5).abs().mean() > 0.01


def test_the_name_of_a_picture_may_be_too_long(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text(f"a@@{'x' * 5000}.png")
    with pytest.raises(InputError, match="does not exist"):
        read_prompts(path)


@pytest.mark.timeout(20)
def test_a_pipe_is_read_while_someone_writes_to_it(tmp_path):
    os.mkfifo(tmp_path / "p.txt")
    with pytest.raises(InputError, match="prompt"):
        read_prompts(tmp_path / "p.txt")
    reader, writer = os.pipe()
    os.write(writer, b"a 3\n")
    os.close(writer)
    assert [prompt.prompt for prompt in read_prompts(Path(f"/dev/fd/{reader}"))] == ["a 3"]
    os.close(reader)
