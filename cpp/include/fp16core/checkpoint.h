// Checkpoint files that C++ and Python both write and read.

#pragma once

#include <fp16core/api.h>
#include <fp16core/state_dict.h>

#include <ATen/core/Dict.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Device.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace fp16core {

/// Writes `values` to a file that `torch.load` reads, with its defaults, as a
/// dict.
///
///     fp16core::save_checkpoint(
///         "run.pt",
///         {{"model", fp16core::state_dict(*model)},
///          {"optimizer", optimizer.state_dict()},
///          {"epoch", epoch}});
///
/// A value is nothing, a bool, an integer, a double, a string, a dense tensor,
/// or a list, a tuple or a dict of values; anything else is a TypeError that
/// names its place. Tensors that share memory share it in the file, unless
/// their dtypes differ; they are written without `requires_grad`. ValueError
/// for values that contain themselves, or lie more than 500 deep in one
/// another.
///
/// The file is written beside `path` under another name and takes its place
/// when it is complete, so a crash leaves the old one. Throws RuntimeError if
/// it cannot be written. On CUDA it synchronizes.
FP16CORE_API void save_checkpoint(
    const std::string& path,
    const std::vector<std::pair<std::string, c10::IValue>>& values);

/// The same for a dict, such as a model's state alone.
FP16CORE_API void save_checkpoint(
    const std::string& path,
    const StateDict& values);

/// Reads a file that `save_checkpoint` wrote, or `torch.save` in Python, if
/// there is a dict in it.
///
///     const auto checkpoint = fp16core::load_checkpoint("run.pt");
///     fp16core::load_state_dict(*model, checkpoint.at("model"));
///     optimizer.load_state_dict(checkpoint.at("optimizer"));
///     const auto epoch = checkpoint.at("epoch").toInt();
///
/// Reads data alone and executes nothing: what `torch.load` reads with its
/// defaults, namely tensors, parameters, numbers, strings, containers (ordered
/// dicts and counters become dicts, sets become lists), and dtypes and devices,
/// which are read as their names. Integers have 64 bits; keys are strings or
/// integers. Tensors come to the device that they were saved from, or to
/// `device`, and without `requires_grad`.
///
/// Throws RuntimeError, naming the file and what is wrong, for a file that
/// cannot be read, is cut off or damaged, was written by torch before 1.6, or
/// holds anything else. As in `torch.load`, wrong bytes within the data of a
/// tensor go unnoticed.
FP16CORE_API StateDict load_checkpoint(
    const std::string& path,
    std::optional<c10::Device> device = std::nullopt);

} // namespace fp16core
