"""Write docs/configuration.md from the settings, and the table of flags in docs/migrating.md.

python -m tools.write_configuration
"""

from pathlib import Path

from truedraft.server.cli.foreign_flags import table
from truedraft.server.cli.help import configuration_page

PAGE = Path(__file__).parent.parent / "docs" / "configuration.md"
MIGRATING = PAGE.with_name("migrating.md")
BEGIN, END = "<!-- written by tools.write_configuration -->\n", "\n<!-- end -->"


def with_table(page: str) -> str:
    """Returns docs/migrating.md with the table as the module has it."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{table()}{END}{after}"


def main() -> None:
    PAGE.write_text(configuration_page(), encoding="utf-8")
    MIGRATING.write_text(with_table(MIGRATING.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"Wrote {PAGE} and the table of {MIGRATING}")


if __name__ == "__main__":
    main()
