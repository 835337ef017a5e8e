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

// Why x, a matrix in tiles and its product do not fit each other; null where they do.
const char* Misfit(const F32& x, const ffi::AnyBuffer& w, ffi::Span<const int64_t> tiles,
                   int64_t num_results) {
  const bool is_bfloat16 = w.element_type() == ffi::BF16;
  if (x.dimensions().size() != 2) return "rows must be a matrix";
  if (!is_bfloat16 && w.element_type() != ffi::F32)
    return "matrices must be float32, or all bfloat16";
  if (tiles.size() != 4 || tiles[1] * tiles[3] != x.dimensions()[1] ||
      tiles[2] != tiled_products::kColumns || tiles[3] != (is_bfloat16 ? 2 : 1))
    return "a matrix in other tiles";
  if (num_results != x.dimensions()[0] * tiles[0] * tiles[2]) return "a product of another size";
  return nullptr;
}

ffi::Error TiledProducts(ffi::ThreadPool pool, F32 x, ffi::RemainingArgs matrices,
                         ffi::RemainingRets products) {
  std::vector<tiled_products::Matrix> all;
  ffi::DataType type = ffi::F32;
  for (size_t i = 0; i < matrices.size(); ++i) {
    const auto w = matrices.get<ffi::AnyBuffer>(i);
    auto y = products.get<F32>(i);
    if (!w.has_value() || !y.has_value()) return Refused("a matrix without a product");
    if (i > 0 && w->element_type() != type)
      return Refused("matrices must be float32, or all bfloat16");
    type = w->element_type();
    if (const char* reason = Misfit(x, *w, w->dimensions(), (*y)->element_count()))
      return Refused(reason);
    all.push_back(
        {static_cast<const uint32_t*>(w->untyped_data()), w->dimensions()[0], (*y)->typed_data()});
  }
  tiled_products::Run(pool, x.typed_data(), x.dimensions()[0], x.dimensions()[1],
                      type == ffi::BF16, all);
  return ffi::Error::Success();
}

// The product with one of several matrices, by its number, which is read where it lies.
ffi::Error TiledProductOf(ffi::ThreadPool pool, F32 x, ffi::AnyBuffer matrices,
                          ffi::Buffer<ffi::S32> number, ffi::Result<F32> y) {
  const auto shape = matrices.dimensions();
  if (shape.size() != 5 || shape[0] < 1 || number.element_count() != 1)
    return Refused("matrices and the number of one");
  const ffi::Span<const int64_t> tiles(shape.begin() + 1, 4);
  if (const char* reason = Misfit(x, matrices, tiles, y->element_count())) return Refused(reason);
  const int64_t which = std::clamp<int64_t>(number.typed_data()[0], 0, shape[0] - 1);
  const int64_t words = tiles[0] * tiles[1] * tiles[2];
  const auto* first = static_cast<const uint32_t*>(matrices.untyped_data()) + which * words;
  tiled_products::Run(pool, x.typed_data(), x.dimensions()[0], x.dimensions()[1],
                      matrices.element_type() == ffi::BF16, {{first, tiles[0], y->typed_data()}});
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
  step_attention::Problem p;
  p.batch = Q[0], p.tokens = Q[1], p.heads = Q[2], p.head_dim = Q[3];
  p.kv_heads = K[1], p.slots = K[2];
  p.q = q.typed_data(), p.k = k.typed_data(), p.v = v.typed_data(), p.mask = mask.typed_data();
  p.sinks = num_sinks ? sinks.typed_data() : nullptr;
  p.scale = scale;
  p.y = y->typed_data();
  step_attention::Run(pool, p);
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

XLA_FFI_DEFINE_HANDLER_SYMBOL(peagle_tiled_product_of, TiledProductOf,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<F32>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<F32>());

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
