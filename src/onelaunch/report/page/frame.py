"""The file around a page: one that opens anywhere, needs nothing else, and loads nothing."""

from __future__ import annotations

import base64
import functools
import hashlib
import importlib.util
from html import escape
from pathlib import Path

from onelaunch.report.page.elements import Html, joined, micro, paragraph

EXTRA = "onelaunch[report]"
"""The extra with the library of the charts: Vega-Lite as one script, and no network for it."""
_HERE = Path(__file__).parent


def can_draw() -> bool:
    """Return whether the package of the charts is installed."""
    return importlib.util.find_spec("vl_convert") is not None


def page(title: str, head: Html, body: Html) -> str:
    """Write the whole file, with the library of the charts if it has any.

    A policy in it forbids the browser to load anything, and to run another script than this one.

    Args:
        head: the answer; what is before the first section.
        body: the sections.
    """
    script = _script() if "<figure" in body else ""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
        f"form-action 'none'; script-src 'sha256-{digest}'"
    )
    footer = paragraph("Made by onelaunch. This file is all there is: it loads nothing.")
    unseen = "<noscript><p>The charts need JavaScript; their figures are below each.</p></noscript>"
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{escape(micro(title))}</title>",
            f"<style>\n{(_HERE / 'page.css').read_text()}</style>\n</head>\n<body>",
            '<a class="skip" href="#figures">Skip to the figures</a>',
            f"<header>\n{head}\n</header>",
            f'<main id="figures" tabindex="-1">\n{unseen if script else ""}',
            joined([body]),
            f"</main>\n<footer>{footer}</footer>",
            f'<script type="module">{script}</script>' if script else "",
            "</body>\n</html>\n",
        ]
    )


@functools.cache
def _script() -> str:
    """Bundle the library of the charts with the few lines that draw them: about 0.9 MB."""
    import vl_convert

    bundle: str = vl_convert.javascript_bundle((_HERE / "page.js").read_text())
    return bundle.replace("\r", "").replace("</script", "<\\/script").replace("<!--", "<\\!--")
