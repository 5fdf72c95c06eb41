// The list kernels of the CPU: chunks, threads, and the combination of what
// the loops find.

#include "../kernels.h"
#include "capability.h"
#include "chunks.h"
#include "powers.h"

#include <cmath>

namespace fp16core::detail {

namespace {

using cpu::BlockKernels;
using cpu::Chunk;

// Destinations that are only written bypass the caches when a pass writes more
// than this. Measured: below it the inner optimizer, or the next forward pass,
// still finds them there.
constexpr std::int64_t kStreamAbove = std::int64_t{16} << 20;

bool may_stream(const void* target) {
  return reinterpret_cast<std::uintptr_t>(target) % cpu::kStreamAlignment == 0;
}

constexpr auto numel_of = [](const auto& item) { return item.numel; };

class CpuListKernels final : public ListKernels {
 public:
  void take_gradients(c10::ArrayRef<GradientItem> items, const Factor* factor)
      override {
    chunks_.build(items, numel_of);
    findings_.assign(chunks_.count(), {});
    std::int64_t written = 0;
    for (const auto& item : items) {
      if (item.destination != item.source && item.destination != nullptr) {
        written += item.numel * static_cast<std::int64_t>(sizeof(float));
      }
    }
    const bool stream = written > kStreamAbove;
    chunks_.for_each([&](std::int64_t index, const Chunk& chunk) {
      const auto& item = items[chunk.item];
      blocks_.take_gradient(
          item,
          chunk.begin,
          chunk.size,
          *factor,
          stream && item.destination != item.source &&
              item.destination != nullptr && may_stream(item.destination),
          findings_[index]);
    });
    // In order, so that the sum does not depend on the threads.
    stats_.assign(items.size(), {});
    for (std::int64_t i = 0; i < chunks_.count(); ++i) {
      auto& stats = stats_[chunks_[i].item];
      const auto& found = findings_[i];
      stats.sum_of_squares += found.sum_of_squares;
      stats.inf_count += found.inf_count;
      stats.nan_count += found.nan_count;
      if (std::isnan(found.largest) || found.largest > stats.largest) {
        stats.largest = found.largest;
      }
    }
  }

  const std::vector<GradientStats>& gradient_stats() override { return stats_; }

  double sum_of_powers(c10::ArrayRef<GradientItem> items, double power)
      override {
    chunks_.build(items, numel_of);
    power_sums_.assign(chunks_.count(), 0.0);
    chunks_.for_each([&](std::int64_t index, const Chunk& chunk) {
      power_sums_[index] =
          cpu::sum_of_powers(items[chunk.item], chunk.begin, chunk.size, power);
    });
    // By item first, so that it does not matter how many share a call.
    double sum = 0.0;
    for (std::int64_t i = 0; i < chunks_.count();) {
      const auto item = chunks_[i].item;
      double of_item = 0.0;
      for (; i < chunks_.count() && chunks_[i].item == item; ++i) {
        of_item += power_sums_[i];
      }
      sum += of_item;
    }
    return sum;
  }

  void scale_(c10::ArrayRef<ScaleItem> items, const Factor* factor) override {
    chunks_.build(items, numel_of);
    chunks_.for_each([&](std::int64_t, const Chunk& chunk) {
      blocks_.scale_(items[chunk.item], chunk.begin, chunk.size, *factor);
    });
  }

  void zero_(c10::ArrayRef<ZeroItem> items) override {
    chunks_.build(items, [](const ZeroItem& item) { return item.bytes; });
    const bool stream = chunks_.total() > kStreamAbove;
    chunks_.for_each([&](std::int64_t, const Chunk& chunk) {
      void* values = items[chunk.item].values;
      blocks_.zero_(
          static_cast<char*>(values) + chunk.begin,
          chunk.size,
          stream && may_stream(values));
    });
  }

  void write_model(c10::ArrayRef<MasterItem> items) override {
    chunks_.build(items, numel_of);
    const bool stream =
        chunks_.total() * static_cast<std::int64_t>(sizeof(c10::Half)) >
        kStreamAbove;
    beyond_range_.assign(chunks_.count(), 0);
    chunks_.for_each([&](std::int64_t index, const Chunk& chunk) {
      const auto& item = items[chunk.item];
      beyond_range_[index] = blocks_.write_model(
          item,
          chunk.begin,
          chunk.size,
          stream && may_stream(item.model));
    });
    gather_saturated(items.size());
  }

  const std::vector<std::uint8_t>& saturated() override { return saturated_; }

  void update(
      const UpdateRule& rule,
      c10::ArrayRef<UpdateItem> items,
      c10::ArrayRef<Factor> factors) override {
    chunks_.build(items, numel_of);
    std::int64_t written = 0;
    for (const auto& item : items) {
      if (item.model != nullptr) {
        written += item.numel * static_cast<std::int64_t>(sizeof(c10::Half));
      }
    }
    const bool stream = written > kStreamAbove;
    const auto run = blocks_.update_kernel(rule.index);
    beyond_range_.assign(chunks_.count(), 0);
    chunks_.for_each([&](std::int64_t index, const Chunk& chunk) {
      const auto& item = items[chunk.item];
      beyond_range_[index] =
          run(item,
              chunk.begin,
              chunk.size,
              factors,
              stream && item.model != nullptr && may_stream(item.model));
    });
    gather_saturated(items.size());
  }

  void adopt_model(c10::ArrayRef<MasterItem> items) override {
    chunks_.build(items, numel_of);
    chunks_.for_each([&](std::int64_t, const Chunk& chunk) {
      blocks_.adopt_model(items[chunk.item], chunk.begin, chunk.size);
    });
  }

 private:
  void gather_saturated(std::size_t items) {
    saturated_.assign(items, 0);
    for (std::int64_t i = 0; i < chunks_.count(); ++i) {
      saturated_[chunks_[i].item] |= beyond_range_[i];
    }
  }

  const BlockKernels& blocks_ = cpu::block_kernels();
  cpu::Chunks chunks_;
  std::vector<GradientStats> findings_;
  std::vector<GradientStats> stats_;
  std::vector<double> power_sums_;
  std::vector<std::uint8_t> beyond_range_;
  std::vector<std::uint8_t> saturated_;
};

} // namespace

std::unique_ptr<ListKernels> make_cpu_kernels() {
  return std::make_unique<CpuListKernels>();
}

} // namespace fp16core::detail
