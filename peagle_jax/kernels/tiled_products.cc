// Products of rows with matrices in tiles of 32 columns, for decoding on a CPU.
//
//     y[r, n] = sum over k of x[r, k] * w[k, n]
//
// x is float32 [R, K]. A matrix is bfloat16 [N/32, K/2, 32, 2] or float32 [N/32, K, 32, 1], so that
// it is read from its first byte to its last, in the order in which registers want it, and nothing
// has to be packed. With bfloat16 the rows are rounded to bfloat16, and sums are float32. A number
// of y depends on its row of x and its column of w alone: not on the other rows, nor on how many
// there are, nor on the threads, because the sum over k always has the same order.
//
// One call multiplies several matrices by the same rows. Its columns are divided among the threads
// of XLA's pool that have nothing else to do: each takes the next few tiles until none is left, the
// calling thread, too, which therefore waits for no thread that has not begun.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

constexpr int kColumns = 32;  // of a tile; `COLUMNS` of tiled_products.py

// A pass reads two vectors of a tile and multiplies each by up to kMostRows rows. Sums of as many
// rows fill the registers, of which AVX-512 has 32, and others 16 or so.
#if defined(__AVX512F__)
constexpr int kLanes = 16, kMostRows = 12;
#else
constexpr int kLanes = 8, kMostRows = 6;
#endif
constexpr int kPass = 2 * kLanes;

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));

// Few bytes are multiplied sooner than another thread wakes up.
constexpr int64_t kLeastBytes = 96 << 10;
constexpr int kTurnsPerThread = 4;

template <typename T>
T Load(const void* from) {
  T value;
  std::memcpy(&value, from, sizeof(T));
  return value;
}

// A row's number, or its two neighbours in bfloat16, beside as many of each of kLanes columns.
struct OfFloats {
  using Number = float;
  static constexpr int kPart = 1;
  static Floats Add(Floats sum, float x, Words w) { return sum + x * (Floats)w; }
};

struct OfBfloat16Pairs {
  using Number = uint32_t;
  static constexpr int kPart = 2;
#if defined(__AVX512BF16__)
  static Floats Add(Floats sum, uint32_t x, Words w) {
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32((int)x), (__m512bh)w);
  }
#else
  static Floats Add(Floats sum, uint32_t x, Words w) {
    const uint32_t low = x << 16, high = x & 0xffff0000u;
    sum += Load<float>(&low) * (Floats)(w << 16);
    return sum + Load<float>(&high) * (Floats)(w & 0xffff0000u);
  }
#endif
};

// Rows as the products read them: one after the other, `stride` numbers apart.
template <typename Kind>
struct Rows {
  const typename Kind::Number* first;
  int64_t stride;
};

// kRows rows by kTiles tiles, `parts` numbers (or pairs) deep; y has `width` columns.
template <typename Kind, int kRows, int kTiles>
void MultiplyTiles(Rows<Kind> x, const uint32_t* tiles, int64_t parts, float* y, int64_t width) {
  for (int pass = 0; pass < kColumns; pass += kPass) {
    Floats sums[kRows][kTiles][2] = {};
    for (int64_t k = 0; k < parts; ++k) {
      Words w[kTiles][2];
      for (int t = 0; t < kTiles; ++t) {
        const uint32_t* from = tiles + (t * parts + k) * kColumns + pass;
        w[t][0] = Load<Words>(from);
        w[t][1] = Load<Words>(from + kLanes);
      }
      for (int r = 0; r < kRows; ++r) {
        const auto number = x.first[r * x.stride + k];
        for (int t = 0; t < kTiles; ++t) {
          sums[r][t][0] = Kind::Add(sums[r][t][0], number, w[t][0]);
          sums[r][t][1] = Kind::Add(sums[r][t][1], number, w[t][1]);
        }
      }
    }
    for (int r = 0; r < kRows; ++r)
      for (int t = 0; t < kTiles; ++t)
        std::memcpy(y + r * width + t * kColumns + pass, sums[r][t], sizeof(sums[r][t]));
  }
}

// Few rows take several tiles at once: a sum waits for the one before it, and others fill the time.
template <typename Kind, int kRows>
void MultiplyRows(Rows<Kind> x, const uint32_t* tiles, int64_t count, int64_t parts, float* y,
                  int64_t width) {
  constexpr int kTiles = std::max(1, kMostRows / 3 / kRows);
  int64_t t = 0;
  for (; t + kTiles <= count; t += kTiles)
    MultiplyTiles<Kind, kRows, kTiles>(x, tiles + t * parts * kColumns, parts, y + t * kColumns,
                                       width);
  for (; t < count; ++t)
    MultiplyTiles<Kind, kRows, 1>(x, tiles + t * parts * kColumns, parts, y + t * kColumns, width);
}

// `rows` of at most kRows rows, by the function for that number.
template <typename Kind, int kRows>
void MultiplyBlock(int rows, Rows<Kind> x, const uint32_t* tiles, int64_t count, int64_t parts,
                   float* y, int64_t width) {
  if (rows == kRows) return MultiplyRows<Kind, kRows>(x, tiles, count, parts, y, width);
  if constexpr (kRows > 1)
    MultiplyBlock<Kind, kRows - 1>(rows, x, tiles, count, parts, y, width);
}

struct Matrix {
  const uint32_t* tiles;
  int64_t count;  // tiles
  float* y;
};

