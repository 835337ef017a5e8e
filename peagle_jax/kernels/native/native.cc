// What XLA's programs call: each function checks its shapes and runs a kernel.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "embedding_rows.h"
#include "head_rotation.h"
#include "packed_attention.h"
#include "row_preparation.h"
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

// The products of rows, made of a source, with matrices in tiles.
ffi::Error Multiply(ffi::ThreadPool& pool, const F32& x, const row_preparation::Source& source,
                    ffi::RemainingArgs& matrices, ffi::RemainingRets& products) {
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
  tiled_products::Run(pool, source, x.dimensions()[0], type == ffi::BF16, all);
  return ffi::Error::Success();
}

// Where rows come from that nothing is done to.
row_preparation::Source AsTheyAre(const F32& x) {
  return {x.typed_data(), x.dimensions().size() == 0 ? 0 : x.dimensions().back()};
}

// Rows are normalized first where there is a gain.
ffi::Error TiledProducts(ffi::ThreadPool pool, F32 x, F32 gain, ffi::RemainingArgs matrices,
                         ffi::RemainingRets products, float eps) {
  row_preparation::Source source = AsTheyAre(x);
  const int64_t size = gain.element_count();
  if (size && size != source.size) return Refused("a gain of another size");
  if (size) source.gain = gain.typed_data();
  source.eps = eps;
  return Multiply(pool, x, source, matrices, products);
}

// Rows are activation(gate) * up.
ffi::Error GatedProducts(ffi::ThreadPool pool, F32 gate, F32 up, ffi::RemainingArgs matrices,
                         ffi::RemainingRets products, int32_t activation) {
  if (!AreSame(gate.dimensions(), up.dimensions())) return Refused("a gate of another size");
  if (activation < 0 || activation > 1) return Refused("an unknown activation");
  row_preparation::Source source = AsTheyAre(gate);
  source.up = up.typed_data();
  source.activation = static_cast<row_preparation::Activation>(activation);
  return Multiply(pool, gate, source, matrices, products);
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
  tiled_products::Run(pool, AsTheyAre(x), x.dimensions()[0], matrices.element_type() == ffi::BF16,
                      {{first, tiles[0], y->typed_data()}});
  return ffi::Error::Success();
}

// Rows of a table [V, K], or in the tiles of its transpose.
ffi::Error EmbeddingRows(ffi::ThreadPool pool, ffi::AnyBuffer table, ffi::Buffer<ffi::S32> tokens,
                         ffi::Result<F32> y) {
  const auto T = table.dimensions(), Y = y->dimensions();
  const bool is_bfloat16 = table.element_type() == ffi::BF16, is_tiled = T.size() == 4;
  const int64_t part = is_bfloat16 ? 2 : 1;
  if (!is_bfloat16 && table.element_type() != ffi::F32)
    return Refused("a table must be float32 or bfloat16");
  if ((T.size() != 2 && !is_tiled) || Y.size() != 2 || Y[1] % part || T[0] < 1 ||
      Y[0] != static_cast<int64_t>(tokens.element_count()) ||
      Y[1] != (is_tiled ? T[1] * part : T[1]) ||
      (is_tiled && (T[2] != tiled_products::kColumns || T[3] != part)))
    return Refused("arrays whose sizes do not fit each other");
  const int64_t vocab = is_tiled ? T[0] * T[2] : T[0];
  embedding_rows::Run(pool, {table.untyped_data(), vocab, Y[1], is_bfloat16, is_tiled},
                      tokens.typed_data(), Y[0], y->typed_data());
  return ffi::Error::Success();
}

// Heads of queries or keys with their norm, where there is a gain, and rotated.
ffi::Error RotateHeads(ffi::ThreadPool pool, F32 x, F32 gain, F32 cos, F32 sin, ffi::Result<F32> y,
                       float eps) {
  const auto X = x.dimensions(), C = cos.dimensions();
  const int64_t size = gain.element_count();
  if (X.size() != 3 || C.size() != 2 || !AreSame(C, sin.dimensions()) || X[0] != C[0] ||
      X[2] != 2 * C[1] || (size && size != X[2]) || !AreSame(X, y->dimensions()))
    return Refused("arrays whose sizes do not fit each other");
  if (C[1] % kLanes) return Refused("halves of heads that are no whole number of vectors");
  head_rotation::Run(pool, {x.typed_data(), size ? gain.typed_data() : nullptr, cos.typed_data(),
                            sin.typed_data(), X[0], X[1], X[2], eps, y->typed_data()});
  return ffi::Error::Success();
}

// New keys and values, and the slot of the first of each sequence.
struct New {
  const float *k, *v;
  const int32_t* first;
  int64_t count;
};

