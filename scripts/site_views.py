"""Opens every page of the documentation site in a browser, and reports what is broken there.

    pip install '.[docs]' playwright && mkdocs build
    python scripts/site_views.py site --browser /usr/bin/chromium

A view is a page in one colour scheme and width. Reported are errors in the console, requests that fail, pages wider
than the screen, pictures that do not load and pictures without a text. Exit status 1: a view has some.
"""

import argparse
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

from playwright.sync_api import Browser, sync_playwright


SCHEMES = ("light", "dark")
WIDTHS = (1280, 390)  # a desk, and a phone
FOUND_IN_PAGE = """() => [
    ...(document.documentElement.scrollWidth > innerWidth ?
        [`${document.documentElement.scrollWidth} pixels wide, the screen has ${innerWidth}`] : []),
    ...[...document.images].filter(image => !image.alt).map(image => `no text for ${image.src}`),
    ...[...document.images].filter(image => image.offsetParent && image.complete && !image.naturalWidth)
        .map(image => `picture does not load: ${image.src}`),
]"""


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Logs nothing."""


@contextmanager
def served(site: Path) -> Iterator[str]:
    """Serves a folder, and gives its address."""
    server = ThreadingHTTPServer(("localhost", 0), partial(_Quiet, directory=str(site)))
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://localhost:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def faults_of(browser: Browser, address: str, scheme: str, width: int) -> list[str]:
    """Returns what is broken on one page."""
    page = browser.new_page(color_scheme=scheme, viewport={"width": width, "height": 900})
    faults: list[str] = []
    page.on("console", lambda message: faults.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("requestfailed", lambda request: faults.append(f"request failed: {request.url}"))
    page.goto(address, wait_until="networkidle")
    faults += page.evaluate(FOUND_IN_PAGE)
    page.close()
    return faults


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("site", type=Path, help="folder of the built site")
    parser.add_argument("--browser", help="path of a Chromium; by default Playwright's own")
    options = parser.parse_args()
    if not options.site.is_dir():
        parser.error(f"{options.site} is no folder: build the site first, with mkdocs build")
    if options.browser and shutil.which(options.browser) is None:
        parser.error(f"--browser {options.browser}: there is no such program")
    pages = sorted(path.parent.relative_to(options.site).as_posix() for path in options.site.rglob("index.html"))
    views = [(page, scheme, width) for scheme in SCHEMES for width in WIDTHS for page in pages]
    broken = 0
    with sync_playwright() as playwright, served(options.site) as root:
        browser = playwright.chromium.launch(executable_path=options.browser, args=["--no-sandbox"])
        for page, scheme, width in views:
            if faults := faults_of(browser, f"{root}/{page}/", scheme, width):
                broken += 1
                print(f"{page}, {scheme}, {width} pixels: {'; '.join(faults)}")
        browser.close()
    print(f"{len(pages)} pages, {len(views)} views, {broken} of them broken")
    sys.exit(1 if broken or not pages else 0)


if __name__ == "__main__":
    main()
