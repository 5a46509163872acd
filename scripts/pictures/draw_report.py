"""Draws the beginning of a page of `distca report` into docs/pictures: the plan of real lengths for 64 ranks.

python scripts/pictures/draw_report.py --browser /usr/bin/chromium
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path


PICTURES = Path(__file__).parents[2] / "docs" / "pictures"
PLAN = ["plan", "pretrain", "--gpus", "64", "--tokens-per-rank", "65536", "--liger", "--json"]
SIZE = "1000,1000"
# Options of Chromium for a reader who prefers light or dark pages.
SCHEMES = {"light": [], "dark": ["--blink-settings=preferredColorScheme=0"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--browser", default="chromium", help="path of a Chromium")
    options = parser.parse_args()
    if shutil.which(options.browser) is None:
        parser.error(f"--browser {options.browser}: there is no such program")
    distca = [sys.executable, "-c", "from distca_hf.cli import main; main()"]
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "report.html"
        planned = subprocess.run([*distca, *PLAN], capture_output=True, text=True, check=True).stdout
        subprocess.run([*distca, "report", "-", "--output", page], input=planned, text=True, check=True)
        for scheme, more in SCHEMES.items():
            picture = PICTURES / f"report-{scheme}.png"
            line = [options.browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", *more]
            line += [f"--window-size={SIZE}", "--virtual-time-budget=3000", f"--screenshot={picture}", page.as_uri()]
            subprocess.run(line, capture_output=True, check=True)
            print(picture.relative_to(PICTURES.parents[1]))


if __name__ == "__main__":
    main()
