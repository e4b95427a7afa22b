"""A hook of MkDocs: adds README.md as the first page, and the files outside of docs/ that pages link to.

It also keeps the columns of docstrings, refuses pages that would fetch something from elsewhere when they are
read, and writes llms.txt: the pages of the navigation, for programs that read the site.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Navigation
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
_LINK = re.compile(r"(?<=\]\()(?!\w+:)([^)#\s]+)")
"""The path in a link to a file: neither a URL nor an anchor of the same page."""
_TO_ANYTHING = re.compile(r"\[([^\]]*)\]\((?!\w+:)([^)#\s]+)\)")
_FETCHED = re.compile(r"""<(?:script|link|img|iframe)\b[^>]*(?:src|href)=["']?(?:https?:)?//[^>]*>""")
_nav: Navigation
_first_sentences: dict[str, str] = {}
"""By source of the page."""
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


def on_nav(nav: Navigation, **_: object) -> None:
    """Keep the navigation for llms.txt."""
    global _nav  # noqa: PLW0603 - hooks of MkDocs are functions
    _nav = nav


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Make links fit the site, where docs/ and the root of the repository are one folder."""
    _first_sentences[page.file.src_uri] = _first_sentence(markdown)
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


def on_post_build(config: MkDocsConfig) -> None:
    """Write llms.txt (llmstxt.org) beside the pages, with addresses relative to it."""
    sections: dict[str, list[str]] = {}
    for page in _nav.pages:
        section = page.ancestors[-1].title if page.ancestors else "Pages"
        sentence = _first_sentences[page.file.src_uri]
        told = f"[{page.title}]({page.url or 'index.html'})" + (f": {sentence}" if sentence else "")
        sections.setdefault(section, []).append(f"- {told}")
    blocks = [f"# {config.site_name}", f"> {config.site_description}"]
    for section, lines in sections.items():
        blocks += [f"## {section}", "\n".join(lines)]
    Path(config.site_dir, "llms.txt").write_text("\n\n".join(blocks) + "\n")


def _first_sentence(markdown: str) -> str:
    """That of the first paragraph, if one follows the title."""
    below = re.sub(r"\A# .*\n+", "", re.sub(r"<!--.*?-->\n*", "", markdown, flags=re.DOTALL).lstrip())
    paragraph = " ".join(below.partition("\n\n")[0].split())
    if paragraph.startswith("```") or not (paragraph[:1].isalpha() or paragraph[:1] in "`["):
        return ""
    sentence = re.split(r"(?<=\.) (?=[A-Z`\[])", paragraph)[0]
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", sentence)


def _without_folder(link: re.Match[str], page: File) -> str:
    """The text alone of a link to a folder of the repository, which a site can't show."""
    return link[1] if (ROOT / _place(link[2], page)).is_dir() else link[0]


def _place(link: str, page: File) -> str:
    """Where in the site a link of a page leads."""
    of_page = Path(page.abs_src_path or "").parent.relative_to(ROOT)
    place = posixpath.normpath(posixpath.join(of_page.as_posix(), link)).removeprefix("docs/")
    return "index.md" if place == "README.md" else place
