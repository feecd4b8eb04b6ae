// Sixteen float32 numbers at once, in the vector extensions of GCC and Clang: whatever the machine
// has is used, from one AVX-512 register to four of NEON.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <type_traits>
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
typedef int8_t ByteLanes __attribute__((vector_size(16)));

// The bits of a bfloat16.
struct BFloat16 {
  uint16_t bits;
};

// The bits of a float8_e4m3fn.
struct Float8 {
  uint8_t bits;
};

inline Lanes select(IntLanes condition, Lanes yes, Lanes no) {
  return (Lanes)((condition & (IntLanes)yes) | (~condition & (IntLanes)no));
}

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

inline Lanes load(const int8_t* from) {
#ifdef __AVX512F__
  const auto bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return (Lanes)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
#else
  ByteLanes bytes;
  std::memcpy(&bytes, from, sizeof bytes);
  return __builtin_convertvector(bytes, Lanes);
#endif
}

// Of float8 each number is read as a 256th of itself: so it has the bits of a half of another
// exponent, which a processor turns into a float32 even where it takes subnormal ones for 0. NaN is
// not told from 480: what writes one into a pool gives it the scale NaN.
constexpr float kFloat8Unit = 256;

inline Lanes load(const Float8* from) {
#ifdef __AVX512F__
  const auto bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  const auto words = _mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), 7);  // the sign is there twice
  return (Lanes)_mm512_cvtph_ps(_mm256_and_si256(words, _mm256_set1_epi16(int16_t(0xbfff))));
#else
  ByteLanes bytes;
  std::memcpy(&bytes, from, sizeof bytes);
  const IntLanes words = __builtin_convertvector(bytes, IntLanes);
  const IntLanes size = words & 0x7f;
  const Lanes smallest = __builtin_convertvector(size, Lanes) * 0x1p-17f;  // of no exponent
  const Lanes others = (Lanes)((size << 20) + (112 << 23));
  const IntLanes sign = words & int32_t(0x80000000);
  return (Lanes)((IntLanes)select(size < 8, smallest, others) | sign);
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

// Thirty-two numbers as bfloat16, which has every number of one byte: pairs of neighbours.
inline Lanes load_pairs(const BFloat16* from) {
  Lanes pairs;
  std::memcpy(&pairs, from, sizeof pairs);
  return pairs;
}

template <typename Byte>
inline Lanes load_pairs(const Byte* from) {
  static_assert(sizeof(Byte) == 1);
#ifdef __AVX512BF16__
  return (Lanes)_mm512_cvtne2ps_pbh((__m512)load(from + kLanes), (__m512)load(from));
#else
  BFloat16 numbers[2 * kLanes];
  store(numbers, load(from));
  store(numbers + kLanes, load(from + kLanes));
  return load_pairs(numbers);
#endif
}

#ifdef __AVX512VBMI__
// The bfloat16 numbers that `load` has for the bytes from 0 to 127, each half's by itself, and where
// the halves of a word's first two numbers and of its last two go.
template <typename Byte>
struct Widening {
  alignas(64) uint8_t high[128], low[128], places[2][64];

  constexpr Widening() : high(), low(), places() {
    for (int byte = 0; byte < 128; ++byte) {
      const uint32_t word = std::bit_cast<uint32_t>(number_of(byte));
      high[byte] = word >> 24, low[byte] = word >> 16;
    }
    for (int place = 0; place < 64; ++place) {  // low, high, low, high of a word's 0, 0, 1, 1
      const int byte = place / 4 * 4 + place % 4 / 2 + place % 2 * 64;
      places[0][place] = byte, places[1][place] = byte + 2;
    }
  }

  static constexpr float number_of(int byte) {
    if (std::is_same_v<Byte, int8_t>) return byte;
    float number = (byte % 8 + (byte >= 8) * 8) * 0x1p-17f;
    for (int power = byte / 8; power > 1; --power) number *= 2;
    return number;
  }
};

// Makes of words of four bytes their first pairs of bfloat16 and their last. (No int8 is -128.)
template <typename Byte>
inline void widen(Lanes quads, Lanes& first, Lanes& last) {
  static constexpr Widening<Byte> kTable;
  const auto at = [](const uint8_t* bytes) { return _mm512_load_si512(bytes); };
  const auto bytes = (__m512i)quads;  // of which a place in a table is the low seven bits
  const auto places = std::is_same_v<Byte, int8_t> ? _mm512_abs_epi8(bytes) : bytes;
  const auto low = _mm512_permutex2var_epi8(at(kTable.low), places, at(kTable.low + 64));
  auto high = _mm512_permutex2var_epi8(at(kTable.high), places, at(kTable.high + 64));
  high = _mm512_or_si512(high, _mm512_and_si512(bytes, _mm512_set1_epi8(int8_t(0x80))));
  first = (Lanes)_mm512_permutex2var_epi8(low, at(kTable.places[0]), high);
  last = (Lanes)_mm512_permutex2var_epi8(low, at(kTable.places[1]), high);
}
#endif

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
