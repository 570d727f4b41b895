"""The version of this server, as its package declares it. Used by the CLI, ``/version`` and metrics."""

from importlib.metadata import PackageNotFoundError, version


def package_version() -> str:
    try:
        return version("truedraft")
    except PackageNotFoundError:
        return "0+source"  # a checkout that was never installed
