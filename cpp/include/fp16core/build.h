// How the library was built and what it uses in this process.

#pragma once

#include <fp16core/api.h>

namespace fp16core {

/// Returns the instruction set that the CPU kernels use: "DEFAULT", "AVX2" or
/// "AVX512". It is the one that ATen uses: the best of the machine, or what
/// the environment variable ATEN_CPU_CAPABILITY asks for.
FP16CORE_API const char* cpu_capability();

/// Returns whether the CUDA backend was compiled into the library.
FP16CORE_API bool built_with_cuda();

} // namespace fp16core
