// Stores that bypass the cache, for memory that is not read again soon.
//
// ATen's vectors have none. A destination above the size of the caches is
// otherwise read before it is written, a third more traffic for a pass that
// reads two bytes and writes four.

#pragma once

#include <ATen/cpu/vec/vec.h>

namespace fp16core::detail::cpu {
namespace CPU_CAPABILITY {

template <typename T>
inline void stream(T* target, const at::vec::Vectorized<T>& values) {
#if defined(CPU_CAPABILITY_AVX512)
  if constexpr (std::is_same_v<T, float>) {
    _mm512_stream_ps(target, values);
  } else {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(target), values);
  }
#elif defined(CPU_CAPABILITY_AVX2)
  if constexpr (std::is_same_v<T, float>) {
    _mm256_stream_ps(target, values);
  } else {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(target), values);
  }
#else
  values.store(target);
#endif
}

/// Makes streamed stores visible to other threads.
inline void stream_fence() {
#if defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_AVX2)
  _mm_sfence();
#endif
}

} // namespace CPU_CAPABILITY
} // namespace fp16core::detail::cpu
