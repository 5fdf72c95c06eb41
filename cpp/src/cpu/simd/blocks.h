// Loops over one dense run of elements, compiled once for every instruction
// set that a machine may have.

#pragma once

#include "../../kernel_items.h"

#include <c10/util/ArrayRef.h>

#include <cstdint>

namespace fp16core::detail::cpu {

/// Runs an update rule on `n` elements of one item. `stream` as below. Returns
/// whether a finite master was stored as inf.
using UpdateKernel = bool (*)(
    const UpdateItem& item,
    std::int64_t begin,
    std::int64_t n,
    c10::ArrayRef<Factor> factors,
    bool stream);

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
  /// Returns the loop of a rule, by UpdateRule::index.
  UpdateKernel (*update_kernel)(std::size_t rule);
};

constexpr std::uintptr_t kStreamAlignment = 64;

namespace DEFAULT {
extern const BlockKernels kBlocks;
UpdateKernel update_kernel(std::size_t rule);
} // namespace DEFAULT
namespace AVX2 {
extern const BlockKernels kBlocks;
UpdateKernel update_kernel(std::size_t rule);
} // namespace AVX2
namespace AVX512 {
extern const BlockKernels kBlocks;
UpdateKernel update_kernel(std::size_t rule);
} // namespace AVX512

} // namespace fp16core::detail::cpu
