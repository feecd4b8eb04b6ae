// y_MN = x_MK . w of bfloat16 numbers, summed in float32, for few rows M: what a decode step is
// made of. There a product takes the time in which the weights come from memory, each once.
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

constexpr int64_t kPanel = 32;        // columns that are summed at once
constexpr int64_t kRows = 256;        // of the weights, in a block
constexpr int64_t kColumns = 256;     // likewise; a block is packed in the L2 cache
constexpr int64_t kMaxRowsAtOnce = 12;  // of x: two registers of sums each, of 32 there are
constexpr int64_t kPiecesPerThread = 3;

// A weight, and the columns of the result that a piece of work computes.
struct Product {
  const BFloat16* w;
  float* y_MN;
  int64_t N;
};

#ifdef __AVX512BF16__

// Two numbers that follow each other in K, side by side: what the instruction multiplies and adds.
using Packed = uint32_t;
constexpr int64_t kPacked = 2;

inline __m512i load_512(const BFloat16* from) { return _mm512_loadu_si512(from); }

// Thirty-two columns' words of 32 bits, as unpacking leaves them: four of a half, then four of the
// other, in both.
struct Mixed {
  __m512i even, odd;
};

// Rows k and k + 1 of 32 columns, as pairs.
inline Mixed pair_up(const BFloat16* w, int64_t N) {
  const __m512i first = load_512(w), second = load_512(w + N);
  return {_mm512_unpacklo_epi16(first, second), _mm512_unpackhi_epi16(first, second)};
}

// Stores the words in the order of their columns.
inline void store_in_order(void* to, const Mixed& mixed) {
  const __m512i kLow = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
  const __m512i kHigh = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
  auto* words = static_cast<uint32_t*>(to);
  _mm512_storeu_si512(words, _mm512_permutex2var_epi64(mixed.even, kLow, mixed.odd));
  _mm512_storeu_si512(words + kLanes, _mm512_permutex2var_epi64(mixed.even, kHigh, mixed.odd));
}

inline void pack_pairs(const BFloat16* w_KN, int64_t N, Packed* to) {
  store_in_order(to, pair_up(w_KN, N));
}

inline void pack_transposed(const BFloat16* w_NK, int64_t K, Packed* to) {
  Lanes pairs[kLanes];
#pragma GCC unroll 16
  for (int64_t n = 0; n < kLanes; ++n) pairs[n] = (Lanes)load_512(w_NK + n * K);
  transpose(pairs);
#pragma GCC unroll 16
  for (int64_t pair = 0; pair < kLanes; ++pair) {
    _mm512_store_si512(to + pair * kPanel, (__m512i)pairs[pair]);
  }
}

inline Lanes add_products(Lanes sum, const Packed* w, Packed x) {
  const __m512bh right = (__m512bh)_mm512_load_si512(w);
  return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32(int32_t(x)), right);
}

// One to three rows need no block: a weight is used where it was read. Panels are of several
// columns' registers, so that what is read of a row is long.
template <int rows, int panels>
void multiply_directly(const BFloat16* x_MK, int64_t K, const BFloat16* w_KN, int64_t N, float* y_MN) {
  __m512 sums[rows][panels][2] = {};
  const auto* x = reinterpret_cast<const Packed*>(x_MK);
  for (int64_t k = 0; k < K; k += 2) {
    const BFloat16* w = w_KN + k * N;
#pragma GCC unroll 8
    for (int panel = 0; panel < panels; ++panel) {
      __builtin_prefetch(w + 16 * N + panel * kPanel);
      __builtin_prefetch(w + 17 * N + panel * kPanel);
      const Mixed pairs = pair_up(w + panel * kPanel, N);
#pragma GCC unroll 4
      for (int row = 0; row < rows; ++row) {
        const __m512bh factor = (__m512bh)_mm512_set1_epi32(int32_t(x[(row * K + k) / 2]));
        sums[row][panel][0] = _mm512_dpbf16_ps(sums[row][panel][0], factor, (__m512bh)pairs.even);
        sums[row][panel][1] = _mm512_dpbf16_ps(sums[row][panel][1], factor, (__m512bh)pairs.odd);
      }
    }
  }
  for (int row = 0; row < rows; ++row) {
    for (int panel = 0; panel < panels; ++panel) {
      store_in_order(y_MN + row * N + panel * kPanel,
                     {(__m512i)sums[row][panel][0], (__m512i)sums[row][panel][1]});
    }
  }
}

