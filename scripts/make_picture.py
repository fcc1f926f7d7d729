"""Takes the picture of a report that README.md shows: `python scripts/make_picture.py RUN/report.html OUT.png`.

Needs a Chromium on the path. The top of the page, as a desktop shows it in light colours.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
WIDTH, HEIGHT = 1120, 1960  # CSS pixels: the verdict, the figures, the curves, the comparison of the files
MOST_BYTES = 300_000


def picture(page: Path, out: Path) -> None:
    """Writes the picture; the program ends where there is no browser, or where it came out too large."""
    program = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if program is None:
        raise SystemExit(f"none of {', '.join(BROWSERS)} is installed")
    with tempfile.TemporaryDirectory() as folder:
        screenshot = Path(folder) / "page.png"
        options = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            f"--user-data-dir={folder}/profile",
        ]
        size = [f"--window-size={WIDTH},{HEIGHT}", f"--screenshot={screenshot}"]
        subprocess.run([program, *options, *size, page.resolve().as_uri()], check=True, capture_output=True)
        if screenshot.stat().st_size > MOST_BYTES:
            raise SystemExit(f"the picture has {screenshot.stat().st_size} bytes, {MOST_BYTES} at most")
        shutil.copyfile(screenshot, out)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    picture(Path(sys.argv[1]), Path(sys.argv[2]))
