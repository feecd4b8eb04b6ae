// y_TD = x_TD / sqrt(mean(x_TD²) + eps) * weight_D, rounded to bfloat16 once (Zhang & Sennrich 2019,
// eq. 4). A row's sum does not depend on the rows beside it.

#include <cmath>

#include "lanes.h"
#include "parallel.h"
#include "xla/ffi/api/ffi.h"

namespace jaxserve {
namespace {

namespace ffi = xla::ffi;

// Some numbers from an offset on: sixteen, or what is left of a row, with zeros behind.
Lanes load_some(const float* from, int64_t num_left) {
  if (num_left >= kLanes) return load(from);
  Lanes lanes{};
  std::memcpy(&lanes, from, num_left * sizeof(float));
  return lanes;
}

void store_some(BFloat16* to, Lanes lanes, int64_t num_left) {
  if (num_left >= kLanes) return store(to, lanes);
  BFloat16 numbers[kLanes];
  store(numbers, lanes);
  std::memcpy(to, numbers, num_left * sizeof(BFloat16));
}

void norm_row(const float* x, const float* weight, int64_t D, float eps, BFloat16* y) {
  Lanes sums{};
  for (int64_t d = 0; d < D; d += kLanes) {
    const Lanes numbers = load_some(x + d, D - d);
    sums += numbers * numbers;
  }
  const float factor = 1 / std::sqrt(sum_of(sums) / float(D) + eps);
  for (int64_t d = 0; d < D; d += kLanes) {
    store_some(y + d, load_some(x + d, D - d) * factor * load_some(weight + d, D - d), D - d);
  }
}

ffi::Error Norm(ffi::Buffer<ffi::F32> x_TD, ffi::Buffer<ffi::F32> weight_D, float eps,
                ffi::ResultBuffer<ffi::BF16> y_TD) {
  const auto sizes = x_TD.dimensions();
  if (sizes.size() != 2 || y_TD->dimensions() != sizes || weight_D.dimensions().size() != 1 ||
      weight_D.dimensions()[0] != sizes[1]) {
    return ffi::Error::InvalidArgument("the sizes of x, its weight and the result do not fit");
  }
  const int64_t T = sizes[0], D = sizes[1];
  const float *x = x_TD.typed_data(), *weight = weight_D.typed_data();
  auto* y = static_cast<BFloat16*>(y_TD->untyped_data());
  share_rows(T, D, [&](int64_t t) { norm_row(x + t * D, weight, D, eps, y + t * D); });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxserve

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_norm, jaxserve::Norm,
                              xla::ffi::Ffi::Bind()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Attr<float>("eps")
                                  .Ret<xla::ffi::Buffer<xla::ffi::BF16>>());
