"""Sphinx: every page of this folder, and the public names from their docstrings."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import fused_slots

project = "fused_slots"
version = release = fused_slots.__version__
copyright = "the fused_slots contributors, Apache-2.0"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
# In docstrings `name` is code; these are no cross references.
default_role = "code"
napoleon_numpy_docstring = False
autodoc_member_order = "bysource"
autodoc_typehints = "none"
autodoc_preserve_defaults = True

html_theme = "furo"
html_title = f"fused_slots {version}"
html_show_sphinx = False
