// y_MN = x_MK . w of bfloat16 numbers, summed in float32: for some weights of one x, or added to what
// is there.

#include <vector>

#include "panels.h"
#include "xla/ffi/api/ffi.h"

namespace jaxserve {
namespace {

namespace ffi = xla::ffi;

// A weight, and its result; its panels are numbered after those of the weights before it.
struct Product {
  const Pair* panels;
  float* y_MN;
  int64_t N, first_panel;

  int64_t end_panel() const { return first_panel + N / kPanel; }
};

// Panels [first, last) of a product.
void multiply(const Pair* x, int64_t M, int64_t num_pairs, const Product& product, int64_t first,
              int64_t last) {
  for (int64_t index = first; index < last; ++index) {
    const Pair* panel = product.panels + index * num_pairs * kPanel;
    Ahead ahead(panel + num_pairs * kPanel, M);
    each_block(0, M, [&]<int rows>(int64_t m) {
      multiply_panel<rows>(x + m * num_pairs, num_pairs, panel, ahead,
                           product.y_MN + m * product.N + index * kPanel, product.N);
    });
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
    if (!is_packed(sizes, K) || y_sizes.size() != 2 || y_sizes[0] != M ||
        y_sizes[1] != sizes[0] * kPanel) {
      return ffi::Error::InvalidArgument("the sizes of x, a packed weight and its result do not fit");
    }
    const auto* panels = static_cast<const Pair*>(w->untyped_data());
    products.push_back({panels, (*y)->typed_data(), y_sizes[1], num_panels});
    num_panels += sizes[0];
  }
  const auto* x = static_cast<const Pair*>(x_MK.untyped_data());
  share_panels(num_panels, M, [&](int64_t first, int64_t last) {
    for (const Product& product : products) {
      multiply(x, M, K / 2, product, std::max(first, product.first_panel) - product.first_panel,
               std::min(last, product.end_panel()) - product.first_panel);
    }
  });
  return ffi::Error::Success();
}

// y_MN = before_MN + x_MK . w, where `before` may be y itself.
ffi::Error DotAdd(ffi::Buffer<ffi::BF16> x_MK, ffi::Buffer<ffi::BF16> weight,
                  ffi::Buffer<ffi::F32> before_MN, ffi::ResultBuffer<ffi::F32> y_MN) {
  const auto sizes = weight.dimensions(), y_sizes = y_MN->dimensions();
  if (x_MK.dimensions().size() != 2 || !is_packed(sizes, x_MK.dimensions()[1]) ||
      y_sizes.size() != 2 || y_sizes[0] != x_MK.dimensions()[0] || y_sizes[1] != sizes[0] * kPanel ||
      before_MN.dimensions() != y_sizes) {
    return ffi::Error::InvalidArgument("the sizes of x, a packed weight and the sum do not fit");
  }
  const int64_t M = y_sizes[0], N = y_sizes[1], num_pairs = sizes[1];
  const auto* x = static_cast<const Pair*>(x_MK.untyped_data());
  const auto* panels = static_cast<const Pair*>(weight.untyped_data());
  const float* before = before_MN.typed_data();
  float* y = y_MN->typed_data();
  share_panels(sizes[0], M, [&](int64_t first, int64_t last) {
    for (int64_t index = first; index < last; ++index) {
      const Pair* panel = panels + index * num_pairs * kPanel;
      Ahead ahead(panel + num_pairs * kPanel, M);
      each_block(0, M, [&]<int rows>(int64_t m) {
        alignas(kLineBytes) float sums[rows * kPanel];
        multiply_panel<rows>(x + m * num_pairs, num_pairs, panel, ahead, sums, kPanel);
        for (int64_t i = 0; i < rows * kPanel; i += kLanes) {
          const int64_t at = (m + i / kPanel) * N + index * kPanel + i % kPanel;
          store(y + at, load(before + at) + load(sums + i));
        }
      });
    }
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxserve

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_dot_add, jaxserve::DotAdd,
                              xla::ffi::Ffi::Bind()
                                  .Arg<xla::ffi::Buffer<xla::ffi::BF16>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::BF16>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_dot, jaxserve::Dot,
                              xla::ffi::Ffi::Bind()
                                  .Arg<xla::ffi::Buffer<xla::ffi::BF16>>()
                                  .RemainingArgs()
                                  .RemainingRets());
