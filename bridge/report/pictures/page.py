"""Pictures of the width of a page, in the format that the suffix of their file stands for."""

from __future__ import annotations

import html
import io
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from bridge.errors import BridgeError
from bridge.files import write_all
from bridge.stack.extras import install_command
from bridge.translation.write_outputs import refuse_other

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = {".png": "png", ".svg": "svg", ".pdf": "pdf", ".html": "svg"}
"""Format of a picture by the suffix of its file. An HTML page contains an SVG picture."""
BEGINS = (b"\x89PNG", b"<?xml", b"%PDF", b"<!doctype html>")
"""First bytes of a picture in each of the formats."""
WIDE = 10.0
"""Width of a page in inches."""
PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>body {{ margin: 1rem auto; max-width: 64rem; font-family: sans-serif }} svg {{ width: 100%; height: auto }}</style>
{svg}
</html>
"""


def format_of(path: Path) -> str:
    """The format of a picture. Raises `BridgeError` if its suffix stands for no format, or if
    matplotlib is not installed.
    """
    format = FORMATS.get(path.suffix.lower())
    if format is None:
        raise BridgeError(
            f"{path}: found {path.suffix or 'no suffix'}, expected a picture {', '.join(FORMATS)}"
        )
    if find_spec("matplotlib") is None:
        raise BridgeError(f"{path}: matplotlib is not installed; {install_command('plot')}")
    return format


def refuse_other_file(path: Path) -> None:
    """Raise `BridgeError` if no picture can be written to `path`, or if the file there is not such a picture."""
    format_of(path)
    # Matplotlib writes its name into pictures of every format.
    refuse_other(
        path,
        "a picture of stagebridge",
        lambda content: content.startswith(BEGINS) and b"Matplotlib" in content,
    )


def blank(height: float) -> Figure:
    """An empty page of `height` inches to draw on."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDE, height), layout="constrained")
    # Not through pyplot, which would look for a screen and keep the figure.
    FigureCanvasAgg(figure)
    return figure


def save(figure: Figure, path: Path, title: str) -> None:
    """Write a picture; the same picture gives the same bytes."""
    format, picture = format_of(path), io.BytesIO()
    # Matplotlib writes the time into these two formats, so that no two files would be alike.
    metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(format, {})
    figure.savefig(picture, format=format, dpi=130, metadata=metadata)
    content = picture.getvalue()
    if path.suffix.lower() == ".html":
        svg = content.decode()
        content = PAGE.format(title=html.escape(title), svg=svg[svg.index("<svg") :]).encode()
    write_all({path: content})
