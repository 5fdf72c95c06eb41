// The list kernels of CUDA: what goes to the device, and what comes back.

#include "device_list.h"
#include "gradients.cuh"
#include "iteration.cuh"
#include "powers.cuh"
#include "runtime.h"
#include "spans.cuh"
#include "task_list.h"
#include "update.cuh"
#include "weights.cuh"

#include <ATen/ATen.h>
#include <c10/util/Exception.h>

#include <array>
#include <cstring>
#include <numeric>
#include <utility>

namespace fp16core::detail {

namespace {

using cuda::blank;
using cuda::ElementType;
using cuda::TaskList;

static_assert(cuda::kMostTensors == UpdateRule::kMostTensors);
static_assert(cuda::kMostCounters == UpdateRule::kMostCounters);
static_assert(cuda::kStepBytes == UpdateRule::kStepBytes);

ElementType element_type(c10::ScalarType type) {
  switch (type) {
    case c10::ScalarType::Half:
      return ElementType::kHalf;
    case c10::ScalarType::BFloat16:
      return ElementType::kBFloat16;
    case c10::ScalarType::Float:
      return ElementType::kFloat;
    default:
      return ElementType::kDouble;
  }
}

cuda::GradientTask gradient_task(
    const GradientItem& item,
    std::int64_t position) {
  auto task = blank<cuda::GradientTask>();
  task.source = item.source;
  task.destination = item.destination;
  task.numel = item.numel;
  task.item = position;
  task.source_type = element_type(item.source_type);
  task.destination_type = element_type(item.destination_type);
  task.unscale = item.unscale;
  return task;
}

cuda::MasterTask master_task(const MasterItem& item, std::int64_t) {
  auto task = blank<cuda::MasterTask>();
  task.master = item.master;
  task.model = item.model;
  task.numel = item.numel;
  task.model_type = element_type(item.model_type);
  return task;
}

cuda::UpdateTask update_task(const UpdateItem& item) {
  auto task = blank<cuda::UpdateTask>();
  task.gradient = item.gradient;
  task.weight = item.weight;
  task.model = item.model;
  for (std::size_t i = 0; i < item.tensors.size(); ++i) {
    task.tensors[i] = item.tensors[i];
  }
  for (std::size_t i = 0; i < item.counters.size(); ++i) {
    task.counters[i] = item.counters[i].data;
    task.single[i] = item.counters[i].single;
  }
  task.numel = item.numel;
  task.group = item.group;
  task.gradient_type = element_type(item.gradient_type);
  task.model_type = element_type(item.model_type);
  task.unscale = item.unscale;
  task.fresh = item.fresh;
  return task;
}

// Whether items saturate, by the bytes of their chunks.
class ChunkSaturation final : public LateSaturation {
 public:
  explicit ChunkSaturation(std::size_t item_count) : saturated_(item_count) {}

  // The bytes of the chunks of the tasks in `list`.
  template <typename Task>
  void add(std::unique_ptr<LateRead> flags, const TaskList<Task>& list) {
    parts_.push_back({std::move(flags), list.items(), list.first_chunks()});
  }

  bool ready() const override {
    for (const auto& part : parts_) {
      if (!part.flags->ready()) {
        return false;
      }
    }
    return true;
  }

  const std::vector<std::uint8_t>& wait() override {
    for (const auto& part : std::exchange(parts_, {})) {
      const auto* flags = part.flags->wait();
      for (std::size_t t = 0; t < part.items.size(); ++t) {
        for (auto c = part.first_chunks[t]; c < part.first_chunks[t + 1]; ++c) {
          saturated_[part.items[t]] |= static_cast<std::uint8_t>(flags[c]);
        }
      }
    }
    return saturated_;
  }

 private:
  struct Part {
    std::unique_ptr<LateRead> flags;
    std::vector<std::int64_t> items;
    std::vector<std::int64_t> first_chunks;
  };

  std::vector<Part> parts_;
  std::vector<std::uint8_t> saturated_;
};

class CudaListKernels final : public ListKernels {
 public:
  explicit CudaListKernels(c10::Device device)
      : device_(device), runtime_(cuda::make_runtime(device)) {}

