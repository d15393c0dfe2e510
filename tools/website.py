"""Hooks of `mkdocs build` (mkdocs.yml): docs/ as a site, without a change to the pages.

A link that leaves docs/ works on a code host. In the site its target becomes a page or a file of the site, so it works there, too.
docs/settings.md ends with the table of all settings, docs/metrics.md, docs/sql.md and docs/dashboard.md with what
tools/reference.py reads from the code. The pages of the commands and of the Python client are made from their docstrings.
"""

import inspect
import posixpath
import re
from itertools import groupby
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import infaas
from infaas.cli import build
from services.core.settings import Setting, Settings, described
from tools.reference import dashboard_page, metrics_page, plain, sql_page

ROOT = Path(__file__).parents[1]
# Pages beside docs/, by their path in the site.
BESIDE = {
    "README.md": "start.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "LICENSE": "license.txt",
}
_STYLE = ".md-typeset td:first-child code { white-space: nowrap }"  # names are never broken
_LINK = re.compile(r"(?P<label>\[(?:\.\./)*[\w/-]+\.md)?(?P<before>\]\()(?P<target>[^)#\s]+)(?P<after>[^)]*\))")
_MERMAID = re.compile(
    r"^```mermaid\n.*?^```\n", re.DOTALL | re.MULTILINE
)  # drawn by code hosts; here it takes a script of another host
_FENCE = re.compile(r"^(?P<fence> *```\w+) [^\n`]+$", re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what the pages link to outside of docs/, and what that links to."""
    config.extra_css.append("website.css")
    files.append(File.generated(config, "website.css", content=_STYLE))
    files.append(File.generated(config, "commands.md", content=_commands()))
    files.append(File.generated(config, "client.md", content=_client()))
    waiting = [Path(file.abs_src_path) for file in files.documentation_pages() if file.abs_src_path]
    waiting.append(ROOT / "README.md")
    seen = set(waiting) - {ROOT / "README.md"}
    while waiting:
        page = waiting.pop()
        if page not in seen:
            seen.add(page)
            files.append(_added(page, config))
        if page.suffix == ".md":
            waiting += [path for path in _targets(page) if path not in seen and not _in_docs(path) and path.is_file()]
    return files


def on_page_markdown(markdown: str, *, page: Page, **_: Any) -> str:
    """Links as the site has them, with the title of a page in place of its file name; fences without the options that only the tests read."""
    if page.file.abs_src_path is None:
        return markdown
    source = Path(page.file.abs_src_path)
    here = posixpath.dirname(page.file.src_uri)

    def moved(match: re.Match[str]) -> str:
        if re.match(r"\w+:", match["target"]):
            return match[0]
        target = (source.parent / match["target"]).resolve()
        if not target.is_relative_to(ROOT):
            return match[0]
        if target.is_dir() and not _in_docs(target):
            return f"{match['label'] or ''}{match['before']}{posixpath.relpath('start.md', here or '.')})"
        place = _place(target / "README.md" if target.is_dir() and (target / "README.md").exists() else target)
        if target.is_dir() and target.parent == ROOT / "docs" and target.name == "adr":
            place = "adr/0001-actors-and-effects.md"
        label = f"[{_title(target)}" if match["label"] else ""
        return f"{label}{match['before']}{posixpath.relpath(place, here or '.')}{match['after']}"

    text = _FENCE.sub(r"\g<fence>", _LINK.sub(moved, _MERMAID.sub("", markdown)))
    made = {
        "settings.md": _settings,
        "metrics.md": metrics_page,
        "sql.md": sql_page,
        "dashboard.md": dashboard_page,
    }.get(page.file.src_uri)
    return text + made() if made else text


def _added(path: Path, config: MkDocsConfig) -> File:
    file = File.generated(config, _place(path), abs_src_path=str(path))
    file.edit_uri = None
    return file


def _in_docs(path: Path) -> bool:
    return path.is_relative_to(ROOT / "docs")


def _place(path: Path) -> str:
    """The path in the site of a file of the repository."""
    if _in_docs(path):
        return path.relative_to(ROOT / "docs").as_posix()
    name = path.relative_to(ROOT).as_posix()
    return BESIDE.get(name, name)


def _title(page: Path) -> str:
    """The first heading of a page."""
    return page.read_text().partition("# ")[2].partition("\n")[0]


def _targets(page: Path) -> list[Path]:
    found = [
        (page.parent / match["target"]).resolve()
        for match in _LINK.finditer(page.read_text())
        if ":" not in match["target"]
    ]
    return [path for path in found if path.is_relative_to(ROOT)]


def _settings() -> str:
    """All settings, a table for each section."""
    lines = ["", "## All settings", "", "`NAME` stands for a name of yours.", ""]
    for section, members in groupby(described(Settings), key=lambda one: one.key.rpartition(".")[0]):
        lines += [
            f"### {section or 'Without a section'}",
            "",
            "| setting | default | allowed | meaning |",
            "|---|---|---|---|",
        ]
        lines += [_row(one) for one in members]
        lines.append("")
    return "\n".join(lines)


def _commands() -> str:
    """What `--help` says of each command."""
    text: str = build().generate_docs(output_format="markdown")
    return "# Commands\n\n## infaas up" + text.partition("\n## infaas up")[2]


def _client() -> str:
    """What the client library's docstrings say."""
    lines = ["# The Python client", "", inspect.cleandoc(infaas.__doc__ or ""), ""]
    for name in ("connect", "connect_blocking", "register"):
        lines += _described(f"infaas.{name}", getattr(infaas, name))
    lines += ["## Methods of a client", "", "The blocking client has the same methods without `await`.", ""]
    for name, method in inspect.getmembers(infaas.Client, inspect.isfunction):
        if not name.startswith("_"):
            lines += _described(name, method)
    lines += ["## An answer", "", inspect.cleandoc(infaas.Answer.__doc__ or ""), ""]
    return "\n".join(lines)


def _described(name: str, function: Any) -> list[str]:
    signature = inspect.signature(function)
    shown = [one.replace(annotation=one.empty) for one in signature.parameters.values() if one.name != "self"]
    call = f"{name}{signature.replace(parameters=shown, return_annotation=signature.empty)}"
    return [
        f"### {name}",
        "",
        f"```python\n{call}\n```",
        "",
        inspect.cleandoc(function.__doc__ or ""),
        "",
    ]


def _row(one: Setting) -> str:
    default = "" if one.default is None or one.default == "" else f"`{one.default}`"
    name = one.key.rpartition(".")[2]
    cells = (f"`{name}`", default, plain(one.bounds or one.kind), plain(one.meaning))
    return f"| {' | '.join(cells)} |"