// Attention over caches of `Number`s that are read, and to which new keys and values, if there are
// any, are written first.
template <typename Number>
void Attend(ffi::ThreadPool& pool, const F32& q, const ffi::AnyBuffer& k, const ffi::AnyBuffer& v,
            const F32& mask, const F32& sinks, float* y, float scale, const New& written) {
  const auto Q = q.dimensions(), K = k.dimensions();
  step_attention::Problem<Number> p = {};
  p.batch = Q[0], p.tokens = Q[1], p.heads = Q[2], p.head_dim = Q[3];
  p.kv_heads = K[1], p.slots = K[2];
  p.q = q.typed_data(), p.mask = mask.typed_data();
  p.k = static_cast<Number*>(k.untyped_data()), p.v = static_cast<Number*>(v.untyped_data());
  p.new_k = written.k, p.new_v = written.v, p.first = written.first, p.num_new = written.count;
  p.sinks = sinks.element_count() ? sinks.typed_data() : nullptr;
  p.scale = scale;
  p.y = y;
  step_attention::Run(pool, p);
}

// As `Attend`, over caches of the numbers that they have.
ffi::Error AttendAny(ffi::ThreadPool& pool, const F32& q, const ffi::AnyBuffer& k,
                     const ffi::AnyBuffer& v, const F32& mask, const F32& sinks,
                     ffi::Result<F32>& y, float scale, const New& written = {}) {
  const auto Q = q.dimensions(), K = k.dimensions(), M = mask.dimensions();
  const int64_t num_sinks = sinks.element_count();
  if (Q.size() != 4 || K.size() != 4 || M.size() != 3 || !AreSame(K, v.dimensions()) ||
      !AreSame(Q, y->dimensions()) || Q[0] != K[0] || Q[3] != K[3] || Q[2] % K[1] ||
      M[0] != Q[0] || M[1] != Q[1] || M[2] != K[2] || (num_sinks && num_sinks != Q[2]))
    return Refused("arrays whose sizes do not fit each other");
  if (Q[3] % kLanes) return Refused("heads that are no whole number of vectors");
  const bool is_bfloat16 = k.element_type() == ffi::U16;
  if (k.element_type() != v.element_type() || (!is_bfloat16 && k.element_type() != ffi::F32))
    return Refused("caches must be float32, or both the bits of bfloat16");
  const auto attend = is_bfloat16 ? Attend<uint16_t> : Attend<float>;
  attend(pool, q, k, v, mask, sinks, y->typed_data(), scale, written);
  return ffi::Error::Success();
}

ffi::Error StepAttention(ffi::ThreadPool pool, F32 q, ffi::AnyBuffer k, ffi::AnyBuffer v, F32 mask,
                         F32 sinks, ffi::Result<F32> y, float scale) {
  return AttendAny(pool, q, k, v, mask, sinks, y, scale);
}

// The caches are operands and results in one.
ffi::Error WriteAndAttend(ffi::ThreadPool pool, F32 q, ffi::AnyBuffer k, ffi::AnyBuffer v, F32 mask,
                          F32 sinks, F32 new_k, F32 new_v, ffi::Buffer<ffi::S32> first,
                          ffi::Result<F32> y, ffi::Result<ffi::AnyBuffer> k_result,
                          ffi::Result<ffi::AnyBuffer> v_result, float scale) {
  const auto K = k.dimensions(), N = new_k.dimensions();
  if (K.size() != 4 || N.size() != 4 || !AreSame(N, new_v.dimensions()) || N[0] != K[0] ||
      N[1] > K[2] || N[2] != K[1] || N[3] != K[3] ||
      static_cast<int64_t>(first.element_count()) != N[0])
    return Refused("arrays whose sizes do not fit each other");
  if (k.untyped_data() != k_result->untyped_data() || v.untyped_data() != v_result->untyped_data())
    return Refused("caches that are not written in place");
  return AttendAny(pool, q, k, v, mask, sinks, y, scale,
                   {new_k.typed_data(), new_v.typed_data(), first.typed_data(), N[1]});
}

using S32 = ffi::Buffer<ffi::S32>;