  bool asynchronous() const override { return true; }
  bool recording() const override { return runtime_->capturing(); }

  void take_gradients(
      c10::ArrayRef<GradientItem> items,
      const FactorSource& factor) override {
    const auto entered = runtime_->enter();
    fill(gradients_, items, gradient_task);
    item_count_ = items.size();
    stats_known_ = false;
    cuda::Work<cuda::GradientTask> work{};
    at::Tensor findings;
    if (!gradients_.empty()) {
      work = gradients_.send(*runtime_);
      reserve(stats_, gradients_.size() * sizeof(GradientStats));
      findings =
          runtime_->allocate(work.chunk_count * sizeof(cuda::GradientFinding));
    }
    cuda::check(
        cuda::launch_take_gradients(
            work,
            factor,
            pointer<cuda::GradientFinding>(findings),
            pointer<GradientStats>(stats_),
            pointer<GradientTotals>(totals_memory()),
            runtime_->stream()));
  }

  const GradientTotals* totals() override {
    return pointer<GradientTotals>(totals_memory());
  }

  at::Tensor found_inf() override {
    return field_of(
        totals_memory(),
        offsetof(GradientTotals, found_inf),
        c10::ScalarType::Float);
  }

  GradientTotals read_totals() override {
    GradientTotals totals;
    const auto entered = runtime_->enter();
    runtime_->read(&totals, totals_memory(), sizeof(totals));
    return totals;
  }

  const std::vector<GradientStats>& gradient_stats() override {
    if (stats_known_) {
      return item_stats_;
    }
    item_stats_.assign(item_count_, {});
    if (!gradients_.empty()) {
      const auto entered = runtime_->enter();
      std::vector<GradientStats> stats(gradients_.size());
      runtime_->read(
          stats.data(),
          stats_,
          gradients_.size() * static_cast<std::int64_t>(sizeof(GradientStats)));
      for (std::size_t t = 0; t < stats.size(); ++t) {
        item_stats_[gradients_.items()[t]] = stats[t];
      }
    }
    // A graph may run again and find something else.
    stats_known_ = !in_graph_;
    return item_stats_;
  }

  double sum_of_powers(c10::ArrayRef<GradientItem> items, double power)
      override {
    const auto entered = runtime_->enter();
    fill(powers_, items, gradient_task);
    if (powers_.empty()) {
      return 0.0;
    }
    const auto work = powers_.send(*runtime_);
    const auto sums = runtime_->allocate(work.chunk_count * sizeof(double));
    cuda::check(
        cuda::launch_sum_of_powers(
            work,
            power,
            pointer<double>(sums),
            runtime_->stream()));
    std::vector<double> of_chunks(work.chunk_count);
    runtime_->read(of_chunks.data(), sums, sums.numel());
    // By item first, so that it does not matter how many share a call.
    double sum = 0.0;
    const auto& first = powers_.first_chunks();
    for (std::size_t t = 0; t + 1 < first.size(); ++t) {
      sum += std::accumulate(
          of_chunks.begin() + first[t],
          of_chunks.begin() + first[t + 1],
          0.0);
    }
    return sum;
  }

  void scale_(c10::ArrayRef<ScaleItem> items, const FactorSource& factor)
      override {
    const auto entered = runtime_->enter();
    fill(scales_, items, [](const ScaleItem& item, std::int64_t) {
      auto task = blank<cuda::ScaleTask>();
      task.values = item.values;
      task.numel = item.numel;
      task.type = element_type(item.type);
      return task;
    });
    if (!scales_.empty()) {
      cuda::check(
          cuda::launch_scale(
              scales_.send(*runtime_),
              factor,
              runtime_->stream()));
    }
  }

  void zero_(c10::ArrayRef<ZeroItem> items) override {
    const auto entered = runtime_->enter();
    fill(zeros_, items, [](const ZeroItem& item, std::int64_t) {
      auto task = blank<cuda::ZeroTask>();
      task.values = item.values;
      task.numel = item.bytes;
      return task;
    });
    if (!zeros_.empty()) {
      cuda::check(
          cuda::launch_zero(zeros_.send(*runtime_), runtime_->stream()));
    }
  }

