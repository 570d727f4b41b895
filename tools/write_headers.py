"""Writes the C headers that mirror Python: what is in them has its source there.

python -m tools.write_headers
"""

from collections.abc import Callable
from pathlib import Path

from truedraft.engine.native.headers import FOLDER
from truedraft.engine.native.shared import rows_header, shared_header

WRITTEN: dict[str, Callable[[], str]] = {
    "shared.h": shared_header,
    "rows.h": rows_header,
}


def main() -> None:
    for name, text in WRITTEN.items():
        (Path(FOLDER) / name).write_text(text(), encoding="utf-8")
        print(f"Wrote {FOLDER / name}")


if __name__ == "__main__":
    main()
