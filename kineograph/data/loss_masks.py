"""Loss masks: NAME-mask.png beside NAME.jpg. White parts of a picture count in the loss, black ones do not."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path, PurePosixPath

from kineograph.core.errors import InputError, Unreadable
from kineograph.data.buckets import MediaInfo
from kineograph.data.captions import Problem
from kineograph.data.decode import probe_media
from kineograph.data.media_config import DecodeOptions, media_kind
from kineograph.data.trim import UNTRIMMED

_ENDING = "-mask"


def pair_masks(names: Iterable[str]) -> dict[str, str]:
    """Item → its mask: a picture of the same name that ends in -mask, in the same folder."""
    names = list(names)
    stems = {name: name.rpartition(".")[0] for name in names}
    masks = {
        stem.removesuffix(_ENDING): name
        for name, stem in stems.items()
        if stem.endswith(_ENDING) and media_kind(name) == "image"
    }
    return {name: masks[stem] for name, stem in stems.items() if stem in masks} if masks else {}


def describe_masks(masks: dict[str, str], names: Iterable[str], used: bool, where: str) -> str | None:
    """A line for the log about the masks of these items. Refuses data.masks=true without any."""
    names = sorted(names)
    missing = [name for name in names if name not in masks]
    if not used:
        found = next((masks[name] for name in names if name in masks), None)
        if found is None:
            return None
        count = len(names) - len(missing)
        return f"{count} items have a mask, such as {found}, which is no item; data.masks=true trains on what the masks show"
    if len(missing) == len(names):
        stem = PurePosixPath(names[0]).stem
        raise InputError(
            f"data.masks=true, and none of {len(names)} items of {where} has a mask: name it as its picture with {_ENDING}, "
            f"such as {stem}{_ENDING}.png; or set data.masks=false"
        )
    if missing:
        return f"data.masks: {len(missing)} of {len(names)} items have no mask and count whole, such as {missing[0]}"
    return None


def mask_options(options: DecodeOptions) -> DecodeOptions:
    """How to read the mask of an item that is read with `options`: one gray frame, whose bars count as the item's do."""
    resize_crop = replace(options.resize_crop, bars=255)
    return replace(
        options, resize_crop=resize_crop, channels=1, background="white", frames=1, span=None, trim=UNTRIMMED
    )


def find_mask_problems(root: Path, masks: dict[str, str], known: dict[str, MediaInfo]) -> list[Problem]:
    """Masks that cannot be read, or do not fit the items, whose sizes are `known`."""
    problems: list[Problem] = []
    for name, mask in sorted(masks.items()):
        try:
            probe_media(root / mask, PurePosixPath(mask).suffix, mask, decode_all=True)
            if name in known:
                check_mask_size(root / mask, known[name], name)
        except Unreadable as error:
            problems.append(Problem(error.path, error.reason))
    return problems


def check_mask_size(mask: Path, info: MediaInfo, name: str) -> None:
    """Refuse a mask of another size than its item's."""
    found = probe_media(mask, mask.suffix, mask.name)
    if (found.width, found.height) != (info.width, info.height):
        raise Unreadable(
            name,
            f"its mask {mask.name} has {found.width} × {found.height} pixels, and it has {info.width} × {info.height}: "
            "give the mask the size of its picture",
        )
