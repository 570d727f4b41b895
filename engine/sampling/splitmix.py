"""Has the hash of which all random numbers are made: splitmix64 (Steele, Lea and Flood 2014, Stafford's
finaliser).
"""

MASK_64 = (1 << 64) - 1
WEYL = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB


def mix(x: int) -> int:
    """Returns a 64-bit integer for any other; ``random`` has the same for tensors."""
    x &= MASK_64
    x = (x ^ (x >> 30)) * MIX_1 & MASK_64
    x = (x ^ (x >> 27)) * MIX_2 & MASK_64
    return x ^ (x >> 31)
