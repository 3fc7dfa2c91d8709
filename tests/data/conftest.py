"""Files that the data tests read: made here, by the encoders that people use."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image

MakeVideo = Callable[..., Path]


def write_video(
    path: Path, frames: np.ndarray, fps: int = 30, codec: str | None = None, rotation: int = 0, **options: str
) -> Path:
    """T H W 3 → a file; `rotation` is stored as a note, as phones do."""
    with av.open(str(path), "w", options={k: v for k, v in options.items() if k == "movflags"}) as container:
        stream = container.add_stream(codec or ("libvpx" if path.suffix == ".webm" else "libx264"), rate=fps)
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv420p"
        stream.codec_context.gop_size = 10
        stream.bit_rate = 2_000_000
        if rotation:
            stream.set_display_rotation(rotation)
        for pixels in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    return path


@pytest.fixture
def make_video() -> MakeVideo:
    return write_video


@pytest.fixture
def counting() -> Callable[[int], np.ndarray]:
    """Clips whose frame i is a flat gray of 4 i + 4: a frame's content tells its number."""

    def make(count: int, height: int = 32, width: int = 48) -> np.ndarray:
        values = (np.arange(count) * 4 + 4).astype(np.uint8)
        return np.broadcast_to(values[:, None, None, None], (count, height, width, 3)).copy()

    return make


@pytest.fixture
def numbers() -> Callable[..., list[int]]:
    """The frame numbers of a `counting` clip, read back from its pixels (T C H W)."""

    def read(pixels) -> list[int]:  # type: ignore[no-untyped-def]
        return [round((float(frame.float().mean()) - 4) / 4) for frame in pixels]

    return read


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """12 captioned pictures of one gray each (10 × index), 8 × 8."""
    root = tmp_path / "pictures"
    root.mkdir()
    for index in range(12):
        Image.new("RGB", (8, 8), (10 * index,) * 3).save(root / f"p{index:02}.png")
        (root / f"p{index:02}.txt").write_text(f"gray {index}")
    return root