template <int rows, int panels>
void multiply_directly(const BFloat16* x_MK, int64_t K, const Product& product, int64_t first,
                       int64_t last) {
  const auto [w_KN, y_MN, N] = product;
  int64_t n = first;
  for (; n + panels * kPanel <= last; n += panels * kPanel) {
    multiply_directly<rows, panels>(x_MK, K, w_KN + n, N, y_MN + n);
  }
  for (; n < last; n += kPanel) multiply_directly<rows, 1>(x_MK, K, w_KN + n, N, y_MN + n);
}

#else  // any machine

using Packed = float;
constexpr int64_t kPacked = 1;

inline void pack_pairs(const BFloat16* w_KN, int64_t N, Packed* to) {
  for (int64_t k = 0; k < 2; ++k) {
    store(to + k * kPanel, load(w_KN + k * N));
    store(to + k * kPanel + kLanes, load(w_KN + k * N + kLanes));
  }
}

inline void pack_transposed(const BFloat16* w_NK, int64_t K, Packed* to) {
  for (int64_t half = 0; half < 2; ++half) {
    Lanes numbers[kLanes];
    for (int64_t n = 0; n < kLanes; ++n) numbers[n] = load(w_NK + n * K + half * kLanes);
    transpose(numbers);
    for (int64_t k = 0; k < kLanes; ++k) store(to + (half * kLanes + k) * kPanel, numbers[k]);
  }
}

inline Lanes add_products(Lanes sum, const Packed* w, Packed x) { return sum + x * load(w); }

#endif

constexpr int64_t kPackedBlock = kRows * kColumns / kPacked;

// Puts rows of weights into panels: in each, K by K, the numbers of 32 columns.
void pack(const BFloat16* w, int64_t stride, bool is_transposed, int64_t num_rows,
          int64_t num_columns, Packed* packed) {
  if (!is_transposed) {
    for (int64_t k = 0; k < num_rows; k += 2) {
      for (int64_t n = 0; n < num_columns; n += kPanel) {
        const BFloat16* from = w + k * stride + n;
        __builtin_prefetch(from + 16 * stride);
        __builtin_prefetch(from + 17 * stride);
        pack_pairs(from, stride, packed + (n * num_rows + k * kPanel) / kPacked);
      }
    }
    return;
  }
  for (int64_t n = 0; n < num_columns; n += kLanes) {
    Packed* panel = packed + n / kPanel * kPanel * num_rows / kPacked + n % kPanel;
    for (int64_t k = 0; k < num_rows; k += 2 * kLanes) {
      pack_transposed(w + n * stride + k, stride, panel + k * kPanel / kPacked);
    }
  }
}

// Adds the products of some rows of x with one panel.
template <int rows>
void multiply_panel(const Packed* x, int64_t x_stride, const Packed* panel, int64_t num_steps,
                    bool is_first, float* y, int64_t N) {
  Lanes sums[rows][2];
#pragma GCC unroll 16
  for (int row = 0; row < rows; ++row) {
    sums[row][0] = is_first ? Lanes{} : load(y + row * N);
    sums[row][1] = is_first ? Lanes{} : load(y + row * N + kLanes);
  }
  for (int64_t step = 0; step < num_steps; ++step, panel += kPanel) {
#pragma GCC unroll 16
    for (int row = 0; row < rows; ++row) {
      const Packed factor = x[row * x_stride + step];
      sums[row][0] = add_products(sums[row][0], panel, factor);
      sums[row][1] = add_products(sums[row][1], panel + kLanes, factor);
    }
  }
#pragma GCC unroll 16
  for (int row = 0; row < rows; ++row) {
    store(y + row * N, sums[row][0]);
    store(y + row * N + kLanes, sums[row][1]);
  }
}

template <int rows = kMaxRowsAtOnce>
void multiply_rest(int64_t num_rows, const Packed* x, int64_t x_stride, const Packed* panel,
                   int64_t num_steps, bool is_first, float* y, int64_t N) {
  if constexpr (rows > 0) {
    if (num_rows == rows) {
      multiply_panel<rows>(x, x_stride, panel, num_steps, is_first, y, N);
    } else {
      multiply_rest<rows - 1>(num_rows, x, x_stride, panel, num_steps, is_first, y, N);
    }
  }
}