  std::unique_ptr<LateSaturation> write_model(
      c10::ArrayRef<MasterItem> items) override {
    const auto entered = runtime_->enter();
    auto saturation = std::make_unique<ChunkSaturation>(items.size());
    fill(written_, items, master_task);
    if (!written_.empty()) {
      const auto work = written_.send(*runtime_);
      const auto flags = runtime_->allocate(work.chunk_count);
      cuda::check(
          cuda::launch_write_model(
              work,
              pointer<std::uint8_t>(flags),
              runtime_->stream()));
      tell_later(*saturation, flags, written_);
    }
    return saturation;
  }

  std::unique_ptr<LateSaturation> update(
      const UpdateRule& rule,
      std::span<UpdateItem> items,
      c10::ArrayRef<RuleOptions> options,
      c10::ArrayRef<FactorSource> factors,
      const float* skip) override {
    const auto entered = runtime_->enter();
    options_.clear();
    for (const auto& group : options) {
      options_.insert(options_.end(), group.values.begin(), group.values.end());
    }
    auto* const device_options = static_cast<double*>(
        device_options_.send(*runtime_, cuda::bytes_of(options_)));
    for (std::size_t g = 0; g < options.size(); ++g) {
      for (const auto& [position, value] : options[g].on_device) {
        at::from_blob(
            device_options + g * rule.options.size() + position,
            value.sizes(),
            at::TensorOptions(at::kDouble).device(device_))
            .copy_(value, /*non_blocking=*/true);
      }
    }
    factors_.assign(factors.begin(), factors.end());
    const cuda::UpdateNumbers numbers{
        device_options,
        static_cast<const FactorSource*>(
            device_factors_.send(*runtime_, cuda::bytes_of(factors_))),
        static_cast<int>(factors.size()),
        skip};
    auto saturation = std::make_unique<ChunkSaturation>(items.size());
    // float32 weights, and float64 weights.
    for (const bool wide : {false, true}) {
      auto& list = updates_[wide ? 1 : 0];
      list.clear();
      for (std::size_t i = 0; i < items.size(); ++i) {
        if ((items[i].weight_type == c10::ScalarType::Double) == wide) {
          // An empty weight has counters all the same.
          list.add(static_cast<std::int64_t>(i), update_task(items[i]), true);
        }
      }
      if (list.empty()) {
        continue;
      }
      const auto work = list.send(*runtime_);
      const auto steps =
          runtime_->allocate(list.size() * std::int64_t{cuda::kStepBytes});
      const auto flags = runtime_->allocate(work.chunk_count);
      const auto launch =
          wide ? &cuda::launch_wide_update : &cuda::launch_update;
      cuda::check(launch(
          rule.index,
          work,
          numbers,
          pointer<std::byte>(steps),
          pointer<std::uint8_t>(flags),
          runtime_->stream()));
      tell_later(*saturation, flags, list);
    }
    return saturation;
  }

  void adopt_model(c10::ArrayRef<MasterItem> items) override {
    const auto entered = runtime_->enter();
    fill(adopted_, items, master_task);
    if (!adopted_.empty()) {
      cuda::check(
          cuda::launch_adopt_model(
              adopted_.send(*runtime_),
              runtime_->stream()));
    }
  }

  void clip(bool check_overflow, bool by_largest, double max_norm, Clip* result)
      override {
    const auto entered = runtime_->enter();
    cuda::check(
        cuda::launch_clip(
            totals(),
            check_overflow,
            by_largest,
            max_norm,
            result,
            runtime_->stream()));
  }

  void end_iteration(
      const ScaleRule& rule,
      bool check_overflow,
      DynamicLossScaleState* scale,
      StepCounts* counts) override {
    const auto entered = runtime_->enter();
    cuda::check(
        cuda::launch_end_iteration(
            rule,
            totals(),
            check_overflow,
            scale,
            counts,
            runtime_->stream()));
  }

  void count_applied(bool check_overflow, StepCounts* counts) override {
    const auto entered = runtime_->enter();
    cuda::check(
        cuda::launch_count_applied(
            totals(),
            check_overflow,
            counts,
            runtime_->stream()));
  }

