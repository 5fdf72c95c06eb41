// Loops over one dense run of elements, compiled once for every instruction
// set that a machine may have.

#pragma once

#include "../../kernels.h"

#include <cstdint>

namespace fp16core::detail::cpu {

/// The loops of one instruction set. They give the same bits in all of them.
struct BlockKernels {
  /// Takes `n` elements of one gradient; adds what it finds to `stats`.
  /// `stream` asks for stores that bypass the cache; it needs a destination
  /// that is aligned to kStreamAlignment.
  void (*take_gradient)(
      const GradientItem& item,
      std::int64_t begin,
      std::int64_t n,
      const Factor& factor,
      bool stream,
      GradientStats& stats);
  void (*scale_)(
      const ScaleItem& item,
      std::int64_t begin,
      std::int64_t n,
      const Factor& factor);
  /// Clears `n` bytes. `stream` as above.
  void (*zero_)(void* values, std::int64_t n, bool stream);
  /// Returns whether a finite master was stored as inf.
  bool (*write_model)(
      const MasterItem& item,
      std::int64_t begin,
      std::int64_t n,
      bool stream);
  void (
      *adopt_model)(const MasterItem& item, std::int64_t begin, std::int64_t n);
};

constexpr std::uintptr_t kStreamAlignment = 64;

namespace DEFAULT {
extern const BlockKernels kBlocks;
}
namespace AVX2 {
extern const BlockKernels kBlocks;
}
namespace AVX512 {
extern const BlockKernels kBlocks;
}

} // namespace fp16core::detail::cpu
