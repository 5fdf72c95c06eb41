// The kernels behind weights.cuh and their launches.

#include "weights.cuh"

#include "rounding.cuh"

namespace fp16core::detail::cuda {

namespace {

// The task: round many masters to the parameters of a model, which may have
// several types. The awkward case is a finite master beyond the range of its
// half type, which becomes inf and is told. Reads 4 and writes 2 bytes an
// element.
__global__ void __launch_bounds__(kThreads, kBlocks) write_model_kernel(
    const __grid_constant__ Work<MasterTask> work,
    std::uint8_t* saturated) {
  const auto span = span_of_block(work);
  const float* master = span.task.master + span.begin;
  const bool master_aligned = is_aligned(span.task.master);
  const bool model_aligned = is_aligned(span.task.model);
  bool beyond = false;
  with_type(span.task.model_type, [&](auto type) {
    using T = decltype(type);
    T* model = static_cast<T*>(span.task.model) + span.begin;
    walk(
        span.size,
        [&](std::int64_t i) {
          beyond |= store_rounded(
              model + i,
              model_aligned,
              load(master + i, master_aligned));
        },
        [&](std::int64_t i) {
          model[i] = static_cast<T>(master[i]);
          beyond |= saturates<T>(master[i]);
        });
  });
  note_saturation(beyond, saturated);
}

// Returns what a master is after the model was written by others.
template <typename T>
__device__ float adopted(float master, T model) {
  using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;
  const auto was = static_cast<Wide>(static_cast<T>(master));
  const auto now = static_cast<Wide>(model);
  const bool same = was == now || (was != was && now != now);
  return same ? master : static_cast<float>(now);
}

// The task: find the elements of the model that are not what their master
// rounds to, and overwrite these masters. The awkward case is NaN, which equals
// itself here. Reads 6 bytes an element, and writes what differs, mostly
// nothing.
__global__ void __launch_bounds__(kThreads, kBlocks)
    adopt_model_kernel(const __grid_constant__ Work<MasterTask> work) {
  const auto span = span_of_block(work);
  float* master = span.task.master + span.begin;
  const bool master_aligned = is_aligned(span.task.master);
  const bool model_aligned = is_aligned(span.task.model);
  with_type(span.task.model_type, [&](auto type) {
    using T = decltype(type);
    const T* model = static_cast<const T*>(span.task.model) + span.begin;
    walk(
        span.size,
        [&](std::int64_t i) {
          const auto masters = load(master + i, master_aligned);
          const auto models = load(model + i, model_aligned);
          Vector<float> result;
          bool changed = false;
          for (int k = 0; k < kVector; ++k) {
            result[k] = adopted(masters[k], models[k]);
            changed |= __float_as_int(result[k]) != __float_as_int(masters[k]);
          }
          if (changed) {
            store(master + i, master_aligned, result);
          }
        },
        [&](std::int64_t i) { master[i] = adopted(master[i], model[i]); });
  });
}

} // namespace

cudaError_t launch_write_model(
    const Work<MasterTask>& work,
    std::uint8_t* saturated,
    cudaStream_t stream) {
  return launch(&write_model_kernel, work.chunk_count, stream, work, saturated);
}

cudaError_t launch_adopt_model(
    const Work<MasterTask>& work,
    cudaStream_t stream) {
  return launch(&adopt_model_kernel, work.chunk_count, stream, work);
}

} // namespace fp16core::detail::cuda
