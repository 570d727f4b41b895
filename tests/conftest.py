"""Settings of every test run: no network, no threads left behind by the tokenizers, none of torch's that
spin, examples that stay."""

import os

from hypothesis import HealthCheck, settings

from truedraft.engine.machine.openmp import spin_settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.update(spin_settings(os.environ))  # before torch is loaded

# An example's time only tells how busy the machine is. Examples follow from the test alone, so that a
# failure comes again; ``--hypothesis-profile default`` looks for others.
settings.register_profile(
    "reproducible", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("reproducible")
