"""Links to files all over the repository: the site takes in the files that its pages link to.

A page or picture outside ``docs`` comes as it is, a notebook as its text and code, any other file as a page that shows
it. A paragraph that is one link with the title "included", such as
``[figures](../benchmarks/uci/README.md#results "included")``, becomes the text under that heading, so that a sentence
or a number stands in one place.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from markdown.extensions.toc import slugify_unicode
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

LINK = re.compile(r"(?P<open>!?\[[^\]]*\])\((?P<path>[^)#:\s]+)(?P<rest>(?:#[^)\s]*)?(?: \"[^\"]*\")?)\)")
INCLUDED = re.compile(r"^\[[^\]]*\]\((?P<path>[^)#\s]+)#(?P<anchor>[^)\s]+) \"included\"\)$", re.MULTILINE)
HEADING = re.compile(r"^#+ +(.*)$")
AS_THEY_ARE = (".md", ".png")
LANGUAGES = {".py": "python", ".yaml": "yaml", ".toml": "toml", ".json": "json"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Take in the files that pages link to, and those that these link to."""
    docs = Path(config.docs_dir)
    pending = [Path(file.abs_src_path) for file in files.documentation_pages() if file.abs_src_path]
    while pending:
        page = pending.pop()
        for target in targets(expanded(page, docs), page):
            uri = site_uri(target, docs)
            if files.get_file_from_path(uri) is None:
                files.append(taken_in(target, uri, config))
                if target.suffix == ".md":
                    pending.append(target)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Insert the included sections, and let links lead to the files of the site."""
    if not page.file.abs_src_path:
        return markdown
    docs = Path(config.docs_dir)
    return rebased(expanded(Path(page.file.abs_src_path), docs), Path(page.file.abs_src_path), docs)


def targets(text: str, page: Path) -> Iterator[Path]:
    """Yield the files of the repository that ``text`` on ``page`` links to."""
    for link in LINK.finditer(text):
        target = (page.parent / link["path"]).resolve()
        if target.is_file():
            yield target


def site_uri(path: Path, docs: Path) -> str:
    """Return a file's path on the site: without ``docs/`` if it lies there, otherwise as in the repository.

    >>> site_uri(Path("/repository/docs/rules.md"), Path("/repository/docs"))
    'rules.md'
    >>> site_uri(Path("/repository/examples/digits.py"), Path("/repository/docs"))
    'examples/digits.py.md'
    """
    relative = path.relative_to(docs if path.is_relative_to(docs) else docs.parent).as_posix()
    return relative if path.suffix in AS_THEY_ARE or path.is_relative_to(docs) else f"{relative}.md"


def taken_in(path: Path, uri: str, config: MkDocsConfig) -> File:
    """Make a file from outside ``docs`` a file of the site."""
    if path.suffix in AS_THEY_ARE:
        return File.generated(config, uri, abs_src_path=str(path))
    name = path.relative_to(Path(config.docs_dir).parent).as_posix()
    if path.suffix == ".ipynb":
        text = notebook(json.loads(path.read_text()), name)
        return File.generated(config, uri, content=rebased(text, path, Path(config.docs_dir)))
    language = LANGUAGES.get(path.suffix, "text")
    return File.generated(config, uri, content=f"# {path.name}\n\n`{name}`\n\n```{language}\n{path.read_text()}```\n")


def notebook(content: dict[str, Any], name: str) -> str:
    r"""Return the cells of a notebook as Markdown, and its name below the title.

    >>> cells = [{"cell_type": "markdown", "source": ["# T\n", "\n", "a"]}, {"cell_type": "code", "source": ["1"]}]
    >>> notebook({"cells": cells}, "n.ipynb")
    '# T\n\n`n.ipynb`\n\na\n\n```python\n1\n```\n'
    """
    texts = [("".join(cell["source"]), cell["cell_type"]) for cell in content["cells"]]
    shown = [f"```python\n{text}\n```" if kind == "code" else text for text, kind in texts if text]
    title, _, rest = "\n\n".join(shown).partition("\n")
    return f"{title}\n\n`{name}`\n\n{rest.lstrip()}\n"


def rebased(text: str, source: Path, docs: Path, page: Path | None = None) -> str:
    """Return ``text`` of ``source`` with links as they are on the site.

    Args:
        text: Markdown whose links are relative to ``source``.
        source: the file that the text comes from.
        docs: the folder of the pages.
        page: the file that it is put in, as a path; None: ``source`` itself, and links lead to the site's files.
    """

    def link(match: re.Match[str]) -> str:
        target = (source.parent / match["path"]).resolve()
        if target.is_dir():
            return match["open"].strip("[]")
        if not target.is_file():
            return match[0]
        if page is not None:
            return f"{match['open']}({os.path.relpath(target, page.parent)}{match['rest']})"
        start = Path(site_uri(source, docs)).parent
        return f"{match['open']}({os.path.relpath(site_uri(target, docs), start)}{match['rest']})"

    return LINK.sub(link, text)


def expanded(page: Path, docs: Path) -> str:
    """Return the text of ``page`` with the sections that it includes; their links are relative to it."""

    def included(match: re.Match[str]) -> str:
        source = (page.parent / match["path"]).resolve()
        return rebased(section(source, match["anchor"]), source, docs, page)

    return INCLUDED.sub(included, page.read_text())


def section(path: Path, anchor: str) -> str:
    """Return the text between a heading of a Markdown file and the next one.

    Raises:
        PluginError: the file has no such heading.
    """
    lines: list[str] = []
    found = code = False
    for line in path.read_text().splitlines():
        code ^= line.startswith("```")
        heading = None if code else HEADING.match(line)
        if found and heading:
            break
        if found:
            lines.append(line)
        elif heading and slugify_unicode(heading[1], "-") == anchor:
            found = True
    if not found:
        raise PluginError(f"{path} has no heading #{anchor}, which a page includes")
    return "\n".join(lines).strip()
