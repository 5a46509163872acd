"""MkDocs hook: what pages link to outside of docs/ (examples, scripts, recipes) gets a page of the site.

In the repository such a link is relative, `../examples/lora.py`, and leads to the file. The site holds docs/ alone, so
that the file is shown on a page of its own, and the link leads there.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files


REPOSITORY = Path(__file__).parents[1]
LINK = re.compile(r"\]\(((?:\.\./)+(?:examples|scripts|recipes|patches)/[^)#]+)\)")
LANGUAGES = {".py": "python", ".sh": "bash", ".sbatch": "bash", ".yaml": "yaml"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds a page for every file that is linked."""
    for page in files.documentation_pages():
        for link in LINK.findall(page.content_string):
            path = _path(link, page.src_uri)
            if files.get_file_from_path(_page_uri(path)) is None:
                files.append(File.generated(config, _page_uri(path), content=_shown(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Leads the links of a page to these pages."""
    here = page.file.src_uri

    def inside(match: re.Match[str]) -> str:
        return f"]({posixpath.relpath(_page_uri(_path(match[1], here)), posixpath.dirname(here) or '.')})"

    return LINK.sub(inside, markdown)


def _path(link: str, page_uri: str) -> str:
    """Returns where a link of a page leads to, from the root of the repository."""
    return posixpath.normpath(posixpath.join("docs", posixpath.dirname(page_uri), link))


def _page_uri(path: str) -> str:
    return f"files/{path}.md"


def _shown(path: str) -> str:
    """Returns a page that shows the file."""
    file = REPOSITORY / path
    return f"# {path}\n\n```{LANGUAGES.get(file.suffix, 'text')}\n{file.read_text().rstrip()}\n```\n"