template <typename Kind>
struct Work {
  Rows<Kind> x;
  int64_t rows, parts;
  std::vector<Matrix> matrices;
  int64_t num_tiles = 0, turn_tiles = 0, num_turns = 0;
  std::atomic<int64_t> next{0}, done{0};

  // Tiles `begin` to `end`, counted through all matrices.
  void Multiply(int64_t begin, int64_t end) const {
    for (const Matrix& matrix : matrices) {
      const int64_t from = std::max<int64_t>(begin, 0), to = std::min(end, matrix.count);
      // a group of tiles stays in the fastest cache while all rows pass
      constexpr int64_t kGroup = std::max(1, kMostRows / 3);
      for (int64_t t = from; t < to; t += kGroup) {
        const int64_t blocks = (rows + kMostRows - 1) / kMostRows;
        for (int64_t b = 0; b < blocks; ++b) {  // of equal sizes, or nearly
          const int64_t first = rows * b / blocks, last = rows * (b + 1) / blocks;
          MultiplyBlock<Kind, kMostRows>(
              last - first, {x.first + first * x.stride, x.stride},
              matrix.tiles + t * parts * kColumns, std::min(kGroup, to - t), parts,
              matrix.y + first * matrix.count * kColumns + t * kColumns, matrix.count * kColumns);
        }
      }
      begin -= matrix.count;
      end -= matrix.count;
    }
  }

  // Takes turns until none is left.
  void TakeTurns() {
    for (int64_t turn; (turn = next.fetch_add(1)) < num_turns;) {
      Multiply(turn * turn_tiles, std::min((turn + 1) * turn_tiles, num_tiles));
      done.fetch_add(1, std::memory_order_release);
    }
  }
};

void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

template <typename Kind>
void Run(ffi::ThreadPool& pool, std::shared_ptr<Work<Kind>> work) {
  int64_t threads = pool.num_threads();
  for (const Matrix& matrix : work->matrices) work->num_tiles += matrix.count;
  if (work->num_tiles * work->parts * kColumns * 4 < kLeastBytes) threads = 1;
  const int64_t turns = threads > 1 ? threads * kTurnsPerThread : 1;
  work->turn_tiles = std::max<int64_t>(1, (work->num_tiles + turns - 1) / turns);
  work->num_turns = (work->num_tiles + work->turn_tiles - 1) / work->turn_tiles;
  for (int64_t i = 1; i < std::min(threads, work->num_turns); ++i)
    pool.Schedule([work] { work->TakeTurns(); });
  work->TakeTurns();
  while (work->done.load(std::memory_order_acquire) < work->num_turns) Pause();
}

// A float32 number rounded to bfloat16, to the nearest, ties to even.
uint16_t Rounded(float x) {
  const uint32_t bits = Load<uint32_t>(&x);
  const uint16_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  return x == x ? rounded : 0x7fc0;
}

ffi::Error Multiply(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x,
                    ffi::RemainingArgs matrices, ffi::RemainingRets products) {
  const int64_t rows = x.dimensions()[0], inputs = x.dimensions()[1];
  std::vector<Matrix> all;
  bool is_bfloat16 = false;
  for (size_t i = 0; i < matrices.size(); ++i) {
    auto w = matrices.get<ffi::AnyBuffer>(i);
    auto y = products.get<ffi::Buffer<ffi::F32>>(i);
    if (!w.has_value() || !y.has_value())
      return ffi::Error::InvalidArgument("a matrix without a product");
    is_bfloat16 = w->element_type() == ffi::BF16;
    const auto shape = w->dimensions();
    if (shape.size() != 4 || shape[1] * shape[3] != inputs || shape[2] != kColumns)
      return ffi::Error::InvalidArgument("a matrix in other tiles");
    all.push_back({static_cast<const uint32_t*>(w->untyped_data()), shape[0],
                   (*y)->typed_data()});
  }
  // Rows that lie a multiple of 4,096 bytes apart would drive each other out of the fastest cache.
  static thread_local std::vector<uint32_t> scratch;
  const int64_t parts = is_bfloat16 ? inputs / 2 : inputs, stride = parts + 16;
  if (scratch.size() < static_cast<size_t>(rows * stride)) scratch.resize(rows * stride);
  for (int64_t r = 0; r < rows; ++r) {
    const float* from = x.typed_data() + r * inputs;
    uint32_t* to = scratch.data() + r * stride;
    if (is_bfloat16) {
      for (int64_t k = 0; k < parts; ++k)
        to[k] = Rounded(from[2 * k]) | uint32_t{Rounded(from[2 * k + 1])} << 16;
    } else {
      std::memcpy(to, from, inputs * sizeof(float));
    }
  }
  if (is_bfloat16) {
    auto work = std::make_shared<Work<OfBfloat16Pairs>>();
    work->x = {scratch.data(), stride};
    work->rows = rows, work->parts = parts, work->matrices = std::move(all);
    Run(pool, std::move(work));
  } else {
    auto work = std::make_shared<Work<OfFloats>>();
    work->x = {reinterpret_cast<const float*>(scratch.data()), stride};
    work->rows = rows, work->parts = parts, work->matrices = std::move(all);
    Run(pool, std::move(work));
  }
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(PeagleTiledProducts, Multiply,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .RemainingArgs()
                                  .RemainingRets());
