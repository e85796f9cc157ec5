"""Sphinx with MyST, as JAX, Flax and Optax have it; `make docs` builds strictly."""

import pathlib
import re

import jaxoffload

project = "jaxoffload"
version = release = jaxoffload.__version__
copyright = "the jaxoffload authors"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"jaxoffload {release}"

myst_heading_anchors = 3
default_role = "code"  # docstrings write `x`, as Markdown does
highlight_language = "none"  # what names no language is a shell's or a program's output
python_use_unqualified_type_names = True
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # signatures show them; most are types of JAX, to which nothing here could link
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_param = False  # "init, xs, length: as for lax.scan" is one line, not three
napoleon_use_rtype = False
# Bases and defaults that autodoc links although typing and JAX are not documented here.
nitpick_ignore_regex = [("py:.*", r"(typing|collections|jax|numpy|Any|Sequence|Mapping|Callable|Iterator).*")]


def as_restructured_text(app, what, name, obj, options, lines):
    """Docstrings are written as Markdown: Sphinx lacks "`scan`s" and "Raises (when called):"."""
    text = re.sub(r"(`[^`]+`)(\w?)", lambda m: f"{m[1]}\\ {m[2]}" if m[2] else m[1], "\n".join(lines))
    when, indent, raising, out = "", 0, False, []
    for line in text.splitlines():
        if section := re.fullmatch(r"( *)Raises(?: \((.+)\))?:", line):
            indent, when, raising = len(section[1]), section[2] or "", True
            out.append(f"{section[1]}Raises:")
            continue
        if line.strip() and len(line) - len(line.lstrip()) <= indent:
            raising = False
        entry = re.fullmatch(r"( +[\w, ]+?)(?: \(([^)]+)\))?: (.*)", line) if raising else None
        if entry and (condition := entry[2] or when):
            line = f"{entry[1]}: {condition}: {entry[3]}"
        out.append(line)
    lines[:] = out


def is_alias(app, what, name, obj, skip, options):
    """Skip a NamedTuple's fields, which Python documents as "Alias for field number 0". autodoc would list them beside
    those that the class describes under "Attributes:"; the fields of a dataclass have no docstrings, and are not."""
    return True if (getattr(obj, "__doc__", None) or "").startswith("Alias for field number") else None


def write_llms_txt(app, failure):
    """List the pages for language models, in the order of the index: https://llmstxt.org"""
    if failure or app.builder.format != "html":
        return
    order = app.env.toctree_includes[app.config.root_doc]
    title = lambda page: app.env.titles[page].astext()
    lines = [f"- [{title(page)}](_sources/{page}.md.txt)" for page in order]
    text = "\n".join([f"# {html_title}", "", "> Activation offload for JAX on NVIDIA GPUs.", "", *lines, ""])
    (pathlib.Path(app.outdir) / "llms.txt").write_text(text)


def setup(app):
    app.connect("autodoc-skip-member", is_alias)
    app.connect("autodoc-process-docstring", as_restructured_text, priority=100)  # before napoleon
    app.connect("build-finished", write_llms_txt)
