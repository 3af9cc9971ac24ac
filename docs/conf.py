"""The site: Markdown pages, the settings from `fedcpsl.config`, the functions from their docstrings."""

import re
from dataclasses import fields

import fedcpsl
from fedcpsl.config import FLAGS, Config
from fedcpsl.kinds import toml_value

project = "fedcpsl"
release = version = fedcpsl.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["_build", "results/*"]  # tables that results.md includes
default_role = "literal"  # docstrings write `name` for code
html_theme = "furo"
html_title = f"fedcpsl {release}"
html_show_copyright = False
html_show_sphinx = False
myst_heading_anchors = 3
smartquotes = False  # it would turn --flag into a dash
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"


def settings_tables() -> str:
    """One table per section of `fedcpsl.config.Config`: each setting, its default, what it accepts and means."""
    flags = {name: flag for flag, name in FLAGS.items()}
    lines = []
    for section in fields(Config):
        values = getattr(Config(), section.name)
        lines += [f"## `[{section.name}]`", "", str(type(values).__doc__), ""]
        lines += ["| setting | default | accepts | meaning |", "|---|---|---|---|"]
        for declared in fields(values):
            name = f"{section.name}.{declared.name}"
            shown = f"`{declared.name}`" + (f"<br>`{flags[name]}`" if name in flags else "")
            default = f"`{toml_value(getattr(values, declared.name))}`"
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


def is_bare_field(_app, _what, _name, member, skip, _options):
    """Leave out a NamedTuple's fields, about which autodoc knows nothing but their number."""
    return True if str(getattr(member, "__doc__", "")).startswith("Alias for field number") else skip


def keep_bars(_app, _what, _name, _object, _options, lines):
    """A norm's |x| and a name's last underscore in a docstring are no markup."""
    lines[:] = [re.sub(r"(\w)_(?!\w)", r"\1\\_", line.replace("|", "\\|")) for line in lines]


def setup(app):
    app.connect("source-read", put_settings)
    app.connect("autodoc-skip-member", is_bare_field)
    app.connect("autodoc-process-docstring", keep_bars)
