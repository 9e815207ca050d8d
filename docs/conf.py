"""How Sphinx makes the pages: ``sphinx-build -W docs build/docs``."""

import inspect
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

import newton_summary

project = "newton_summary"
author = "newton_summary contributors"
version = release = newton_summary.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "newton_summary"
html_static_path = ["_static"]
html_css_files = ["page.css"]
html_copy_source = False

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 88
napoleon_google_docstring = True
napoleon_numpy_docstring = False


def describe_field(
    app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """Take the comment behind a field of a dataclass as its description: shape and meaning."""
    if what != "attribute" or any(lines):
        return
    owner, _, field = name.rpartition(".")
    module, _, cls = owner.rpartition(".")
    try:
        source = inspect.getsource(getattr(sys.modules[module], cls))
    except (KeyError, AttributeError, OSError, TypeError):
        return
    found = re.search(rf"^    {field}: .*?  # (.*)$", source, re.MULTILINE)
    if found:
        lines[:] = [re.sub(r"([|*`_\\])", r"\\\1", found[1])]


def setup(app: Any) -> None:
    """Connect the above."""
    app.connect("autodoc-process-docstring", describe_field)
