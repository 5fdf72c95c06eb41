// The list kernels of the CPU: chunks, threads, and the combination of what
// the loops find.

#include "../kernels.h"
#include "capability.h"
#include "chunks.h"
#include "powers.h"
#include "step_numbers.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

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

// What was known at once.
class KnownSaturation final : public LateSaturation {
 public:
  explicit KnownSaturation(std::vector<std::uint8_t> saturated)
      : saturated_(std::move(saturated)) {}
  bool ready() const override { return true; }
  const std::vector<std::uint8_t>& wait() override { return saturated_; }

 private:
  std::vector<std::uint8_t> saturated_;
};

class KnownBytes final : public LateRead {
 public:
  explicit KnownBytes(at::Tensor bytes) : bytes_(std::move(bytes)) {}
  bool ready() const override { return true; }
  const std::byte* wait() override {
    return static_cast<const std::byte*>(bytes_.const_data_ptr());
  }

 private:
  at::Tensor bytes_;
};

class CpuListKernels final : public ListKernels {
 public:
  bool asynchronous() const override { return false; }
  bool recording() const override { return false; }

  void take_gradients(
      c10::ArrayRef<GradientItem> items,
      const FactorSource& factor_source) override {
    const Factor factor = factor_source.read();
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
          factor,
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
    sum_up();
  }

  const GradientTotals* totals() override { return totals_.get(); }

  at::Tensor found_inf() override {
    // The memory stays while anybody has the tensor.
    return at::from_blob(
        &totals_->found_inf,
        {},
        [totals = totals_](void*) {},
        at::kFloat);
  }

  GradientTotals read_totals() override { return *totals_; }

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

  void scale_(c10::ArrayRef<ScaleItem> items, const FactorSource& factor_source)
      override {
    const Factor factor = factor_source.read();
    chunks_.build(items, numel_of);
    chunks_.for_each([&](std::int64_t, const Chunk& chunk) {
      blocks_.scale_(items[chunk.item], chunk.begin, chunk.size, factor);
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

  std::unique_ptr<LateSaturation> write_model(
      c10::ArrayRef<MasterItem> items) override {
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
    return saturation(items.size());
  }

  std::unique_ptr<LateSaturation> update(
      const UpdateRule& rule,
      std::span<UpdateItem> items,
      c10::ArrayRef<RuleOptions> options,
      c10::ArrayRef<FactorSource> factors,
      const float* skip) override {
    if (skip != nullptr && *skip != 0.0F) {
      return std::make_unique<KnownSaturation>(
          std::vector<std::uint8_t>(items.size()));
    }
    steps_.prepare(rule, items, options);
    factors_.clear();
    // Only read where somebody wants them.
    if (std::any_of(items.begin(), items.end(), [](const auto& item) {
          return item.unscale;
        })) {
      for (const auto& factor : factors) {
        factors_.push_back(factor.read());
      }
    }
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
              factors_,
              stream && item.model != nullptr && may_stream(item.model));
    });
    return saturation(items.size());
  }

  void adopt_model(c10::ArrayRef<MasterItem> items) override {
    chunks_.build(items, numel_of);
    chunks_.for_each([&](std::int64_t, const Chunk& chunk) {
      blocks_.adopt_model(items[chunk.item], chunk.begin, chunk.size);
    });
  }

  void clip(bool check_overflow, bool by_largest, double max_norm, Clip* result)
      override {
    *result = detail::clip(*totals_, check_overflow, by_largest, max_norm);
  }

  void end_iteration(
      const ScaleRule& rule,
      bool check_overflow,
      DynamicLossScaleState* scale,
      StepCounts* counts) override {
    detail::end_iteration(rule, *totals_, check_overflow, *scale, *counts);
  }

  void count_applied(bool check_overflow, StepCounts* counts) override {
    detail::count_applied(*totals_, check_overflow, *counts);
  }

  at::Tensor store(c10::ArrayRef<std::byte> bytes) override {
    const auto memory =
        at::empty({static_cast<std::int64_t>(bytes.size())}, at::kByte);
    write(memory, bytes);
    return memory;
  }

  void write(const at::Tensor& memory, c10::ArrayRef<std::byte> bytes)
      override {
    std::memcpy(memory.mutable_data_ptr(), bytes.data(), bytes.size());
  }

  void read(const at::Tensor& memory, std::span<std::byte> target) override {
    std::memcpy(target.data(), memory.const_data_ptr(), target.size());
  }

  std::unique_ptr<LateRead> read_later(
      const at::Tensor& memory,
      std::int64_t bytes) override {
    return std::make_unique<KnownBytes>(memory.narrow(0, 0, bytes).clone());
  }

 private:
  void sum_up() {
    GradientTotals totals;
    for (std::size_t i = 0; i < stats_.size(); ++i) {
      const auto& found = stats_[i];
      totals.sum_of_squares += found.sum_of_squares;
      if (std::isnan(found.largest) || found.largest > totals.largest) {
        totals.largest = found.largest;
      }
      if (found.inf_count + found.nan_count > 0 && totals.first_offender < 0) {
        totals.first_offender = static_cast<std::int64_t>(i);
        totals.inf_count = found.inf_count;
        totals.nan_count = found.nan_count;
        totals.found_inf = 1.0F;
      }
    }
    *totals_ = totals;
  }

  std::unique_ptr<LateSaturation> saturation(std::size_t items) const {
    std::vector<std::uint8_t> saturated(items, 0);
    for (std::int64_t i = 0; i < chunks_.count(); ++i) {
      saturated[chunks_[i].item] |= beyond_range_[i];
    }
    return std::make_unique<KnownSaturation>(std::move(saturated));
  }

  const BlockKernels& blocks_ = cpu::block_kernels();
  cpu::Chunks chunks_;
  cpu::StepNumbers steps_;
  std::vector<Factor> factors_;
  std::vector<GradientStats> findings_;
  std::vector<GradientStats> stats_;
  std::shared_ptr<GradientTotals> totals_ = std::make_shared<GradientTotals>();
  std::vector<double> power_sums_;
  std::vector<std::uint8_t> beyond_range_;
};

} // namespace

std::unique_ptr<ListKernels> make_cpu_kernels() {
  return std::make_unique<CpuListKernels>();
}

} // namespace fp16core::detail
