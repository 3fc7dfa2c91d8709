"""Small files that are damaged: pictures, clips with and without sound, WAV files, arrays, Parquet files."""

from __future__ import annotations

import functools
import io
import wave
from typing import Any

import av
import numpy as np
from PIL import Image


@functools.cache
def make_media() -> dict[str, bytes]:
    frames = [Image.fromarray(np.full((24, 32, 3), 40 * i, np.uint8)) for i in range(5)]
    made = {}
    for suffix, form in {
        ".png": "PNG",
        ".jpg": "JPEG",
        ".bmp": "BMP",
        ".tiff": "TIFF",
        ".webp": "WEBP",
        ".gif": "GIF",
    }.items():
        for moving in (False, True):
            buffer = io.BytesIO()
            more = (
                {"save_all": True, "append_images": frames[1:], "duration": 100}
                if moving and form in ("GIF", "WEBP", "PNG")
                else {}
            )
            frames[0].save(buffer, form, **more)
            made[f"{'clip' if more else 'still'}{suffix}"] = buffer.getvalue()
    for suffix, codec in {".mp4": "libx264", ".webm": "libvpx", ".avi": "mpeg4", ".mkv": "libx264"}.items():
        buffer = io.BytesIO()
        with av.open(buffer, "w", format={".mkv": "matroska"}.get(suffix, suffix[1:])) as container:
            stream = container.add_stream(codec, rate=8)
            stream.width, stream.height, stream.pix_fmt = 32, 24, "yuv420p"
            for frame in frames:
                container.mux(stream.encode(av.VideoFrame.from_image(frame)))
            container.mux(stream.encode())
        made[f"clip{suffix}"] = buffer.getvalue()
    return made


@functools.cache
def make_sounds() -> dict[str, bytes]:
    """WAV files, and a clip with a sound track."""
    wave_form = (8000 * np.sin(np.arange(8000) / 5)).astype("<i2")
    made = {}
    for name, channels, rate in (("mono.wav", 1, 8000), ("stereo.wav", 2, 44100), ("wide.wav", 64, 8000)):
        buffer = io.BytesIO()
        with wave.open(buffer, "wb") as file:
            file.setnchannels(channels)
            file.setsampwidth(2)
            file.setframerate(rate)
            file.writeframes(wave_form.tobytes() * channels)
        made[name] = buffer.getvalue()
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream, sound = container.add_stream("libx264", rate=8), container.add_stream("aac", rate=8000, layout="mono")
        stream.width, stream.height, stream.pix_fmt = 32, 24, "yuv420p"
        for i in range(8):
            frame = av.VideoFrame.from_ndarray(np.full((24, 32, 3), 30 * i, np.uint8), "rgb24")
            container.mux(stream.encode(frame))
        part = av.AudioFrame.from_ndarray(wave_form.astype(np.float32)[None] / 32768, "fltp", "mono")
        part.sample_rate = 8000
        for each in (part, None):
            container.mux(sound.encode(each))
        container.mux(stream.encode())
    return made | {"clip.mp4": buffer.getvalue()}


def make_npy(values: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.asarray(values), allow_pickle=True)
    return buffer.getvalue()


def make_npz(compressed: bool = False, **arrays: Any) -> bytes:
    buffer = io.BytesIO()
    (np.savez_compressed if compressed else np.savez)(buffer, **arrays)
    return buffer.getvalue()


@functools.cache
def make_parquet(columns: tuple[str, ...], rows: int) -> bytes:
    import pyarrow
    from pyarrow import parquet

    table = {name: [f"{number}.png" if name == "file_name" else "a b" for number in range(rows)] for name in columns}
    buffer = io.BytesIO()
    parquet.write_table(pyarrow.table(table), buffer)
    return buffer.getvalue()
