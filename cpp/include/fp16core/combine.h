// The one door to other processes: how a number of each becomes one.

#pragma once

#include <functional>

namespace fp16core {

/// What is made of the numbers of all processes.
enum class Reduction { kSum, kMax };

/// Combines `value` with those of the other processes of a group, and returns
/// the same number in all of them. The core calls it in the same order in all
/// processes, so that a collective operation of c10d fits behind it. What it
/// throws comes out of the call that combined.
using Combine = std::function<double(double value, Reduction reduction)>;

} // namespace fp16core
