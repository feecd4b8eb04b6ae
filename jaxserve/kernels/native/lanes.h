// Sixteen float32 numbers at once, in the vector extensions of GCC and Clang: whatever the machine
// has is used, from one AVX-512 register to four of NEON.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

namespace jaxserve {

constexpr int64_t kLanes = 16;

typedef float Lanes __attribute__((vector_size(64)));
typedef int32_t IntLanes __attribute__((vector_size(64)));
typedef uint32_t WordLanes __attribute__((vector_size(64)));
typedef uint16_t HalfLanes __attribute__((vector_size(32)));

// The bits of a bfloat16.
struct BFloat16 {
  uint16_t bits;
};

inline Lanes load(const float* from) {
  Lanes lanes;
  std::memcpy(&lanes, from, sizeof lanes);
  return lanes;
}

inline Lanes load(const BFloat16* from) {
  HalfLanes halves;
  std::memcpy(&halves, from, sizeof halves);
  return (Lanes)(__builtin_convertvector(halves, WordLanes) << 16);
}

inline void store(float* to, Lanes lanes) { std::memcpy(to, &lanes, sizeof lanes); }

// To the nearest bfloat16, ties to even; NaN stays NaN.
inline void store(BFloat16* to, Lanes lanes) {
  const WordLanes words = (WordLanes)lanes;
  const WordLanes rounded = (words + 0x7fff + ((words >> 16) & 1)) >> 16;
  const WordLanes quiet = (words >> 16) | 0x40;
  const WordLanes is_nan = (WordLanes)(lanes != lanes);
  const HalfLanes halves = __builtin_convertvector((is_nan & quiet) | (~is_nan & rounded), HalfLanes);
  std::memcpy(to, &halves, sizeof halves);
}

inline Lanes fill(float value) { return Lanes{} + value; }

inline Lanes select(IntLanes condition, Lanes yes, Lanes no) {
  return (Lanes)((condition & (IntLanes)yes) | (~condition & (IntLanes)no));
}

inline Lanes larger(Lanes left, Lanes right) { return select(left > right, left, right); }

inline float largest_of(Lanes lanes) {
  float largest = lanes[0];
  for (int64_t lane = 1; lane < kLanes; ++lane) largest = lanes[lane] > largest ? lanes[lane] : largest;
  return largest;
}

inline float sum_of(Lanes lanes) {
  float sum = 0;
  for (int64_t lane = 0; lane < kLanes; ++lane) sum += lanes[lane];
  return sum;
}

// e^x for x <= 0, within 2 units of the last place; 0 below -87.
// By 2^n * e^r with |r| <= ln(2) / 2, and e^r by its Taylor series to the seventh power.
inline Lanes exp_of_negative(Lanes x) {
  constexpr float kLog2E = 1.44269504f, kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;
  constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number
  const IntLanes is_tiny = x < fill(-87.0f);
  x = select(is_tiny, fill(-87.0f), x);
  const Lanes n = (x * kLog2E + kMagic) - kMagic;
  const Lanes r = (x - n * kLn2High) - n * kLn2Low;
  Lanes sum = fill(1.0f / 5040);
  for (const float factor : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) {
    sum = sum * r + factor;
  }
  const IntLanes power = (__builtin_convertvector(n, IntLanes) + 127) << 23;
  return select(is_tiny, Lanes{}, sum * (Lanes)power);
}

// Turns sixteen rows of sixteen into columns, by exchanging ever larger halves.
inline void transpose(Lanes rows[kLanes]) {
  constexpr IntLanes kLane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#pragma GCC unroll 4
  for (int step = 1; step < kLanes; step *= 2) {
    // Lane i of the low row keeps its own where bit `step` of i is 0, and takes the high row's
    // lane i - step where it is 1; and the other way round.
    const IntLanes has_bit = (kLane & step) / step;
    const IntLanes low = kLane + has_bit * (int(kLanes) - step);
    const IntLanes high = low + step;
#pragma GCC unroll 16
    for (int row = 0; row < kLanes; ++row) {
      if (row & step) continue;
      const Lanes first = rows[row], second = rows[row + step];
#ifdef __clang__
      Lanes mixed_low, mixed_high;
      for (int lane = 0; lane < kLanes; ++lane) {
        mixed_low[lane] = low[lane] < kLanes ? first[low[lane]] : second[low[lane] - kLanes];
        mixed_high[lane] = high[lane] < kLanes ? first[high[lane]] : second[high[lane] - kLanes];
      }
      rows[row] = mixed_low, rows[row + step] = mixed_high;
#else
      rows[row] = __builtin_shuffle(first, second, low);
      rows[row + step] = __builtin_shuffle(first, second, high);
#endif
    }
  }
}

}  // namespace jaxserve
