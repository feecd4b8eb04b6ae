"""Random numbers that a seed decides for good: on any machine, under any version of any library.

Each stream is SHAKE-128 of the seed and the stream's name, so that one more draw in one place moves
nothing in another. Only +, -, *, / and the square root are used beyond that, which IEEE 754 rounds
in one way; a C library's log and exp may differ in the last bit.
"""

import hashlib
import math
from typing import Final

_WORDS: Final = 128  # 64-bit words made at a time

# log and exp: algorithms and constants of fdlibm 5.3, e_log.c and e_exp.c.
_LN2_HI: Final = 6.93147180369123816490e-01
_LN2_LO: Final = 1.90821492927058770002e-10
_LOG: Final = (
    6.666666666666735130e-01, 3.999999999940941908e-01, 2.857142874366239149e-01,
    2.222219843214978396e-01, 1.818357216161805012e-01, 1.531383769920937332e-01,
    1.479819860511658591e-01,
)  # fmt: skip
_EXP: Final = (
    1.66666666666666019037e-01, -2.77777777770155933842e-03, 6.61375632143793436117e-05,
    -1.65339022054652515390e-06, 4.13813679705723846039e-08,
)  # fmt: skip
_SQRT_HALF: Final = 0.7071067811865476


class Draws:
    """One stream of random numbers."""

    def __init__(self, seed: int, name: str) -> None:
        self._key = f"{seed}\0{name}"
        self._num_made = 0
        self._words: list[int] = []

    def uniform(self) -> float:
        """Returns a number in (0, 1), of 53 bits."""
        return ((self._word() >> 11) + 0.5) * 2.0**-53

    def below(self, limit: int) -> int:
        """Returns a whole number in [0, limit), evenly to limit in 2^64."""
        return (self._word() * limit) >> 64

    def exponential(self) -> float:
        """Returns a draw of mean 1."""
        return -log(self.uniform())

    def normal(self) -> float:
        """Returns a draw of mean 0 and deviation 1: Marsaglia's polar method."""
        while True:
            u, v = 2.0 * self.uniform() - 1.0, 2.0 * self.uniform() - 1.0
            square = u * u + v * v
            if 0.0 < square < 1.0:
                return u * math.sqrt(-2.0 * log(square) / square)

    def gamma(self, shape: float) -> float:
        """Returns a draw of mean `shape`, scale 1.

        Marsaglia and Tsang, A simple method for generating gamma variables, 2000, §§2 and 6.
        """
        if shape < 1.0:
            return self.gamma(shape + 1.0) * exp(log(self.uniform()) / shape)
        d = shape - 1.0 / 3.0
        c = 1.0 / math.sqrt(9.0 * d)
        while True:
            x = self.normal()
            v = 1.0 + c * x
            v = v * v * v
            if v > 0.0 and log(self.uniform()) < 0.5 * x * x + d - d * v + d * log(v):
                return d * v

    def _word(self) -> int:
        if not self._words:
            made = hashlib.shake_128(f"{self._key}\0{self._num_made}".encode()).digest(8 * _WORDS)
            self._num_made += 1
            self._words = [
                int.from_bytes(made[i : i + 8], "little") for i in range(0, len(made), 8)
            ]
            self._words.reverse()
        return self._words.pop()


def log(x: float) -> float:
    """Returns the natural logarithm of a positive, finite number, to less than 1 ulp."""
    fraction, power = math.frexp(x)
    if fraction < _SQRT_HALF:
        fraction, power = fraction * 2.0, power - 1
    f = fraction - 1.0
    s = f / (2.0 + f)
    z = s * s
    w = z * z
    odd = w * (_LOG[1] + w * (_LOG[3] + w * _LOG[5]))
    even = z * (_LOG[0] + w * (_LOG[2] + w * (_LOG[4] + w * _LOG[6])))
    half = 0.5 * f * f
    return power * _LN2_HI - ((half - (s * (half + (odd + even)) + power * _LN2_LO)) - f)


def exp(x: float) -> float:
    """Returns e to the x, to less than 1 ulp; 0 below -700, and never above e to the 700."""
    if x < -700.0:
        return 0.0
    x = min(x, 700.0)
    power = math.floor(x / (_LN2_HI + _LN2_LO) + 0.5)
    high, low = x - power * _LN2_HI, power * _LN2_LO
    r = high - low
    t = r * r
    c = r - t * (_EXP[0] + t * (_EXP[1] + t * (_EXP[2] + t * (_EXP[3] + t * _EXP[4]))))
    return math.ldexp(1.0 - ((low - (r * c) / (2.0 - c)) - high), power)
