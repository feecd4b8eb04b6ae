// A packed bfloat16 weight, as `pack` of kernels/dot.py has it: in panels of 32 columns, which lie one
// after the other; in a panel pairs of rows, each the 32 columns' words of two numbers. So memory is
// read from end to end, and a word is what the machine multiplies at once.
//
// A number is the sum of its K products in their order, whatever M and the other numbers are: rows
// do not depend on the rows beside them.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "lanes.h"
#include "parallel.h"

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

namespace jaxserve {

// Two numbers that follow each other in K, the first in the low half.
using Pair = uint32_t;

constexpr int64_t kPanel = 32;
constexpr int64_t kLineBytes = 64;
constexpr int64_t kManyRows = 64;
#ifdef __AVX512F__
constexpr int64_t kMaxRowsAtOnce = 12;  // of x: two registers of sums each, of 32 there are
#else
constexpr int64_t kMaxRowsAtOnce = 3;  // four, of 16
#endif

// What is fetched, two lines at each step, while something else is computed: a part of the panel to
// come.
struct Ahead {
  const char* next;
  int64_t step;

  // Of a panel, while M rows are multiplied.
  Ahead(const Pair* panel, int64_t M)
      : next(reinterpret_cast<const char*>(panel)),
        step(2 * kLineBytes / ((M + kMaxRowsAtOnce - 1) / kMaxRowsAtOnce)) {}

  void fetch() {
    __builtin_prefetch(next, 0, 2);
    __builtin_prefetch(next + kLineBytes, 0, 2);
    next += step;
  }
};

// The sums of some rows of x with one panel's columns.
template <int rows>
class Sums {
 public:
  // Adds the products with a pair of rows of the panel; x is of the first row.
  void add(const Pair* w, const Pair* x, int64_t x_stride) {
#ifdef __AVX512BF16__
    const auto low = (__m512bh)_mm512_loadu_si512(w);
    const auto high = (__m512bh)_mm512_loadu_si512(w + kLanes);
#pragma GCC unroll 16
    for (int row = 0; row < rows; ++row) {
      const auto factor = (__m512bh)_mm512_set1_epi32(int32_t(x[row * x_stride]));
      sums_[row][0] = _mm512_dpbf16_ps(sums_[row][0], factor, low);
      sums_[row][1] = _mm512_dpbf16_ps(sums_[row][1], factor, high);
    }
#else
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      WordLanes words;
      std::memcpy(&words, w + half * kLanes, sizeof words);
      const Lanes first = (Lanes)(words << 16), second = (Lanes)(words & 0xffff0000);
#pragma GCC unroll 16
      for (int row = 0; row < rows; ++row) {
        const Pair factor = x[row * x_stride];
        sums_[row][half] += std::bit_cast<float>(factor << 16) * first;
        sums_[row][half] += std::bit_cast<float>(factor & 0xffff0000) * second;
      }
    }
#endif
  }

  void store_to(float* y, int64_t stride) const {
#pragma GCC unroll 16
    for (int row = 0; row < rows; ++row) {
      store(y + row * stride, (Lanes)sums_[row][0]);
      store(y + row * stride + kLanes, (Lanes)sums_[row][1]);
    }
  }

 private:
  Lanes sums_[rows][2] = {};
};

// Writes the sums of some rows of x with one panel.
template <int rows>
void multiply_panel(const Pair* x, int64_t num_pairs, const Pair* panel, Ahead& ahead, float* y,
                    int64_t stride) {
  Sums<rows> sums;
  for (int64_t pair = 0; pair < num_pairs; ++pair) {
    ahead.fetch();
    sums.add(panel + pair * kPanel, x + pair, num_pairs);
  }
  sums.store_to(y, stride);
}

// Calls work.operator()<rows>(m) for rows m to m + rows of [m, M), as many at once as there are
// registers for.
template <int rows = kMaxRowsAtOnce, typename Work>
void each_block(int64_t m, int64_t M, const Work& work) {
  for (; m + rows <= M; m += rows) work.template operator()<rows>(m);
  if constexpr (rows > 1) each_block<rows - 1>(m, M, work);
}

// Has the team work through panels [0, num_panels): do_panels(first, last). Threads are not equally
// fast, so there are more pieces than threads; of many rows a piece may be small.
template <typename Panels>
void share_panels(int64_t num_panels, int64_t M, const Panels& do_panels) {
  const int64_t num_wanted = Team::get().num_threads() * (M > kManyRows ? 24 : 3);
  const int64_t width = std::max<int64_t>(1, (num_panels + num_wanted - 1) / num_wanted);
  Team::get().run((num_panels + width - 1) / width, [&](int64_t piece) {
    do_panels(piece * width, std::min(num_panels, (piece + 1) * width));
  });
}

// Whether a weight's sizes are those of panels for x_MK.
inline bool is_packed(const auto& sizes, int64_t K) {
  return sizes.size() == 4 && sizes[1] * 2 == K && sizes[2] == kPanel && sizes[3] == 2;
}

}  // namespace jaxserve
