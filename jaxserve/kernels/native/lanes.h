// Sixteen float32 numbers at once, in the vector extensions of GCC and Clang: whatever the machine
// has is used, from one AVX-512 register to four of NEON.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <utility>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

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
#ifdef __AVX512F__  // GCC 12 would take four instructions to widen them
  const auto halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return (Lanes)((WordLanes)_mm512_cvtepu16_epi32(halves) << 16);
#else
  HalfLanes halves;
  std::memcpy(&halves, from, sizeof halves);
  return (Lanes)(__builtin_convertvector(halves, WordLanes) << 16);
#endif
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

// Adds to each lane the products of its pair of bfloat16 numbers with another pair, the first of
// which is in the low half.
inline Lanes add_pair_products(Lanes sum, Lanes pairs, uint32_t factors) {
#ifdef __AVX512BF16__
  return (Lanes)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(int32_t(factors)),
                                 (__m512bh)pairs);
#else
  const WordLanes words = (WordLanes)pairs;
  sum += std::bit_cast<float>(factors << 16) * (Lanes)(words << 16);
  return sum + std::bit_cast<float>(factors & 0xffff0000) * (Lanes)(words & 0xffff0000);
#endif
}

inline Lanes select(IntLanes condition, Lanes yes, Lanes no) {
  return (Lanes)((condition & (IntLanes)yes) | (~condition & (IntLanes)no));
}

inline Lanes larger(Lanes left, Lanes right) { return select(left > right, left, right); }

// Lanes of two: from 16 on a number is of the second.
template <int32_t... lane>
inline Lanes pick(Lanes first, Lanes second) {
#ifdef __clang__
  return __builtin_shufflevector(first, second, lane...);
#else  // before version 12, GCC has this one alone
  return __builtin_shuffle(first, second, IntLanes{lane...});
#endif
}

constexpr auto kEachLane = std::make_integer_sequence<int32_t, kLanes>{};

template <int count, int32_t... lane>
inline Lanes turn(Lanes lanes, std::integer_sequence<int32_t, lane...>) {
  return pick<((lane + count) % kLanes)...>(lanes, lanes);
}

// Lanes turned by `count`: lane i takes lane i + count. Element by element, a compiler would turn
// them in memory.
template <int count>
inline Lanes turn(Lanes lanes) {
  return turn<count>(lanes, kEachLane);
}

inline float largest_of(Lanes lanes) {
  lanes = larger(lanes, turn<8>(lanes));
  lanes = larger(lanes, turn<4>(lanes));
  lanes = larger(lanes, turn<2>(lanes));
  return larger(lanes, turn<1>(lanes))[0];
}

inline float sum_of(Lanes lanes) {
  lanes += turn<8>(lanes);
  lanes += turn<4>(lanes);
  lanes += turn<2>(lanes);
  return lanes[0] + lanes[1];
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

// Exchanges, in each pair of rows `step` apart, the low row's lanes whose number has that bit with
// the high row's whose number has not.
template <int step, int32_t... lane>
inline void exchange(Lanes rows[kLanes], std::integer_sequence<int32_t, lane...>) {
#pragma GCC unroll 16
  for (int row = 0; row < kLanes; ++row) {
    if (row & step) continue;
    const Lanes low = rows[row], high = rows[row + step];
    rows[row] = pick<((lane & step) ? 16 + lane - step : lane)...>(low, high);
    rows[row + step] = pick<((lane & step) ? 16 + lane : lane + step)...>(low, high);
  }
}

// Makes columns of sixteen rows.
inline void transpose(Lanes rows[kLanes]) {
  exchange<1>(rows, kEachLane);
  exchange<2>(rows, kEachLane);
  exchange<4>(rows, kEachLane);
  exchange<8>(rows, kEachLane);
}

}  // namespace jaxserve
