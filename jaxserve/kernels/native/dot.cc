// y_MN = x_MK . w of bfloat16 numbers, summed in float32.
//
// A weight comes packed, as `pack` of kernels/dot.py has it: in panels of 32 columns, which lie one
// after the other; in a panel pairs of rows, each the 32 columns' words of two numbers. So memory is
// read from end to end, and a word is what the machine multiplies at once.
//
// A number is the sum of its K products in their order, whatever M and the other numbers are: rows
// do not depend on the rows beside them.

#include <algorithm>
#include <bit>
#include <cstdint>
#include <vector>

#include "lanes.h"
#include "parallel.h"
#include "xla/ffi/api/ffi.h"

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

namespace jaxserve {
namespace {

namespace ffi = xla::ffi;

// Two numbers that follow each other in K, the first in the low half.
using Pair = uint32_t;

constexpr int64_t kPanel = 32;
constexpr int64_t kLineBytes = 64;
constexpr int64_t kPiecesPerThread = 3;
#ifdef __AVX512F__
constexpr int64_t kMaxRowsAtOnce = 12;  // of x: two registers of sums each, of 32 there are
#else
constexpr int64_t kMaxRowsAtOnce = 3;  // four, of 16
#endif

// A weight, and its result.
struct Product {
  const Pair* panels;
  float* y_MN;
  int64_t N;
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

  void store_to(float* y, int64_t N) const {
#pragma GCC unroll 16
    for (int row = 0; row < rows; ++row) {
      store(y + row * N, (Lanes)sums_[row][0]);
      store(y + row * N + kLanes, (Lanes)sums_[row][1]);
    }
  }

 private:
  Lanes sums_[rows][2] = {};
};

// Some rows of x with one panel, while a part of the next panel is fetched.
template <int rows>
void multiply_panel(const Pair* x, int64_t num_pairs, const Pair* panel, const char* ahead,
                    int64_t ahead_step, float* y, int64_t N) {
  Sums<rows> sums;
  for (int64_t pair = 0; pair < num_pairs; ++pair) {
    __builtin_prefetch(ahead, 0, 2);
    __builtin_prefetch(ahead + kLineBytes, 0, 2);
    ahead += ahead_step;
    sums.add(panel + pair * kPanel, x + pair, num_pairs);
  }
  sums.store_to(y, N);
}

template <int rows = kMaxRowsAtOnce, typename... Rest>
void multiply_rest(int64_t num_rows, Rest... rest) {
  if constexpr (rows > 0) {
    if (num_rows == rows) return multiply_panel<rows>(rest...);
    multiply_rest<rows - 1>(num_rows, rest...);
  }
}

// Panels [first, last) of a product.
void multiply(const Pair* x, int64_t M, int64_t num_pairs, const Product& product, int64_t first,
              int64_t last) {
  const int64_t panel_len = num_pairs * kPanel;
  const int64_t num_blocks = (M + kMaxRowsAtOnce - 1) / kMaxRowsAtOnce;
  const int64_t ahead_step = 2 * kLineBytes / num_blocks;
  for (int64_t index = first; index < last; ++index) {
    const Pair* panel = product.panels + index * panel_len;
    const char* ahead = reinterpret_cast<const char*>(panel + panel_len);
    for (int64_t m = 0; m < M; m += kMaxRowsAtOnce) {
      multiply_rest(std::min(kMaxRowsAtOnce, M - m), x + m * num_pairs, num_pairs, panel, ahead,
                    ahead_step, product.y_MN + m * product.N + index * kPanel, product.N);
      ahead += num_pairs * ahead_step;
    }
  }
}

// x_MK, then weights [N / 32, K / 2, 32, 2] with a y_MN each.
ffi::Error Dot(ffi::Buffer<ffi::BF16> x_MK, ffi::RemainingArgs weights, ffi::RemainingRets results) {
  if (x_MK.dimensions().size() != 2 || weights.size() != results.size()) {
    return ffi::Error::InvalidArgument("x is no matrix, or not every weight has a result");
  }
  const int64_t M = x_MK.dimensions()[0], K = x_MK.dimensions()[1];
  std::vector<Product> products;
  int64_t num_panels = 0;
  for (size_t index = 0; index < weights.size(); ++index) {
    const auto w = weights.get<ffi::Buffer<ffi::BF16>>(index);
    const auto y = results.get<ffi::Buffer<ffi::F32>>(index);
    if (w.has_error()) return w.error();
    if (y.has_error()) return y.error();
    const auto sizes = w->dimensions(), y_sizes = (*y)->dimensions();
    if (sizes.size() != 4 || sizes[1] * 2 != K || sizes[2] != kPanel || sizes[3] != 2 ||
        y_sizes.size() != 2 || y_sizes[0] != M || y_sizes[1] != sizes[0] * kPanel) {
      return ffi::Error::InvalidArgument("the sizes of x, a packed weight and its result do not fit");
    }
    const auto* panels = static_cast<const Pair*>(w->untyped_data());
    products.push_back({panels, (*y)->typed_data(), y_sizes[1]});
    num_panels += sizes[0];
  }
  struct Piece {
    const Product* product;
    int64_t first, last;
  };
  std::vector<Piece> pieces;
  const int64_t num_wanted = kPiecesPerThread * Team::get().num_threads();
  const int64_t width = std::max<int64_t>(1, (num_panels + num_wanted - 1) / num_wanted);
  for (const Product& product : products) {
    const int64_t end = product.N / kPanel;
    for (int64_t first = 0; first < end; first += width) {
      pieces.push_back({&product, first, std::min(end, first + width)});
    }
  }
  const auto* x = static_cast<const Pair*>(x_MK.untyped_data());
  Team::get().run(int64_t(pieces.size()), [&](int64_t index) {
    const auto [product, first, last] = pieces[index];
    multiply(x, M, K / 2, *product, first, last);
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxserve

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_dot, jaxserve::Dot,
                              xla::ffi::Ffi::Bind()
                                  .Arg<xla::ffi::Buffer<xla::ffi::BF16>>()
                                  .RemainingArgs()
                                  .RemainingRets());
