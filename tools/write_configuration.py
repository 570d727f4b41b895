"""Write docs/configuration.md from the declarations of the settings.

python -m tools.write_configuration
"""

from pathlib import Path

from truedraft.server.cli.help import configuration_page

PAGE = Path(__file__).parent.parent / "docs" / "configuration.md"


def main() -> None:
    PAGE.write_text(configuration_page(), encoding="utf-8")
    print(f"Wrote {PAGE}")


if __name__ == "__main__":
    main()
