"""The site: Markdown pages and notebooks, the settings from `fedcpsl.config`, the functions from their docstrings."""

import json
import re
from dataclasses import fields
from importlib import import_module
from pathlib import Path

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.util import logging

import fedcpsl
from fedcpsl.config import FLAGS, Config, other_algorithm_settings
from fedcpsl.settings import DEFAULT_ALGORITHM, toml_value

project = "fedcpsl"
release = version = fedcpsl.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc"]
source_suffix = {".md": "markdown", ".ipynb": "markdown"}  # a notebook becomes Markdown, see `put_notebook`
exclude_patterns = ["_build", "results/*"]  # tables that results.md includes
default_role = "literal"  # docstrings write `name` for code
html_theme = "furo"
html_title = f"fedcpsl {release}"
html_show_copyright = False
html_show_sphinx = False
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_math_renderer = "mathml"
myst_enable_extensions = ["dollarmath", "html_image"]
myst_dmath_allow_space = myst_dmath_allow_digits = False  # "$5 and $6" is no formula
myst_heading_anchors = 3
smartquotes = False  # it would turn --flag into a dash
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
maximum_signature_line_length = 90

NAME = re.compile(r"(?<!`)`(fedcpsl(?:\.\w+)+)`(?!`)")
FROM_ELSEWHERE = re.compile(r"""<(?:script|img|iframe|source)\b[^>]*\bsrc="(?:https?:)?//|<link\b[^>]*href="http""")


def settings_tables() -> str:
    """One table per section of `fedcpsl.config.Config`: each setting, its default, what it accepts and means."""
    flags = {name: flag for flag, name in FLAGS.items()}
    lines = []
    sections = [(section.name, getattr(Config(), section.name), "") for section in fields(Config)]
    others = [("algorithm", kind(), f" of {kind().name}") for kind in other_algorithm_settings()]
    for title, values, whose in [*sections, *others]:
        lines += [f"## `[{title}]`{whose}", "", str(type(values).__doc__), ""]
        lines += ["| setting | default | accepts | meaning |", "|---|---|---|---|"]
        for declared in fields(values):
            name = f"{title}.{declared.name}"
            shown = f"`{declared.name}`" + (f"<br>`{flags[name]}`" if name in flags else "")
            value = DEFAULT_ALGORITHM if (whose, name) == ("", "algorithm.name") else getattr(values, declared.name)
            default = f"`{toml_value(value)}`"
            cells = [shown, default, declared.metadata["accepts"], declared.metadata["help"]]
            lines.append("| " + " | ".join(cell.replace("|", "\\|").replace("*", "\\*") for cell in cells) + " |")
        lines.append("")
    return "\n".join(lines)


def put_settings(_app, page, source):
    """Put the tables where settings.md has its marker."""
    if page == "settings":
        before, marker, after = source[0].partition("<!-- settings -->")
        assert marker, "docs/settings.md has lost its marker"
        source[0] = before + settings_tables() + after


def put_notebook(app, page, source):
    """A notebook's cells and the outputs that were saved with it, as Markdown. Nothing is executed."""
    if app.env.doc2path(page).suffix == ".ipynb":
        parts = []
        for cell in json.loads(source[0])["cells"]:
            content = "".join(cell["source"])
            parts.append(content if cell["cell_type"] == "markdown" else f"```python\n{content}\n```")
            parts += [shown_output(output) for output in cell.get("outputs", [])]
        source[0] = "\n\n".join(parts) + "\n"


def shown_output(output) -> str:
    """A picture, or text; tables as text too, since the site has a style of its own."""
    data = output.get("data", {})
    if "image/png" in data:
        content = "".join("".join(data["image/png"]).split())
        return f'<img class="output" alt="what the cell above draws" src="data:image/png;base64,{content}">'
    text = "".join(output.get("text", data.get("text/plain", ""))).rstrip()
    return f"~~~text\n{text}\n~~~" if text else ""


def link_functions(_app, _page, source):
    """Make `fedcpsl.module.function` in the text a link to its place in the API, wherever it was imported from."""
    source[0] = NAME.sub(_linked, source[0])


def _linked(found):
    module, _, name = found[1].rpartition(".")
    try:
        thing = getattr(import_module(module), name)
        shown = ".".join(found[1].split(".")[-2:])  # problem.mixture: long names break tables and lines
        return f"{{py:obj}}`{shown} <{thing.__module__}.{thing.__qualname__}>`"
    except (ImportError, AttributeError):  # a module, or a constant
        return found[0]


def is_bare_field(_app, _what, _name, member, skip, _options):
    """Leave out a NamedTuple's fields, about which autodoc knows nothing but their number."""
    return True if str(getattr(member, "__doc__", "")).startswith("Alias for field number") else skip


def keep_bars(_app, _what, _name, _object, _options, lines):
    """A norm's |x| and a name's last underscore in a docstring are no markup."""
    lines[:] = [re.sub(r"(\w)_(?!\w)", r"\1\\_", line.replace("|", "\\|")) for line in lines]


def short_arrays(_app, _what, _name, _object, _options, signature, returned):
    """NumPy's arrays as the code writes them, NDArray[int64], not as they are spelt out."""
    spelt = re.compile(r"~?[\w.]*ndarray\[tuple\[[~\w.]*Any, \.\.\.\], [~\w.]*dtype\[[~\w.]*?(\w+)\]\]")
    return tuple(text and spelt.sub(r"NDArray[\1]", text) for text in (signature, returned))


def mathml(tex, displayed=False):
    """MathML, which browsers draw themselves: no script, no font, no network. A space around log, mean and the like."""
    tex = re.sub(r"(\\log|\\operatorname\{\w+\}(?:_\w)?)\s+(?=[\w\\])", r"\1\\, ", tex)
    return tex2mathml(re.sub(r"(?<=\w) (?=\\operatorname)", r"\\, ", tex), as_block=displayed)


def inline_formula(translator, node):
    translator.body.append(mathml(node.astext()))
    raise nodes.SkipNode


def displayed_formula(translator, node):
    translator.body.append(f'<div class="formula">{mathml(node.astext(), displayed=True)}</div>')
    raise nodes.SkipNode


def check_offline(app, failure):
    """The site must be readable without a network, so no page may load anything from elsewhere."""
    for page in [] if failure else Path(app.outdir).rglob("*.html"):
        if found := FROM_ELSEWHERE.search(page.read_text(encoding="utf-8")):
            logging.getLogger(__name__).warning("%s loads from the network: %s", page.name, found[0])


def setup(app):
    app.connect("source-read", put_settings)
    app.connect("source-read", put_notebook)
    app.connect("source-read", link_functions)
    app.connect("autodoc-skip-member", is_bare_field)
    app.connect("autodoc-process-docstring", keep_bars)
    app.connect("autodoc-process-signature", short_arrays)
    app.connect("build-finished", check_offline)
    app.add_html_math_renderer("mathml", (inline_formula, None), (displayed_formula, None))
