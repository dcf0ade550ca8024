"""Random bits by counter: they depend on the numbers that key them, and on nothing that came before."""

_MASK_64 = 2**64 - 1


def uniform_bits(seed: int, sequence: int, position: int) -> int:
    """64 random bits that depend on the three numbers only (SplitMix64, Steele et al. 2014, chained)."""
    state = 0
    for number in (seed, sequence, position):
        state = _splitmix64(state ^ (number & _MASK_64))
    return state


def _splitmix64(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & _MASK_64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return x ^ (x >> 31)
