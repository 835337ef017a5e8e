// What XLA's programs call: each function checks its shapes and runs a kernel.

#include "step_attention.h"
#include "tiled_products.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

using F32 = ffi::Buffer<ffi::F32>;

ffi::Error TiledProducts(ffi::ThreadPool pool, F32 x, ffi::RemainingArgs matrices,
                         ffi::RemainingRets products) {
  const auto rows = x.dimensions()[0], inputs = x.dimensions()[1];
  std::vector<tiled_products::Matrix> all;
  bool is_bfloat16 = false;
  for (size_t i = 0; i < matrices.size(); ++i) {
    const auto w = matrices.get<ffi::AnyBuffer>(i);
    auto y = products.get<F32>(i);
    if (!w.has_value() || !y.has_value())
      return ffi::Error::InvalidArgument("a matrix without a product");
    const auto shape = w->dimensions();
    is_bfloat16 = w->element_type() == ffi::BF16;
    if (shape.size() != 4 || shape[1] * shape[3] != inputs ||
        shape[2] != tiled_products::kColumns || shape[3] != (is_bfloat16 ? 2 : 1))
      return ffi::Error::InvalidArgument("a matrix in other tiles");
    all.push_back(
        {static_cast<const uint32_t*>(w->untyped_data()), shape[0], (*y)->typed_data()});
  }
  tiled_products::Run(pool, x.typed_data(), rows, inputs, is_bfloat16, all);
  return ffi::Error::Success();
}

ffi::Error StepAttention(ffi::ThreadPool pool, F32 q, F32 k, F32 v, F32 mask, F32 sinks,
                         ffi::Result<F32> y, float scale) {
  const auto of_q = q.dimensions(), of_k = k.dimensions();
  if (of_q[3] % kLanes)
    return ffi::Error::InvalidArgument("heads that are no whole number of vectors");
  step_attention::Problem p{of_q[0],        of_q[1],         of_q[2],
                            of_k[1],        of_k[2],         of_q[3],
                            q.typed_data(), k.typed_data(),  v.typed_data(),
                            mask.typed_data(), sinks.element_count() ? sinks.typed_data() : nullptr,
                            scale,          y->typed_data()};
  step_attention::Run(pool, p);
  return ffi::Error::Success();
}

}  // namespace

// Numbers that a vector holds: heads have a multiple of them.
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
