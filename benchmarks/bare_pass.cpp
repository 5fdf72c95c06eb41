// Passes that read and write the bytes of the product's passes, with the same
// mix of reads and writes, and compute nothing: the floor that the product is
// measured against.
//
// So that every load and store is needed, and can be checked, a pass moves
// what it reads from tensor to tensor. Threads, chunks and streaming stores
// are those of the product. Compiled for the machine at hand by bare_pass.py.

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>

#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace {

// Elements moved at once: a register of singles.
constexpr std::int64_t kBlock = 8;

using Half = std::uint16_t;
using Single = std::uint32_t;
typedef Half Halves __attribute__((vector_size(kBlock * sizeof(Half))));
typedef Single Singles __attribute__((vector_size(kBlock * sizeof(Single))));

template <typename Block>
constexpr std::int64_t kElementSize = sizeof(Block) / kBlock;

// A half becomes the upper part of a single, and back.
inline Singles widen(const Singles& values) {
  return values;
}
inline Singles widen(const Halves& values) {
  return __builtin_convertvector(values, Singles) << 16;
}
inline Halves narrow(const Singles& values) {
  return __builtin_convertvector(values >> 16, Halves);
}

// A run of elements of up to five tensors, in the order of the pass.
struct Span {
  void* tensors[5];
  std::int64_t elements;
  Half sum;
};

// `count` elements of the tensors of a span, beginning with element `begin`.
struct Place {
  void* const* tensors;
  std::int64_t begin;
  std::int64_t count;

  template <typename Block>
  char* address(int tensor) const {
    return static_cast<char*>(tensors[tensor]) + begin * kElementSize<Block>;
  }

  template <typename Block>
  Block load(int tensor) const {
    Block values{};
    std::memcpy(&values, address<Block>(tensor), count * kElementSize<Block>);
    return values;
  }

  template <typename Block>
  void store(int tensor, const Block& values) const {
    std::memcpy(address<Block>(tensor), &values, count * kElementSize<Block>);
  }

  // For a tensor that is only written.
  template <bool kStream, typename Block>
  void write(int tensor, const Block& values) const {
#ifdef __AVX2__
    if constexpr (kStream) {
      char* target = address<Block>(tensor);
      if constexpr (sizeof(Block) == sizeof(__m256i)) {
        const auto bits = std::bit_cast<__m256i>(values);
        _mm256_stream_si256(reinterpret_cast<__m256i*>(target), bits);
      } else {
        const auto bits = std::bit_cast<__m128i>(values);
        _mm_stream_si128(reinterpret_cast<__m128i*>(target), bits);
      }
      return;
    }
#endif
    store(tensor, values);
  }
};

inline void fence() {
#ifdef __AVX2__
  _mm_sfence();
#endif
}

// What a pass does where it has nothing else to say.
struct Mover {
  // Blocks that it takes at once.
  static constexpr std::int64_t kBlocks = 1;
  // The sum of all that it read, if it writes nothing.
  Half total() const { return 0; }
};

// The check of gradients. Sums that do not wait for each other, or they would
// take longer than the loads.
struct Read : Mover {
  static constexpr std::int64_t kBlocks = 4;
  Halves sums[kBlocks]{};
  template <bool kStream>
  void move(const Place& at) {
    for (std::int64_t i = 0; i < kBlocks; ++i) {
      const std::int64_t left = at.count - i * kBlock;
      const Place part{
          at.tensors,
          at.begin + i * kBlock,
          std::clamp(left, std::int64_t{0}, kBlock)};
      sums[i] += part.load<Halves>(0);
    }
  }
  Half total() const {
    Half sum = 0;
    for (const Halves& lanes : sums) {
      for (std::int64_t i = 0; i < kBlock; ++i) {
        sum += lanes[i];
      }
    }
    return sum;
  }
};

// Gradients into fp32.
struct Widen : Mover {
  template <bool kStream>
  void move(const Place& at) {
    at.write<kStream>(1, widen(at.load<Halves>(0)));
  }
};

// Masters to the model.
struct Narrow : Mover {
  template <bool kStream>
  void move(const Place& at) {
    at.write<kStream>(1, narrow(at.load<Singles>(0)));
  }
};

// Scaling in place.
struct Flip : Mover {
  template <bool kStream>
  void move(const Place& at) {
    at.store(0, ~at.load<Singles>(0));
  }
};

// Zeroing in place, of singles as pairs of halves.
struct Zero : Mover {
  template <bool kStream>
  void move(const Place& at) {
    at.write<kStream>(0, Halves{});
  }
};

// An update rule: reads the gradient and `kStates` tensors (the weight and its
// moments), and writes those, and maybe the model. Each gets what the next one
// held, the last the gradient, with a trace of the first.
template <typename Gradient, int kStates, bool kModel>
struct Step : Mover {
  template <bool kStream>
  void move(const Place& at) {
    const Singles first = at.load<Singles>(1);
    for (int state = 1; state < kStates; ++state) {
      at.store(state, at.load<Singles>(state + 1));
    }
    at.store(kStates, widen(at.load<Gradient>(0)) ^ first);
    if constexpr (kModel) {
      at.write<kStream>(kStates + 1, narrow(first));
    }
  }
};

template <bool kStream, typename Pass>
void move_span(Span& span) {
  constexpr std::int64_t size = kBlock * Pass::kBlocks;
  // A copy that no store can alias.
  const Span here = span;
  Pass pass;
  std::int64_t i = 0;
  for (; i + size <= here.elements; i += size) {
    pass.template move<kStream>(Place{here.tensors, i, size});
  }
  if (i < here.elements) {
    pass.template move<false>(Place{here.tensors, i, here.elements - i});
  }
  span.sum = pass.total();
}

// Thread t moves the spans from first[t] up to first[t + 1].
template <typename Pass>
void move_list(
    Span* spans,
    const std::int64_t* first,
    int threads,
    int streaming) {
#pragma omp parallel for num_threads(threads) schedule(static, 1)
  for (int thread = 0; thread < threads; ++thread) {
    for (std::int64_t i = first[thread]; i < first[thread + 1]; ++i) {
      if (streaming != 0) {
        move_span<true, Pass>(spans[i]);
      } else {
        move_span<false, Pass>(spans[i]);
      }
    }
    fence();
  }
}

} // namespace

#define BARE_PASS(name, ...)                                  \
  extern "C" void name(                                       \
      Span* spans,                                            \
      const std::int64_t* first,                              \
      int threads,                                            \
      int streaming) {                                        \
    move_list<__VA_ARGS__>(spans, first, threads, streaming); \
  }

BARE_PASS(read_halves, Read)
BARE_PASS(widen_halves, Widen)
BARE_PASS(narrow_singles, Narrow)
BARE_PASS(flip_singles, Flip)
BARE_PASS(zero_halves, Zero)
BARE_PASS(step_sgd, Step<Singles, 2, false>)
BARE_PASS(fused_sgd, Step<Singles, 2, true>)
BARE_PASS(lean_sgd, Step<Halves, 2, true>)
BARE_PASS(step_adam, Step<Singles, 3, false>)
BARE_PASS(fused_adam, Step<Singles, 3, true>)
BARE_PASS(lean_adam, Step<Halves, 3, true>)
