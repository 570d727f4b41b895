"""The server at odd moments, with the real worker: faults, hostile inputs."""
