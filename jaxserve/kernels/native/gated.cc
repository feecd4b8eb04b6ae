// y_MN = silu(x_MK . gate) * (x_MK . up), rounded to bfloat16 once: what stands between a gated MLP's
// products never goes through memory.

#include "panels.h"
#include "xla/ffi/api/ffi.h"

namespace jaxserve {
namespace {

namespace ffi = xla::ffi;

// x / (1 + e^-x), by an exponential that cannot overflow.
Lanes silu(Lanes x) {
  const Lanes power = exp_of_negative(select(x < 0, x, -x));
  return x * select(x < 0, power, fill(1)) / (1 + power);
}

// x_MK, then two weights [N / 32, K / 2, 32, 2].
ffi::Error Gated(ffi::Buffer<ffi::BF16> x_MK, ffi::Buffer<ffi::BF16> gate, ffi::Buffer<ffi::BF16> up,
                 ffi::ResultBuffer<ffi::BF16> y_MN) {
  const auto sizes = gate.dimensions(), y_sizes = y_MN->dimensions();
  if (x_MK.dimensions().size() != 2 || !is_packed(sizes, x_MK.dimensions()[1]) ||
      up.dimensions() != sizes || y_sizes.size() != 2 || y_sizes[0] != x_MK.dimensions()[0] ||
      y_sizes[1] != sizes[0] * kPanel) {
    return ffi::Error::InvalidArgument("the sizes of x, two packed weights and the result do not fit");
  }
  const int64_t M = y_sizes[0], N = y_sizes[1], num_pairs = sizes[1];
  const auto* x = static_cast<const Pair*>(x_MK.untyped_data());
  const auto* gates = static_cast<const Pair*>(gate.untyped_data());
  const auto* ups = static_cast<const Pair*>(up.untyped_data());
  auto* y = static_cast<BFloat16*>(y_MN->untyped_data());
  share_panels(sizes[0], M, [&](int64_t first, int64_t last) {
    for (int64_t index = first; index < last; ++index) {
      const int64_t offset = index * num_pairs * kPanel;
      Ahead to_up(ups + offset, M), to_next(gates + offset + num_pairs * kPanel, M);
      each_block(0, M, [&]<int rows>(int64_t m) {
        const Pair* x_m = x + m * num_pairs;
        alignas(kLineBytes) float gate_sums[rows * kPanel], up_sums[rows * kPanel];
        multiply_panel<rows>(x_m, num_pairs, gates + offset, to_up, gate_sums, kPanel);
        multiply_panel<rows>(x_m, num_pairs, ups + offset, to_next, up_sums, kPanel);
        for (int64_t i = 0; i < rows * kPanel; i += kLanes) {
          store(y + (m + i / kPanel) * N + index * kPanel + i % kPanel,
                silu(load(gate_sums + i)) * load(up_sums + i));
        }
      });
    }
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxserve

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_gated, jaxserve::Gated,
                              xla::ffi::Ffi::Bind()
                                  .Arg<xla::ffi::Buffer<xla::ffi::BF16>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::BF16>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::BF16>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::BF16>>());
