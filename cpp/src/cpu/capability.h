// Which instruction set the loops use.

#pragma once

#include "simd/blocks.h"

namespace fp16core::detail::cpu {

/// Returns the loops for the instruction set that ATen uses in this process:
/// the best of the machine, or what ATEN_CPU_CAPABILITY asks for.
const BlockKernels& block_kernels();

/// Returns its name: "DEFAULT", "AVX2" or "AVX512".
const char* capability();

} // namespace fp16core::detail::cpu
