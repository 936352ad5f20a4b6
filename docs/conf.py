"""Sphinx configuration of the documentation site: `make docs`."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from sphinx.application import Sphinx

DOCS = Path(__file__).parent
ROOT = DOCS.parent
LINK = re.compile(r"\[([^\]\n]+)\]\(([^)#\s]+)(?:#[^)\s]*)?\)")
sys.path.insert(0, str(ROOT))

import ringlog  # noqa: E402  the checkout, not an installed release

project = "ringlog"
copyright = "the ringlog authors"
release = version = ringlog.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["_build"]
root_doc = "index"
default_role = "code"
"""Docstrings write code in single backticks."""

myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
suppress_warnings = ["misc.highlighting_failure", "ref.python"]
"""Blocks of our own languages; names that `ringlog.aio` and `ringlog.client` share."""

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "inherited-members": "BaseException,str,tuple,Struct"}
autodoc_mock_imports = ["pyspark", "pyarrow", "obstore"]

html_theme = "furo"
html_title = f"ringlog {release}"
html_copy_source = False


def _unlink_outside(app: object, docname: str, source: list[str]) -> None:
    """Links to files outside docs/ work on GitHub; on the site their text stays."""

    def plain(link: re.Match[str]) -> str:
        target = (DOCS / docname).parent / link[2]
        is_outside = "://" not in link[2] and not target.resolve().is_relative_to(DOCS)
        return link[1] if is_outside else link[0]

    source[0] = LINK.sub(plain, source[0])


def _mark_examples(
    app: object, what: str, name: str, target: object, options: object, lines: list[str]
) -> None:
    """Make the block below `Example:` code. Runs before napoleon, which takes it for text."""
    lines[:] = [part for line in lines for part in (("Example::", "") if line == "Example:" else (line,))]


def setup(app: Sphinx) -> None:
    app.connect("source-read", _unlink_outside)
    app.connect("autodoc-process-docstring", _mark_examples, priority=400)
