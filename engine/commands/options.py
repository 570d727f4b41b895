"""The terminal's commands read the engine's settings and their own options, as ``serve`` does."""

from pydantic_settings import SettingsConfigDict


def command_options(name: str) -> SettingsConfigDict:
    """Errors are exceptions, which ``server.cli.main`` prints as one line."""
    return SettingsConfigDict(
        env_prefix="TRUEDRAFT_",
        cli_prog_name=f"truedraft {name}",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_exit_on_error=False,
        extra="forbid",
    )
