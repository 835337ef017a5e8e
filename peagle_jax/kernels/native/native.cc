// What XLA's programs call: each function checks its shapes and runs a kernel.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "step_attention.h"
#include "tiled_products.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

using F32 = ffi::Buffer<ffi::F32>;

ffi::Error Refused(const char* reason) { return ffi::Error::InvalidArgument(reason); }

bool AreSame(F32::Dimensions a, F32::Dimensions b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end());
}

ffi::Error TiledProducts(ffi::ThreadPool pool, F32 x, ffi::RemainingArgs matrices,
                         ffi::RemainingRets products) {
  if (x.dimensions().size() != 2) return Refused("rows must be a matrix");
  const int64_t rows = x.dimensions()[0], inputs = x.dimensions()[1];
  std::vector<tiled_products::Matrix> all;
  ffi::DataType type = ffi::F32;
  for (size_t i = 0; i < matrices.size(); ++i) {
    const auto w = matrices.get<ffi::AnyBuffer>(i);
    auto y = products.get<F32>(i);
    if (!w.has_value() || !y.has_value()) return Refused("a matrix without a product");
    if (i == 0) type = w->element_type();
    if (w->element_type() != type || (type != ffi::F32 && type != ffi::BF16))
      return Refused("matrices must be float32, or all bfloat16");
    const auto shape = w->dimensions();
    if (shape.size() != 4 || shape[1] * shape[3] != inputs ||
        shape[2] != tiled_products::kColumns || shape[3] != (type == ffi::BF16 ? 2 : 1))
      return Refused("a matrix in other tiles");
    if (static_cast<int64_t>((*y)->element_count()) != rows * shape[0] * shape[2])
      return Refused("a product of another size");
    all.push_back(
        {static_cast<const uint32_t*>(w->untyped_data()), shape[0], (*y)->typed_data()});
  }
  tiled_products::Run(pool, x.typed_data(), rows, inputs, type == ffi::BF16, all);
  return ffi::Error::Success();
}

ffi::Error StepAttention(ffi::ThreadPool pool, F32 q, F32 k, F32 v, F32 mask, F32 sinks,
                         ffi::Result<F32> y, float scale) {
  const auto Q = q.dimensions(), K = k.dimensions(), M = mask.dimensions();
  const int64_t num_sinks = sinks.element_count();
  if (Q.size() != 4 || K.size() != 4 || M.size() != 3 || !AreSame(K, v.dimensions()) ||
      !AreSame(Q, y->dimensions()) || Q[0] != K[0] || Q[3] != K[3] || Q[2] % K[1] ||
      M[0] != Q[0] || M[1] != Q[1] || M[2] != K[2] || (num_sinks && num_sinks != Q[2]))
    return Refused("arrays whose sizes do not fit each other");
  if (Q[3] % kLanes) return Refused("heads that are no whole number of vectors");
  const float* of_sinks = num_sinks ? sinks.typed_data() : nullptr;
  step_attention::Run(pool, {Q[0], Q[1], Q[2], K[1], K[2], Q[3], q.typed_data(), k.typed_data(),
                             v.typed_data(), mask.typed_data(), of_sinks, scale,
                             y->typed_data()});
  return ffi::Error::Success();
}

}  // namespace

// The lanes of a vector: heads must have a multiple of them.
extern "C" int peagle_lanes() { return kLanes; }

XLA_FFI_DEFINE_HANDLER_SYMBOL(peagle_tiled_products, TiledProducts,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<F32>()
                                  .RemainingArgs()
                                  .RemainingRets());

XLA_FFI_DEFINE_HANDLER_SYMBOL(peagle_step_attention, StepAttention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<F32>()
                                  .Arg<F32>()
                                  .Arg<F32>()
                                  .Arg<F32>()
                                  .Arg<F32>()
                                  .Ret<F32>()
                                  .Attr<float>("scale"));
