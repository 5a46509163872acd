"""MkDocs hook: pages that are written for a repository's viewer become pages of a site.

Links out of docs/, such as `../examples/lora.py`, lead to files that the site does not hold: each gets its own
page. A `<picture>` for light and dark follows the system; on the site it follows the switch in the header.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files


REPOSITORY = Path(__file__).parents[1]
LINK = re.compile(r"\]\(((?:\.\./)+(?:examples|scripts|recipes|patches)/[^)#]+)\)")
PICTURE = re.compile(
    r'<picture>.*?srcset="([^"]+)".*?<img src="([^"]+)"(?: width="(\d+)")? alt="([^"]+)".*?</picture>', re.DOTALL
)
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
    """Leads the links of a page to these pages, and its pictures by the switch."""
    here = page.file.src_uri

    def inside(match: re.Match[str]) -> str:
        return f"]({posixpath.relpath(_page_uri(_path(match[1], here)), posixpath.dirname(here) or '.')})"

    return PICTURE.sub(_both_pictures, LINK.sub(inside, markdown))


def _both_pictures(match: re.Match[str]) -> str:
    """Returns the light and the dark picture; the theme shows one of them."""
    dark, light, width, alternative = match.groups()
    alternative, size = " ".join(alternative.split()), f'{{ width="{width}" }}' if width else ""
    return f"![{alternative}]({light}#only-light){size}\n![{alternative}]({dark}#only-dark){size}"


def _path(link: str, page_uri: str) -> str:
    """Returns the path that a link of a page leads to, from the root of the repository."""
    return posixpath.normpath(posixpath.join("docs", posixpath.dirname(page_uri), link))


def _page_uri(path: str) -> str:
    return f"files/{path}.md"


def _shown(path: str) -> str:
    """Returns a page that shows the file."""
    file = REPOSITORY / path
    if file.suffix == ".md":
        return file.read_text()
    return f"# {path}\n\n```{LANGUAGES.get(file.suffix, 'text')}\n{file.read_text().rstrip()}\n```\n"