// Columns [first, last) of a product, block by block.
void multiply(const Packed* x, int64_t M, int64_t K, const Product& product, bool is_transposed,
              int64_t first, int64_t last) {
  alignas(64) static thread_local Packed packed[kPackedBlock];
  const auto [w, y_MN, N] = product;
  const int64_t stride = is_transposed ? K : N, x_stride = K / kPacked;
  for (int64_t n = first; n < last; n += kColumns) {
    const int64_t num_columns = std::min(kColumns, last - n);
    for (int64_t k = 0; k < K; k += kRows) {
      const int64_t num_rows = std::min(kRows, K - k);
      pack(w + (is_transposed ? n * K + k : k * N + n), stride, is_transposed, num_rows,
           num_columns, packed);
      for (int64_t column = 0; column < num_columns; column += kPanel) {
        const Packed* panel = packed + column * num_rows / kPacked;
        for (int64_t m = 0; m < M; m += kMaxRowsAtOnce) {
          multiply_rest(std::min(kMaxRowsAtOnce, M - m), x + m * x_stride + k / kPacked, x_stride,
                        panel, num_rows / kPacked, k == 0, y_MN + m * N + n + column, N);
        }
      }
    }
  }
}

void multiply_columns(const BFloat16* x_MK, const Packed* x, int64_t M, int64_t K,
                      const Product& product, bool is_transposed, int64_t first, int64_t last) {
#ifdef __AVX512BF16__
  if (!is_transposed && M == 1) return multiply_directly<1, 8>(x_MK, K, product, first, last);
  if (!is_transposed && M == 2) return multiply_directly<2, 4>(x_MK, K, product, first, last);
  if (!is_transposed && M == 3) return multiply_directly<3, 4>(x_MK, K, product, first, last);
#endif
  multiply(x, M, K, product, is_transposed, first, last);
}

// x_MK bfloat16, then weights w_KN (w_NK where is_transposed) with a y_MN each; N a multiple of 32,
// K of 2 (of 32 where is_transposed).
ffi::Error Dot(ffi::Buffer<ffi::BF16> x_MK, ffi::RemainingArgs weights,
               ffi::RemainingRets results, bool is_transposed) {
  if (x_MK.dimensions().size() != 2 || weights.size() != results.size()) {
    return ffi::Error::InvalidArgument("x is no matrix, or not every weight has a result");
  }
  const int64_t M = x_MK.dimensions()[0], K = x_MK.dimensions()[1];
  const auto* x = static_cast<const BFloat16*>(x_MK.untyped_data());
  std::vector<Product> products;
  int64_t num_columns = 0;
  for (size_t index = 0; index < weights.size(); ++index) {
    const auto w = weights.get<ffi::Buffer<ffi::BF16>>(index);
    const auto y = results.get<ffi::Buffer<ffi::F32>>(index);
    if (w.has_error()) return w.error();
    if (y.has_error()) return y.error();
    const auto w_sizes = w->dimensions(), y_sizes = (*y)->dimensions();
    if (w_sizes.size() != 2 || y_sizes.size() != 2 || y_sizes[0] != M ||
        w_sizes[is_transposed] != K || w_sizes[!is_transposed] != y_sizes[1]) {
      return ffi::Error::InvalidArgument("the sizes of x, a weight and its result do not fit");
    }
    const int64_t N = y_sizes[1];
    if (K == 0 || N % kPanel || K % (is_transposed ? kPanel : 2)) {
      return ffi::Error::InvalidArgument("a size is no multiple of what it must be");
    }
    products.push_back({static_cast<const BFloat16*>(w->untyped_data()), (*y)->typed_data(), N});
    num_columns += N;
  }
#ifdef __AVX512BF16__
  const auto* factors = reinterpret_cast<const Packed*>(x);
#else
  std::vector<float> numbers(M * K);
  for (int64_t i = 0; i < M * K; ++i) {
    numbers[i] = std::bit_cast<float>(uint32_t(x[i].bits) << 16);
  }
  const float* factors = numbers.data();
#endif
  struct Piece {
    const Product* product;
    int64_t first, last;
  };
  std::vector<Piece> pieces;
  const int64_t num_wanted = kPiecesPerThread * Team::get().num_threads();
  const int64_t width = std::max<int64_t>(2, (num_columns / kPanel + num_wanted - 1) / num_wanted);
  for (const Product& product : products) {
    for (int64_t n = 0; n < product.N; n += width * kPanel) {
      pieces.push_back({&product, n, std::min(product.N, n + width * kPanel)});
    }
  }
  Team::get().run(int64_t(pieces.size()), [&](int64_t index) {
    const auto [product, first, last] = pieces[index];
    multiply_columns(x, factors, M, K, *product, is_transposed, first, last);
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxserve

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_dot, jaxserve::Dot,
                              xla::ffi::Ffi::Bind()
                                  .Arg<xla::ffi::Buffer<xla::ffi::BF16>>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<bool>("is_transposed"));
