// Passes that move the bytes of the product's passes and compute nothing: the
// floor that the product is measured against.
//
// Threads, chunks and streaming stores are those of the product. Compiled for
// the machine at hand by bare_pass.py.

#include <bit>
#include <cstdint>
#include <cstring>

#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace {

// Elements moved at once: a register of the wide kind.
constexpr std::int64_t kBlock = 8;

using Half = std::uint16_t;
using Single = std::uint32_t;
typedef Half Halves __attribute__((vector_size(kBlock * sizeof(Half))));
typedef Single Singles __attribute__((vector_size(kBlock * sizeof(Single))));

// A half becomes the upper part of a single, and back.
inline Singles convert(const Halves& values) {
  return __builtin_convertvector(values, Singles) << 16;
}
inline Halves convert(const Singles& values) {
  return __builtin_convertvector(values >> 16, Halves);
}

inline void stream(void* target, const Singles& values) {
#ifdef __AVX2__
  _mm256_stream_si256(
      static_cast<__m256i*>(target),
      std::bit_cast<__m256i>(values));
#else
  std::memcpy(target, &values, sizeof(values));
#endif
}
inline void stream(void* target, const Halves& values) {
#ifdef __AVX2__
  _mm_stream_si128(
      static_cast<__m128i*>(target),
      std::bit_cast<__m128i>(values));
#else
  std::memcpy(target, &values, sizeof(values));
#endif
}

inline void fence() {
#ifdef __AVX2__
  _mm_sfence();
#endif
}

struct Span {
  const void* source;
  void* target;
  std::int64_t elements;
};

template <bool kStream, typename From>
void move_span(const Span& span) {
  using To = decltype(convert(From{}));
  const auto* source = static_cast<const char*>(span.source);
  auto* target = static_cast<char*>(span.target);
  std::int64_t left = span.elements;
  for (; left >= kBlock; left -= kBlock) {
    From from;
    std::memcpy(&from, source, sizeof(from));
    const To to = convert(from);
    if constexpr (kStream) {
      stream(target, to);
    } else {
      std::memcpy(target, &to, sizeof(to));
    }
    source += sizeof(from);
    target += sizeof(to);
  }
  From from{};
  std::memcpy(&from, source, sizeof(from) / kBlock * left);
  const To to = convert(from);
  std::memcpy(target, &to, sizeof(to) / kBlock * left);
}

// Thread t moves the spans from first[t] up to first[t + 1].
template <typename From>
void move_list(
    const Span* spans,
    const std::int64_t* first,
    int threads,
    int streaming) {
#pragma omp parallel for num_threads(threads) schedule(static, 1)
  for (int thread = 0; thread < threads; ++thread) {
    for (std::int64_t i = first[thread]; i < first[thread + 1]; ++i) {
      if (streaming != 0) {
        move_span<true, From>(spans[i]);
      } else {
        move_span<false, From>(spans[i]);
      }
    }
    fence();
  }
}

} // namespace

extern "C" void widen(
    const Span* spans,
    const std::int64_t* first,
    int threads,
    int streaming) {
  move_list<Halves>(spans, first, threads, streaming);
}

extern "C" void narrow(
    const Span* spans,
    const std::int64_t* first,
    int threads,
    int streaming) {
  move_list<Singles>(spans, first, threads, streaming);
}
