"""Everything that is made for one kind of device: kernels, captured rounds, and what runs them.

Nothing here has run on a GPU yet; docs/gpu.md says what is tested, and how.
"""