// The attention of training; why its operands do not fit each other, or null where they do.
const char* FillProblem(const F32& q, const F32& k, const F32& v, const S32& first, const S32& last,
                        const S32& chain_len, const S32& ahead, float scale, int64_t depth0,
                        packed_attention::Problem& p) {
  const auto Q = q.dimensions(), K = k.dimensions();
  const char* misfit = "arrays whose sizes do not fit each other";
  if (Q.size() != 4 || K.size() != 4 || !AreSame(K, v.dimensions()) || Q[0] != K[0] ||
      Q[1] > K[1] || Q[3] != K[3] || depth0 < 0 || depth0 > K[1] || q.element_count() == 0 ||
      k.element_count() == 0 || Q[2] % K[2])
    return misfit;
  if (Q[3] % kLanes) return "heads that are no whole number of vectors";
  const auto fits = [&](const S32& x) {
    return x.dimensions().size() == 2 && x.dimensions()[0] == K[0] && x.dimensions()[1] == K[1];
  };
  const bool has_ahead = ahead.element_count() > 0;
  if (!fits(first) || !fits(last) || !fits(chain_len) || (has_ahead && !fits(ahead))) return misfit;
  p.batch = K[0], p.rows = K[1], p.queries = Q[1], p.heads = Q[2], p.kv_heads = K[2];
  p.depth0 = depth0, p.head_dim = K[3], p.scale = scale;
  p.q = q.typed_data(), p.k = k.typed_data(), p.v = v.typed_data();
  p.first = first.typed_data(), p.last = last.typed_data(), p.chain_len = chain_len.typed_data();
  p.ahead = has_ahead ? ahead.typed_data() : nullptr;
  return nullptr;
}

ffi::Error PackedAttention(ffi::ThreadPool pool, F32 q, F32 k, F32 v, S32 first, S32 last,
                           S32 chain_len, S32 ahead, ffi::Result<F32> y, ffi::Result<F32> lse,
                           float scale, int64_t depth0) {
  packed_attention::Problem p = {};
  if (const char* why = FillProblem(q, k, v, first, last, chain_len, ahead, scale, depth0, p))
    return Refused(why);
  if (y->element_count() != q.element_count() ||
      lse->element_count() * p.head_dim != q.element_count())
    return Refused("results of another size");
  packed_attention::Run(pool, p, y->typed_data(), lse->typed_data());
  return ffi::Error::Success();
}

ffi::Error PackedAttentionGradient(ffi::ThreadPool pool, F32 q, F32 k, F32 v, S32 first, S32 last,
                                   S32 chain_len, S32 ahead, F32 y, F32 lse, F32 dy, F32 dlse,
                                   ffi::Result<F32> dq, ffi::Result<F32> dk, ffi::Result<F32> dv,
                                   float scale, int64_t depth0) {
  packed_attention::Problem p = {};
  if (const char* why = FillProblem(q, k, v, first, last, chain_len, ahead, scale, depth0, p))
    return Refused(why);
  const size_t queries = q.element_count(), keys = k.element_count();
  if (y.element_count() != queries || dy.element_count() != queries ||
      dq->element_count() != queries || lse.element_count() * p.head_dim != queries ||
      dlse.element_count() * p.head_dim != queries || dk->element_count() != keys ||
      dv->element_count() != keys)
    return Refused("gradients of another size");
  const packed_attention::Gradient gradient = {y.typed_data(),   lse.typed_data(),
                                               dy.typed_data(),  dlse.typed_data(),
                                               dq->typed_data(), dk->typed_data(),
                                               dv->typed_data()};
  if (!packed_attention::RunGradient(pool, p, gradient))
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, "no memory for sums of gradients");
  return ffi::Error::Success();
}

}  // namespace

// The lanes of a vector: heads must have a multiple of them.
extern "C" int peagle_lanes() { return kLanes; }

XLA_FFI_DEFINE_HANDLER_SYMBOL(peagle_tiled_products, TiledProducts,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<F32>()
                                  .Arg<F32>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<float>("eps"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(peagle_gated_products, GatedProducts,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<F32>()
                                  .Arg<F32>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<int32_t>("activation"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(peagle_tiled_product_of, TiledProductOf,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<F32>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<F32>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(peagle_embedding_rows, EmbeddingRows,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<F32>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(peagle_rotate_heads, RotateHeads,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<F32>()
                                  .Arg<F32>()
                                  .Arg<F32>()
                                  .Arg<F32>()
                                  .Ret<F32>()
                                  .Attr<float>("eps"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(peagle_step_attention, StepAttention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<F32>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<F32>()
                                  .Arg<F32>()
                                  .Ret<F32>()
                                  .Attr<float>("scale"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(peagle_write_and_attend, WriteAndAttend,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<F32>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<F32>()
                                  .Arg<F32>()
                                  .Arg<F32>()
                                  .Arg<F32>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<F32>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<float>("scale"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(peagle_packed_attention, PackedAttention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<F32>()
                                  .Arg<F32>()
                                  .Arg<F32>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<F32>()
                                  .Ret<F32>()
                                  .Attr<float>("scale")
                                  .Attr<int64_t>("depth0"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(peagle_packed_attention_gradient, PackedAttentionGradient,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<F32>()
                                  .Arg<F32>()
                                  .Arg<F32>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<F32>()
                                  .Arg<F32>()
                                  .Arg<F32>()
                                  .Arg<F32>()
                                  .Ret<F32>()
                                  .Ret<F32>()
                                  .Ret<F32>()
                                  .Attr<float>("scale")
                                  .Attr<int64_t>("depth0"));
