"""A hook of MkDocs: adds README.md as the first page, and the files outside of docs/ that pages link to.

It also keeps the columns of docstrings, and refuses pages that would fetch something from elsewhere when
they are read.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
_LINK = re.compile(r"(?<=\]\()(?!\w+:)([^)#\s]+)")
"""The path in a link to a file: neither a URL nor an anchor of the same page."""
_TO_ANYTHING = re.compile(r"\[([^\]]*)\]\((?!\w+:)([^)#\s]+)\)")
_FETCHED = re.compile(r"""<(?:script|link|img|iframe)\b[^>]*(?:src|href)=["']?(?:https?:)?//[^>]*>""")
_WITH_COLUMNS = re.compile(r"<p>((?:[^<]|</?code>)*?(?:├──|\w {3,}\w|\n {2,}\w)(?:[^<]|</?code>)*)</p>")
"""A paragraph of a docstring or of a command's help that is laid out in lines and columns."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what the pages link to, and what those pages link to in turn."""
    files.append(File.generated(config, "index.md", abs_src_path=str(ROOT / "README.md")))
    looked_at: set[str] = set()
    while pages := [file for file in files.documentation_pages() if file.src_uri not in looked_at]:
        for page in pages:
            looked_at.add(page.src_uri)
            for link in _LINK.findall(page.content_string):
                target = _place(link, page)
                if files.get_file_from_path(target) is None and (ROOT / target).is_file():
                    files.append(File.generated(config, target, abs_src_path=str(ROOT / target)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Make links fit the site, where docs/ and the root of the repository are one folder."""
    folder = posixpath.dirname(page.file.src_uri)
    markdown = _TO_ANYTHING.sub(lambda match: _without_folder(match, page.file), markdown)
    return _LINK.sub(lambda match: posixpath.relpath(_place(match[1], page.file), folder or "."), markdown)


def on_page_content(html: str, **_: object) -> str:
    """Keep the lines and columns of docstrings, which are plain text."""
    return _WITH_COLUMNS.sub(r"<pre>\1</pre>", html)


def on_post_page(output: str, page: Page, **_: object) -> str:
    """Raise PluginError where a page would fetch something from another site."""
    if fetched := _FETCHED.search(output):
        raise PluginError(f"{page.file.src_uri} would fetch {fetched[0]}")
    return output


def _without_folder(link: re.Match[str], page: File) -> str:
    """The text alone of a link to a folder of the repository, which a site can't show."""
    return link[1] if (ROOT / _place(link[2], page)).is_dir() else link[0]


def _place(link: str, page: File) -> str:
    """Where in the site a link of a page leads."""
    of_page = Path(page.abs_src_path or "").parent.relative_to(ROOT)
    place = posixpath.normpath(posixpath.join(of_page.as_posix(), link)).removeprefix("docs/")
    return "index.md" if place == "README.md" else place