  at::Tensor store(c10::ArrayRef<std::byte> bytes) override {
    const auto entered = runtime_->enter();
    const auto memory =
        runtime_->allocate(static_cast<std::int64_t>(bytes.size()));
    write(memory, bytes);
    return memory;
  }

  void write(const at::Tensor& memory, c10::ArrayRef<std::byte> bytes)
      override {
    const auto entered = runtime_->enter();
    const auto size = static_cast<std::int64_t>(bytes.size());
    const auto pinned = cuda::pinned_copy(*runtime_, bytes);
    runtime_->copy(memory.narrow(0, 0, size), pinned);
    if (runtime_->capturing()) {
      captured_.push_back(pinned);
    }
  }

  void read(const at::Tensor& memory, std::span<std::byte> target) override {
    const auto entered = runtime_->enter();
    runtime_->read(
        target.data(),
        memory,
        static_cast<std::int64_t>(target.size()));
  }

  std::unique_ptr<LateRead> read_later(
      const at::Tensor& memory,
      std::int64_t bytes) override {
    const auto entered = runtime_->enter();
    return runtime_->read_later(memory, bytes);
  }

 private:
  template <typename Task, typename Items, typename Make>
  static void fill(TaskList<Task>& list, const Items& items, const Make& make) {
    list.clear();
    for (std::size_t i = 0; i < items.size(); ++i) {
      const auto position = static_cast<std::int64_t>(i);
      list.add(position, make(items[i], position));
    }
  }

  template <typename T>
  static T* pointer(const at::Tensor& memory) {
    return memory.defined() ? static_cast<T*>(memory.data_ptr()) : nullptr;
  }

  // Others may hold the address, so the memory never moves once it is there.
  const at::Tensor& totals_memory() {
    if (!totals_.defined()) {
      totals_ = store(bytes_of(GradientTotals{}));
    }
    return totals_;
  }

  // Grows `memory`, if need be.
  void reserve(at::Tensor& memory, std::int64_t bytes) {
    in_graph_ |= runtime_->capturing();
    if (!memory.defined() || memory.numel() < bytes) {
      if (memory.defined() && in_graph_) {
        captured_.push_back(memory); // a graph still writes to it
      }
      memory = runtime_->allocate(bytes);
    }
  }

  template <typename Task>
  void tell_later(
      ChunkSaturation& saturation,
      const at::Tensor& flags,
      const TaskList<Task>& list) {
    // Nobody is there to be told when a graph runs.
    if (flags.numel() > 0 && !runtime_->capturing()) {
      saturation.add(runtime_->read_later(flags, flags.numel()), list);
    }
  }

  c10::Device device_;
  std::shared_ptr<cuda::Runtime> runtime_;

  TaskList<cuda::GradientTask> gradients_;
  TaskList<cuda::GradientTask> powers_;
  TaskList<cuda::ScaleTask> scales_;
  TaskList<cuda::ZeroTask> zeros_;
  TaskList<cuda::MasterTask> written_;
  TaskList<cuda::MasterTask> adopted_;
  std::array<TaskList<cuda::UpdateTask>, 2> updates_;
  std::vector<double> options_;
  std::vector<FactorSource> factors_;
  cuda::DeviceList device_options_;
  cuda::DeviceList device_factors_;

  at::Tensor totals_;
  at::Tensor stats_;
  std::size_t item_count_ = 0;
  std::vector<GradientStats> item_stats_;
  bool stats_known_ = true;
  // Whether a graph may run what fills the statistics.
  bool in_graph_ = false;
  std::vector<at::Tensor> captured_;
};

} // namespace

void cuda::check(cudaError_t error) {
  TORCH_CHECK(
      error == cudaSuccess,
      "fp16core: CUDA error: ",
      cudaGetErrorString(error));
}

bool built_with_cuda() {
  return true;
}

std::unique_ptr<ListKernels> make_cuda_kernels(c10::Device device) {
  return std::make_unique<CudaListKernels>(device);
}

} // namespace fp16core::detail
